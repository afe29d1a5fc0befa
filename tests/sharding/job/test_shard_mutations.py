"""Two thousand damaged videos among intact ones, in one job. Started by ``make soak``; results are recorded."""

from __future__ import annotations

import collections
import csv
import json
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from bench.common.harness import RESULTS, machine_facts, write_json
from fastvid.format.tar import read_members
from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.runtime.processes import available_cores
from tests.sharding.shardtools import REPOSITORY

pytestmark = [pytest.mark.soak, pytest.mark.timeout(4 * 3600)]

SEED = 20_000
MUTANTS = 2000
UNTOUCHED = 200
# Small files of real encoders and cameras: two thousand of them take minutes.
LARGEST_BYTES = 600_000
LARGEST_MEGAPIXELS = 40
LONGEST_SECONDS = 12


def truncate(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Truncate the file anywhere, or just before its end."""
    del other
    return data[: rng.randrange(1, len(data)) if rng.random() < 0.8 else max(1, len(data) - rng.randrange(1, 200))]


def flip(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Flip one or many bits, anywhere or in the headers."""
    del other
    changed = bytearray(data)
    end = len(data) if rng.random() < 0.6 else min(len(data), 4096)
    for _ in range(rng.choice((1, 3, 10, 100, 1000))):
        changed[rng.randrange(end)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Join two files, or remove, repeat, overwrite or move a piece of one."""
    first, second = sorted(rng.randrange(len(data)) for _ in range(2))
    piece = data[first:second]
    return rng.choice(
        (
            lambda: data[:second] + other[rng.randrange(len(other)) :],
            lambda: data[:first] + data[second:],
            lambda: data[:second] + piece + data[second:],
            lambda: data[:first] + bytes(second - first) + data[second:],
            lambda: data[:first] + rng.randbytes(second - first) + data[second:],
            lambda: data[second:] + data[:second],
        )
    )()


MUTATIONS = {"truncated": truncate, "flipped": flip, "spliced": splice}


class Watch(threading.Thread):
    """Samples the memory of a process and its descendants."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.process = psutil.Process(pid)
        self.done = threading.Event()
        self.own: list[int] = []
        self.tree = self.one = 0

    def run(self) -> None:
        while not self.done.wait(0.3):
            try:
                self.own.append(self.process.memory_info().rss)
                others = []
                for child in self.process.children(recursive=True):
                    try:
                        others.append(child.memory_info().rss)
                    except psutil.NoSuchProcess:
                        continue
            except psutil.NoSuchProcess:
                return
            self.tree = max(self.tree, self.own[-1] + sum(others))
            self.one = max([self.one, *others])


def bases(footage: Path) -> list[Path]:
    """Small valid videos that this build of ffmpeg decodes."""
    with (footage / "manifest.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["folder"] != "bad" and "vvc" not in row["file"]]
    chosen = []
    for row in rows:
        path = footage / row["folder"] / row["file"]
        try:
            size = int(row["width"]) * int(row["height"]) * int(row["frames"]) / 1e6
            long = float(row["duration"])
        except ValueError:
            continue
        if path.stat().st_size <= LARGEST_BYTES and size <= LARGEST_MEGAPIXELS and long <= LONGEST_SECONDS:
            chosen.append(path)
    return chosen


def make_sources(footage: Path, raw: Path) -> dict[str, str]:
    """Write the videos; return what each is, by file name."""
    originals = bases(footage)
    contents = {path: path.read_bytes() for path in originals}
    kinds = {}
    for number in range(MUTANTS):
        rng = random.Random(f"{SEED}/{number}")
        kind = list(MUTATIONS)[number % len(MUTATIONS)]
        base, other = rng.choice(originals), rng.choice(originals)
        name = f"{kind}-{number:04d}{base.suffix}"
        (raw / name).write_bytes(MUTATIONS[kind](rng, contents[base], contents[other]))
        kinds[name] = kind
    for number in range(UNTOUCHED):
        base = originals[number % len(originals)]
        name = f"untouched-{number:04d}{base.suffix}"
        (raw / name).write_bytes(contents[base])
        kinds[name] = "untouched"
    return kinds


def samples(out: Path):
    """Yield every packed sample: key, MP4, promised frames."""
    for tar in sorted(out.glob("*.tar")):
        data = memoryview(tar.read_bytes())
        meta = {}
        for member in read_members(data):
            body = data[member.offset : member.offset + member.size]
            if member.suffix == "json":
                meta = json.loads(bytes(body))
            else:
                yield member.key, bytes(body), meta["num_frames"]


def wrong(sample: tuple[str, bytes, int]) -> str | None:
    """Return the first error that ffmpeg finds in a sample."""
    key, video, frames = sample
    command = [find_ffmpeg().path, "-v", "error", "-xerror", "-err_detect", "explode", "-threads", "1", "-f", "mov"]
    command += ["-i", "pipe:0", "-map", "0:v", "-fps_mode", "passthrough", "-f", "framecrc", "pipe:1"]
    done = subprocess.run(command, input=video, capture_output=True, check=False)
    lines = [line for line in done.stdout.splitlines() if not line.startswith(b"#")]
    if done.returncode or done.stderr or len(lines) != frames:
        return f"{key}: exit {done.returncode}, {len(lines)} of {frames} frames, {done.stderr[-200:]!r}"
    return None


def test_damaged_videos_neither_hang_nor_corrupt_a_job(footage, tmp_path):
    raw, out = tmp_path / "raw", tmp_path / "out"
    raw.mkdir()
    kinds = make_sources(footage, raw)
    started = time.monotonic()
    with (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(
            [sys.executable, "-m", "fastvid", "shard", raw, "--out", out, "--short-side", "64"],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        watch = Watch(job.pid)
        watch.start()
        try:
            status = job.wait(timeout=3 * 3600)
        finally:
            job.kill()
            watch.done.set()
            watch.join()
    wall = time.monotonic() - started
    assert status == 3, (tmp_path / "log").read_text()[-2000:]
    rows = {row["source_id"]: row for row in ledger_with_times(out)}
    assert set(rows) == set(kinds)
    verdicts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for name, row in rows.items():
        verdicts[kinds[name]][row["reason"] or "packed"] += 1
    with ThreadPoolExecutor(available_cores()) as pool:
        found = list(pool.map(wrong, samples(out)))
    undecodable = [text for text in found if text is not None]
    slowest = max(rows.values(), key=lambda row: row["seconds"])
    tenth = max(1, len(watch.own) // 10)
    record = {
        "schema": "fastvid-shard-mutations/1",
        "machine": machine_facts(),
        "ffmpeg": find_ffmpeg().identity(),
        "seed": SEED,
        "recipe": "mutant n is a function of random.Random(f'{seed}/{n}') and of the files in `bases`",
        "bases": [path.name for path in bases(footage)],
        "sources": dict(collections.Counter(kinds.values())),
        "verdicts": {kind: dict(sorted(counts.items())) for kind, counts in sorted(verdicts.items())},
        "samples_checked_with_xerror": len(found),
        "undecodable_samples": undecodable,
        "workers": available_cores(),
        "wall_seconds": round(wall, 1),
        "slowest_source": {"name": slowest["source_id"], "seconds": slowest["seconds"], "reason": slowest["reason"]},
        "peak_memory_mb": {
            "job_and_all_children": round(watch.tree / 1e6, 1),
            "largest_child": round(watch.one / 1e6, 1),
            "job": round(max(watch.own) / 1e6, 1),
            "job_in_first_tenth": round(max(watch.own[:tenth]) / 1e6, 1),
            "job_in_last_tenth": round(max(watch.own[-tenth:]) / 1e6, 1),
        },
    }
    write_json(RESULTS / "shard_mutations.json", record)
    assert not undecodable
    assert verdicts["untouched"] == {"packed": UNTOUCHED}
    assert sum(verdicts[kind].total() for kind in MUTATIONS) == MUTANTS
    # Memory is bounded by the limit per source, and does not grow with their number.
    assert watch.one < Limits().memory_bytes
    assert watch.own[-1] - max(watch.own[:tenth]) < 200e6
    assert slowest["seconds"] < Limits().max_seconds


def ledger_with_times(out: Path) -> list[dict]:
    """Return the ledger's rows, including times."""
    import pyarrow.parquet as pq

    return pq.read_table(out / "ledger.parquet").to_pylist()
