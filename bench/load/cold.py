"""Measure the time to the first batch: 100 million samples, 10,000 shards, and real footage.

Each number is measured in a fresh process.

reach   100 million samples in 10,000 shards: find the byte ranges of the packets of a batch of 512, then read and check
        the packets. Sidecars and tars are sparse files of full size, written only where the batch reads. Measured with
        a warm page cache, and with the files dropped from it.
open    10,000 shards of 100 videos: from `fastvid.open` to the first batch.
first   real footage: from `import fastvid` to the first batch, in a process that has imported torch.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.common.footage import shard as shard_footage
from bench.common.harness import DATASET, Record, options
from bench.common.rounds import apart, resident, spread
from fastvid.errors import FastvidError

SCHEMA: Final = "fastvid-bench-cold/1"

REACH: Final = {"shards": 10_000, "samples": 10_000, "packets": 100, "bytes": 2_000}
"""A video of 100 packets of 2 kB is a short clip in `compact`."""

BATCH: Final = 512
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
        for question, dropped in (("reach", False), ("reach from disk", True)):
            answers = [
                apart(reach, str(make_reach(folder / "reach", number)), number, dropped)
                for number in range(args.rounds)
            ]
            record[question] = _summary(answers) | {"batch": BATCH, "samples": REACH["shards"] * REACH["samples"]}
        wide = make_wide(folder / "wide")
        answers = [apart(first_batch, wide, 64) for _ in range(args.rounds)]
        record["open"] = _summary(answers) | {"shards": OPEN_SHARDS, "samples": OPEN_SHARDS * OPEN_SAMPLES}
    data = args.data or (str(shard_footage(args.footage, "compact", args.cache)) if args.footage else None)
    if data is not None:
        answers = [apart(first_batch, data, 224) for _ in range(args.rounds)]
        record["first"] = _summary(answers) | {"dataset": Path(data).name}
    for question in ("reach", "reach from disk", "open", "first"):
        for name, value in record.get(question, {}).items():
            if isinstance(value, dict):
                print(f"{question:15} {name:24} {value['median']:10.1f}   ({value['min']:.1f} to {value['max']:.1f})")
    record.save()
    return 0


def reach(folder: str, number: int, dropped: bool) -> Answer:
    """Time one batch of the large dataset."""
    from fastvid.decode.clips import PacketBuffer, coalesce
    from fastvid.decode.request import Box, ClipRequest
    from fastvid.format.shard import Shard
    from fastvid.load.clips.sampling import Segments, VideoInfo
    from fastvid.load.order.draws import Draws
    from fastvid.load.workers.clip_worker import fetch
    from fastvid.storage import LocalStorage

    storage, sampler = LocalStorage(folder), Segments(8)
    if dropped:
        for name in storage.list():
            drop_from_cache(storage.path(name))
    before = resident()
    wall, cpu = time.perf_counter(), time.process_time()
    clips, ranges = [], 0
    shards: dict[int, Shard] = {}
    for place, sample in enumerate(reach_batch(number).tolist()):
        index, row = divmod(sample, REACH["samples"])
        if index not in shards:
            shards[index] = Shard(storage, f"data-{index:06d}")
        shard = shards[index]
        info = shard.info(row)
        frames = sampler.draw(VideoInfo(info.num_frames, float(info.fps), info.width, info.height), Draws(1, 0, place))
        table = shard.table(row)
        records = table.records[table.plan(frames).packets]
        ranges += len(coalesce(records["offset"].tolist(), records["size"].tolist(), storage.gap)[1])
        clips.append((shard, row, info, frames))
    found = time.perf_counter() - wall, time.process_time() - cpu
    grown = resident() - before
    scratch, total = PacketBuffer(), 0
    for shard, row, info, frames in clips:
        request = ClipRequest(0, frames, Box(0, 0, 224, 224), (224, 224))
        total += fetch(shard, row, request, key="", info=info, scratch=scratch)[1].bytes_read
    return {
        "ranges_ms": 1e3 * found[0],
        "ranges_cpu_ms": 1e3 * found[1],
        "ranges_megabytes": grown / 1e6,
        "checked_ms": 1e3 * (time.perf_counter() - wall),
        "checked_cpu_ms": 1e3 * (time.process_time() - cpu),
        "checked_megabytes": (resident() - before) / 1e6,
        "read_megabytes": total / 1e6,
        "ranges": ranges,
        "shards": len(shards),
    }


def reach_batch(number: int) -> np.ndarray:
    """Return the samples of a batch of the large dataset, int64 [BATCH]."""
    from fastvid.load.order.draws import Permutation

    total = REACH["shards"] * REACH["samples"]
    start = number * total // 100
    return Permutation(total, 1, 0).ids(np.arange(start, start + BATCH))


def make_reach(folder: Path, number: int) -> Path:
    """Create the shards that batch `number` reads, as sparse files of full size."""
    from fastvid.format.packets import packet_records
    from fastvid.format.schema import (
        FORMAT_VERSION,
        PACKET_DTYPE,
        PKT_HEADER_DTYPE,
        PKT_MAGIC,
        STREAM_DTYPE,
        Codec,
        PacketFlag,
    )

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    samples, packets, size = REACH["samples"], REACH["packets"], REACH["bytes"]
    header = np.zeros(1, PKT_HEADER_DTYPE)
    header["magic"], header["major"], header["minor"] = PKT_MAGIC, *FORMAT_VERSION
    header["num_samples"], header["num_streams"], header["num_packets"] = samples, 1, samples * packets
    header["stream_bytes"], header["packet_bytes"] = STREAM_DTYPE.itemsize, PACKET_DTYPE.itemsize
    # The structure of `compact`: GOPs of 32, seven of eight packets droppable. Packets are zeros, as holes read.
    key, droppable = int(PacketFlag.KEY), int(PacketFlag.DROPPABLE)
    flags = [key if n % 32 == 0 else 0 if n % 8 == 0 else droppable for n in range(packets)]
    checksums = [zlib.crc32(bytes(size))] * packets
    records = packet_records(np.arange(packets) * size, [size] * packets, checksums, range(packets), flags).tobytes()
    rows_at = PKT_HEADER_DTYPE.itemsize
    packets_at = rows_at + samples * STREAM_DTYPE.itemsize
    for index, row in zip(*(part.tolist() for part in np.divmod(reach_batch(number), samples)), strict=True):
        sidecar = folder / f"data-{index:06d}.pkt"
        if not sidecar.exists():
            sidecar.write_bytes(header.tobytes())
            os.truncate(sidecar, packets_at + samples * packets * PACKET_DTYPE.itemsize)
            tar = sidecar.with_suffix(".tar")
            tar.touch()
            os.truncate(tar, samples * packets * size)
        stream = np.zeros(1, STREAM_DTYPE)
        stream["member_offset"], stream["member_size"] = row * packets * size, packets * size
        stream["first_packet"], stream["num_packets"], stream["num_frames"] = row * packets, packets, packets
        stream["fps_num"], stream["fps_den"], stream["width"], stream["height"] = 25, 1, 336, 256
        stream["codec"], stream["packets_crc32"] = Codec.H264, zlib.crc32(records)
        with sidecar.open("r+b") as file:
            file.seek(rows_at + row * STREAM_DTYPE.itemsize)
            file.write(stream.tobytes())
            file.seek(packets_at + row * packets * PACKET_DTYPE.itemsize)
            file.write(records)
            # The last field of the header is the checksum of all else that precedes the packets.
            file.seek(0)
            index = file.read(packets_at)
            file.seek(rows_at - 4)
            file.write(zlib.crc32(index[: rows_at - 4] + index[rows_at:]).to_bytes(4, "little"))
    return folder


def make_wide(folder: Path) -> str:
    """Create a dataset of many small shards, which are hard links to one, with annotations for all samples."""
    import pyarrow as pa

    from fastvid.format.dataset import Generation, ShardRecord, commit_generation
    from fastvid.format.schema import ANNOTATION_FIELDS
    from fastvid.format.shard import sample_members, write_shard
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


def drop_from_cache(path: Path) -> None:
    """Drop a file from the page cache, so that the next read comes from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def _summary(answers: list[Answer]) -> dict[str, Any]:
    return {name: spread([answer[name] for answer in answers]) for name in answers[0]}
