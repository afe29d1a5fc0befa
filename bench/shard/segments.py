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
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import av

from bench.common.harness import Record, options
from bench.common.rounds import in_turn, ratios, timed
from fastvid.errors import FastvidError
from fastvid.format.tar import read_members
from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.media.probe import open_source, probe
from fastvid.sharding.encode.profiles import build_command
from fastvid.sharding.job.job import choose_settings

SCHEMA: Final = "fastvid-bench-segments/1"
_RATE, _WIDTH, _HEIGHT, _GOP = 25, 320, 240, 250
# Bits of a frame's number, painted side by side along the top.
_BITS: Final = 17
_BLOCK: Final = _WIDTH // _BITS // 2 * 2


add_arguments = options(
    json="segments.json",
    footage=(Path, "a real video, used in a loop", {"required": True, "metavar": "FILE"}),
    seconds=(3600, "length of the long video"),
    segments=(300, "segments of it"),
    length=(5.0, "seconds of a segment"),
    rounds=(3, "measured rounds"),
    scratch=(Path("runs/bench/segments"), "folder of the long video"),
)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    args.scratch.mkdir(parents=True, exist_ok=True)
    long = (args.scratch / f"long-{args.seconds}.mp4").resolve()
    if not long.exists():
        make_long(args.footage, long, args.seconds)
    starts = segment_starts(args.seconds, args.segments, args.length)
    with tempfile.TemporaryDirectory(dir=args.scratch) as name:
        record = Record(SCHEMA, args, **compare(long, starts, args.length, args.rounds, Path(name).resolve()))
    print(json.dumps(record, indent=1))
    record.save()
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
    """Time both contenders; return what was found."""
    annotations = folder / "segments.csv"
    rows = [f"{long.name},{start},{start + length:.2f},segment" for start in starts]
    annotations.write_text("\n".join(["path,start,end,label", *rows]) + "\n")
    plain, out = folder / "plain", folder / "out"
    shard = [sys.executable, "-m", "fastvid", "shard", str(long), "--annotations", f"csv:{annotations}"]
    commands = {"ffmpeg": rival(long, starts, length, plain)}
    commands["fastvid"] = [[*shard, "--out", str(out), "--workers", "1"]]
    checked = []

    def once(name: str, _: int) -> tuple[float, float]:
        for target in (plain, out):
            shutil.rmtree(target, ignore_errors=True)
        plain.mkdir()
        run = partial(subprocess.run, check=True, stderr=subprocess.DEVNULL)
        cost = timed(lambda: [run(command) for command in commands[name]])
        if name == "fastvid":
            checked.append(check(out, starts, length))
        return cost

    found = in_turn(tuple(commands), rounds, once)
    cpu, wall = ({name: [cost[kind] for cost in costs] for name, costs in found.items()} for kind in (0, 1))
    times = ratios(cpu["fastvid"], cpu["ffmpeg"])
    return {
        "seconds": round(probe_seconds(long)),
        "segments": len(starts),
        "segment_seconds": length,
        "frames_checked": checked[-1],
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "cpu_ratio": statistics.median(times),
        "cpu_ratios": times,
    }


def rival(long: Path, starts: Sequence[float], length: float, target: Path) -> list[list[str]]:
    """Return an ffmpeg command for each segment: fastvid's for the whole video, with a seek and a length."""
    with open_source(str(long)) as source:
        info = probe(source, Limits())
    commands = []
    for number, start in enumerate(starts):
        url = f"file:{target}/{number:04d}.mp4"
        command = build_command(choose_settings("compact"), info, f"file:{long}", [(url, None)])
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
