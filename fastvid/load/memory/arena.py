"""Memory that a loader shares with its worker processes: one range of addresses, in which batches come and go.

A worker writes a clip where the batch will be used, so nothing is copied and nothing but a number is sent. All of it is
one anonymous file, mapped once by each process, far larger than it will ever be: pages exist from when they are first
written, and are given back when nobody uses them.
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

_TIMES_MEMORY: Final = 4
"""Addresses reserved for each byte of the machine's memory. Room of one size is not used for another, so more may be
taken over a loader's life than is ever in use."""


class Arena:
    """Shared memory, used again as soon as nobody can see it any more. Safe to use from many threads.

    Unlike other memory it is also shared with forked children: what is written to it there is seen here.

    Args:
        keep: Free ranges of each size whose pages are kept.

    Raises:
        WorkerError: The system does not give the addresses.

    Attributes:
        file: Descriptor of the file, for processes that are started.
        size: Bytes of it.
    """

    def __init__(self, keep: int) -> None:
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
        self._keep = keep
        self._start = np.frombuffer(self._memory, dtype=np.uint8, count=1).ctypes.data
        # Offsets by size. Arrays die wherever the garbage collector runs, also in a thread that holds the lock;
        # appending to a deque and popping from it are atomic.
        self._free: dict[int, deque[int]] = {}
        self._end = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> UInt8Array:
        """An array of `nbytes` > 0 uninitialised bytes, uint8 [nbytes], for as long as it or a view of it lives.

        Raises:
            WorkerError: All addresses are taken.
        """
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        free = self._free.setdefault(size, deque())
        try:
            offset = free.pop()  # the last one used: it is still in the cache
        except IndexError:
            with self._lock:
                offset, self._end = self._end, self._end + size
            if self._end > self.size:
                raise WorkerError(f"batches in use fill {self.size >> 30} GiB", hint="keep fewer of them") from None
        # numpy keeps this very array as the base of all its views, because its own base is not an array.
        lease = np.frombuffer(self._memory, dtype=np.uint8, count=nbytes, offset=offset)
        weakref.finalize(lease, self._give, free, offset, size).atexit = False
        return lease

    def offset(self, array: npt.NDArray[np.generic]) -> int:
        """Where an array that was taken here, or a view of one, begins in the file."""
        return int(array.__array_interface__["data"][0]) - self._start

    def _give(self, free: deque[int], offset: int, size: int) -> None:
        if len(free) >= self._keep:
            # Where that is not supported the pages stay until the file is closed.
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_REMOVE, offset, size)
        free.append(offset)
