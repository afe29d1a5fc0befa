"""Small datasets for tests: clips encoded by ffmpeg as the profiles do, packed into shards."""

import hashlib
import json
import subprocess
import zlib
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from fastvid.format.annotations import annotation_table
from fastvid.format.dataset import Dataset, Generation, ShardRecord, commit_generation
from fastvid.format.schema import PACKET_DTYPE, PKT_HEADER_DTYPE, STREAM_DTYPE
from fastvid.format.writing import sample_members, write_shard
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.storage import LocalStorage
from tests.makers import TAGS

REPOSITORY = Path(__file__).parents[1]

_X264 = "-c:v libx264 -threads 1 -preset ultrafast -tune fastdecode -x264-params"
COMPACT = f"{_X264} keyint=8:min-keyint=8:scenecut=0:open-gop=0:bframes=3:b-adapt=0:b-pyramid=none"


def make_clip(
    path: Path,
    *,
    frames: int = 12,
    size: str = "96x64",
    rate: int | Fraction = 25,
    arguments: str = COMPACT,
    filters: str = "null",
    tags: str = TAGS,
) -> bytes:
    """Return an MP4 of a moving test pattern; `tags` is the last filter."""
    source = f"testsrc2=s={size}:r={rate}:d={float(frames / rate)},hue=h={frames * 37}"
    command = [
        find_ffmpeg().path,
        "-v",
        "error",
        "-f",
        "lavfi",
        "-i",
        source,
        "-vf",
        f"{filters},format=yuv420p,{tags}",
    ]
    subprocess.run([*command, *arguments.split(), "-fps_mode", "passthrough", "-y", str(path)], check=True)
    return path.read_bytes()


def pack(
    folder: Path,
    shards: list[list[tuple[str, bytes, int]]],
    *,
    classes: tuple[str, ...] = ("left", "right"),
    meta: dict[str, object] | None = None,
    columns: dict[str, list[object]] | None = None,
) -> LocalStorage:
    """Create a dataset of generation 1.

    Args:
        folder: Output folder.
        shards: The samples of each shard: key, MP4 or a mapping of MP4s by stream, label. The number of frames is read
            from the sidecar.
        classes: Class names.
        meta: Additional fields of every sample's JSON; `conforms` is true by default.
        columns: Additional annotation columns, one value per sample.
    """
    store, records, rows = LocalStorage(folder), [], []
    first = shards[0][0][1]
    streams = tuple(first) if isinstance(first, dict) else ("rgb",)
    for index, samples in enumerate(shards):
        stem = f"data-{index:06d}"
        members = [
            (
                key,
                sample_members(
                    {"source_id": f"{key}.avi", "conforms": True, **(meta or {})},
                    data if isinstance(data, dict) else {"rgb": data},
                ),
            )
            for key, data, _ in samples
        ]
        digest = write_shard(store, stem, members, streams=streams)
        records.append(ShardRecord(stem, digest.bytes, digest.sha256, digest.samples, {"name": "compact"}))
        rows += [
            {"key": key, "source_id": f"{key}.avi", "label": label, "removed": False}
            | facts_of(store, stem, row, streams)
            for row, (key, _, label) in enumerate(samples)
        ]
    for name, values in (columns or {}).items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    commit_generation(
        store, "made", Generation(1, tuple(records), classes=classes, streams=streams), annotation_table(rows)
    )
    return store


def facts_of(store: LocalStorage, stem: str, row: int, streams: tuple[str, ...] = ("rgb",)) -> dict[str, object]:
    """Return the facts of a sample for its annotations, from its shard's packet sidecar."""
    from fastvid.format.shard import Shard

    info = Shard(store, stem, streams=streams).info(row)
    facts = {name: getattr(info, name) for name in ("num_frames", "width", "height")}
    return facts | {"fps": float(info.fps), "duration": info.num_frames / float(info.fps)}


def damage(folder: Path, key: str, *, stream: str = "", packets: list[int] | slice = slice(None)) -> None:
    """Flip a bit in each of these packets of a sample, by default in all of its first stream."""
    dataset = Dataset(str(folder))
    (index,), (row,) = (numbers.tolist() for numbers in dataset.locate([dataset.find(key)]))
    shard, tar = dataset.shard(index), folder / f"{dataset.shard_name(index)}.tar"
    start, data = shard.member(row, stream)[0], bytearray(tar.read_bytes())
    for offset in shard.table(row, stream).records["offset"][packets].tolist():
        data[start + offset + 5] ^= 1
    tar.write_bytes(data)


def edit_pkt(store: LocalStorage, stem: str, change: Callable[[np.ndarray, np.ndarray], object]) -> None:
    """Change the streams and packets of a packet sidecar, and give it checksums that fit."""
    data = bytearray(store.read(f"{stem}.pkt"))
    header = np.frombuffer(data, PKT_HEADER_DTYPE, count=1)
    start = PKT_HEADER_DTYPE.itemsize
    rows = int(header["num_samples"][0] * header["num_streams"][0])
    streams = np.frombuffer(data, STREAM_DTYPE, count=rows, offset=start)
    end = start + rows * STREAM_DTYPE.itemsize + int(header["extradata_bytes"][0])
    end += int(header["audio_bytes"][0])
    packets = np.frombuffer(data, PACKET_DTYPE, offset=end)
    change(streams, packets)
    for row in streams:
        first, count = int(row["first_packet"]), int(row["num_packets"])
        row["packets_crc32"] = zlib.crc32(packets[first : first + count].tobytes())
    # The checksum is the last field of the header; it covers all that precedes the packets except itself.
    header["index_crc32"] = zlib.crc32(data[: start - 4] + data[start:end])
    store.write(f"{stem}.pkt", bytes(data))


def edit_record(store: LocalStorage, name: str, **changes: object) -> None:
    """Change fields of a commit record or generation, and give it a SHA-256 that fits."""
    record = json.loads(store.read(name)) | changes
    record.pop("sha256")
    text = json.dumps(record, indent=1, sort_keys=True) + "\n"
    record["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    store.write(name, json.dumps(record).encode())


def recommit(store: LocalStorage, **changes: object) -> None:
    """Commit the current generation again with changed fields, or with other annotations in ``annotations``."""
    from fastvid.format.generations import read_annotations, read_generation

    dataset_id, generation = read_generation(store)
    table = changes.pop("annotations", None) or read_annotations(store, generation)
    commit_generation(store, dataset_id, replace(generation, number=generation.number + 1, **changes), table)
