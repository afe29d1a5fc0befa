"""Opens the shards of a generation, and keeps them open within a limit of memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

from fastvid.errors import FormatError
from fastvid.format.generations import Generation
from fastvid.format.shard import Shard
from fastvid.storage import Storage

MEMORY: Final = 256 * 2**20
"""Bytes of open shards in a process: the indexes of about 2,500 shards of 1,000 videos, or 40 whole packet sidecars of
them, which a process keeps of a remote storage without a node cache."""


class OpenShards:
    """Opens shards when they are first used, and closes those that were used least recently. Thread-safe.

    When the limit is first reached, shards that are opened later keep no whole sidecars: their packet tables are then
    requested one by one.

    `limit`: total memory in bytes; at least one shard stays open.
    """

    def __init__(self, limit: int = MEMORY) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._shards: OrderedDict[Hashable, tuple[Shard, int]] = OrderedDict()
        self._bytes = 0
        self._is_full = False

    def __contains__(self, key: Hashable) -> bool:
        return key in self._shards

    def __len__(self) -> int:
        return len(self._shards)

    def get(self, key: Hashable, make: Callable[[bool], Shard]) -> Shard:
        """Return a shard."""
        with self._lock:
            known = self._shards.get(key)
            if known is not None:
                self._count(key, known[0])
                return known[0]
        # No lock: threads can open shards at once; if two open the same one, the first is kept.
        shard = make(not self._is_full)
        with self._lock:
            if key in self._shards:
                shard = self._shards[key][0]
            self._count(key, shard)
            while self._bytes > self.limit and len(self._shards) > 1:
                self._bytes -= self._shards.popitem(last=False)[1][1]
                self._is_full = True
        return shard

    def _count(self, key: Hashable, shard: Shard) -> None:
        """Make a shard the one used last, and count its memory, which grows when it reads its list of files."""
        before = self._shards.pop(key, (shard, 0))[1]
        self._shards[key] = shard, shard.nbytes
        self._bytes += shard.nbytes - before


def open_shard(
    storage: Storage, generation: Generation, index: int, root: str | None = None, whole: bool = True
) -> Shard:
    """Open a shard after checking that its files are those that the generation lists."""
    record, streams = generation.shards[index], generation.streams
    place = generation.root_of(record, root)
    shard = Shard(storage, record.name, record.sha256, streams=streams, root=place, whole=whole)
    found, expected = (shard.num_samples, shard.num_streams), (record.samples, len(streams))
    if found != expected:
        raise FormatError(
            f"packet sidecar contains {found[0]} samples of {found[1]} streams, the generation lists {expected[0]} of"
            f" {expected[1]}",
            shard=record.name,
            hint="run `fastvid index DIR` to rebuild the sidecars of the dataset in DIR",
        )
    if (size := storage.size(shard.data)) != record.bytes:
        raise FormatError(
            f"{record.data} has {size} bytes, the generation lists {record.bytes}",
            shard=record.name,
            hint="restore the file from a copy of the dataset; `fastvid verify DIR` finds all damage",
        )
    return shard
