"""Keeps the packet tables that were used last, because the next clip of a video needs the same one.

Where each frame of an episode is an item, its table is used a thousand times an epoch; reading, checking and parsing it
takes as long as planning and reading the packets of a small clip. A table is known by the opening of its shard: who
opens the shard again reads and checks the table again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

from fastvid.format.packets import PacketTable

MEMORY: Final = 16 * 2**20
"""Bytes of tables in a process: those of about 1,500 videos of 300 packets."""

_TABLE_BYTES: Final = 1000  # of the object itself
_PACKET_BYTES: Final = 32  # its record, its flags, and the packet of its frame


class TableCache:
    """Tables by what identifies them; those used least recently are dropped. Thread-safe.

    Args:
        limit: Total memory in bytes.
    """

    def __init__(self, limit: int = MEMORY) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._tables: OrderedDict[Hashable, PacketTable] = OrderedDict()
        self._bytes = 0

    def get(self, key: Hashable) -> PacketTable | None:
        """Return a table that was added, or None."""
        with self._lock:
            table = self._tables.get(key)
            if table is not None:
                self._tables.move_to_end(key)
            return table

    def add(self, key: Hashable, table: PacketTable) -> PacketTable:
        """Keep a table, and return it."""
        with self._lock:
            if key not in self._tables:
                self._tables[key] = table
                self._bytes += _size(table)
            while self._bytes > self.limit:
                self._bytes -= _size(self._tables.popitem(last=False)[1])
        return table


TABLES: Final = TableCache()
"""The tables of all shards of this process."""


def _size(table: PacketTable) -> int:
    return _TABLE_BYTES + _PACKET_BYTES * len(table)
