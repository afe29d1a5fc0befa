"""The packet tables that a process keeps."""

import numpy as np

from fastvid.format.packets import PacketTable, TableCache, packet_records
from fastvid.format.schema import PacketFlag


def table(count):
    sizes = np.full(count, 10)
    return PacketTable(packet_records(np.cumsum(sizes) - 10, sizes, sizes, range(count), [int(PacketFlag.KEY)] * count))


def test_tables_used_least_recently_are_dropped_at_the_limit():
    cache = TableCache(limit=10_000)
    tables = [cache.add(number, table(50)) for number in range(3)]
    assert [cache.get(number) for number in range(3)] == tables
    cache.get(0)
    cache.add(3, table(50))
    cache.add(4, table(50))
    assert cache.get(0) is tables[0]
    assert cache.get(1) is None


def test_a_table_larger_than_the_limit_is_not_kept():
    cache = TableCache(limit=10_000)
    large = table(1000)
    assert cache.add("large", large) is large
    assert cache.get("large") is None
    small = cache.add("small", table(10))
    assert cache.get("small") is small
