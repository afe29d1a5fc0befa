"""Read the samples of a shard of videos in place as they were when it was written, to list them in another shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from fastvid.errors import FormatError, UsageError
from fastvid.format.facts import META_FIELDS
from fastvid.format.in_place import ListedFile
from fastvid.format.indexed import IndexedSample, IndexedStream
from fastvid.format.parquet import from_parquet
from fastvid.format.schema import StreamFlag
from fastvid.format.shard import Shard
from fastvid.format.tar import TarDigest, TarMember
from fastvid.format.write_shard import write_in_place
from fastvid.storage import Storage


@dataclass(frozen=True, slots=True)
class ListedSample:
    """A sample of a shard of videos in place."""

    indexed: IndexedSample
    files: tuple[ListedFile, ...]

    def renamed(self, key: str, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> ListedSample:
        """Return the sample with another key and changed facts."""
        files = tuple(replace(file, key=key) for file in self.files)
        streams = tuple(replace(stream, member=replace(stream.member, key=key)) for stream in self.indexed.streams)
        return ListedSample(replace(self.indexed, key=key, meta=change(self.indexed.meta), streams=streams), files)


def listed_samples(shard: Shard) -> Iterator[ListedSample]:
    """Yield the samples of a shard of videos in place, in order."""
    name = f"{shard.stem}.parquet"
    facts = from_parquet(shard.storage.read(name), file=name).to_pylist()
    count = shard.num_streams
    if len(facts) != shard.num_samples * count:
        raise FormatError(f"{len(facts)} facts for {shard.num_samples} samples of {count} streams", file=name)
    for row in range(shard.num_samples):
        mine = facts[row * count : (row + 1) * count]
        streams, files = [], []
        for stream, fact in zip(shard.streams, mine, strict=True):
            files.append(shard.file(row, stream))
            offset, size = shard.member(row, stream)
            member = TarMember(fact["member"], fact["key"], "", offset, size)
            records = shard.table(row, stream).records
            streams.append(IndexedStream(stream, member, shard.info(row, stream), records))
        meta = {field: mine[0][field] for field in META_FIELDS}
        yield ListedSample(IndexedSample(mine[0]["key"], meta, tuple(streams)), tuple(files))


def whole_file(shard: Shard, row: int, stream: str = "") -> tuple[str, bytes]:
    """Return the suffix, such as ``mp4``, and the bytes of the file of a sample of videos in place."""
    if shard.info(row, stream).flags & StreamFlag.PART:
        raise UsageError(
            "the sample is a part of a file that others share",
            shard=shard.stem,
            file=shard.file(row, stream).file,
            hint="write its frames with `fastvid get --seconds`, or encode the dataset with `fastvid transcode` first",
        )
    reader = shard.reader(row, stream)
    data = bytearray(reader.size)
    reader([(0, memoryview(data))])
    suffix = PurePosixPath(shard.file(row, stream).file).suffix.lower().lstrip(".")
    return suffix or "mp4", bytes(data)


def write_listed(storage: Storage, stem: str, samples: Iterable[ListedSample], streams: tuple[str, ...]) -> TarDigest:
    """Write a shard of videos in place from samples of others, see `write_in_place`."""
    chosen = list(samples)
    files = [file for sample in chosen for file in sample.files]
    return write_in_place(storage, stem, [sample.indexed for sample in chosen], files, streams)
