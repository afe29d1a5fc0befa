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
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pyarrow.parquet as pq

from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.media.probe import SourceInfo, open_source, probe
from fastvid.sharding.encode.parts import plan_window
from fastvid.sharding.encode.profiles import PROFILES, Profile, Settings
from fastvid.sharding.encode.transcode import transcode
from fastvid.sharding.work.encode import encode_clips
from fastvid.sharding.work.tasks import Outcome, SourceTask
from tests import forks

REPOSITORY = Path(__file__).parents[2]

# A filter that tags pictures as HDR10.
HDR = "setparams=color_primaries=bt2020:color_trc=smpte2084:colorspace=bt2020nc"


def ffmpeg(*arguments: str, data: bytes | None = None) -> None:
    """Runs ffmpeg, quietly; the last argument is the output."""
    command = [find_ffmpeg().path, "-nostdin", "-v", "error", *arguments[:-1], "-y", arguments[-1]]
    if data is not None:
        command.remove("-nostdin")
    subprocess.run(command, check=True, input=data, stdin=None if data is not None else subprocess.DEVNULL)


def make(path: Path, *options: str, size: str = "96x64", frames: int = 20, rate: str = "25") -> Path:
    """A test pattern that moves, as a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source = ["-f", "lavfi", "-i", f"testsrc2=size={size}:rate={rate}", "-frames:v", str(frames)]
    ffmpeg(*source, *(options or ("-pix_fmt", "yuv420p", "-preset", "veryfast")), str(path))
    return path


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


def ledger(folder: Path) -> list[dict]:
    """The rows of a dataset's ledger, without the times."""
    rows = pq.read_table(folder / "ledger.parquet").to_pylist()
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def seconds(frames: int, rate: Fraction | int = 25) -> float:
    """Length of a number of frames."""
    return float(frames / Fraction(rate))
