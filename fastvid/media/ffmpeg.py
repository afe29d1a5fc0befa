"""Find the ffmpeg program and identify its exact build."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Final

from fastvid.errors import MissingDependency, WorkerError
from fastvid.media.colour_tags import tagged
from fastvid.runtime.children import how_it_ended
from fastvid.runtime.hashing import sha256

VARIABLE: Final = "FASTVID_FFMPEG"

_SECONDS: Final = 60
_QUERIES: Final = ("-version", "-encoders", "-filters")
_HINT: Final = f"install ffmpeg, or `pip install imageio-ffmpeg`, or set {VARIABLE} to a program"
_AGAIN: Final = f"run the command again; if that does not help, set {VARIABLE} to another program"
_OTHER: Final = f"set {VARIABLE} to a newer or more complete program, such as that of imageio-ffmpeg"

_ENCODERS: Final = ("libvpx-vp9", "libx264", "libx265", "mjpeg")
# Filters that the commands of `fastvid.sharding.encode.profiles` use.
_FILTERS: Final = (
    "bwdif", "crop", "format", "fps", "scale", "select", "setparams", "setpts", "setsar", "settb", "split", "trim",
)  # fmt: skip
STATISTICS: Final = re.compile(r"\(video\): (\d+) packets read \(\d+ bytes\); (\d+) frames decoded;")
"""ffmpeg's final log line about an input stream under ``-loglevel verbose``: numbers of packets and frames."""
# MP4's box for the colour that `_test_encode` requests: BT.601, full range, which no encoder has as its default.
_COLOUR_BOX: Final = b"colrnclx" + bytes([0, 6, 0, 6, 0, 6, 0x80])


@dataclass(frozen=True, slots=True)
class FfmpegBuild:
    """One ffmpeg program."""

    path: str
    found: str
    version: str
    libraries: dict[str, str]
    x264: str
    configuration: str
    encoders: tuple[str, ...]
    zscale: bool

    def identity(self) -> dict[str, Any]:
        """Return everything that may change its output: all attributes except `path` and `found`."""
        record = asdict(self)
        del record["path"], record["found"]
        record["encoders"] = list(self.encoders)
        return record

    def __str__(self) -> str:
        return f"ffmpeg {self.version} ({self.path}, from {self.found}), x264 {self.x264 or 'absent'}"


def find_ffmpeg() -> FfmpegBuild:
    """Find ffmpeg: the program in FASTVID_FFMPEG, else on PATH, else in the imageio-ffmpeg wheel."""
    return _inspect(*_locate())


def environment() -> dict[str, str]:
    """Return our environment without the variables that change what ffmpeg prints or writes."""
    drop = {"FFREPORT", "AV_LOG_FORCE_COLOR", "AV_LOG_FORCE_256COLOR", "FFMPEG_DATADIR"}
    return {name: value for name, value in os.environ.items() if name not in drop} | {"AV_LOG_FORCE_NOCOLOR": "1"}


def _locate() -> tuple[str, str]:
    named = os.environ.get(VARIABLE)
    if named:
        path = shutil.which(named)
        if path is None:
            raise MissingDependency(f"{VARIABLE} is {named!r}, which is not a program", hint=_HINT)
        return path, "environment"
    path = shutil.which("ffmpeg")
    if path is not None:
        return path, "path"
    try:
        import imageio_ffmpeg

        return imageio_ffmpeg.get_ffmpeg_exe(), "imageio-ffmpeg"
    except (ImportError, RuntimeError) as error:
        raise MissingDependency("ffmpeg is not installed", hint=_HINT) from error


@lru_cache(maxsize=8)
def _inspect(path: str, found: str) -> FfmpegBuild:
    # Run concurrently: each takes a tenth of a second, mostly to start the program.
    with ThreadPoolExecutor(len(_QUERIES) + 1, thread_name_prefix="ffmpeg") as executor:
        queries = [executor.submit(_run, path, [query]) for query in _QUERIES]
        stream = executor.submit(_run, path, _test_encode("libx264"))
        banner, encoders, filters = (_stdout(query.result()) for query in queries)
    matched = re.match(r"ffmpeg version (\S+)", banner)
    if matched is None:
        raise MissingDependency(f"{path} is not ffmpeg: `-version` prints {banner[:80]!r}", hint=_HINT)
    version = matched[1]
    present = tuple(name for name in _ENCODERS if f" {name} " in encoders)
    # Without x264, test the other features with MJPEG, which every build has, but not colour: which tags an MP4 has for
    # MJPEG differs between versions.
    x264 = "libx264" in present
    written = stream.result() if x264 else _run(path, _test_encode("mjpeg"))
    missing = [f"the filter {name}" for name in _FILTERS if f" {name} " not in filters]
    missing = missing or _missing_features(written, colour=x264)
    if missing:
        raise MissingDependency(f"ffmpeg {version} lacks {', '.join(missing)}", file=path, hint=_OTHER)
    configure = re.search(r"^configuration:(.*)$", banner, re.MULTILINE)
    # The loaded version of each library, not the one that ffmpeg was compiled against.
    lines = re.findall(r"^(lib\w+)\s.*/\s*([\d. ]+?)\s*$", banner, re.MULTILINE)
    libraries = {name: loaded.replace(" ", "") for name, loaded in lines}
    return FfmpegBuild(
        path=path,
        found=found,
        version=version,
        libraries=libraries,
        x264=_x264_version(written.stdout) if x264 else "",
        configuration=sha256((configure[1] if configure else "").strip().encode()),
        encoders=present,
        zscale=" zscale " in filters and " tonemap " in filters,
    )


def _test_encode(encoder: str) -> list[str]:
    """Return arguments that encode one frame as profiles do, to test features instead of inferring them."""
    # Only an encoded stream reveals the version of x264, which writes it into its first packet.
    return [
        *("-nostdin", "-hide_banner", "-nostats", "-loglevel", "level+verbose"),
        *("-f", "lavfi", "-i", "color=size=64x64:duration=1:rate=1"),
        *("-filter:v", tagged(full_range=True), "-fps_mode", "passthrough", "-frames:v", "1", "-codec:v", encoder),
        *("-f", "mp4", "-movflags", "+frag_keyframe+empty_moov", "-"),
    ]


def _missing_features(written: subprocess.CompletedProcess[bytes], *, colour: bool) -> list[str]:
    """Return the features that the test encode shows to be missing."""
    log = written.stderr.decode("utf-8", "replace")
    if written.returncode:
        unknown = re.search(r"Unrecognized option '([\w:]+)'", log)
        if unknown:
            return [f"the option -{unknown[1]}"]
        errors = "; ".join(re.findall(r"\[(?:error|fatal)\] (.*)", log)) or f"exit status {written.returncode}"
        return [f"a feature needed to encode a frame: {errors[:300]}"]
    missing = []
    if STATISTICS.search(log) is None:
        missing.append("the count of packets and frames that it read (-loglevel verbose)")
    if colour and _COLOUR_BOX not in written.stdout:
        missing.append("the colour tags of the filter setparams in its output")
    return missing


def _x264_version(stream: bytes) -> str:
    matched = re.search(rb"x264 - (core [ -~]+?) - H\.264", stream)
    return matched[1].decode("ascii") if matched else "unknown"


def _stdout(done: subprocess.CompletedProcess[bytes]) -> str:
    if done.returncode:
        text = done.stderr.decode("utf-8", "replace").strip()[-300:]
        raise MissingDependency(f"ffmpeg exits with status {done.returncode}: {text}", file=done.args[0], hint=_HINT)
    return done.stdout.decode("utf-8", "replace")


def _run(path: str, arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    try:
        done = subprocess.run(
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            env=environment(),
            check=False,
        )
    except OSError as error:
        raise MissingDependency(f"cannot run ffmpeg: {error}", file=path, hint=_HINT) from error
    except subprocess.TimeoutExpired as error:
        raise WorkerError(f"ffmpeg did not answer within {_SECONDS} s", file=path, hint=_AGAIN) from error
    if done.returncode < 0:
        raise WorkerError(f"ffmpeg {how_it_ended(done.returncode)} on startup", file=path, hint=_AGAIN)
    return done
