"""Lists and indexes videos in place: the work of jobs that neither encode nor copy a video."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastvid.errors import UsageError
from fastvid.format.in_place import ListedFile, common_root
from fastvid.format.indexed import IndexedSample, IndexedStream
from fastvid.format.schema import FORMAT_VERSION, IN_PLACE, IN_PLACE_SUFFIXES, PICTURES, shard_stem
from fastvid.format.tar import TarMember
from fastvid.format.write_shard import write_in_place
from fastvid.runtime import faults
from fastvid.runtime.file_names import encode_name
from fastvid.sharding.job.identity import digest
from fastvid.sharding.job.ledger import PackedSample, Part, Row, ledger_row
from fastvid.sharding.job.plan import file_order, plan_shards
from fastvid.sharding.sources.sources import Source, SourceList
from fastvid.sharding.work.index_source import unpack_found
from fastvid.sharding.work.messages import Outcome, Settings, SourceTask
from fastvid.storage import LocalStorage, Storage
from fastvid.storage.urls import FileUrl, is_remote

# No bytes of sources are copied, so their size does not limit a shard.
_ANY_BYTES = 2**62


class IndexFiles:
    """Indexes sources in place: a `ShardWork` whose shards are lists of files.

    `seed`: seed of the order of samples in the shards.
    """

    suffix = IN_PLACE_SUFFIXES[0]
    encoder: Mapping[str, Any] = {}
    scratch: LocalStorage | None = None

    def __init__(
        self,
        storage: Storage,
        found: SourceList,
        settings: Settings,
        *,
        seed: int,
        samples_per_shard: int,
        shards: Sequence[Sequence[Source]] | None = None,
    ) -> None:
        self._storage, self._seed = storage, seed
        self.blocked = settings.blocked
        for source in found.sources:
            if is_remote(source.path) and FileUrl.parse(source.path).query:
                raise UsageError(
                    "a URL with a query cannot be listed in a dataset: it may be a signature, which expires",
                    file=FileUrl.parse(source.path),
                    hint="use URLs that need no signature, or credentials in the environment (s3://, gs://)",
                )
        tried = [source for source in found.sources if source.problem is None]
        self.root = common_root([source.path for source in tried]) if tried else ""
        if shards is None:
            shards = plan_shards(tried, seed=seed, samples=samples_per_shard, source_bytes=_ANY_BYTES)
        self.shards = shards
        self.stems = [shard_stem(number) for number in range(len(self.shards))]
        files = [(encode_name(s.id), s.size, s.start, s.end, s.key, s.tag) for s in tried]
        notes = [(encode_name(s.id), s.label, dict(s.columns), s.problem) for s in found.sources]
        self.identity: Mapping[str, Any] = {
            "format": ".".join(map(str, FORMAT_VERSION)),
            "profile": {"name": IN_PLACE},
            "proof": settings.proof,
            "root": encode_name(self.root),
            "sources": {"number": len(tried), "bytes": sum(s.size for s in tried), "sha256": digest(files)},
            "annotations": {"number": len(notes), "sha256": digest([notes, found.classes])},
            "order": {"seed": seed, "samples_per_shard": samples_per_shard},
        }

    def order(self, shard: int) -> Sequence[int]:
        # Clips of a file follow each other, also across shards, so that a worker reads its tables once.
        sources = self.shards[shard]
        return sorted(range(len(sources)), key=lambda slot: file_order(sources[slot], self._seed))

    def task(self, index: int, source: Source) -> SourceTask:
        parent = None if source.parent is None else encode_name(source.parent)
        return SourceTask(
            index,
            encode_name(source.id),
            source.path,
            source.key,
            size=source.size,
            start=source.start,
            end=source.end,
            tag=source.tag,
            parent=parent,
        )

    def write(self, shard: int, outcomes: Iterator[Outcome]) -> Part:
        stem, rows = self.stems[shard], list[Row]()
        packed, samples, files = list[PackedSample](), list[IndexedSample](), list[ListedFile]()
        for source, outcome in zip(self.shards[shard], outcomes, strict=True):
            rows.append(ledger_row(source, outcome, stem))
            if outcome.reason is not None:
                continue
            rows[-1]["bytes_out"] = 0  # the video stays where it is
            sample, file, row = indexed_source(source, outcome)
            samples.append(sample)
            files.append(file)
            packed.append(row)
        made = write_in_place(self._storage, stem, samples, files, (PICTURES,)) if samples else None
        faults.reach("ledger")
        return Part(stem, rows, packed, made)


def indexed_source(source: Source, outcome: Outcome) -> tuple[IndexedSample, ListedFile, PackedSample]:
    """Return the sample of a source, the file that lists it, and its row for the annotations."""
    info, records, facts = unpack_found(outcome.samples[0])
    version, name = facts["version"], encode_name(source.id)
    file = ListedFile(source.key, source.stream, source.path, version["size"], version["tag"], version["modified"])
    place = {key: facts.get(key) for key in ("parent", "start_seconds", "end_seconds")}
    meta = {
        "source_id": name,
        "source_sha256": outcome.source_sha256 or None,
        "pix_fmt": facts["pix_fmt"],
        **place,
    }
    member = TarMember(encode_name(source.path), source.key, "", 0, file.size)
    sample = IndexedSample(source.key, meta, (IndexedStream(source.stream, member, info, records),))
    row = PackedSample(name, source.key, info.num_frames, str(info.fps), info.width, info.height, **place)
    return sample, file, row
