"""Host memory that is reused as soon as nobody can see it any more, private or shared with worker processes.

A batch handed to a user may be kept for any time, so its memory cannot simply be overwritten by a later batch; and
memory fresh from the system costs a page fault every 4 kB, about 0.1 ms a clip. Here an array returns to the pool when
its last view dies, be that a slice, a torch tensor or what autograd saved of it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

from fastvid.errors import WorkerError
from fastvid.runtime.arrays import UInt8Array

_Block = tuple[mmap.mmap, int]
"""A map, and the first byte of a free range of it."""

_TIMES_MEMORY: Final = 4
"""Addresses reserved for each byte of the machine's memory. A range of one size is not used for another size, so a
loader may take more over its life than is ever in use."""


class BufferPool:
    """Byte arrays, page-aligned, recycled by size. Safe to use from many threads.

    Args:
        keep: Free buffers of each size whose memory is kept; more are released to the system.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        # Without a lock: arrays die wherever the garbage collector runs, also in a thread that holds a lock here.
        # Appending to a deque and popping from it are atomic.
        self._free: dict[int, deque[_Block]] = {}

    def take(self, nbytes: int) -> UInt8Array:
        """An array of `nbytes` > 0 uninitialised bytes, uint8 [nbytes], for as long as it or a view of it lives."""
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        free = self._free.setdefault(size, deque())
        try:
            block = free.pop()  # the last one used: it is still in the cache
        except IndexError:
            block = self._allocate(size)
        # numpy keeps this very array as the base of all its views, because its own base is not an array.
        lease = np.frombuffer(block[0], dtype=np.uint8, count=nbytes, offset=block[1])
        weakref.finalize(lease, self._release, free, size, block).atexit = False
        return lease

    def offset(self, array: npt.NDArray[np.generic]) -> int | None:  # noqa: ARG002 - of the shared pool
        """Where an array of this pool, or a view of one, begins in the memory that worker processes share; None where
        they share none."""
        return None

    def _allocate(self, size: int) -> _Block:
        # Private: a forked child gets a copy, not a window into batches that are still being written.
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), 0

    def _release(self, free: deque[_Block], size: int, block: _Block) -> None:  # noqa: ARG002 - of the shared pool
        if len(free) < self._keep:
            free.append(block)


class SharedBufferPool(BufferPool):
    """Buffers that worker processes write: a clip lies where its batch is used, nothing is copied and only a number is
    sent.

    All of it is one anonymous file, mapped once by each process, far larger than it will ever be: pages exist from when
    they are first written, and are released when nobody uses them. Forked children share it too: what is written there
    is seen here.

    Args:
        keep: Free buffers of each size whose memory is kept.

    Raises:
        WorkerError: The system does not give the addresses.

    Attributes:
        file: Descriptor of the file, for processes that are started.
        size: Bytes of it.
    """

    def __init__(self, keep: int) -> None:
        super().__init__(keep)
        self.size = _TIMES_MEMORY * os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
        try:
            self.file = os.memfd_create("fastvid-batches", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self.file).atexit = False
            os.ftruncate(self.file, self.size)
            self._memory = mmap.mmap(self.file, self.size)
        except OSError as error:
            raise WorkerError(
                f"no {self.size >> 30} GiB of addresses for memory shared with worker processes: {error}",
                hint="they are not memory, but a limit (ulimit -v, ulimit -f) counts them; or use workers='thread'",
            ) from error
        self._start = np.frombuffer(self._memory, dtype=np.uint8, count=1).ctypes.data
        self._end = 0
        self._lock = threading.Lock()

    def offset(self, array: npt.NDArray[np.generic]) -> int:
        """See `BufferPool.offset`."""
        return int(array.__array_interface__["data"][0]) - self._start

    def _allocate(self, size: int) -> _Block:
        with self._lock:
            offset, self._end = self._end, self._end + size
        if self._end > self.size:
            raise WorkerError(f"batches in use fill {self.size >> 30} GiB", hint="keep fewer of them") from None
        return self._memory, offset

    def _release(self, free: deque[_Block], size: int, block: _Block) -> None:
        if len(free) >= self._keep:
            # Where that is not supported the pages stay until the file is closed.
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_REMOVE, block[1], size)
        free.append(block)
