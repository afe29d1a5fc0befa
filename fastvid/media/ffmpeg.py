"""Run ffmpeg on one source, or for test clips: its build, temporary files, and limits on time, memory and size."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Final

from fastvid.errors import MissingDependency, SourceError, WorkerError
from fastvid.media.reasons import Reason
from fastvid.media.timing import tagged
from fastvid.runtime.processes import how_it_ended
from fastvid.runtime.values import sha256

VARIABLE: Final = "FASTVID_FFMPEG"

_SECONDS: Final = 60
_QUERIES: Final = ("-version", "-encoders", "-filters")
_HINT: Final = f"install ffmpeg, or `pip install 'fastvid-toolkit[prepare]'`, or set {VARIABLE} to a program"
_AGAIN: Final = f"run the command again; if that does not help, set {VARIABLE} to another program"
_OTHER: Final = f"set {VARIABLE} to a newer or more complete program, such as that of imageio-ffmpeg"

_ENCODERS: Final = ("libvpx-vp9", "libx264", "libx265", "mjpeg")
# Filters that a build must have, because commands of `fastvid.sharding.encode.profiles` use them.
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
    jpeg: str = ""  # the library that encodes JPEG in its place, for a profile that needs one

    def identity(self) -> dict[str, Any]:
        """Return everything that may change the bytes that ffmpeg writes: all attributes except `path` and `found`."""
        record = asdict(self)
        del record["path"], record["found"]
        if not self.jpeg:
            del record["jpeg"]
        record["encoders"] = list(self.encoders)
        return record

    def __str__(self) -> str:
        others = ", ".join(filter(None, (f"x264 {self.x264 or 'absent'}", self.jpeg)))
        return f"ffmpeg {self.version} ({self.path}, from {self.found}), {others}"


def find_ffmpeg() -> FfmpegBuild:
    """Find ffmpeg: the program in FASTVID_FFMPEG, else on PATH, else in the imageio-ffmpeg wheel."""
    return _inspect(*_locate())


def environment() -> dict[str, str]:
    """Return this process's environment without the variables that change what ffmpeg prints or writes."""
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
    # Without x264, test the other features with MJPEG, which every build has. Do not test colour then, because which
    # tags an MP4 has for MJPEG differs between versions.
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
    """Return arguments that encode one frame as profiles do: features are tested, not inferred from the version."""
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


# 256 lines, the default short side of profiles; 64 frames, two GOPs of the profile "compact".
_SOURCE: Final = "testsrc2=s=336x256:r=25:d=2.56"
_LIMITED: Final = f"scale=out_range=limited:out_color_matrix=smpte170m,format=yuv420p,{tagged(full_range=False)}"
_FULL: Final = f"scale=out_range=full:out_color_matrix=smpte170m,format=yuvj420p,{tagged(full_range=True)}"
_X264: Final = "-c:v libx264 -threads 1 -preset veryfast -tune fastdecode -crf 23 -x264-params"
_CLIPS: Final = {
    "h264 compact": ("libx264", f"{_X264} keyint=32:min-keyint=32:scenecut=0:open-gop=0:bframes=7:b-pyramid=none"),
    "h264 intra": ("libx264", f"{_X264} keyint=1"),
    "hevc": ("libx265", "-c:v libx265 -tag:v hvc1 -x265-params log-level=none:pools=1:info=0:keyint=16:open-gop=0"),
    "vp9": ("libvpx-vp9", "-c:v libvpx-vp9 -g 12 -crf 32 -b:v 0 -cpu-used 8 -auto-alt-ref 0 -lag-in-frames 0"),
    "mjpeg": ("mjpeg", "-c:v mjpeg -q:v 3"),
}


def make_sample_clips(folder: Path) -> dict[str, bytes]:
    """Return MP4s by name, one per codec for which ffmpeg has an encoder."""
    build = find_ffmpeg()
    clips = {}
    for name, (encoder, arguments) in _CLIPS.items():
        if encoder != "mjpeg" and encoder not in build.encoders:
            continue
        path = folder / f"{name.replace(' ', '-')}.mp4"
        picture = _FULL if encoder == "mjpeg" else _LIMITED
        command = [build.path, "-v", "error", "-f", "lavfi", "-i", _SOURCE, "-vf", picture, *arguments.split()]
        command += ["-y", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MissingDependency(f"ffmpeg failed to encode {name}: {done.stderr.strip().splitlines()[-1:]}")
        clips[name] = path.read_bytes()
    return clips


@contextmanager
def temporary_file() -> Iterator[IO[bytes]]:
    """Open an unlinked file in the folder TMPDIR: it disappears however this process ends."""
    try:
        file = tempfile.TemporaryFile(prefix="fastvid-")  # noqa: SIM115
    except OSError as error:
        raise no_space(error) from error
    with file:
        yield file


def contents(descriptor: int) -> bytes:
    """Return all bytes of an open file, whatever its position: a process that shares the descriptor may move it."""
    return Path(f"/proc/self/fd/{descriptor}").read_bytes()


def is_full(error: OSError) -> bool:
    """Return whether the error means that a disk or a quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def no_space(error: OSError | None = None) -> SourceError:
    """Return the transient error for a temporary file that cannot be written."""
    what = "is full" if error is None or is_full(error) else f"cannot be written: {error.strerror}"
    return SourceError(
        f"disk for temporary files, {tempfile.gettempdir()}, {what}", reason=Reason.NO_SPACE, transient=True
    )


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits per source."""

    seconds: float = 60.0
    seconds_per_frame: float = 0.5
    max_seconds: float = 6 * 3600.0
    memory_bytes: int = 4 << 30
    # pixels of a decoded frame. 8192x4352 covers all common levels of H.264, HEVC, VP9 and AV1.
    max_pixels: int = 8192 * 4352
    max_frames: int = 24 * 3600 * 60  # frames of a source: 24 hours at 60 per second
    output_bytes: int = 2 << 30  # size of one encoded sample in bytes, because packet offsets have 32 bits
    source_bytes: int = 64 << 30  # size in bytes of a source; one that is downloaded is stored on the local disk

    def read_seconds(self, size: int) -> float:
        """Return the wall time to read `size` bytes twice, at a slow 4 MB/s, and decode one frame."""
        return min(self.max_seconds, self.seconds + 2 * size / 4e6)

    def transcode_seconds(self, *, frames: int, pixels: int) -> float:
        """Return the wall time to decode and encode a source: about twenty times what a slow core needs."""
        return min(self.max_seconds, self.seconds + self.seconds_per_frame * frames * max(pixels / 1e6, 0.25))


def confine(limits: Limits) -> None:
    """Permanently limit the memory of this process and its future children, and disable core files."""
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _lower(0, resource.RLIMIT_AS, mapped + limits.memory_bytes)
    _lower(0, resource.RLIMIT_CORE, 0)


def confine_child(pid: int, limits: Limits, *, cpu_seconds: float) -> None:
    """Limit a running child's file size, and its CPU time in case the process that watches it dies."""
    _lower(pid, resource.RLIMIT_CPU, int(cpu_seconds) + 1)
    _lower(pid, resource.RLIMIT_FSIZE, limits.output_bytes)


def _lower(pid: int, kind: int, value: int) -> None:
    """Limit a process, 0 for this one; the limit of the user's shell stays if it is lower."""
    _, hard = resource.prlimit(pid, kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.prlimit(pid, kind, (value, value))
