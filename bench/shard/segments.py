"""Measure ``fastvid shard`` on many segments of one long video against ffmpeg that seeks to each segment.

The video is real footage in a loop with the number of each frame painted on it. The rival is one ffmpeg for each
segment, which seeks, cuts, scales and encodes with the same settings; it verifies, hashes and indexes nothing. fastvid
is timed as users call it, from the start of the interpreter to the last byte of the dataset. The painted numbers of
every frame of every sample must be those of the full decode before anything is reported. Both run in alternating
rounds; a ratio is the median of the rounds' ratios of CPU time (all processes).
"""

from __future__ import annotations

import argparse
import io
import json
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import av

from bench.common.harness import RESULTS, machine_facts, write_json
from fastvid.errors import FastvidError
from fastvid.format.tar import read_members
from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.media.probe import open_source, probe
from fastvid.sharding.encode.profiles import build_command, get_profile

SCHEMA: Final = "fastvid-bench-segments/1"
_RATE, _WIDTH, _HEIGHT, _GOP = 25, 320, 240, 250
# Bits of a frame's number, painted side by side along the top.
_BITS: Final = 17
_BLOCK: Final = _WIDTH // _BITS // 2 * 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m bench segments``."""
    parser.add_argument("--footage", type=Path, required=True, metavar="FILE", help="a real video, used in a loop")
    parser.add_argument("--seconds", type=int, default=3600, help="length of the long video (%(default)s)")
    parser.add_argument("--segments", type=int, default=300, help="(%(default)s)")
    parser.add_argument("--length", type=float, default=5.0, help="seconds of a segment (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds (%(default)s)")
    parser.add_argument("--scratch", type=Path, default=Path("runs/bench/segments"), help="(%(default)s)")
    parser.add_argument("--json", type=Path, default=RESULTS / "segments.json", help="result file (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    args.scratch.mkdir(parents=True, exist_ok=True)
    long = (args.scratch / f"long-{args.seconds}.mp4").resolve()
    if not long.exists():
        make_long(args.footage, long, args.seconds)
    starts = segment_starts(args.seconds, args.segments, args.length)
    with tempfile.TemporaryDirectory(dir=args.scratch) as name:
        record = compare(long, starts, args.length, args.rounds, Path(name).resolve())
    print(json.dumps(record, indent=1))
    write_json(args.json, record)
    return 0


def make_long(footage: Path, target: Path, seconds: int) -> None:
    """Write the long video: H.264 with B-frames, a key frame every 250 frames."""
    filters = [f"fps={_RATE}", f"scale={_WIDTH}:{_HEIGHT}", "setsar=1", "setpts=N"]
    for bit in range(_BITS):
        box = f"drawbox=x={bit * _BLOCK}:y=0:w={_BLOCK}:h={_BLOCK}:t=fill"
        filters += [f"{box}:color=black", f"{box}:color=white:enable='mod(floor(n/{1 << _BITS - 1 - bit})\\,2)'"]
    command = [find_ffmpeg().path, "-v", "error", "-stream_loop", "-1", "-i", str(footage), "-an"]
    command += ["-vf", ",".join(filters).replace("setpts=N", f"setpts=N/{_RATE}/TB")]
    command += ["-frames:v", str(seconds * _RATE)]
    command += ["-r", str(_RATE), "-c:v", "libx264", "-preset", "veryfast", "-crf", "23", "-pix_fmt", "yuv420p"]
    part = target.with_suffix(".part.mp4")
    subprocess.run([*command, "-g", str(_GOP), "-sc_threshold", "0", "-bf", "2", "-y", str(part)], check=True)
    part.rename(target)


def segment_starts(seconds: int, count: int, length: float) -> list[float]:
    """Return where the segments begin: one at a random place in each of `count` equal stretches."""
    draws, stretch = random.Random(0), seconds / count
    places = ((number + draws.random()) * stretch * (1 - length / seconds) for number in range(count))
    return [round(place * _RATE) / _RATE for place in places]


def compare(long: Path, starts: Sequence[float], length: float, rounds: int, folder: Path) -> dict[str, Any]:
    """Time both contenders; return the record."""
    annotations = folder / "segments.csv"
    rows = [f"{long.name},{start},{start + length:.2f},segment" for start in starts]
    annotations.write_text("\n".join(["path,start,end,label", *rows]) + "\n")
    plain, out = folder / "plain", folder / "out"
    shard = [sys.executable, "-m", "fastvid", "shard", str(long), "--annotations", f"csv:{annotations}"]
    shard += ["--out", str(out), "--workers", "1"]
    prepared = rival(long, starts, length, plain)
    costs: dict[str, list[float]] = {"ffmpeg": [], "fastvid": []}
    walls: dict[str, list[float]] = {"ffmpeg": [], "fastvid": []}
    frames = 0
    for _ in range(rounds):
        for name, work in (
            (
                "ffmpeg",
                lambda: [subprocess.run(command, check=True, stderr=subprocess.DEVNULL) for command in prepared],
            ),
            ("fastvid", lambda: subprocess.run(shard, check=True, stderr=subprocess.DEVNULL)),
        ):
            shutil.rmtree(plain, ignore_errors=True)
            shutil.rmtree(out, ignore_errors=True)
            plain.mkdir()
            cpu, wall = timed(work)
            costs[name].append(cpu)
            walls[name].append(wall)
        frames = check(out, starts, length)
    ratios = [mine / other for mine, other in zip(costs["fastvid"], costs["ffmpeg"], strict=True)]
    return {
        "schema": SCHEMA,
        "machine": machine_facts(),
        "seconds": round(probe_seconds(long)),
        "segments": len(starts),
        "segment_seconds": length,
        "frames_checked": frames,
        "cpu_seconds": costs,
        "wall_seconds": walls,
        "cpu_ratio": statistics.median(ratios),
        "cpu_ratios": ratios,
    }


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the CPU seconds of the child processes that a function starts, and its wall seconds."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    work()
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def rival(long: Path, starts: Sequence[float], length: float, target: Path) -> list[list[str]]:
    """Return an ffmpeg command for each segment: fastvid's for the whole video, with a seek and a length."""
    with open_source(str(long)) as source:
        info = probe(source, Limits())
    commands = []
    for number, start in enumerate(starts):
        url = f"file:{target}/{number:04d}.mp4"
        command = build_command(find_ffmpeg(), get_profile("compact"), info, f"file:{long}", [(url, None)], Limits())
        # A forced rate would renumber the frames after the seek.
        forced = command.index("-r")
        del command[forced : forced + 2]
        at = command.index("-i")
        command[at:at] = ["-ss", str(start), "-t", str(length)]
        commands.append(command)
    return commands


def probe_seconds(path: Path) -> float:
    """Return the length of a video."""
    with av.open(str(path)) as container:
        return float((container.duration or 0) / av.time_base)


def check(out: Path, starts: Sequence[float], length: float) -> int:
    """Compare the painted number of every frame with that of the full decode; return the number of frames."""
    wanted = [list(range(round(start * _RATE), round((start + length) * _RATE))) for start in starts]
    found = []
    for tar in sorted(out.glob("*.tar")):
        data = tar.read_bytes()
        members = [member for member in read_members(memoryview(data)) if member.suffix == "mp4"]
        found += [painted(data[member.offset : member.offset + member.size]) for member in members]
    if sorted(found) != sorted(wanted):
        raise FastvidError("frames differ from the full decode", file=out)
    return sum(map(len, found))


def painted(video: bytes) -> list[int]:
    """Return the numbers painted on the frames of an encoded segment."""
    numbers = []
    with av.open(io.BytesIO(video)) as container:
        for frame in container.decode(video=0):
            luma = frame.to_ndarray()[: frame.height]
            # Scaled by height, then cropped at both sides.
            scale = frame.height / _HEIGHT
            left = (round(_WIDTH * scale / 2) * 2 - frame.width) / 2
            middle = slice(round(_BLOCK * scale / 3), round(_BLOCK * scale * 2 / 3))
            number = 0
            for bit in range(_BITS):
                begin, end = (round((bit + part) * _BLOCK * scale - left) for part in (0.4, 0.7))
                number = number << 1 | int(luma[middle, begin:end].mean() > 127)
            numbers.append(number)
    return numbers
