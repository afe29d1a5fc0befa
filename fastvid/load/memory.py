"""Host memory of batches: pools of buffers, private or shared with worker processes, and the layout of a batch's rows.

A row is the memory of one clip in a batch. A user may keep a batch for any time, so a later batch must not overwrite
its memory; and newly mapped memory costs a page fault every 4 kB, about 0.1 ms per clip. So an array returns to its
pool when its last view is freed, whether that is a slice, a torch tensor or a tensor saved by autograd.

Does not import torch, because worker processes write batches too.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fastvid.decode.request import Rgb
from fastvid.errors import WorkerError
from fastvid.runtime.arrays import UInt8Array

_TIMES_MEMORY: Final = 4
"""Bytes of address space reserved per byte of physical memory. A block is never split or joined, so a loader may
allocate more over its lifetime than it uses at any moment."""

_LARGER: Final = 2
"""Largest size of a reused block relative to the requested size: batches of clips of different length rarely have the
same size twice. The system allocates no memory for the pages of a block that are never written."""


class _Block(NamedTuple):
    """Memory of one array: a memory map, the offset in it, and the size in bytes."""

    memory: mmap.mmap
    offset: int
    size: int


def _take(free: deque[_Block], size: int) -> _Block | None:
    """Remove and return a block of `free` that fits, trying the last one first; None if none fits."""
    # No lock: each operation on the deque is atomic.
    for _ in range(len(free)):
        try:
            block = free.pop()
        except IndexError:
            break
        if size <= block.size <= _LARGER * size:
            return block
        free.appendleft(block)
    return None


class BufferPool:
    """Allocates page-aligned byte arrays and reuses the memory of freed ones; keeps `keep` free blocks. Thread-safe."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        # No lock: the garbage collector frees arrays in any thread, even one that holds the pool's lock. Appending to a
        # deque and popping from it are atomic.
        self._free: deque[_Block] = deque()

    def take(self, nbytes: int) -> UInt8Array:
        """Allocate an uninitialised array, uint8 [nbytes], nbytes > 0; memory is reused when no view of it is left."""
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # The most recently used block is likely still in the CPU cache.
        block = _take(self._free, size) or self._allocate(size)
        # The base of all views is exactly this array: numpy looks no further, because its own base is not an array.
        lease = np.frombuffer(block.memory, dtype=np.uint8, count=nbytes, offset=block.offset)
        weakref.finalize(lease, self._release, block).atexit = False
        return lease

    def _allocate(self, size: int) -> _Block:
        # Private: a forked child gets a copy and does not see batches that are still being written.
        return _Block(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), 0, size)

    def _release(self, block: _Block) -> None:
        self._free.append(block)
        if len(self._free) > self._keep:
            with contextlib.suppress(IndexError):
                self._drop(self._free.popleft())

    def _drop(self, block: _Block) -> None:
        """Release a block's memory to the system; a private memory map is released when nothing refers to it."""


class SharedBufferPool(BufferPool):
    """Buffers that worker processes write into directly: only their offsets are sent, and nothing is copied.

    All buffers are in one anonymous file, mapped once by each process and much larger than needed: pages are allocated
    on first write and released when unused. Forked children share the file too, so their writes are visible here.

    `size`: size of the file in bytes.
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
                f"cannot reserve {self.size >> 30} GiB of address space to share with worker processes: {error}",
                hint="raise ulimit -v and ulimit -f (reserving takes no memory), or use Workers('thread')",
            ) from error
        self._start = np.frombuffer(self._memory, dtype=np.uint8, count=1).ctypes.data
        self._end = 0
        self._empty: deque[_Block] = deque()  # blocks whose pages were released, to be reused
        self._lock = threading.Lock()

    def offset(self, array: npt.NDArray[np.generic]) -> int:
        """Return where an array of this pool (or a view of one) begins in the memory shared with worker processes."""
        return int(array.__array_interface__["data"][0]) - self._start

    def _allocate(self, size: int) -> _Block:
        block = _take(self._empty, size)
        if block is not None:
            return block
        with self._lock:
            offset, self._end = self._end, self._end + size
        if self._end > self.size:
            raise WorkerError(f"batches fill {self.size >> 30} GiB of memory", hint="keep fewer batches") from None
        return _Block(self._memory, offset, size)

    def _drop(self, block: _Block) -> None:
        # If unsupported, the pages stay allocated until the file is closed.
        with contextlib.suppress(OSError):
            self._memory.madvise(mmap.MADV_REMOVE, block.offset, block.size)
        self._empty.append(block)


@dataclass(frozen=True)
class RowLayout:
    """Layout of one row of a batch: the RGB pixels of one clip."""

    num_frames: int
    size: tuple[int, int]  # height and width in pixels
    order: str = "CTHW"  # axes in memory, outermost first
    # scale and bias of each channel, for float32 ``value * scale + bias``; None keeps uint8 values.
    channels: tuple[tuple[float, float], ...] | None = None
    fast: bool = False  # see `Rgb`

    @cached_property
    def dtype(self) -> np.dtype[np.float32] | np.dtype[np.uint8]:
        """Data type of the row."""
        return np.dtype(np.uint8) if self.channels is None else np.dtype(np.float32)

    @cached_property
    def levels_shape(self) -> tuple[int, int, int, int]:
        """Shape that decoders write: [3, T, H, W]."""
        return (3, self.num_frames, *self.size)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the row in memory."""
        return tuple(self.levels_shape["CTHW".index(axis)] for axis in self.order)

    @cached_property
    def nbytes(self) -> int:
        """Size of the row in bytes."""
        return math.prod(self.levels_shape) * self.dtype.itemsize

    @cached_property
    def as_decoded(self) -> bool:
        """Whether decoders can write the row directly: they write uint8 values and contiguous planes [H, W]."""
        return self.channels is None and self.order.endswith("HW")

    def view(self, memory: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return `nbytes` bytes of memory as a row viewed as [3, T, H, W]."""
        return memory.view(self.dtype).reshape(self.shape).transpose(*map(self.order.index, "CTHW"))

    def fill(self, memory: npt.NDArray[Any], levels: UInt8Array) -> None:
        """Convert decoded values, uint8 [3, T, H, W], and write them to a row of `nbytes` bytes of memory."""
        row = self.view(memory)
        if self.channels is None:
            row[...] = levels
            return
        # Plane by plane, so that the three passes over a plane stay in the CPU cache. With numpy, because torch would
        # start a team of OpenMP threads per decode thread, which compete for cores.
        for channel, (scale, bias) in enumerate(self.channels):
            by, plus = np.float32(scale), np.float32(bias)
            for source, plane in zip(levels[channel], row[channel], strict=True):
                plane[...] = source
                plane *= by
                plane += plus


# Cached: the rows of a batch often have the same layout, and its properties are then computed once.
row_layout: Final = lru_cache(maxsize=256)(RowLayout)


class RgbRow(NamedTuple):
    """A row of a batch and its memory, which a decoder of RGB or a worker process writes."""

    layout: RowLayout
    memory: UInt8Array  # its bytes


class DecodeBuffer:
    """Memory of one thread for a clip's decoded values, which are converted into its row while in the CPU cache."""

    def __init__(self) -> None:
        self._memory = np.empty(0, dtype=np.uint8)

    def open(self, row: RgbRow) -> Rgb:
        """Return where to decode a clip: its row of the batch, or this buffer if values are converted afterwards."""
        layout = row.layout
        if layout.as_decoded:
            return Rgb(layout.view(row.memory), layout.fast)
        size = math.prod(layout.levels_shape)
        if len(self._memory) < size:
            self._memory = np.empty(size, dtype=np.uint8)
        return Rgb(self._memory[:size].reshape(layout.levels_shape), layout.fast)

    def finish(self, row: RgbRow) -> None:
        """Convert the clip that was decoded into this memory and write it to its row; nothing to do if it is there."""
        layout = row.layout
        if not layout.as_decoded:
            levels = self._memory[: math.prod(layout.levels_shape)].reshape(layout.levels_shape)
            layout.fill(row.memory, levels)
