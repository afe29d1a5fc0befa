"""Finds the ffmpeg program and says exactly which build it is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Final

from fastvid.errors import MissingDependency
from fastvid.media.colour_tags import tagged
from fastvid.runtime.hashing import sha256

VARIABLE: Final = "FASTVID_FFMPEG"

_SECONDS: Final = 60
_QUESTIONS: Final = ("-version", "-encoders", "-filters")
_HINT: Final = f"install ffmpeg, or `pip install imageio-ffmpeg`, or name a program in {VARIABLE}"
_OTHER: Final = f"name a newer or more complete one in {VARIABLE}; the one of imageio-ffmpeg will do"

_ENCODERS: Final = ("libvpx-vp9", "libx264", "libx265", "mjpeg")
# What the commands of `fastvid.sharding.encode.profiles` use.
_FILTERS: Final = (
    "crop", "format", "fps", "framestep", "scale", "setparams", "setpts", "setsar", "settb", "split", "trim", "yadif",
)  # fmt: skip
STATISTICS: Final = re.compile(r"\(video\): (\d+) packets read \(\d+ bytes\); (\d+) frames decoded;")
"""What ffmpeg says at its end of a stream that it read, when it is told ``-loglevel verbose``: packets and frames."""
# MP4's box for the colour that `_stream_question` asks for: BT.601, full range, which is no encoder's default.
_COLOUR_BOX: Final = b"colrnclx" + bytes([0, 6, 0, 6, 0, 6, 0x80])


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
        MissingDependency: There is none, it does not run, or it lacks an ability that fastvid needs.
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
    with ThreadPoolExecutor(len(_QUESTIONS) + 1, thread_name_prefix="ffmpeg") as asking:
        answers = [asking.submit(_run, path, [question]) for question in _QUESTIONS]
        stream = asking.submit(_run, path, _stream_question("libx264"))
        banner, encoders, filters = (_said(answer.result()) for answer in answers)
    matched = re.match(r"ffmpeg version (\S+)", banner)
    if matched is None:
        raise MissingDependency(f"{path} does not answer as ffmpeg does: {banner[:80]!r}", hint=_HINT)
    version = matched[1]
    present = tuple(name for name in _ENCODERS if f" {name} " in encoders)
    # Without x264 the other abilities are proved by an encoder that every build has. Colour is not among them: which
    # tags MP4 gets for MJPEG differs between versions.
    x264 = "libx264" in present
    written = stream.result() if x264 else _run(path, _stream_question("mjpeg"))
    lacks = [f"the filter {name}" for name in _FILTERS if f" {name} " not in filters] or _lacks(written, colour=x264)
    if lacks:
        raise MissingDependency(f"ffmpeg {version} lacks {', '.join(lacks)}", file=path, hint=_OTHER)
    configure = re.search(r"^configuration:(.*)$", banner, re.MULTILINE)
    # Loaded version, not the one it was compiled against.
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


def _stream_question(encoder: str) -> list[str]:
    """Arguments that have a frame written as profiles do: what a program can do, not what its version lets expect."""
    # Only a stream tells the version of x264, which writes it into its first packet.
    return [
        *("-nostdin", "-hide_banner", "-nostats", "-loglevel", "level+verbose"),
        *("-f", "lavfi", "-i", "color=size=64x64:duration=1:rate=1"),
        *("-filter:v", tagged(full_range=True), "-fps_mode", "passthrough", "-frames:v", "1", "-codec:v", encoder),
        *("-f", "mp4", "-movflags", "+frag_keyframe+empty_moov", "-"),
    ]


def _lacks(written: subprocess.CompletedProcess[bytes], *, colour: bool) -> list[str]:
    """What is missing from a stream that was asked for."""
    log = written.stderr.decode("utf-8", "replace")
    if written.returncode:
        unknown = re.search(r"Unrecognized option '([\w:]+)'", log)
        if unknown:
            return [f"the option -{unknown[1]}"]
        complaints = "; ".join(re.findall(r"\[(?:error|fatal)\] (.*)", log)) or f"it exits with {written.returncode}"
        return [f"what it takes to write one frame: {complaints[:300]}"]
    lacks = []
    if STATISTICS.search(log) is None:
        lacks.append("the count of packets and frames that it read (-loglevel verbose)")
    if colour and _COLOUR_BOX not in written.stdout:
        lacks.append("colour as the filter setparams sets it, in what it writes")
    return lacks


def _x264_version(stream: bytes) -> str:
    matched = re.search(rb"x264 - (core [ -~]+?) - H\.264", stream)
    return matched[1].decode("ascii") if matched else "unknown"


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    if done.returncode:
        complaint = done.stderr.decode("utf-8", "replace").strip()[-300:]
        raise MissingDependency(f"ffmpeg exits with {done.returncode}: {complaint}", file=done.args[0], hint=_HINT)
    return done.stdout.decode("utf-8", "replace")


def _run(path: str, arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            env=environment(),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingDependency(f"ffmpeg does not run: {error}", file=path, hint=_HINT) from error
