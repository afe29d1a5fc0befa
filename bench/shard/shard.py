"""Measure the overhead of ``fastvid shard`` over the same ffmpeg commands run by ``xargs -P``.

The rival gets its commands prepared: its time includes no finding, probing, planning or verification. fastvid is timed
as users call it, from the start of the interpreter to the last byte of the dataset, with verification. Both must write
the same MP4s before they are timed. They run in alternating rounds; a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from bench.common.harness import NEEDED, Record, options
from bench.common.rounds import in_turn, ranged, ratios, timed
from fastvid.errors import FastvidError, UsageError
from fastvid.format.tar import read_members
from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.media.probe import open_source, probe
from fastvid.sharding.encode.parts import plan_parts
from fastvid.sharding.encode.profiles import build_command, get_profile
from fastvid.sharding.encode.transcode import verify
from fastvid.sharding.job.job import choose_settings
from fastvid.sharding.job.ledger import read_ledger
from fastvid.storage import open_storage
from fastvid.videos.dataset import open as open_dataset

SCHEMA: Final = "fastvid-bench-shard/1"
_SHARDS: Final = 10
_LONGEST: Final = 600.0  # seconds; fastvid would split a longer video, so it is skipped here

_log = logging.getLogger(__name__)


add_arguments = options(
    "workers",
    json="shard.json",
    footage=(Path, "videos, at any depth", {"nargs": "+", **NEEDED}),
    files=(int, "number of files to use, of all sizes (default: all)"),
    times=(3, "use each file so often that the start-up time of one second hardly counts"),
    profile=("compact", "profile"),
    rounds=(3, "measured rounds"),
    scratch=(Path("runs/bench/shard"), "folder of both outputs"),
)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    for folder in args.footage:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder")
    args.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.scratch) as name:
        record = compare(args, Path(name).resolve())
    return record.finish()


def spent(command: Sequence[str], *, stdin: bytes = b"", allowed: tuple[int, ...] = (0,)) -> tuple[float, float]:
    """Run a command; return its CPU seconds, of all processes, and its wall seconds."""
    done: list[subprocess.CompletedProcess[bytes]] = []
    run = partial(subprocess.run, input=stdin, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    found = timed(lambda: done.append(run(command)))
    if done[0].returncode not in allowed:
        raise FastvidError(f"{command[0]} failed with exit code {done[0].returncode}: {done[0].stderr[-300:].decode()}")
    _log.info("%s: %.1f s of CPU time, %.1f s", command[-1][-20:], *found)
    return found


def compare(args: argparse.Namespace, scratch: Path) -> Record:
    """Measure both contenders and return the record."""
    raw, plain = scratch / "raw", scratch / "plain"
    raw.mkdir()
    plain.mkdir()
    chosen = packed(choose(args.footage, args.files), args, scratch) * args.times
    lines = commands(chosen, plain, args.profile)
    copy_all(chosen, raw)
    ours = [sys.executable, "-m", "fastvid", "shard", str(raw), "--profile", args.profile]
    # Several shards, as in a real dataset: only the last one is packed after all encoding is done.
    ours += ["--samples-per-shard", str(-(-len(chosen) // _SHARDS)), "--workers", str(args.workers), "--out"]
    theirs = ["xargs", "-P", str(args.workers), "-d", "\n", "-n", "1", "sh", "-c"]
    kept = scratch / "out--1"

    def once(name: str, number: int) -> tuple[float, float]:
        if name == "xargs":
            return spent(theirs, stdin="\n".join(lines).encode())
        out = scratch / f"out-{number}"
        cost = spent([*ours, str(out)])
        if number >= 0:
            shutil.rmtree(out)
        return cost

    # The first round is a warm-up that fills the page cache.
    found = in_turn(("fastvid", "xargs"), args.rounds, once, warm_up=1)
    check(kept, plain, len(chosen))
    cpu, wall = ({name: [cost[kind] for cost in costs] for name, costs in found.items()} for kind in (0, 1))
    walls, cpus = (ratios(one["xargs"], one["fastvid"]) for one in (wall, cpu))
    frames, checked = verification(kept, args.profile)
    record = Record(
        SCHEMA, args, "profile", "workers", "rounds", "times", ffmpeg=find_ffmpeg().identity(), frames=frames
    )
    record["footage"] = [folder.name for folder in args.footage]
    record["files"] = len(chosen)
    record["megabytes"] = round(sum(path.stat().st_size for path in chosen) / 1e6, 2)
    for name in found:
        record[name] = ranged("wall", wall[name]) | ranged("cpu", cpu[name])
    record["throughput_of_xargs"] = {"wall": statistics.median(walls), "cpu": statistics.median(cpus)}
    # The order alternates, so these show whether the machine's speed drifted.
    record["throughput_of_xargs"] |= {"wall_rounds": walls, "cpu_rounds": cpus}
    share = checked / record["fastvid"]["cpu"]
    record["verification"] = {"cpu_seconds": checked, "part_of_cpu": share, "ms_a_frame": 1e3 * checked / frames}
    return record


def choose(footage: Sequence[Path], count: int | None) -> list[Path]:
    """Return the videos that fastvid would not split, by name; with `count`, a selection spread over the sizes."""
    found = []
    for path in sorted(path for folder in footage for path in folder.rglob("*") if path.is_file()):
        try:
            with open_source(str(path)) as source:
                timing = probe(source, Limits()).timing
        except FastvidError as error:
            _log.info("skipped: %s: %s", path.name, error)
            continue
        if timing.frames / timing.rate <= _LONGEST:
            found.append(path)
    if not found:
        raise UsageError(f"no usable video in {', '.join(map(str, footage))}")
    if count is None or count >= len(found):
        return found
    found.sort(key=lambda path: path.stat().st_size)
    return sorted(found[number * len(found) // count] for number in range(count))


def packed(paths: Sequence[Path], args: argparse.Namespace, scratch: Path) -> list[Path]:
    """Return the videos that a job packs; the rival would spend time on rejected ones for nothing."""
    raw, out = scratch / "tried", scratch / "tried-out"
    raw.mkdir()
    copy_all(paths, raw)
    command = [sys.executable, "-m", "fastvid", "shard", str(raw), "--profile", args.profile, "--out", str(out)]
    spent([*command, "--workers", str(args.workers)], allowed=(0, 3))
    rows = read_ledger(open_storage(str(out)))[0].to_pylist()
    taken = {int(Path(row["source_id"]).stem) for row in rows if row["status"] == "packed"}
    for number in sorted(set(range(len(paths))) - taken):
        _log.info("skipped: %s: rejected", paths[number].name)
    shutil.rmtree(raw)
    shutil.rmtree(out)
    return [paths[number] for number in sorted(taken)]


def copy_all(paths: Sequence[Path], folder: Path) -> None:
    """Copy videos into a folder, named by their index."""
    for number, path in enumerate(paths):
        shutil.copyfile(path, folder / f"{number:04d}{path.suffix}")


def commands(paths: Sequence[Path], target: Path, profile: str) -> list[str]:
    """Return a shell command for each video: fastvid's ffmpeg command, with paths instead of file descriptors."""
    settings, lines = choose_settings(profile), []
    for number, path in enumerate(paths):
        with open_source(str(path)) as source:
            info = probe(source, settings.limits)
        (part,) = plan_parts(info.timing, None, None, _LONGEST)
        command = build_command(settings, info, f"file:{path.resolve()}", [(f"file:{target}/{number:04d}.mp4", part)])
        lines.append(f"exec {shlex.join(command)} 2>/dev/null")
    return lines


def check(dataset: Path, plain: Path, files: int) -> None:
    """Compare the MP4s of both contenders."""
    seen = 0
    for tar in sorted(dataset.glob("*.tar")):
        data = memoryview(tar.read_bytes())
        for member in read_members(data):
            if member.suffix == "mp4":
                seen += 1
                other = (plain / f"{member.key[:4]}.mp4").read_bytes()
                if data[member.offset : member.offset + member.size] != other:
                    raise FastvidError("the same ffmpeg command wrote different bytes under xargs", key=member.key)
    if seen != files:
        raise FastvidError(f"{seen} of {files} files were packed")


def verification(folder: Path, profile: str) -> tuple[int, float]:
    """Return the number of frames of a dataset, and the CPU seconds of verifying all its samples."""
    dataset, chosen = open_dataset(str(folder)), get_profile(profile)
    frames, seconds = 0, 0.0
    for number in range(len(dataset)):
        shards, rows = dataset.locate([number])
        shard = dataset.shard(int(shards[0]))
        start, size = shard.member(int(rows[0]))
        data = bytearray(size)
        shard.storage.read_into(shard.data, [(start, memoryview(data))])
        video = dataset[number]
        count = (video.num_frames, video.num_frames)
        started = time.process_time()
        # Small pictures are not enlarged.
        side = min(chosen.short_side, video.height, video.width)
        verify(bytes(data), chosen.changed(short_side=side), frames=count, rate=video.fps)
        seconds += time.process_time() - started
        frames += video.num_frames
    return frames, seconds
