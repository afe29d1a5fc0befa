"""Execute the steps of a Dockerfile on a machine without a container engine. Needs Linux and root.

    python docker/run_steps.py docker/Dockerfile.cpu [--build-arg NAME=VALUE] [--scratch DIR]

Each build stage is a copy-on-write view of this machine's root file system (overlayfs in a private mount namespace),
which replaces the base image; the machine itself is not changed. ARG, ENV, WORKDIR, COPY (with .dockerignore), USER and
RUN are executed as written, then the health check. Not tested: the base image itself, and whether the image depends on
something that only this machine has.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

CONTEXT = Path(__file__).resolve().parents[1]
_BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile: its keyword in capitals, its text, and its first line number."""

    word: str
    text: str
    line: int


def instructions(text: str) -> list[Instruction]:
    """Split a Dockerfile into instructions: comment lines are dropped, continued lines joined."""
    found: list[Instruction] = []
    parts: list[str] = []
    start = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not (line.strip() or parts):
            continue
        start = start if parts else number
        parts.append(line.strip().removesuffix("\\").strip())
        if not line.rstrip().endswith("\\"):
            word, _, rest = " ".join(parts).partition(" ")
            found.append(Instruction(word.upper(), rest.strip(), start))
            parts = []
    return found


def substitute(text: str, values: Mapping[str, str]) -> str:
    """Replace ``$NAME`` and ``${NAME}`` as Docker does outside RUN; an unset name becomes empty."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: values.get(found[1] or found[2], ""), text)


def ignored(path: str, patterns: list[str]) -> bool:
    """Return whether .dockerignore excludes `path` (relative, with slashes); the last matching pattern decides."""
    out = False
    parents = ["/".join(path.split("/")[: depth + 1]) for depth in range(path.count("/") + 1)]
    for pattern in patterns:
        bare = pattern.removeprefix("!").rstrip("/")
        forms = [bare, bare.removeprefix("**/")]
        if any(fnmatchcase(parent, form) for parent in parents for form in forms) or (
            bare.startswith("**/") and any(fnmatchcase(part, bare[3:]) for part in path.split("/"))
        ):
            out = not pattern.startswith("!")
    return out


def context_files(context: Path) -> Iterator[str]:
    """Yield the files of the build context that .dockerignore does not exclude, relative to it."""
    ignore = context / ".dockerignore"
    lines = ignore.read_text(encoding="utf-8").splitlines() if ignore.exists() else []
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    kept = {pattern[1:].split("/")[0] for pattern in patterns if pattern.startswith("!")}
    for top in sorted(path for path in context.iterdir() if not kept or path.name in kept):
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            name = path.relative_to(context).as_posix()
            if path.is_file() and not ignored(name, patterns):
                yield name


@dataclass
class Stage:
    """One build stage: its root directory, and the state for later instructions."""

    root: Path
    values: dict[str, str] = field(default_factory=dict)  # ARG and ENV
    env: dict[str, str] = field(default_factory=lambda: {"PATH": _BASE_PATH})
    user: str = "0:0"
    workdir: str = "/"

    def path(self, inside: str) -> Path:
        """Return the path of `inside` on this machine."""
        return self.root / os.path.normpath(os.path.join(self.workdir, inside)).lstrip("/")

    def run(self, argv: list[str], extra: Mapping[str, str]) -> int:
        """Run a command in the stage; return its exit status."""
        script = 'cd "$1" && shift && exec "$@"'
        # By its full path, because the stage's PATH may lack it.
        chroot = shutil.which("chroot") or "/usr/sbin/chroot"
        command = [chroot, f"--userspec={self.user}", str(self.root), "/bin/sh", "-c", script, "sh", self.workdir]
        return subprocess.run([*command, *argv], env={**self.env, **extra}, check=False).returncode


class Builder:
    """Executes a Dockerfile."""

    def __init__(self, scratch: Path, build_args: Mapping[str, str], host_env: Mapping[str, str]) -> None:
        self.scratch, self.build_args, self.host_env = scratch, dict(build_args), dict(host_env)
        self.stages: dict[str, Stage] = {}
        self.globals: dict[str, str] = {}

    def build(self, dockerfile: Path) -> int:
        """Run all instructions; return the exit status of the first that fails, else of the health check."""
        stage: Stage | None = None
        check: list[str] = []
        for step in instructions(dockerfile.read_text(encoding="utf-8")):
            began = time.monotonic()
            if step.word == "FROM":
                stage = self._from(step.text)
            elif stage is None:
                name, _, value = step.text.partition("=")
                self.globals[name] = self.build_args.get(name, substitute(value, self.globals))
                continue
            elif step.word == "HEALTHCHECK":
                check = json.loads(step.text.partition("CMD")[2])
                continue
            elif status := self._step(stage, step):
                _say(f"line {step.line}: {step.word} failed with exit status {status}")
                return status
            _say(f"line {step.line}: {step.word} {step.text[:90]} ({time.monotonic() - began:.1f} s)")
        if stage is None or not check:
            return 0
        status = stage.run(check, {})
        _say(f"health check {shlex.join(check)}: exit {status}")
        return status

    def _from(self, text: str) -> Stage:
        image, _, name = substitute(text, self.globals).partition(" AS ")
        folder = self.scratch / f"stage{len(self.stages)}"
        for part in ("upper", "work", "root"):
            (folder / part).mkdir(parents=True)
        root = folder / "root"
        options = f"lowerdir=/,upperdir={folder / 'upper'},workdir={folder / 'work'}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(root)], check=True)
        for shared in ("dev", "proc"):
            subprocess.run(["mount", "--bind", f"/{shared}", str(root / shared)], check=True)
        # The base image calls its interpreter `python`; use this machine's Python instead.
        python = root / "usr/local/bin/python"
        python.unlink(missing_ok=True)
        python.symlink_to("/usr/bin/python3")
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
        for table in ("passwd", "group"):  # the base image has no ordinary users
            file = root / "etc" / table
            rows = file.read_text(encoding="utf-8").splitlines(keepends=True)
            file.write_text(
                "".join(row for row in rows if not 1000 <= int(row.split(":")[2]) < 60000), encoding="utf-8"
            )
        _say(f"stage {name or len(self.stages)}: using this machine instead of {image}")
        stage = self.stages[name or str(len(self.stages))] = Stage(root)
        return stage

    def _step(self, stage: Stage, step: Instruction) -> int:
        if step.word == "RUN":
            return stage.run(["/bin/sh", "-c", step.text], {**self.host_env, **stage.values})
        text = substitute(step.text, {**stage.values, **stage.env})
        if step.word == "ARG":
            name, _, value = text.partition("=")
            stage.values[name] = self.build_args.get(name, value or self.globals.get(name, ""))
        elif step.word == "ENV":
            for pair in shlex.split(text):
                name, _, value = pair.partition("=")
                stage.env[name] = value
        elif step.word == "WORKDIR":
            stage.workdir = os.path.join(stage.workdir, text)
            stage.path(".").mkdir(parents=True, exist_ok=True)
        elif step.word == "USER":
            stage.user = text
        elif step.word == "COPY":
            self._copy(stage, shlex.split(text))
        elif step.word not in ("LABEL", "CMD"):
            _say(f"line {step.line}: {step.word} is not supported")
            return 1
        return 0

    def _copy(self, stage: Stage, words: list[str]) -> None:
        *sources, target = [word for word in words if not word.startswith("--")]
        origin = next((word.removeprefix("--from=") for word in words if word.startswith("--from=")), None)
        if origin is not None:
            subprocess.run(
                ["cp", "-aT", str(self.stages[origin].path(sources[0])), str(stage.path(target))], check=True
            )
            return
        files = list(context_files(CONTEXT))
        for source in sources:
            chosen = [name for name in files if name == source or name.startswith(f"{source}/")]
            if not chosen:
                raise SystemExit(f"COPY {source}: not in the build context; check .dockerignore")
            for name in chosen:
                # A folder's content is copied into the target; a file into a target that ends with a slash.
                inside = (
                    name[len(source) + 1 :] if name != source else (Path(name).name if target.endswith("/") else "")
                )
                place = stage.path(target) / inside
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(CONTEXT / name, place)


def _say(text: str) -> None:
    sys.stderr.write(f"run_steps: {text}\n")


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--scratch", type=Path, help="folder with space for the image, not on an overlay")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside is not None:
        host = {
            name: value for name, value in os.environ.items() if name.lower().endswith("_proxy") or name[:4] == "PIP_"
        }
        build_args = {name: value for name, _, value in (pair.partition("=") for pair in args.build_arg)}
        return Builder(args.inside, build_args, host).build(args.dockerfile)
    # The mounts exist only in the inner command's namespace, so removing the folder here cannot delete this machine's
    # files through them.
    with tempfile.TemporaryDirectory(prefix="fastvid-steps-", dir=args.scratch) as scratch:
        inner = ["unshare", "--mount", sys.executable, *sys.argv, "--inside", scratch]
        return subprocess.run(inner, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
