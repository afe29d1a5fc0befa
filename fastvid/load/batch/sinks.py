"""Sinks: the memory that decoders write clips into, and the conversion from there to a batch tensor.

There are two ways for decoders that write to the host, see `fastvid.load.batch.device_sinks` for the others:

- RGB: the thread that decoded a clip also normalises it into the batch, while it is in that core's cache. For another
  device the batch is copied as decoded and normalised there.
- Planes: the YUV 4:2:0 planes of all clips are packed into one buffer, copied to the device at once, and converted,
  resized, flipped and normalised there.

For CUDA the memory is pinned, and copied on the loader's stream without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

import numpy as np
import torch

from fastvid.decode.colours import ClipPlanes, Layout, Pixels, empty_batch
from fastvid.decode.pixels import finish_planes, finish_rgb
from fastvid.decode.request import Output, Planes, Rgb
from fastvid.load.clips.clip import BatchRow, Clip, as_clips
from fastvid.load.memory.buffers import BufferPool, SharedBufferPool
from fastvid.load.memory.device import LoaderStream
from fastvid.load.memory.row_layout import RowLayout, SharedRow
from fastvid.runtime.arrays import UInt8Array

_ALIGN: Final = 64  # bytes: a cache line, and enough for any vector load on a device

# Normalisation that keeps levels 0 to 255: (level / 255 - 0) / (1 / 255).
_LEVELS: Final = ((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255))


@dataclass(frozen=True)
class VideoSpec:
    """Shape, normalisation and device of a batch's video tensor.

    Attributes:
        num_frames: Frames per clip, T.
        size: Height and width in pixels.
        layout: Order of the axes.
        pixels: How values are normalised; None for uint8 levels 0 to 255 as decoded.
        stream: Where the tensor is allocated and filled.
        channels_last: Memory format, see `fastvid.decode.colours.empty_batch`.
    """

    num_frames: int
    size: tuple[int, int]
    layout: Layout
    pixels: Pixels | None
    stream: LoaderStream
    channels_last: bool = False

    def arranged(self, levels: torch.Tensor) -> torch.Tensor:
        """Return uint8 levels [B, 3, T, H, W] on the device in the layout and memory format of the batch."""
        if self.layout == "BCTHW" and not self.channels_last:
            return levels
        clips, device = len(levels), self.stream.device
        shape = (clips, 3, self.num_frames, *self.size)
        video = empty_batch(shape, self.layout, torch.uint8, device, channels_last=self.channels_last)
        return video.copy_(levels if self.layout == "BCTHW" else levels.transpose(1, 2))


class Sink(Protocol):
    """The memory of one stream of a batch in the making.

    Attributes:
        kinds: What it can return from `output`: decoder outputs, and `SharedRow`.
    """

    kinds: ClassVar[frozenset[type]]

    def output(self, row: int, kinds: Set[type], /) -> Output | SharedRow:
        """Return where to write a clip: memory for a decoder that writes some of `kinds`, or a process's whole row."""
        ...

    def done(self, row: int, *, good: bool) -> None:
        """Mark a row as written, or (not `good`) as failed: it becomes zeros."""
        ...

    def finish(self) -> torch.Tensor:
        """Return the stream on its device; it keeps no memory. Called once, after every row is done."""
        ...


OpenSink = Callable[[Sequence[BatchRow | None]], Sink]
"""Opens the memory for the rows of a stream; None is a masked row, which stays zero."""


class RgbMemory:
    """Host memory for the RGB clips of a loader's batches.

    Args:
        spec: The batch tensor to make.
        batches: Allocator of batch memory.
        threads: Number of concurrent decode threads.
    """

    def __init__(self, spec: VideoSpec, batches: BufferPool, *, threads: int) -> None:
        self.spec, self.batches, self.clips = spec, batches, BufferPool(threads)
        on_host, pixels = spec.stream.device.type == "cpu", spec.pixels
        # Worker processes write to their own shared memory, which is not pinned.
        self.is_pinned = spec.stream.is_asynchronous and not isinstance(batches, SharedBufferPool)
        # Another device gets uint8 as decoded and normalises and transposes there. On the host half precision is
        # converted from float32 at the end: numpy has no bfloat16, and its float16 is slow.
        channels = tuple(pixels.channels()) if pixels is not None and on_host else None
        order = "CTHW" if not on_host else "THWC" if spec.channels_last else spec.layout[1:]
        self.layout = RowLayout(spec.num_frames, spec.size, order, channels)


class RgbSink:
    """Collects RGB from decoders, or whole rows from worker processes, in host memory."""

    kinds: ClassVar[frozenset[type]] = frozenset({Rgb, SharedRow})

    def __init__(self, memory: RgbMemory, clips: Sequence[BatchRow | None]) -> None:
        layout = memory.layout
        self._memory = memory
        nbytes = len(clips) * layout.nbytes
        if memory.is_pinned:
            self._host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            bytes_: UInt8Array = self._host.numpy()
        else:
            bytes_ = memory.batches.take(nbytes)
            self._host = torch.from_numpy(bytes_)
        self._shared = memory.batches.offset(bytes_)
        self._video = bytes_.view(layout.dtype).reshape(len(clips), *layout.shape)
        self._staged: dict[int, UInt8Array] = {}
        self._blank = [row for row, clip in enumerate(clips) if clip is None]
        self._video[self._blank] = 0

    def output(self, row: int, kinds: Set[type]) -> Output | SharedRow:
        """See `Sink`."""
        layout = self._memory.layout
        if SharedRow in kinds and self._shared is not None:
            return SharedRow(self._shared + row * layout.nbytes, layout)
        if layout.as_decoded:
            return Rgb(self._video[row])
        self._staged[row] = self._memory.clips.take(int(np.prod(layout.levels_shape))).reshape(layout.levels_shape)
        return Rgb(self._staged[row])

    def done(self, row: int, *, good: bool) -> None:
        """See `Sink`."""
        staged = self._staged.pop(row, None)
        if not good:
            self._video[row] = 0
            self._blank.append(row)
        elif staged is not None:
            layout = self._memory.layout
            layout.fill(layout.channels_first(self._video[row]), staged)

    def finish(self) -> torch.Tensor:
        """See `Sink`."""
        spec, pixels = self._memory.spec, self._memory.spec.pixels
        # From here on only the tensor keeps the memory alive.
        video, host = torch.from_numpy(self._video), self._host
        del self._video, self._host
        if spec.stream.device.type == "cpu":
            video = video.permute(0, *(1 + self._memory.layout.order.index(axis) for axis in spec.layout[1:]))
            return video if pixels is None else video.to(pixels.dtype)
        video = spec.stream.upload(host).view(video.shape)
        if pixels is None:
            return spec.arranged(video)
        video = finish_rgb(video, pixels)
        for row in self._blank:
            video[row] = 0
        return video


class PlanesBuffer:
    """A buffer for the planes of a batch's clips, one clip after the other.

    Args:
        clips: The clip of each row; None for a masked row.
        stream: The stream of the batch.
        on_device: Whether the buffer is on the device of the batch, otherwise on the host: pinned if it is copied to a
            CUDA device.
    """

    def __init__(self, clips: Sequence[BatchRow | None], stream: LoaderStream, *, on_device: bool = False) -> None:
        clips = self._clips = as_clips(clips)
        self._good = [False] * len(clips)
        self._spans: list[tuple[int, int]] = []
        at = 0
        for clip in clips:
            size = Planes.nbytes(len(clip.request.frames), clip.request.box) if clip else 0
            self._spans.append((at, at + size))
            at += -(-size // _ALIGN) * _ALIGN
        if on_device:
            self._memory = torch.empty(at, dtype=torch.uint8, device=stream.device)
        else:
            self._memory = torch.empty(at, dtype=torch.uint8, pin_memory=stream.is_asynchronous)

    def done(self, row: int, *, good: bool) -> None:
        """See `Sink`."""
        self._good[row] = good

    def _clip(self, row: int) -> Clip:
        clip = self._clips[row]
        assert clip is not None
        return clip

    def _take(self) -> torch.Tensor:
        """Return the buffer and keep it no longer."""
        memory = self._memory
        del self._memory
        return memory


class HostPlanes(PlanesBuffer):
    """Collects YUV 4:2:0 planes from decoders on the host, 1.5 bytes per pixel.

    Args:
        clips: The clip of each row; None for a masked row.
        stream: The stream of the batch.
    """

    kinds: ClassVar[frozenset[type]] = frozenset({Planes})

    def __init__(self, clips: Sequence[BatchRow | None], stream: LoaderStream) -> None:
        super().__init__(clips, stream)
        self._bytes = self._memory.numpy()

    def output(self, row: int, _kinds: Set[type]) -> Output:
        """See `Sink`."""
        clip, (start, stop) = self._clip(row), self._spans[row]
        return Planes.packed(self._bytes[start:stop], len(clip.request.frames), clip.request.box)

    def _take(self) -> torch.Tensor:
        del self._bytes
        return super()._take()


class PlanesSink(HostPlanes):
    """Makes the video of a batch from planes on the host.

    Args:
        spec: The batch tensor to make.
        clips: The clip of each row; None for a masked row.
    """

    def __init__(self, spec: VideoSpec, clips: Sequence[BatchRow | None]) -> None:
        super().__init__(clips, spec.stream)
        self._spec = spec

    def finish(self) -> torch.Tensor:
        """See `Sink`."""
        moved = self._spec.stream.upload(self._take())
        planes = [self._planes(moved, row) if good else None for row, good in enumerate(self._good)]
        return video_of(planes, self._spec)

    def _planes(self, moved: torch.Tensor, row: int) -> ClipPlanes:
        clip, (start, stop) = self._clip(row), self._spans[row]
        return ClipPlanes.packed(
            moved[start:stop],
            self._spec.num_frames,
            clip.request.box.height,
            clip.request.box.width,
            flip=clip.request.flip,
            matrix=clip.info.matrix,
            sample_range=clip.info.range,
        )


def video_of(planes: Sequence[ClipPlanes | None], spec: VideoSpec) -> torch.Tensor:
    """Return the video tensor of a batch, on the device of the planes; rows without planes are zero."""
    pixels = spec.pixels or Pixels(*_LEVELS, layout=spec.layout, channels_last=spec.channels_last)
    rows = [row for row, clip in enumerate(planes) if clip is not None]
    good = [clip for clip in planes if clip is not None]
    if len(good) == len(planes):
        video = finish_planes(good, spec.size, pixels)
    else:
        video = pixels.empty(len(planes), spec.num_frames, spec.size, spec.stream.device).zero_()
        # Row by row, because a list of rows would be copied to the device, and the host would wait for that.
        for row, clip in zip(rows, finish_planes(good, spec.size, pixels) if good else (), strict=True):
            video[row] = clip
    return video if spec.pixels else video.to(torch.uint8)
