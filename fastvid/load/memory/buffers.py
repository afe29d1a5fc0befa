"""Host memory that is used again as soon as nobody can see it any more.

A batch handed to a user may be kept for any time, so its memory cannot simply be overwritten by a later batch; and
memory fresh from the system costs a page fault every 4 kB, about 0.1 ms a clip. Here an array returns to the pool when
its last view dies, be that a slice, a torch tensor or what autograd saved of it.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque

import numpy as np

from fastvid.runtime.arrays import UInt8Array


class BufferPool:
    """Byte arrays, page-aligned, recycled by size. Safe to use from many threads.

    Args:
        keep: Free buffers kept of each size; more are given back to the system.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        # Without a lock: arrays die wherever the garbage collector runs, also in a thread that holds a lock here.
        # Appending to a deque and popping from it are atomic.
        self._free: dict[int, deque[mmap.mmap]] = {}

    def take(self, nbytes: int) -> UInt8Array:
        """An array of `nbytes` > 0 uninitialised bytes, uint8 [nbytes], for as long as it or a view of it lives."""
        free = self._free.setdefault(nbytes, deque(maxlen=self._keep))
        try:
            buffer = free.pop()  # the last one used: it is still in the cache
        except IndexError:
            # Private: a forked child gets a copy, not a window into batches that are still being written.
            buffer = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # numpy keeps this very array as the base of all its views, because its own base is not an array.
        lease = np.frombuffer(buffer, dtype=np.uint8)
        weakref.finalize(lease, free.append, buffer).atexit = False
        return lease
