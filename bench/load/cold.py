"""Measure the time to the first batch of 10,000 shards and of real footage.

Each number is measured in a fresh process.

open    10,000 shards of 100 videos: from `fastvid.open` to the first batch.
first   real footage: from `import fastvid` to the first batch, in a process that has imported torch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.common.footage import shard as shard_footage
from bench.common.harness import DATASET, Record, options
from bench.common.rounds import apart, resident, spread
from fastvid.errors import FastvidError

SCHEMA: Final = "fastvid-bench-cold/1"

OPEN_SHARDS: Final = 10_000
OPEN_SAMPLES: Final = 100

Answer = dict[str, float]


add_arguments = options(
    "footage cache rounds", json="cold.json", data=(str, "a dataset; instead of --footage", DATASET)
)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    record = Record(SCHEMA, args, "rounds")
    with tempfile.TemporaryDirectory(prefix="fastvid-cold-") as scratch:
        folder = Path(scratch)
        wide = make_wide(folder / "wide")
        answers = [apart(first_batch, wide, 64) for _ in range(args.rounds)]
        record["open"] = _summary(answers) | {"shards": OPEN_SHARDS, "samples": OPEN_SHARDS * OPEN_SAMPLES}
    data = args.data or (str(shard_footage(args.footage, "compact", args.cache)) if args.footage else None)
    if data is not None:
        answers = [apart(first_batch, data, 224) for _ in range(args.rounds)]
        record["first"] = _summary(answers) | {"dataset": Path(data).name}
    return record.finish()


def make_wide(folder: Path) -> str:
    """Create a dataset of many small shards, which are hard links to one, with annotations for all samples."""
    import pyarrow as pa

    from fastvid.format.dataset import Generation, ShardRecord, commit_generation
    from fastvid.format.schema import ANNOTATION_FIELDS
    from fastvid.format.writing import sample_members, write_shard
    from fastvid.media.ffmpeg import find_ffmpeg
    from fastvid.media.timing import tagged
    from fastvid.storage import LocalStorage

    folder.mkdir()
    clip = folder.parent / "clip.mp4"
    source = "testsrc2=s=96x64:r=25:d=1,format=yuv420p"
    x264 = "-c:v libx264 -threads 1 -preset ultrafast -x264-params keyint=8:bframes=3:b-pyramid=none"
    command = f"{find_ffmpeg().path} -v error -f lavfi -i {source} -vf {tagged(full_range=False)} {x264} -y {clip}"
    subprocess.run(command.split(), check=True)
    store = LocalStorage(folder)
    members = sample_members({"source_id": "clip", "conforms": True}, {"rgb": clip.read_bytes()})
    digest = write_shard(store, "data-000000", [(f"video{n:02d}", members) for n in range(OPEN_SAMPLES)])
    for number in range(1, OPEN_SHARDS):
        for suffix in ("tar", "pkt"):
            os.link(folder / f"data-000000.{suffix}", folder / f"data-{number:06d}.{suffix}")
    records = tuple(
        ShardRecord(f"data-{n:06d}", digest.bytes, digest.sha256, digest.samples, {"name": "compact"})
        for n in range(OPEN_SHARDS)
    )
    total = OPEN_SHARDS * OPEN_SAMPLES
    keys = [f"class_{n % 400:03d}/video_{n:08d}" for n in range(total)]
    columns = {"key": keys, "source_id": keys, "label": np.arange(total) % 400, "num_frames": np.full(total, 25)}
    columns["removed"] = np.zeros(total, dtype=bool)
    table = pa.table({name: pa.array(columns[name], kind) for name, kind in ANNOTATION_FIELDS.items()})
    table = table.append_column("split", pa.array(["train" if n % 10 else "test" for n in range(total)]))
    classes = tuple(f"class {n}" for n in range(400))
    commit_generation(store, "wide", Generation(1, records, classes=classes), table)
    return str(folder)


def first_batch(data: str, crop: int) -> Answer:
    """Time everything from `import fastvid` to the first batch of the split "train", or of all samples."""
    import torch  # imported before the clock starts

    assert torch.__version__
    before = resident()
    wall, cpu = time.perf_counter(), time.process_time()
    import fastvid

    try:
        dataset = fastvid.open(data, split="train")
    except FastvidError:
        dataset = fastvid.open(data)
    opened = time.perf_counter() - wall
    spatial = [fastvid.RandomResizedCrop(crop), fastvid.HorizontalFlip(0.5)]
    batch_size = min(32, len(dataset))
    loader = fastvid.ClipLoader(
        dataset, frames=fastvid.Segments(8), spatial=spatial, global_batch_size=batch_size, rank=0, world_size=1
    )
    made = time.perf_counter() - wall
    iterator = iter(loader)
    next(iterator)
    answer = {
        "opened_ms": 1e3 * opened,
        "loader_made_ms": 1e3 * made,
        "first_batch_ms": 1e3 * (time.perf_counter() - wall),
        "cpu_ms": 1e3 * (time.process_time() - cpu),
        "decoding_cpu_ms": 1e3 * loader.stats.step.decode_seconds,
        "megabytes": (resident() - before) / 1e6,
        "clips": float(batch_size),
    }
    loader.close()
    return answer


def _summary(answers: list[Answer]) -> dict[str, Any]:
    return {name: spread([answer[name] for answer in answers]) for name in answers[0]}
