"""Write shards: a tar, and the sidecars that are derived from it.

`index_shard` is the only function that derives the sidecars of a tar, for new shards as for repaired ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from fastvid.errors import FastvidError
from fastvid.format.facts import facts_parquet
from fastvid.format.in_place import ListedFile, pack_files
from fastvid.format.indexed import IndexedSample, index_sample, pack_index
from fastvid.format.schema import AUDIO, FLOW, PICTURES, SHARD_SUFFIXES, member_suffix
from fastvid.format.tar import TarDigest, TarMember, read_members, sample_groups, to_json, wds2idx, write_tar
from fastvid.runtime import faults
from fastvid.runtime.hashing import sha256
from fastvid.storage import Storage
from fastvid.storage.transfer import copy_file

_LAST: Final = {FLOW: 1, AUDIO: 2}

Indexer = Callable[[memoryview, str, Sequence[TarMember], tuple[str, ...]], IndexedSample | None]
"""Indexes one sample, given the tar, the sample's key, its members and the wanted streams. None omits the sample from
the sidecars; it stays in the tar."""


def sample_members(meta: Mapping[str, Any], streams: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the tar members of a sample by suffix: its JSON, its pictures or cameras, its flow, then its sound."""
    names = sorted(streams, key=lambda name: _LAST.get(name, 0))
    return {"json": to_json(meta)} | {member_suffix(name): streams[name] for name in names}


def write_shard(
    storage: Storage,
    stem: str,
    samples: Iterable[tuple[str, Mapping[str, bytes]]],
    *,
    streams: tuple[str, ...] = (PICTURES,),
    scratch: Storage | None = None,
) -> TarDigest:
    """Write a tar and its sidecars. The tar appears whole, before its sidecars."""
    place = storage if scratch is None else scratch
    with place.create(f"{stem}.tar") as file:
        digest = write_tar(file, samples)
        faults.reach("rename")
    index_shard(place, stem, streams=streams, tar_sha256=digest.sha256)
    if scratch is not None:
        for suffix in SHARD_SUFFIXES:
            copy_file(scratch, f"{stem}.{suffix}", storage)
            faults.reach("upload")
        for suffix in SHARD_SUFFIXES:
            scratch.delete(f"{stem}.{suffix}")
    return digest


def write_in_place(
    storage: Storage, stem: str, samples: Sequence[IndexedSample], files: Sequence[ListedFile], streams: tuple[str, ...]
) -> TarDigest:
    """Write a shard of videos in place: the list of their files, then its sidecars; return the digest of the list."""
    listed = pack_files(files)
    digest = TarDigest(len(listed), sha256(listed), len(samples))
    pkt, rows = pack_index(samples, streams, digest.sha256)
    storage.write(f"{stem}.files", listed)
    faults.reach("sidecar")
    storage.write(f"{stem}.parquet", facts_parquet(samples, rows))
    storage.write(f"{stem}.pkt", pkt)
    return digest


def index_shard(
    storage: Storage,
    stem: str,
    *,
    streams: tuple[str, ...] = (PICTURES,),
    indexer: Indexer | None = None,
    tar_sha256: str | None = None,
) -> list[IndexedSample]:
    """Derive the sidecars of a tar from its bytes and write them.

    `indexer`: indexes samples of tars that other tools wrote; by default `index_sample`, for fastvid's own.
    """
    view = storage.map(f"{stem}.tar")
    members = list(read_members(view))
    samples = []
    for key, group in sample_groups(members):
        try:
            sample = (indexer or index_sample)(view, key, group, streams)
        except FastvidError as error:
            raise error.at(shard=stem, key=key) from error
        if sample is not None:
            samples.append(sample)
    storage.write(f"{stem}.idx", wds2idx(members))
    faults.reach("sidecar")
    pkt, rows = pack_index(samples, streams, tar_sha256 or sha256(view))
    storage.write(f"{stem}.parquet", facts_parquet(samples, rows))
    storage.write(f"{stem}.pkt", pkt)
    return samples


def has_sidecars(storage: Storage, stem: str) -> bool:
    """Return whether all sidecars of a shard exist."""
    return all(storage.exists(f"{stem}.{suffix}") for suffix in ("idx", "parquet", "pkt"))
