"""Finds the ffmpeg program and says exactly which build it is."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Final

from fastvid.errors import MissingDependency

VARIABLE: Final = "FASTVID_FFMPEG"

# -fps_mode and the stream statistics that verification reads came with 5.1.
_OLDEST: Final = (5, 1)
_SECONDS: Final = 60
# What is asked of a program. Only a stream tells the version of x264, which writes it into its first packet.
_QUESTIONS: Final = {
    "version": ["-version"],
    "encoders": ["-encoders"],
    "filters": ["-filters"],
    "stream": [
        *("-nostdin", "-hide_banner", "-loglevel", "error"),
        *("-f", "lavfi", "-i", "color=size=64x64:duration=1:rate=1", "-frames:v", "1"),
        *("-codec:v", "libx264", "-f", "h264", "-"),
    ],
}
_HINT: Final = f"install ffmpeg, or `pip install imageio-ffmpeg`, or name a program in {VARIABLE}"


@dataclass(frozen=True, slots=True)
class FfmpegBuild:
    """One ffmpeg program.

    Attributes:
        path: The program.
        found: How it was found: "environment", "path" or "imageio-ffmpeg".
        version: As it prints it, such as ``5.1.9-0+deb12u1``.
        libraries: Version of each FFmpeg library, by name.
        x264: Version that x264 writes into its streams, such as ``core 164 r3095 baee400``; empty without x264.
        configuration: SHA-256 of its configure line, hex.
        encoders: Names of the video encoders that fastvid uses and this build has.
        zscale: Whether it can tone-map (filters zscale and tonemap).
    """

    path: str
    found: str
    version: str
    libraries: dict[str, str]
    x264: str
    configuration: str
    encoders: tuple[str, ...]
    zscale: bool

    def identity(self) -> dict[str, Any]:
        """What may change the bytes it writes: everything but where it lies and how it was found."""
        record = asdict(self)
        del record["path"], record["found"]
        record["encoders"] = list(self.encoders)
        return record

    def __str__(self) -> str:
        return f"ffmpeg {self.version} ({self.path}, from {self.found}), x264 {self.x264 or 'absent'}"


def find_ffmpeg() -> FfmpegBuild:
    """The ffmpeg to use: FASTVID_FFMPEG, else the one on PATH, else the binary in the imageio-ffmpeg wheel.

    Raises:
        MissingDependency: There is none, or it is too old or does not run.
    """
    return _inspect(*_locate())


def environment() -> dict[str, str]:
    """The environment for ffmpeg: ours without the variables that change what it prints or writes."""
    drop = {"FFREPORT", "AV_LOG_FORCE_COLOR", "AV_LOG_FORCE_256COLOR", "FFMPEG_DATADIR"}
    return {name: value for name, value in os.environ.items() if name not in drop} | {"AV_LOG_FORCE_NOCOLOR": "1"}


def _locate() -> tuple[str, str]:
    named = os.environ.get(VARIABLE)
    if named:
        path = shutil.which(named)
        if path is None:
            raise MissingDependency(f"{VARIABLE} names {named!r}, which is no program", hint=_HINT)
        return path, "environment"
    path = shutil.which("ffmpeg")
    if path is not None:
        return path, "path"
    try:
        import imageio_ffmpeg

        return imageio_ffmpeg.get_ffmpeg_exe(), "imageio-ffmpeg"
    except (ImportError, RuntimeError) as error:
        raise MissingDependency("there is no ffmpeg", hint=_HINT) from error


@lru_cache(maxsize=8)
def _inspect(path: str, found: str) -> FfmpegBuild:
    # Each answer takes a tenth of a second, most of it the program's start: they are asked for at the same time.
    with ThreadPoolExecutor(len(_QUESTIONS), thread_name_prefix="ffmpeg") as asking:
        answers = {name: asking.submit(_run, path, arguments) for name, arguments in _QUESTIONS.items()}
        banner = _text(answers["version"])
        matched = re.match(r"ffmpeg version (\S+)", banner)
        if matched is None:
            raise MissingDependency(f"{path} does not answer as ffmpeg does: {banner[:80]!r}", hint=_HINT)
        version = matched[1]
        number = re.match(r"n?(\d+)\.(\d+)", version)
        # Builds from a snapshot have no number; they are newer than any release that is too old.
        if number is not None and (int(number[1]), int(number[2])) < _OLDEST:
            raise MissingDependency(f"ffmpeg {version} is older than {_OLDEST[0]}.{_OLDEST[1]}", file=path, hint=_HINT)
        listed, filters = _text(answers["encoders"]), _text(answers["filters"])
        encoders = tuple(name for name in ("libvpx-vp9", "libx264", "libx265", "mjpeg") if f" {name} " in listed)
        x264 = _x264_version(answers["stream"].result()) if "libx264" in encoders else ""
    configure = re.search(r"^configuration:(.*)$", banner, re.MULTILINE)
    # Loaded version, not the one it was compiled against.
    lines = re.findall(r"^(lib\w+)\s.*/\s*([\d. ]+?)\s*$", banner, re.MULTILINE)
    libraries = {name: loaded.replace(" ", "") for name, loaded in lines}
    return FfmpegBuild(
        path=path,
        found=found,
        version=version,
        libraries=libraries,
        x264=x264,
        configuration=hashlib.sha256((configure[1] if configure else "").strip().encode()).hexdigest(),
        encoders=encoders,
        zscale=" zscale " in filters and " tonemap " in filters,
    )


def _x264_version(stream: bytes) -> str:
    matched = re.search(rb"x264 - (core [ -~]+?) - H\.264", stream)
    return matched[1].decode("ascii") if matched else "unknown"


def _text(answer: Future[bytes]) -> str:
    return answer.result().decode("utf-8", "replace")


def _run(path: str, arguments: list[str]) -> bytes:
    try:
        done = subprocess.run(
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            env=environment(),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingDependency(f"ffmpeg does not run: {error}", file=path, hint=_HINT) from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()[-300:]
        raise MissingDependency(f"ffmpeg exits with {done.returncode}: {said}", file=path, hint=_HINT)
    return done.stdout
