"""Indexes the videos of tars that other tools wrote: one shard for each tar, which stays as it is."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastvid.errors import FormatError
from fastvid.format.indexed import IndexedSample, IndexedStream
from fastvid.format.schema import FOREIGN, FORMAT_VERSION
from fastvid.format.tar import TarDigest, TarMember
from fastvid.format.write_shard import index_shard
from fastvid.media.reasons import Reason
from fastvid.runtime import faults
from fastvid.runtime.file_names import encode_name
from fastvid.runtime.hashing import sha256
from fastvid.sharding.job.identity import digest
from fastvid.sharding.job.ledger import PackedSample, Part, Row, ledger_row, problem_row
from fastvid.sharding.sources.sources import Source
from fastvid.sharding.sources.tars import TarSample, missing_video, read_tar, sample_keys
from fastvid.sharding.work.index_source import unpack_found
from fastvid.sharding.work.messages import Outcome, SourceTask
from fastvid.storage import LocalStorage


@dataclass(frozen=True, slots=True)
class IndexedTar:
    """A tar to index."""

    stem: str
    path: str
    version: tuple[int, int]  # its size in bytes and modification time in nanoseconds
    samples: Sequence[TarSample] = ()  # its samples, in order
    problem: str = ""


def open_tar(storage: LocalStorage, stem: str, path: str) -> IndexedTar:
    """Return the tar `stem` in a folder, with its samples."""
    stat = storage.path(f"{stem}.tar").stat()
    version = stat.st_size, stat.st_mtime_ns
    try:
        return IndexedTar(stem, path, version, read_tar(storage.map(f"{stem}.tar")))
    except FormatError as error:
        return IndexedTar(stem, path, version, problem=error.message)


class IndexShards:
    """Indexes the videos of tars: a `ShardWork` whose shards are the tars.

    `tars`: the tars; keys are unique among the samples of all. `sources`: the samples of all tars as sources, for
    the annotations.
    """

    suffix = "tar"
    encoder: Mapping[str, Any] = {}
    scratch: LocalStorage | None = None

    def __init__(
        self,
        storage: LocalStorage,
        tars: Sequence[IndexedTar],
        *,
        chosen: Mapping[str, Sequence[str] | None] | None = None,
        classes: Sequence[str] = (),
        blocked: Collection[str] = (),
    ) -> None:
        self._storage, self.blocked = storage, blocked
        self._wanted = dict.fromkeys(tar.stem for tar in tars) if chosen is None else chosen
        keys = sample_keys({tar.stem: tar.samples for tar in tars})
        self._sources: dict[tuple[str, int], Source] = {}
        for tar in tars:
            for sample in tar.samples:
                self._sources[tar.stem, sample.first] = _source(tar, sample, *keys[tar.stem, sample.first])
        self.sources = tuple(self._sources.values())
        self._tars = [tar for tar in tars if tar.stem in self._wanted]
        self.stems = [tar.stem for tar in self._tars]
        # A worker reads the tar, whose folder tells a missing disk from a missing file.
        self.shards = [
            [
                replace(self._sources[tar.stem, sample.first], path=str(storage.path(f"{tar.stem}.tar")))
                for sample in tar.samples
                if missing_video(sample) is None
            ]
            for tar in self._tars
        ]
        tried = [source for shard in self.shards for source in shard]
        notes = [(encode_name(s.id), s.key, s.member, s.label, dict(s.columns)) for s in self.sources]
        self.identity: Mapping[str, Any] = {
            "format": ".".join(map(str, FORMAT_VERSION)),
            "profile": {"name": FOREIGN},
            "tars": {"number": len(tars), "sha256": digest([(tar.stem, tar.version) for tar in tars])},
            "sources": {"number": len(tried), "bytes": sum(source.size for source in tried)},
            "annotations": {"number": len(notes), "sha256": digest([notes, list(classes)])},
        }

    def order(self, shard: int) -> Sequence[int]:
        return range(len(self.shards[shard]))

    def task(self, index: int, source: Source) -> SourceTask:
        name = encode_name(source.id)
        return SourceTask(index, name, source.path, source.key, size=source.size, member=source.member, indexes=True)

    def write(self, shard: int, outcomes: Iterator[Outcome]) -> Part:
        """Write the sidecars of a tar; its part has no digest if there is nothing to index."""
        tar = self._tars[shard]
        if tar.problem:
            broken = Source(os.path.basename(tar.path), tar.path)
            row = problem_row(broken, Reason.BROKEN_CONTAINER, f"the tar is broken: {tar.problem}")
            return Part(tar.stem, [row], (), None)
        rows: list[Row] = []
        packed: list[PackedSample] = []
        found: dict[int, IndexedSample] = {}
        for sample in tar.samples:
            source, problem = self._sources[tar.stem, sample.first], missing_video(sample)
            outcome = next(outcomes) if problem is None else Outcome(-1, reason=problem[0], message=problem[1])
            row = ledger_row(source, outcome, tar.stem)
            # The video stays unchanged; the blobs of the outcome are its index.
            row["bytes_out"] = source.size if outcome.reason is None else None
            row["warnings"] = [*outcome.warnings, *sample.notes]
            rows.append(row)
            if outcome.reason is None:
                indexed = found[sample.first] = _indexed(sample, source, outcome)
                info = indexed.streams[0].info
                facts = (info.num_frames, str(info.fps), info.width, info.height)
                packed.append(PackedSample(encode_name(source.id), source.key, *facts))
        wanted = self._wanted[tar.stem]
        if wanted is not None:
            _check_keys(tar, [sample.key for sample in packed], wanted)
        if not found:
            return Part(tar.stem, rows, (), None)

        def indexer(
            _view: memoryview, _name: str, members: Sequence[TarMember], _streams: tuple[str, ...]
        ) -> IndexedSample | None:
            return found.get(members[0].offset)

        view = self._storage.map(f"{tar.stem}.tar")
        tar_sha256 = sha256(view)
        samples = index_shard(self._storage, tar.stem, indexer=indexer, tar_sha256=tar_sha256)
        faults.reach("ledger")
        return Part(tar.stem, rows, packed, TarDigest(len(view), tar_sha256, len(samples)))


def _source(tar: IndexedTar, sample: TarSample, name: str, key: str) -> Source:
    """Return a sample as a source for the ledger and the annotations."""
    label, video = None if sample.label is None else str(sample.label), sample.video
    if video is None:
        return Source(name, tar.path, 0, label, sample.columns, key=key)
    place = (video.offset, video.size)
    return Source(name, f"{tar.path}/{video.name}", video.size, label, sample.columns, member=place, key=key)


def _indexed(sample: TarSample, source: Source, outcome: Outcome) -> IndexedSample:
    assert sample.video is not None
    info, records, facts = unpack_found(outcome.samples[0])
    meta = {
        "source_id": encode_name(source.id),
        "source_sha256": outcome.source_sha256,
        "pix_fmt": facts["pix_fmt"],
    }
    return IndexedSample(source.key, meta, (IndexedStream("rgb", sample.video, info, records),))


def _check_keys(tar: IndexedTar, keys: Sequence[str], wanted: Sequence[str]) -> None:
    if keys != wanted:
        lost = sorted(set(wanted) - set(keys))
        raise FormatError(
            f"the tar contains {len(keys)} samples, the dataset lists {len(wanted)}"
            + (f"; {lost[0]!r} can no longer be indexed" if lost else ""),
            shard=tar.stem,
        )
