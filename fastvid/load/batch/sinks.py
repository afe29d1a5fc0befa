"""The video tensor of a batch: its rows' shapes, and how rows of different shapes are put together.

Sinks: the memory that decoders write clips into, and the conversion from there to a batch tensor.

There are two ways for decoders that write to the host, see `fastvid.load.batch.sinks` for the others:

- RGB: the thread that decoded a clip also normalises it into the batch, while it is in that core's cache. For another
  device the batch is copied as decoded and normalised there.
- Planes: the YUV 4:2:0 planes of all clips are packed into one buffer, copied to the device at once, and converted,
  resized, flipped and normalised there.

For CUDA the memory is pinned, and copied on the loader's stream without waiting.

Sinks for decoders that leave their frames on the device of the batch.

Their memory is allocated on the loader's stream, where earlier batches may still read what the allocator hands out
again. So each output carries an event of that stream, which the decoder's own stream waits for before it writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, Protocol, get_args

import numpy as np
import torch

from fastvid.decode.colours import ClipPlanes, Layout, Pixels, empty_batch
from fastvid.decode.pixels import finish_planes, finish_rgb
from fastvid.decode.request import DecoderOutput, DevicePlanes, DeviceRgb, Planes, Rgb, packed, packed_size
from fastvid.errors import UsageError
from fastvid.load.clips.clip import BatchRow, Clip, ClipRules, as_clips
from fastvid.load.device import LoaderStream
from fastvid.load.memory import BufferPool, RowLayout, SharedBufferPool, SharedRow
from fastvid.load.options import Output
from fastvid.load.order.buckets import Buckets
from fastvid.load.order.epoch import ClipShape
from fastvid.load.order.packed import Packed
from fastvid.runtime.arrays import UInt8Array
from fastvid.runtime.values import check_choice

Collate = Literal["stack", "pad", "list"]

Video = torch.Tensor | list[torch.Tensor]
"""One tensor of all rows, or a list of one tensor a row."""


_SMALLEST: Final = (1, 2, 2)
"""Shape of a batch that has only masked rows, if nothing else decides it."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes of a batch's rows, each (T, H, W) in pixels."""

    rows: list[ClipShape]  # shape of each row; (0, 0, 0) for a masked row of a batch whose rows differ
    uniform: ClipShape | None  # the shape of all rows; None if they differ, or are delivered as a list
    padded: ClipShape | None = None  # the shape that rows are padded to; None if they are not


def one_shape(clips: Sequence[BatchRow | None], planned: ClipShape | None) -> ClipShape:
    """Return the shape of all clips.

    `clips`: the clip of each row; None for a masked row.
    """
    shapes = [planned, *(one.clip_shape for one in clips if isinstance(one, Clip))]
    kinds = list(dict.fromkeys(shape for shape in shapes if shape is not None)) or [_SMALLEST]
    if len(kinds) > 1:
        raise UsageError(
            f"clips of a batch have the shapes {', '.join(map(str, kinds))} (frames, height, width)",
            hint="use collate='pad' or 'list', Buckets, or a sampler and a crop of one shape",
        )
    return kinds[0]


@dataclass(frozen=True)
class VideoSpec:
    """Shape, normalisation and device of a batch's video tensor."""

    shape: ClipShape | None  # frames per clip, height and width in pixels; None if they differ between clips
    layout: Layout
    pixels: Pixels | None  # how values are normalised; None for uint8 levels 0 to 255 as decoded
    stream: LoaderStream
    channels_last: bool = False
    collate: Collate = "stack"  # how rows are put together

    def shapes(self, clips: Sequence[BatchRow | None], planned: ClipShape | None) -> Shapes:
        """Return the shapes of a batch's rows.

        `clips`: the clip of each row; None for a masked row. `planned`: shape of the largest clip of the global
        batch, of which these are one rank's rows; None if it is not known before clips are planned.
        """
        whole = self.shape if planned is None else planned
        if self.collate == "stack":
            whole = one_shape(clips, whole)
            return Shapes([whole] * len(clips), whole)
        rows = [one.clip_shape if isinstance(one, Clip) else None for one in clips]
        kinds = [shape for shape in (whole, *rows) if shape is not None] or [_SMALLEST]
        each = [shape or (0, 0, 0) for shape in rows]
        if self.collate == "list":
            return Shapes(each, None)
        largest = max(t for t, _, _ in kinds), max(h for _, h, _ in kinds), max(w for _, _, w in kinds)
        if whole not in (None, largest):
            raise UsageError(
                f"a clip has more frames, rows or columns than counted: {largest}, expected at most {whole}",
                hint="let the sampler's count() and the crop's sizes() return what draw() makes",
            )
        whole = largest
        return Shapes(each, None, whole) if set(each) != {whole} else Shapes(each, whole)

    def arranged(self, levels: torch.Tensor) -> torch.Tensor:
        """Return uint8 levels [B, 3, T, H, W] on the device in the layout and memory format of the batch."""
        if self.layout == "BCTHW" and not self.channels_last:
            return levels
        clips, channels, *shape = levels.shape
        whole = (clips, channels, shape[0], shape[1], shape[2])
        video = empty_batch(whole, self.layout, torch.uint8, self.stream.device, channels_last=self.channels_last)
        return video.copy_(levels if self.layout == "BCTHW" else levels.transpose(1, 2))

    def collated(self, rows: list[torch.Tensor], shapes: Shapes) -> Video:
        """Put rows of different shapes together.

        `rows`: tensors [3, T, H, W] or [T, 3, H, W], in the layout of the batch.
        """
        if shapes.padded is None:
            return rows
        whole = (len(rows), 3, *shapes.padded)
        dtype, device = rows[0].dtype, rows[0].device
        video = empty_batch(whole, self.layout, dtype, device, channels_last=self.channels_last).zero_()
        for into, row, (frames, height, width) in zip(video, rows, shapes.rows, strict=True):
            along = into if self.layout == "BCTHW" else into.transpose(0, 1)
            along[:, :frames, :height, :width] = row if self.layout == "BCTHW" else row.transpose(0, 1)
        return video


def check_collate(
    collate: Collate, streams: Sequence[str], *, views: bool, batches: Buckets | Packed | None
) -> Collate:
    """Return how a loader puts rows together: as asked, or as a list from which packed patches are made.

    `views`: whether each row is several clips of one sample.
    """
    check_choice("collate", collate, get_args(Collate))
    if batches is not None and collate != "stack":
        raise UsageError(f"collate={collate!r} was given with batches=", hint="leave out collate: the plan decides")
    packed = isinstance(batches, Packed)
    if (packed or collate != "stack") and (views or "flow" in streams):
        raise UsageError(
            f"{'batches=Packed' if packed else f'collate={collate!r}'} was given with {'views' if views else 'flow'}",
            hint="use collate='stack', and a sampler and a crop of one shape",
        )
    return "list" if packed else collate


def video_spec(rules: ClipRules, output: Output, stream: LoaderStream, collate: Collate) -> VideoSpec:
    """Return the specification of a loader's batches."""
    count, size = rules.num_frames, rules.output
    shape = None if count is None or size is None else (count, *size)
    pixels = None if output.dtype is torch.uint8 else output.pixels
    return VideoSpec(shape, output.layout, pixels, stream, output.channels_last, collate)


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


class DeviceRgbSink:
    """Collects RGB from decoders that write it to the device.

    `clips`: the clip of each row; None for a masked row. `shape`: shape that all rows get, if the plan decides it.
    """

    kinds: ClassVar[frozenset[type]] = frozenset({DeviceRgb})

    def __init__(self, spec: VideoSpec, clips: Sequence[BatchRow | None], shape: ClipShape | None) -> None:
        self._spec, self._shapes = spec, spec.shapes(clips, shape)
        self._good = [False] * len(clips)
        stops = np.cumsum([3 * math.prod(shape) for shape in self._shapes.rows]).tolist()
        self._memory = torch.empty(stops[-1], dtype=torch.uint8, device=spec.stream.device)
        self._rows = [
            self._memory[start:stop].view(3, *shape)
            for start, stop, shape in zip([0, *stops], stops, self._shapes.rows, strict=False)
        ]
        self._writable = spec.stream.mark()

    def output(self, row: int, _kinds: Set[type]) -> DecoderOutput:
        """See `fastvid.load.batch.sinks.Sink`."""
        return DeviceRgb(self._rows[row], self._writable)

    def done(self, row: int, *, good: bool) -> None:
        """See `fastvid.load.batch.sinks.Sink`."""
        self._good[row] = good

    def finish(self) -> Video:
        """See `fastvid.load.batch.sinks.Sink`."""
        memory, rows, uniform = self._memory, self._rows, self._shapes.uniform
        del self._memory, self._rows
        if uniform is not None:
            return self._finished(memory.view(len(rows), 3, *uniform), self._good)
        each = [self._finished(row[None], [good])[0] for row, good in zip(rows, self._good, strict=True)]
        return self._spec.collated(each, self._shapes)

    def _finished(self, video: torch.Tensor, good: Sequence[bool]) -> torch.Tensor:
        spec = self._spec
        video = spec.arranged(video) if spec.pixels is None else finish_rgb(video, spec.pixels)
        for row, one in enumerate(good):
            if not one:
                video[row] = 0
        return video


class DevicePlanesSink(PlanesBuffer):
    """Collects NV12 planes from decoders that write them to the device, 1.5 bytes per pixel.

    `clips`: the clip of each row; None for a masked row. `shape`: shape that all rows get, if the plan decides it.
    """

    kinds: ClassVar[frozenset[type]] = frozenset({DevicePlanes})

    def __init__(self, spec: VideoSpec, clips: Sequence[BatchRow | None], shape: ClipShape | None) -> None:
        super().__init__(clips, spec.stream, on_device=True)
        self._spec, self._shapes = spec, spec.shapes(clips, shape)
        self._writable = spec.stream.mark()

    def output(self, row: int, _kinds: Set[type]) -> DecoderOutput:
        """See `fastvid.load.batch.sinks.Sink`."""
        return DevicePlanes(*self._nv12(self._memory, row), self._writable)

    def finish(self) -> Video:
        """See `fastvid.load.batch.sinks.Sink`."""
        memory = self._take()
        planes = [self._planes(memory, row) if good else None for row, good in enumerate(self._good)]
        return video_of(planes, self._spec, self._shapes)

    def _nv12(self, memory: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a row's luma [T, h, w] and chroma [T, h/2, w/2, 2]."""
        request, (start, stop) = self._clip(row).request, self._spans[row]
        count, height, width = len(request.frames), request.box.height, request.box.width
        chroma = start + count * height * width
        luma = memory[start:chroma].view(count, height, width)
        return luma, memory[chroma:stop].view(count, height // 2, width // 2, 2)

    def _planes(self, memory: torch.Tensor, row: int) -> ClipPlanes:
        clip, (y, uv) = self._clip(row), self._nv12(memory, row)
        return ClipPlanes(y, uv[..., 0], uv[..., 1], clip.request.flip, clip.info.matrix, clip.info.range)
