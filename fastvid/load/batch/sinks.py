"""Sinks: the memory that decoders write clips into, and the conversion from there to a batch tensor.

There are two ways for decoders that write to the host, see `fastvid.load.batch.device_sinks` for the others:

- RGB: the thread that decoded a clip also normalises it into the batch, while it is in that core's cache. For another
  device the batch is copied as decoded and normalised there.
- Planes: the YUV 4:2:0 planes of all clips are packed into one buffer, copied to the device at once, and converted,
  resized, flipped and normalised there.

For CUDA the memory is pinned, and copied on the loader's stream without waiting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from typing import ClassVar, Final, Protocol

import numpy as np
import torch

from fastvid.decode.colours import ClipPlanes, Pixels
from fastvid.decode.pixels import finish_planes, finish_rgb
from fastvid.decode.request import DecoderOutput, Planes, Rgb, packed, packed_size
from fastvid.load.batch.video import Shapes, Video, VideoSpec
from fastvid.load.clips.clip import BatchRow, Clip, as_clips
from fastvid.load.memory.buffers import BufferPool, SharedBufferPool
from fastvid.load.memory.device import LoaderStream
from fastvid.load.memory.row_layout import RowLayout, SharedRow
from fastvid.load.order.batches import ClipShape
from fastvid.runtime.arrays import UInt8Array

_ALIGN: Final = 64  # bytes: a cache line, and enough for any vector load on a device

# Normalisation that keeps levels 0 to 255: (level / 255 - 0) / (1 / 255).
_LEVELS: Final = ((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255))


class Sink(Protocol):
    """The memory of one stream of a batch in the making."""

    kinds: ClassVar[frozenset[type]]

    def output(self, row: int, kinds: Set[type], /) -> DecoderOutput | SharedRow:
        """Return where to write a clip: memory for a decoder that writes some of `kinds`, or a process's whole row."""
        ...

    def done(self, row: int, *, good: bool) -> None:
        """Mark a row as written, or (not `good`) as failed: it becomes zeros."""
        ...

    def finish(self) -> Video:
        """Return the stream on its device; it keeps no memory. Called once, after every row is done."""
        ...


OpenSink = Callable[[Sequence[BatchRow | None], ClipShape | None], Sink]
"""Opens the memory for the rows of a stream and the shape that all rows get, if the plan decides it. None is a masked
row, which stays zero."""


class RgbMemory:
    """Host memory for the RGB clips of a loader's batches."""

    def __init__(self, spec: VideoSpec, batches: BufferPool, *, threads: int) -> None:
        self.spec, self.batches, self.clips = spec, batches, BufferPool(threads)
        on_host, pixels = spec.stream.device.type == "cpu", spec.pixels
        # Worker processes write to their own shared memory, which is not pinned.
        self.is_pinned = spec.stream.is_asynchronous and not isinstance(batches, SharedBufferPool)
        # Another device gets uint8 as decoded and normalises and transposes there. On the host half precision is
        # converted from float32 at the end: numpy has no bfloat16, and its float16 is slow.
        self._channels = tuple(pixels.channels()) if pixels is not None and on_host else None
        self.order = "CTHW" if not on_host else "THWC" if spec.channels_last else spec.layout[1:]

    def layout(self, shape: ClipShape) -> RowLayout:
        """Return the layout of a row of this shape."""
        return RowLayout(shape[0], shape[1:], self.order, self._channels)


class RgbSink:
    """Collects RGB from decoders, or whole rows from worker processes, in host memory."""

    kinds: ClassVar[frozenset[type]] = frozenset({Rgb, SharedRow})

    def __init__(self, memory: RgbMemory, clips: Sequence[BatchRow | None], shape: ClipShape | None) -> None:
        self._memory = memory
        self._shapes = memory.spec.shapes(clips, shape)
        layouts = {shape: memory.layout(shape) for shape in set(self._shapes.rows)}
        self._layouts = [layouts[shape] for shape in self._shapes.rows]
        stops = np.cumsum([layout.nbytes for layout in self._layouts]).tolist()
        if memory.is_pinned:
            self._host = torch.empty(stops[-1], dtype=torch.uint8, pin_memory=True)
            bytes_: UInt8Array = self._host.numpy()
        else:
            bytes_ = memory.batches.take(max(1, stops[-1]))[: stops[-1]]
            self._host = torch.from_numpy(bytes_)
        shared = memory.batches.offset(bytes_)
        self._starts = [stop - layout.nbytes for layout, stop in zip(self._layouts, stops, strict=True)]
        self._shared = None if shared is None else [shared + start for start in self._starts]
        self._rows = [
            bytes_[start:stop].view(layout.dtype).reshape(layout.shape)
            for start, stop, layout in zip(self._starts, stops, self._layouts, strict=True)
        ]
        self._staged: dict[int, UInt8Array] = {}
        self._blank = [row for row, clip in enumerate(clips) if clip is None]
        for row in self._blank:
            self._rows[row][...] = 0

    def output(self, row: int, kinds: Set[type]) -> DecoderOutput | SharedRow:
        """See `Sink`."""
        layout = self._layouts[row]
        if SharedRow in kinds and self._shared is not None:
            return SharedRow(self._shared[row], layout)
        if layout.as_decoded:
            return Rgb(layout.decoded(self._rows[row]))
        self._staged[row] = self._memory.clips.take(math.prod(layout.levels_shape)).reshape(layout.levels_shape)
        return Rgb(self._staged[row])

    def done(self, row: int, *, good: bool) -> None:
        """See `Sink`."""
        staged = self._staged.pop(row, None)
        if not good:
            self._rows[row][...] = 0
            self._blank.append(row)
        elif staged is not None:
            layout = self._layouts[row]
            layout.fill(layout.channels_first(self._rows[row]), staged)

    def finish(self) -> Video:
        """See `Sink`."""
        spec, shapes, layouts, host = self._memory.spec, self._shapes, self._layouts, self._host
        # From here on only the tensor keeps the memory alive.
        del self._rows, self._host
        if spec.stream.device.type == "cpu":
            return self._on_host(host)
        moved = spec.stream.upload(host)
        if shapes.uniform is not None:
            return self._on_device(moved.view(len(layouts), *layouts[0].shape), self._blank)
        rows = [
            self._on_device(moved[start : start + layout.nbytes].view(1, *layout.shape), [0] * (row in self._blank))[0]
            for row, (start, layout) in enumerate(zip(self._starts, layouts, strict=True))
        ]
        return spec.collated(rows, shapes)

    def _on_host(self, host: torch.Tensor) -> Video:
        spec, layouts, shapes = self._memory.spec, self._layouts, self._shapes
        values = host if spec.pixels is None else host.view(torch.float32)
        order = [1 + self._memory.order.index(axis) for axis in spec.layout[1:]]

        def arranged(rows: torch.Tensor) -> torch.Tensor:
            rows = rows.permute(0, *order)
            return rows if spec.pixels is None else rows.to(spec.pixels.dtype)

        if shapes.uniform is not None:
            return arranged(values.view(len(layouts), *layouts[0].shape))
        each = torch.split(values, [layout.nbytes // layout.dtype.itemsize for layout in layouts])
        rows = [arranged(row.view(1, *layout.shape))[0] for row, layout in zip(each, layouts, strict=True)]
        return spec.collated(rows, shapes)

    def _on_device(self, video: torch.Tensor, blank: Sequence[int]) -> torch.Tensor:
        spec = self._memory.spec
        if spec.pixels is None:
            return spec.arranged(video)
        video = finish_rgb(video, spec.pixels)
        for row in blank:
            video[row] = 0
        return video


class PlanesBuffer:
    """A buffer for the planes of a batch's clips, one clip after the other.

    `clips`: the clip of each row; None for a masked row.
    """

    def __init__(self, clips: Sequence[BatchRow | None], stream: LoaderStream, *, on_device: bool = False) -> None:
        clips = self._clips = as_clips(clips)
        self._good = [False] * len(clips)
        self._spans: list[tuple[int, int]] = []
        at = 0
        for clip in clips:
            size = packed_size(clip.request) if clip else 0
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

    `clips`: the clip of each row; None for a masked row.
    """

    kinds: ClassVar[frozenset[type]] = frozenset({Planes})

    def __init__(self, clips: Sequence[BatchRow | None], stream: LoaderStream) -> None:
        super().__init__(clips, stream)
        self._bytes = self._memory.numpy()

    def output(self, row: int, _kinds: Set[type]) -> DecoderOutput:
        """See `Sink`."""
        clip, (start, stop) = self._clip(row), self._spans[row]
        return packed(self._bytes[start:stop], clip.request)

    def _take(self) -> torch.Tensor:
        del self._bytes
        return super()._take()


class PlanesSink(HostPlanes):
    """Makes the video of a batch from planes on the host.

    `clips`: the clip of each row; None for a masked row. `shape`: shape that all rows get, if the plan decides it.
    """

    def __init__(self, spec: VideoSpec, clips: Sequence[BatchRow | None], shape: ClipShape | None) -> None:
        super().__init__(clips, spec.stream)
        self._spec, self._shapes = spec, spec.shapes(clips, shape)

    def finish(self) -> Video:
        """See `Sink`."""
        moved = self._spec.stream.upload(self._take())
        planes = [self._planes(moved, row) if good else None for row, good in enumerate(self._good)]
        return video_of(planes, self._spec, self._shapes)

    def _planes(self, moved: torch.Tensor, row: int) -> ClipPlanes:
        clip, (start, stop) = self._clip(row), self._spans[row]
        return ClipPlanes.packed(
            moved[start:stop],
            len(clip.request.frames),
            clip.request.box.height,
            clip.request.box.width,
            flip=clip.request.flip,
            matrix=clip.info.matrix,
            sample_range=clip.info.range,
        )


def video_of(planes: Sequence[ClipPlanes | None], spec: VideoSpec, shapes: Shapes) -> Video:
    """Return the video of a batch, on the device of the planes; rows without planes are zero."""
    if shapes.uniform is not None:
        return _uniform(planes, spec, shapes.uniform)
    # Row by row, because clips of different sizes are resized to different sizes.
    return spec.collated(
        [_uniform([one], spec, shape)[0] for one, shape in zip(planes, shapes.rows, strict=True)], shapes
    )


def _uniform(planes: Sequence[ClipPlanes | None], spec: VideoSpec, shape: ClipShape) -> torch.Tensor:
    pixels = spec.pixels or Pixels(*_LEVELS, layout=spec.layout, channels_last=spec.channels_last)
    rows = [row for row, clip in enumerate(planes) if clip is not None]
    good = [clip for clip in planes if clip is not None]
    if len(good) == len(planes):
        video = finish_planes(good, shape[1:], pixels)
    else:
        video = pixels.empty(len(planes), shape[0], shape[1:], spec.stream.device).zero_()
        # Row by row, because a list of rows would be copied to the device, and the host would wait for that.
        for row, clip in zip(rows, finish_planes(good, shape[1:], pixels) if good else (), strict=True):
            video[row] = clip
    return video if spec.pixels else video.to(torch.uint8)
