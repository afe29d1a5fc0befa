"""What the sharding tests share: small sources, stub programs, and the command run as a user runs it."""

import hashlib
import io
import os
import shlex
import stat
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path

import pyarrow.parquet as pq

from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.media.probe import SourceInfo, open_source, probe
from fastvid.sharding.encode.parts import plan_window
from fastvid.sharding.encode.profiles import PROFILES, Profile, Settings
from fastvid.sharding.encode.transcode import transcode
from fastvid.sharding.work.encode import encode_clips
from fastvid.sharding.work.tasks import Outcome, SourceTask
from fastvid.storage import Storage
from tests import forks

REPOSITORY = Path(__file__).parents[2]

SMALL = PROFILES["compact"].changed(short_side=64)

X264 = ["-c:v", "libx264", "-preset", "veryfast", "-crf", "12", "-g", "24", "-sc_threshold", "0", "-bf", "3"]
FRONT = ["-movflags", "+faststart"]
_FIELDS = ["-vf", "fieldorder=tff", "-flags", "+ildct+ilme", "-x264-params", "tff=1"]
_VARIABLE = ["-vf", r"setpts='(N*N/400+N)/(25*TB)'", *X264]
# What the fixture `film` makes: suffix and options. In the first nine decoding may begin at a key frame.
FILMS: dict[str, tuple[str, list[str]]] = {
    "mp4": ("mp4", [*X264, *FRONT]),
    "mp4-fragments": ("mp4", [*X264, "-movflags", "frag_keyframe+empty_moov"]),
    "mkv": ("mkv", X264),
    "late": ("mkv", [*X264, "-output_ts_offset", "5"]),
    "edit-list": ("mp4", X264),
    "webm": ("webm", ["-c:v", "libvpx-vp9", "-cpu-used", "8", "-b:v", "1M", "-g", "24", "-lag-in-frames", "16"]),
    "hevc": ("mp4", ["-c:v", "libx265", "-x265-params", "log-level=none:open-gop=0:keyint=24:scenecut=0", *FRONT]),
    "variable": ("mkv", _VARIABLE),
    "gaps": ("mp4", ["-vf", r"setpts='(N+floor(N/40)*3)/(25*TB)'", *X264]),
    "ts": ("ts", X264),
    "avi": ("avi", X264),
    "mpeg": ("mpg", ["-c:v", "mpeg2video", "-b:v", "4M", "-bf", "2", "-g", "24"]),
    "mpeg4": ("avi", ["-c:v", "mpeg4", "-q:v", "3", "-g", "24"]),
    "raw": ("h264", X264),
    "open-groups": ("mp4", [*X264, "-x264-params", "open-gop=1", *FRONT]),
    "interlaced": ("mp4", [*_FIELDS, *X264, *FRONT]),
    "reordered": ("mp4", [*X264, "-x264-params", "b-adapt=0:b-pyramid=normal", *FRONT]),
    "refresh": ("mp4", [*X264, "-x264-params", "intra-refresh=1:bframes=0", *FRONT]),
    "variable-mp4": ("mp4", [*_VARIABLE, *FRONT]),
}

# A filter that tags pictures as HDR10.
HDR = "setparams=color_primaries=bt2020:color_trc=smpte2084:colorspace=bt2020nc"


def ffmpeg(*arguments: str, data: bytes | None = None) -> None:
    """Runs ffmpeg, quietly; the last argument is the output."""
    command = [find_ffmpeg().path, "-nostdin", "-v", "error", *arguments[:-1], "-y", arguments[-1]]
    if data is not None:
        command.remove("-nostdin")
    subprocess.run(command, check=True, input=data, stdin=None if data is not None else subprocess.DEVNULL)


def make(path: Path, *options: str, size: str = "96x64", frames: int = 20, rate: str = "25") -> Path:
    """A test pattern that moves, as a file; each kind is encoded once in a session. Options may have more inputs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    options = options or ("-pix_fmt", "yuv420p", "-preset", "veryfast")
    inputs = max((place + 2 for place, word in enumerate(options) if word == "-i"), default=0)
    source = ("-f", "lavfi", "-i", f"testsrc2=size={size}:rate={rate}", *options[:inputs], "-frames:v", str(frames))
    path.write_bytes(_made(*source, *options[inputs:], suffix=path.suffix))
    return path


@cache
def _made(*arguments: str, suffix: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        ffmpeg(*arguments, f"{folder}/made{suffix}")
        return Path(f"{folder}/made{suffix}").read_bytes()


def tar_of(path, members):
    """Write a tar of (name, bytes or text)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            data = data.encode() if isinstance(data, str) else data
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def turn(path: Path, target: Path) -> Path:
    """An MP4 with a display matrix that turns it clockwise by a quarter, as a phone held upright writes it."""
    data = bytearray(path.read_bytes())
    # The matrix stands 40 bytes into a version 0 track header (ISO/IEC 14496-12, 8.3.2).
    struct.pack_into(">9i", data, data.index(b"tkhd") + 4 + 40, 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    target.write_bytes(data)
    return target


def look(path: Path | str, limits: Limits | None = None) -> SourceInfo:
    """What `probe` says of a file."""
    with open_source(str(path)) as source:
        return probe(source, limits or Limits())


def settings(profile: Profile = PROFILES["compact"], *, build=None, limits=None, max_seconds=600.0, **options):
    """Settings of a job, with the ffmpeg and the limits that users have."""
    return Settings(profile, build or find_ffmpeg(), limits or Limits(), max_seconds, **options)


def encode(path: Path | str, profile: Profile = PROFILES["compact"], parts=(None,), **options) -> list[bytes]:
    """A file through `transcode`: the MP4 of each part."""
    how = settings(profile, **options)
    with open_source(str(path)) as source:
        info = probe(source, Limits())
        return transcode(how, source, info, list(parts), plan_window(info, profile, parts))


def encode_source(task: SourceTask, how: Settings, report=lambda _phase, _seconds: None) -> Outcome:
    """What a worker makes of one source, or of one clip of it."""
    (outcome,) = encode_clips([task], how, report, lambda _tasks: None)
    return outcome


def stub(path: Path, body: str) -> str:
    """A program that stands in for ffmpeg; `body` is shell."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def other_build(path: Path) -> str:
    """The ffmpeg that is found, under another version."""
    program = shlex.quote(find_ffmpeg().path)
    body = f"""[ "$*" = -version ] || exec {program} "$@"\n{program} -version | sed '1s/version /version other-/'"""
    return stub(path, body)


def command(
    *arguments: object, fault: str = "", preexec_fn: Callable[[], object] | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """``fastvid shard`` in a process of its own; in a fresh interpreter if something has to be done before it."""
    if preexec_fn is None:
        return forks.fastvid("shard", *arguments, fault=fault, **environment)
    words = [sys.executable, "-m", "fastvid", "shard", *map(str, arguments)]
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment
    return subprocess.run(words, env=variables, preexec_fn=preexec_fn, capture_output=True, text=True, check=False)


def tars(folder: Path) -> dict[str, str]:
    """SHA-256 of every tar of a dataset."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.tar"))}


def content(dataset, key: str) -> bytes:
    """The bytes of a sample's video in its tar."""
    (shard,), (row,) = dataset.locate([dataset.find(key)])
    shard = dataset.shard(int(shard))
    start, size = shard.member(int(row))
    return bytes(shard.storage.map(shard.data)[start : start + size])


def copy_files(source: Storage, target: Storage) -> None:
    """Write all files of a store into another one."""
    for name in source.list():
        target.write(name, source.read(name))


def contents(store: Storage) -> dict[str, bytes]:
    """All files of a store, by name."""
    return {name: store.read(name) for name in store.list()}


def ledger(folder: Path) -> list[dict]:
    """The rows of a dataset's ledger, without the times."""
    rows = pq.read_table(folder / "ledger.parquet").to_pylist()
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def seconds(frames: int, rate: Fraction | int = 25) -> float:
    """Length of a number of frames."""
    return float(frames / Fraction(rate))
