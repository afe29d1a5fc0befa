"""Sinks: the memory that decoders write clips into, and the conversion from there to a batch tensor.

There are two ways for decoders that write to the host:

- RGB: the thread that decoded a clip also normalises it into the batch, while it is in that core's cache. For another
  device the batch is copied as decoded and normalised there.
- Planes: the YUV 4:2:0 planes of all clips are packed into one buffer, copied to the device at once, and converted,
  resized, flipped and normalised there.

For CUDA the memory is pinned, and copied on the loader's stream without waiting.

Decoders that leave their frames on the device write into memory that is allocated on the loader's stream, where earlier
batches may still read what the allocator hands out again. So each output carries an event of that stream, which the
decoder's own stream waits for before it writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from typing import ClassVar, Final, Protocol

import numpy as np
import torch

from fastvid.decode.colours import ClipPlanes, Pixels, empty_batch
from fastvid.decode.pixels import finish_planes, finish_rgb, resize
from fastvid.decode.request import (
    ClipRequest,
    DecoderOutput,
    DevicePlanes,
    DeviceRgb,
    Levels,
    Planes,
    Rgb,
    packed,
    packed_size,
)
from fastvid.format.packets import StreamInfo
from fastvid.format.planes import STEPS, ZERO
from fastvid.load.batch.spec import Video, VideoSpec
from fastvid.load.clips.plan import Plan
from fastvid.load.memory import BufferPool, RowLayout, SharedBufferPool, SharedRow
from fastvid.load.order.epoch import ClipShape
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


OpenSink = Callable[[Plan, int], Sink]
"""Opens the memory of a batch's stream, given by its number. Masked rows stay zero."""


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
        self._layouts: dict[ClipShape, RowLayout] = {}

    def layout(self, shape: ClipShape) -> RowLayout:
        """Return the layout of a row of this shape."""
        if shape not in self._layouts:
            self._layouts[shape] = RowLayout(shape[0], shape[1:], self.order, self._channels)
        return self._layouts[shape]


class _LevelsSink:
    """Rows of decoded RGB levels, one after the other in one block of memory."""

    def __init__(self, spec: VideoSpec, plan: Plan, stream: int) -> None:
        self._spec, self._shapes = spec, spec.shapes(plan.shapes(stream), plan.share.shape)
        self._blank = set(np.flatnonzero(plan.lengths == 0).tolist())

    def _levels(self, memory: torch.Tensor) -> Video:
        """Return the video of levels [3, T, H, W] in the device's memory."""
        if self._shapes.uniform is not None:
            return self._finished(memory.view(-1, 3, *self._shapes.uniform), self._blank)
        each = torch.split(memory, [3 * math.prod(shape) for shape in self._shapes.rows])
        rows = [
            self._finished(levels.view(1, 3, *shape), {0} if row in self._blank else ())[0]
            for row, (levels, shape) in enumerate(zip(each, self._shapes.rows, strict=True))
        ]
        return self._spec.collated(rows, self._shapes)

    def _finished(self, levels: torch.Tensor, blank: Iterable[int]) -> torch.Tensor:
        pixels = self._spec.pixels
        video = self._spec.arranged(levels) if pixels is None else finish_rgb(levels, pixels)
        for row in blank:
            video[row] = 0
        return video


class RgbSink(_LevelsSink):
    """Collects RGB from decoders, or whole rows from worker processes, in host memory."""

    kinds: ClassVar[frozenset[type]] = frozenset({Rgb, SharedRow})

    def __init__(self, memory: RgbMemory, plan: Plan, stream: int) -> None:
        super().__init__(memory.spec, plan, stream)
        self._memory = memory
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
        starts = [stop - layout.nbytes for layout, stop in zip(self._layouts, stops, strict=True)]
        self._shared = None if shared is None else [shared + start for start in starts]
        self._rows = [
            bytes_[start:stop].view(layout.dtype).reshape(layout.shape)
            for start, stop, layout in zip(starts, stops, self._layouts, strict=True)
        ]
        self._staged: dict[int, UInt8Array] = {}
        for row in self._blank:
            self._rows[row][...] = 0

    def output(self, row: int, kinds: Set[type]) -> DecoderOutput | SharedRow:
        """See `Sink`."""
        layout = self._layouts[row]
        if SharedRow in kinds and self._shared is not None:
            return SharedRow(self._shared[row], layout)
        if layout.as_decoded:
            return Rgb(layout.view(self._rows[row]))
        self._staged[row] = self._memory.clips.take(math.prod(layout.levels_shape)).reshape(layout.levels_shape)
        return Rgb(self._staged[row])

    def done(self, row: int, *, good: bool) -> None:
        """See `Sink`."""
        staged = self._staged.pop(row, None)
        if not good:
            self._rows[row][...] = 0
            self._blank.add(row)
        elif staged is not None:
            layout = self._layouts[row]
            layout.fill(layout.view(self._rows[row]), staged)

    def finish(self) -> Video:
        """See `Sink`."""
        spec, shapes, layouts, host = self._spec, self._shapes, self._layouts, self._host
        # From here on only the tensor keeps the memory alive.
        del self._rows, self._host
        if spec.stream.device.type != "cpu":
            return self._levels(spec.stream.upload(host))
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


class DeviceRgbSink(_LevelsSink):
    """Collects RGB from decoders that write it to the device."""

    kinds: ClassVar[frozenset[type]] = frozenset({DeviceRgb})

    def __init__(self, spec: VideoSpec, plan: Plan, stream: int) -> None:
        super().__init__(spec, plan, stream)
        sizes = [3 * math.prod(shape) for shape in self._shapes.rows]
        self._memory = torch.empty(sum(sizes), dtype=torch.uint8, device=spec.stream.device)
        self._rows = torch.split(self._memory, sizes)
        self._writable = spec.stream.mark()

    def output(self, row: int, _kinds: Set[type]) -> DecoderOutput:
        """See `Sink`."""
        return DeviceRgb(self._rows[row].view(3, *self._shapes.rows[row]), self._writable)

    def done(self, row: int, *, good: bool) -> None:
        """See `Sink`."""
        (self._blank.discard if good else self._blank.add)(row)

    def finish(self) -> Video:
        """See `Sink`."""
        memory = self._memory
        del self._memory, self._rows
        return self._levels(memory)


class PlanesSink:
    """Collects the YUV 4:2:0 planes of clips on the host, 1.5 bytes per pixel, and converts them on the device."""

    kinds: ClassVar[frozenset[type]] = frozenset({Planes})
    on_device: ClassVar[bool] = False  # whether decoders write to the device

    def __init__(self, spec: VideoSpec, plan: Plan, stream: int) -> None:
        self._spec, self._plan, self._first = spec, plan, stream * len(plan.lengths)
        self._good = [False] * len(plan.lengths)
        self._shapes = spec.shapes(plan.shapes(stream), plan.share.shape)
        sizes = [0 if not count else packed_size(self._request(row)) for row, count in enumerate(plan.lengths)]
        stops = np.cumsum([-(-size // _ALIGN) * _ALIGN for size in sizes]).tolist()
        self._spans = [slice(start, start + size) for start, size in zip([0, *stops], sizes, strict=False)]
        where = {"device": spec.stream.device} if self.on_device else {"pin_memory": spec.stream.is_asynchronous}
        self._memory = torch.empty(stops[-1], dtype=torch.uint8, **where)
        self._writable = spec.stream.mark() if self.on_device else None

    def output(self, row: int, _kinds: Set[type]) -> DecoderOutput:
        """See `Sink`."""
        return packed(self._memory[self._spans[row]].numpy(), self._request(row))

    def done(self, row: int, *, good: bool) -> None:
        """See `Sink`."""
        self._good[row] = good

    def finish(self) -> Video:
        """See `Sink`."""
        memory = self._memory
        del self._memory
        moved = memory if self.on_device else self._spec.stream.upload(memory)
        return self._video([moved[span] if good else None for span, good in zip(self._spans, self._good, strict=True)])

    def _request(self, row: int) -> ClipRequest:
        return self._plan.part(self._first + row)

    def _info(self, row: int) -> StreamInfo:
        return self._plan.info(self._first + row)

    def _video(self, rows: Sequence[torch.Tensor | None]) -> Video:
        """Convert the bytes of each row on the device; None is a row that becomes zeros."""
        spec, shapes = self._spec, self._shapes
        planes = [None if data is None else self._planes(data, row) for row, data in enumerate(rows)]
        if shapes.uniform is not None:
            return _uniform(planes, spec, shapes.uniform)
        # Row by row, because clips of different sizes are resized to different sizes.
        each = [_uniform([one], spec, shape)[0] for one, shape in zip(planes, shapes.rows, strict=True)]
        return spec.collated(each, shapes)

    def _planes(self, data: torch.Tensor, row: int) -> ClipPlanes:
        request, info = self._request(row), self._info(row)
        size = (len(request.frames), request.box.height, request.box.width)
        return ClipPlanes.packed(data, *size, flip=request.flip, matrix=info.matrix, sample_range=info.range)


class DevicePlanesSink(PlanesSink):
    """Collects NV12 planes from decoders that write them to the device, 1.5 bytes per pixel."""

    kinds: ClassVar[frozenset[type]] = frozenset({DevicePlanes})
    on_device: ClassVar[bool] = True

    def output(self, row: int, _kinds: Set[type]) -> DecoderOutput:
        """See `Sink`."""
        return DevicePlanes(*_nv12(self._memory[self._spans[row]], self._request(row)), self._writable)

    def _planes(self, data: torch.Tensor, row: int) -> ClipPlanes:
        request, info = self._request(row), self._info(row)
        y, uv = _nv12(data, request)
        return ClipPlanes(y, uv[..., 0], uv[..., 1], request.flip, info.matrix, info.range)


def _nv12(data: torch.Tensor, request: ClipRequest) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a row's luma [T, h, w] and chroma [T, h/2, w/2, 2]."""
    count, height, width = len(request.frames), request.box.height, request.box.width
    pixels = count * height * width
    return data[:pixels].view(count, height, width), data[pixels:].view(count, height // 2, width // 2, 2)


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


class _MeasuresSink(PlanesSink):
    """Pictures that are measurements, all clips of one shape."""

    @property
    def _dtype(self) -> torch.dtype:
        return self._spec.pixels.dtype if self._spec.pixels else torch.float32

    def __init__(self, spec: VideoSpec, plan: Plan, stream: int) -> None:
        super().__init__(replace(spec, collate="stack"), plan, stream)


class DepthSink(_MeasuresSink):
    """Collects levels of depth as decoded; they become whole millimetres on the device, as LeRobot delivers them.

    Crops and flips are those of the pictures of the same clip. Where a crop is resized the nearest level is taken:
    between an object and what is behind it nothing is to average.

    `table`: returns the distance of each level, [4096], on the device.
    """

    kinds: ClassVar[frozenset[type]] = frozenset({Levels})

    def __init__(self, spec: VideoSpec, plan: Plan, stream: int, *, table: Callable[[], torch.Tensor]) -> None:
        super().__init__(spec, plan, stream)
        self._table = table

    def _video(self, rows: Sequence[torch.Tensor | None]) -> torch.Tensor:
        depth = torch.zeros((len(rows), *self._shapes.rows[0]), dtype=self._dtype, device=self._spec.stream.device)
        for row, data in enumerate(rows):
            if data is not None:
                request = self._request(row)
                # torch has few operations on uint16: the bits are those of a positive int16.
                levels = data.view(torch.int16).view(len(request.frames), request.box.height, request.box.width)
                depth[row] = to_depth(levels, request, self._table())
        return depth.unsqueeze(1 if self._spec.layout == "BCTHW" else 2)


def to_depth(levels: torch.Tensor, request: ClipRequest, table: torch.Tensor) -> torch.Tensor:
    """Convert levels to distances.

    `levels`: int16 [T, h, w], 0 to 4095, cropped. `table`: the distance of each level, [4096]. Returns [T, H, W] of
    the table's type.
    """
    size = request.size
    if size != levels.shape[1:]:
        rows, columns = (
            ((torch.arange(new, device=levels.device) + 0.5) * old / new).long()
            for new, old in zip(size, levels.shape[1:], strict=True)
        )
        levels = levels[:, rows][:, :, columns]
    depth = table[levels.clamp(0, len(table) - 1).int()]
    return depth.flip(-1) if request.flip else depth


class FlowSink(_MeasuresSink):
    """Collects flow pictures as decoded; they become flow in *output* pixels per frame on the device.

    Resizing a crop scales x by W/w and y by H/h, and a flip negates x, so that the flow matches the motion visible in
    the clip. (The TSN code resizes without scaling.)
    """

    def _video(self, rows: Sequence[torch.Tensor | None]) -> torch.Tensor:
        spec, (frames, *size) = self._spec, self._shapes.rows[0]
        channels = 2 * self._plan.rules.flow_stack
        whole = (len(rows), channels, *self._shapes.rows[0])
        flow = empty_batch(
            whole, spec.layout, self._dtype, spec.stream.device, channels_last=spec.channels_last
        ).zero_()
        for row, data in enumerate(rows):
            if data is not None:
                # Luma precedes chroma, which carries no flow.
                request = self._request(row)
                luma, _ = _nv12(data, request)
                # [T * L, 2, H, W] to channels x1 y1 x2 y2 ... of each frame.
                value = to_flow(luma, self._info(row), request).view(frames, channels, *size)
                flow[row] = value.transpose(0, 1) if spec.layout == "BCTHW" else value
        return flow


def to_flow(luma: torch.Tensor, info: StreamInfo, request: ClipRequest) -> torch.Tensor:
    """Convert pictures of x above y to flow in pixels of the output picture.

    `luma`: uint8 [N, h', w], cropped as by `Plan.part`. Returns float32 [N, 2, H, W]: x and y, in pixels per frame.
    """
    half = info.height // 2
    rows = request.box.height - half
    levels = torch.stack([luma[:, :rows], luma[:, half:]], dim=1).float()
    levels -= ZERO
    flow = resize(levels, request.size)
    height, width = request.size
    unit = info.flow_bound / STEPS
    flow[:, 0].mul_(unit * width / request.box.width)
    flow[:, 1].mul_(unit * height / rows)
    if request.flip:
        flow = flow.flip(-1)
        flow[:, 0].neg_()
    return flow
