"""`Canvas`: one batch in the making. Its sinks are the memory that each stream is decoded into, and its conversion.

There are two ways for decoders that write to the host:

- RGB: the thread that decoded a clip also normalises it into the batch, while it is in that core's cache. For another
  device the batch is copied as decoded and normalised there.
- Planes: the YUV 4:2:0 planes of all clips are packed into one buffer, copied to the device in one transfer, and
  converted, resized, flipped and normalised there.

For CUDA the memory is pinned, and copied on the loader's stream without waiting.

Decoders that leave their frames on the device write into memory that is allocated on the loader's stream. It may be a
freed block that queued work of an earlier batch still reads. So each output carries an event of that stream, which the
decoder's own stream waits for before it writes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from fastvid.decode.colours import ClipPlanes, Pixels
from fastvid.decode.pixels import finish_planes, finish_rgb, resize
from fastvid.decode.pyav import RgbConverter
from fastvid.decode.request import (
    SLACK,
    ClipRequest,
    DecoderOutput,
    DevicePlanes,
    DeviceRgb,
    EncodedClip,
    Levels,
    Planes,
    Rgb,
    as_decoded,
    packed,
    packed_size,
)
from fastvid.decode.sound import Audio
from fastvid.format.packets import StreamInfo
from fastvid.format.planes import STEPS, ZERO
from fastvid.load.batch.batch import Batch
from fastvid.load.batch.spec import Video, VideoSpec
from fastvid.load.clips.plan import Plan, SoundTask
from fastvid.load.device import LoaderStream, upload
from fastvid.load.memory import BufferPool, DecodeBuffer, RgbRow, SharedBufferPool, row_layout
from fastvid.load.order.epoch import ClipShape
from fastvid.load.stats import Counters

_ALIGN: Final = 64  # bytes: a cache line, and enough for any vector load on a device

# Normalisation that keeps levels 0 to 255: (level / 255 - 0) / (1 / 255).
_LEVELS: Final = ((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255))


def _on_host(size: int, stream: LoaderStream, pool: BufferPool | None = None) -> Tensor:
    """Allocate bytes of the host: of the pool, or pinned ones if a GPU copies them without waiting."""
    # Worker processes write to their own shared memory, which is not pinned.
    if pool is None or (stream.is_asynchronous and not isinstance(pool, SharedBufferPool)):
        return torch.empty(size, dtype=torch.uint8, pin_memory=stream.is_asynchronous)
    return torch.from_numpy(pool.take(max(1, size))[:size])


class Sink(ABC):
    """Collects one stream (pictures, flow, a camera) of a batch, row after row, and makes the batch's tensor of it."""

    kinds: ClassVar[frozenset[type]]  # types of output that decoders may write there
    on_device: ClassVar[bool] = False  # whether decoders write to the device
    align: ClassVar[int] = 1  # each row starts at a multiple of so many bytes

    def __init__(self, spec: VideoSpec, plan: Plan, stream: int) -> None:
        self._spec, self._plan, self._first = spec, plan, stream * len(plan.lengths)
        self._shapes = spec.shapes(plan.shapes(stream), plan.share.shape)
        sizes = self._sizes()
        stops = np.cumsum(-(-np.array(sizes) // self.align) * self.align).tolist()
        self._spans = [slice(start, start + size) for start, size in zip([0, *stops], sizes, strict=False)]
        self._memory = self._allocate(stops[-1])
        self._writable = spec.stream.mark() if self.on_device else None

    @abstractmethod
    def output(self, row: int) -> DecoderOutput | RgbRow:
        """Return where to write a clip."""

    def finish(self, good: Sequence[bool]) -> Video:
        """Return the stream's tensors on the batch's device; rows that are not `good` were not written, and are zeros.

        Called once, after every row is done; from here on only the tensor keeps the memory alive.
        """
        memory = self._memory
        del self._memory
        return self._video(memory if self.on_device else upload(memory, self._spec.stream.device), good)

    @abstractmethod
    def _sizes(self) -> list[int]:
        """Return the bytes of each row."""

    def _allocate(self, size: int) -> Tensor:
        stream = self._spec.stream
        return torch.empty(size, dtype=torch.uint8, device=stream.device) if self.on_device else _on_host(size, stream)

    def _video(self, memory: Tensor, good: Sequence[bool]) -> Video:
        """Return the tensors made of the memory, which is on the batch's device by now."""
        shapes = self._shapes
        if shapes.uniform is not None:
            return self._converted(memory, range(len(good)), good, shapes.uniform)
        # One by one, because clips of different sizes are resized to different sizes.
        made = [self._converted(memory, [row], good, shape)[0] for row, shape in enumerate(shapes.rows)]
        return self._spec.collated(made, shapes)

    @abstractmethod
    def _converted(self, memory: Tensor, rows: Sequence[int], good: Sequence[bool], shape: ClipShape) -> Tensor:
        """Return consecutive rows of one shape."""

    def _of(self, rows: Sequence[int]) -> slice:
        return slice(self._spans[rows[0]].start, self._spans[rows[-1]].stop)

    def _request(self, row: int) -> ClipRequest:
        return self._plan.part(self._first + row)

    def _info(self, row: int) -> StreamInfo:
        return self._plan.info(self._first + row)


class DeviceRgbSink(Sink):
    """Collects RGB from decoders that write it to the device."""

    kinds = frozenset({DeviceRgb})
    on_device = True

    def output(self, row: int) -> DecoderOutput | RgbRow:
        """See `Sink`."""
        return DeviceRgb(self._memory[self._spans[row]].view(3, *self._shapes.rows[row]), self._writable)

    def _sizes(self) -> list[int]:
        return [3 * math.prod(shape) for shape in self._shapes.rows]

    def _converted(self, memory: Tensor, rows: Sequence[int], good: Sequence[bool], shape: ClipShape) -> Tensor:
        levels, pixels = memory[self._of(rows)].view(len(rows), 3, *shape), self._spec.pixels
        video = self._spec.arranged(levels) if pixels is None else finish_rgb(levels, pixels)
        for number, row in enumerate(rows):
            if not good[row]:
                video[number] = 0
        return video


class RgbSink(DeviceRgbSink):
    """Collects RGB from decoders, or whole rows from worker processes, in host memory.

    `batches`: pool from which the memory of each batch is taken.
    """

    kinds = frozenset({Rgb})
    on_device = False

    def __init__(self, spec: VideoSpec, plan: Plan, stream: int, *, batches: BufferPool) -> None:
        # A batch for another device is copied as decoded uint8, then normalised and transposed there. On the host half
        # precision is converted from float32 at the end: numpy has no bfloat16, and its float16 is slow.
        on_host = spec.stream.device.type == "cpu"
        self._order = "CTHW" if not on_host else "THWC" if spec.channels_last else spec.layout[1:]
        self._batches = batches
        super().__init__(spec, plan, stream)
        data = self._memory.numpy()
        self._rows = [RgbRow(layout, data[span]) for layout, span in zip(self._layouts, self._spans, strict=True)]

    def output(self, row: int) -> DecoderOutput | RgbRow:
        """See `Sink`."""
        return self._rows[row]

    def finish(self, good: Sequence[bool]) -> Video:
        """See `Sink`."""
        for row, is_good in zip(self._rows, good, strict=True):
            if not is_good:
                row.memory[:] = 0
        del self._rows
        return super().finish(good)

    def _sizes(self) -> list[int]:
        rows = self._shapes.rows
        kind = (self._order, self._spec.channels, self._spec.resize == "fast")
        self._layouts = [row_layout(shape[0], shape[1:], *kind) for shape in rows]
        return list(map(attrgetter("nbytes"), self._layouts))

    def _allocate(self, size: int) -> Tensor:
        return _on_host(size, self._spec.stream, self._batches)

    def _converted(self, memory: Tensor, rows: Sequence[int], good: Sequence[bool], shape: ClipShape) -> Tensor:
        spec = self._spec
        if spec.stream.device.type != "cpu":
            return super()._converted(memory, rows, good, shape)
        data = memory[self._of(rows)] if spec.pixels is None else memory[self._of(rows)].view(torch.float32)
        axes = [1 + self._order.index(axis) for axis in spec.layout[1:]]
        return data.view(len(rows), *self._layouts[rows[0]].shape).permute(0, *axes).to(spec.dtype)


class PlanesSink(Sink):
    """Collects the YUV 4:2:0 planes of clips on the host, 1.5 bytes per pixel, and converts them on the device."""

    kinds = frozenset({Planes})
    align = _ALIGN

    def output(self, row: int) -> DecoderOutput | RgbRow:
        """See `Sink`."""
        return packed(self._memory[self._spans[row]].numpy(), self._request(row))

    def _sizes(self) -> list[int]:
        return [0 if not count else packed_size(self._request(row)) for row, count in enumerate(self._plan.lengths)]

    def _converted(self, memory: Tensor, rows: Sequence[int], good: Sequence[bool], shape: ClipShape) -> Tensor:
        spec = self._spec
        pixels = spec.pixels or Pixels(*_LEVELS, layout=spec.layout, channels_last=spec.channels_last)
        clips = {n: self._planes(memory[self._spans[row]], row) for n, row in enumerate(rows) if good[row]}
        video = finish_planes(list(clips.values()), shape[1:], pixels) if clips else torch.empty(0)
        if len(clips) < len(rows):
            whole = pixels.empty(len(rows), shape[0], shape[1:], spec.stream.device).zero_()
            # Copied row by row: an index list would be copied to the device, and the host would wait for that.
            for number, clip in zip(clips, video, strict=True):
                whole[number] = clip
            video = whole
        return video if spec.pixels else video.to(torch.uint8)

    def _planes(self, data: Tensor, row: int) -> ClipPlanes:
        request, info = self._request(row), self._info(row)
        size = (len(request.frames), request.box.height, request.box.width)
        return ClipPlanes.packed(data, *size, flip=request.flip, matrix=info.matrix, sample_range=info.range)


class DevicePlanesSink(PlanesSink):
    """Collects NV12 planes from decoders that write them to the device, 1.5 bytes per pixel."""

    kinds = frozenset({DevicePlanes})
    on_device = True

    def output(self, row: int) -> DecoderOutput | RgbRow:
        """See `Sink`."""
        return DevicePlanes(*_nv12(self._memory[self._spans[row]], self._request(row)), self._writable)

    def _planes(self, data: Tensor, row: int) -> ClipPlanes:
        request, info = self._request(row), self._info(row)
        y, uv = _nv12(data, request)
        return ClipPlanes(y, uv[..., 0], uv[..., 1], request.flip, info.matrix, info.range)


def _nv12(data: Tensor, request: ClipRequest) -> tuple[Tensor, Tensor]:
    """Return a row's luma, uint8 [T, h, w], and chroma, uint8 [T, h/2, w/2, 2], as views of its bytes."""
    count, height, width = len(request.frames), request.box.height, request.box.width
    pixels = count * height * width
    return data[:pixels].view(count, height, width), data[pixels:].view(count, height // 2, width // 2, 2)


class _MeasuresSink(PlanesSink):
    """Base of the sinks whose pictures store measurements, depth or flow; all clips of a batch have one shape."""

    @property
    def _dtype(self) -> torch.dtype:
        return self._spec.pixels.dtype if self._spec.pixels else torch.float32


class DepthSink(_MeasuresSink):
    """Collects levels of depth as decoded, and converts them to whole millimetres on the device, as LeRobot does.

    Crops and flips are those of the same clip's pictures. A resized crop takes the nearest level: the average of an
    object's depth and that of its background is the depth of neither.

    `table`: returns the distance of each level, [4096], on the device.
    """

    kinds = frozenset({Levels})

    def __init__(self, spec: VideoSpec, plan: Plan, stream: int, *, table: Callable[[], Tensor]) -> None:
        super().__init__(spec, plan, stream)
        self._table = table

    def _video(self, memory: Tensor, good: Sequence[bool]) -> Tensor:
        depth = torch.zeros((len(good), *self._shapes.rows[0]), dtype=self._dtype, device=self._spec.stream.device)
        for row in np.flatnonzero(good).tolist():
            request = self._request(row)
            # Read as int16, because torch has few operations on uint16; levels below 4096 have the same bits in both.
            levels = memory[self._spans[row]].view(torch.int16)
            levels = levels.view(len(request.frames), request.box.height, request.box.width)
            depth[row] = to_depth(levels, request, self._table())
        return depth.unsqueeze(1 if self._spec.layout == "BCTHW" else 2)


def to_depth(levels: Tensor, request: ClipRequest, table: Tensor) -> Tensor:
    """Convert levels to distances, resized to the clip's size by taking the nearest level.

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

    def _video(self, memory: Tensor, good: Sequence[bool]) -> Tensor:
        spec, (frames, *size) = self._spec, self._shapes.rows[0]
        channels = 2 * self._plan.rules.flow_stack
        flow = spec.empty((len(good), channels, *self._shapes.rows[0]), self._dtype).zero_()
        for row in np.flatnonzero(good).tolist():
            # Only luma carries flow; chroma follows it.
            request = self._request(row)
            luma, _ = _nv12(memory[self._spans[row]], request)
            # [T * L, 2, H, W] to channels x1 y1 x2 y2 ... of each frame.
            value = to_flow(luma, self._info(row), request).view(frames, channels, *size)
            flow[row] = value.transpose(0, 1) if spec.layout == "BCTHW" else value
        return flow


def to_flow(luma: Tensor, info: StreamInfo, request: ClipRequest) -> Tensor:
    """Convert flow pictures, x in the upper half and y in the lower, to flow in pixels of the output picture.

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


OpenSink = Callable[[Plan, int], Sink]
"""Opens the sink of one stream of a batch, given the batch's plan and the number of the stream."""

# Outputs to which planes can be cut.
_CUT: Final = frozenset({Planes, Rgb})


@dataclass(eq=False)
class CanvasMemory:
    """Opens the canvas of each batch, and keeps the memory that canvases reuse."""

    streams: Sequence[Sequence[OpenSink]]  # functions that open the sinks, by stream
    stream: LoaderStream
    pool: BufferPool  # memory of sound
    planes: BufferPool  # of clips that are decoded together, one for each decode thread
    converters: deque[tuple[RgbConverter, DecodeBuffer]] = field(default_factory=deque)

    def open(self, plan: Plan) -> Canvas:
        """Open the canvas of a plan."""
        with self.stream.use():
            return Canvas(self, plan)


class Canvas:
    """One batch in the making: what was read and decoded so far. Any thread may call `output`, `cut` and `fail`."""

    def __init__(self, memory: CanvasMemory, plan: Plan) -> None:
        self.plan, self._memory, self._rows = plan, memory, len(plan.lengths)
        self.place, self.request = plan.place, plan.request
        self._sinks = [[open_sink(plan, number) for open_sink in sinks] for number, sinks in enumerate(memory.streams)]
        self.sound = None if plan.rules.audio is None else BatchSound(memory, plan.rules.audio, plan)
        self.sounds: dict[int, Sequence[SoundTask]] = {} if self.sound is None else self.sound.tasks
        """Sounds to decode together with a canvas row, by its number."""
        self.packets: dict[int, EncodedClip] = {}
        """Packets read in advance for canvas rows, until these are decoded."""
        self.errors = dict(plan.errors)
        self.costs: list[Counters] = []  # of reading and decoding; threads append to it
        self.finish_seconds = 0.0
        self.pending = len(plan.reads)  # reads that are not decoded; several rows may come from one
        self.finished: tuple[Batch, torch.cuda.Event | None] | None = None
        self.planes: dict[int, Planes] = {}
        """Planes from which several rows are made, by the first of these rows, until they are `cut`."""
        self._taken: dict[int, Sink] = {}  # sink of each canvas row that is written

    def keep(self, row: int, clip: EncodedClip, cost: Counters) -> None:
        """See `fastvid.load.workers.clip_worker.Target`."""
        self.packets[row] = clip
        self.costs.append(cost)

    def output(self, row: int, kinds: Set[type]) -> DecoderOutput | RgbRow:
        """Return where to write a clip: memory for a decoder that writes some of `kinds`."""
        if self.plan.reads[row] > row + 1:
            request = self.plan.request(row)
            count, size = len(request.frames), packed_size(request)
            self.planes[row] = Planes.packed(self._memory.planes.take(size + SLACK)[:size], count, request.box)
            return self.planes[row]
        sinks = self._sinks[row // self._rows]
        (sink, *_) = sinks if len(sinks) == 1 else [one for one in sinks if one.kinds & kinds]
        self._taken[row] = sink
        return sink.output(row % self._rows)

    def fail(self, row: int, error: Exception) -> None:
        """Mark a row, and the rows that are decoded together with it, as failed: they become zeros."""
        self.place(row).locate(error)
        self.planes.pop(row, None)
        for number in range(row, self.plan.reads[row]):
            self.errors[number] = error
            self._taken.pop(number, None)

    def cut(self, row: int) -> None:
        """Cut each clip that was decoded together with `row` out of their planes, and write it to its own row.

        Called by the thread that decoded them.
        """
        try:
            converter, buffer = self._memory.converters.pop()
        except IndexError:
            converter, buffer = RgbConverter(), DecodeBuffer()
        plan, planes, whole = self.plan, self.planes.pop(row), self.plan.request(row)
        for number in range(row, plan.reads[row]):
            part = plan.part(number)
            index = np.searchsorted(whole.frames, part.frames).tolist()
            inside = replace(part, box=replace(part.box, y=part.box.y - whole.box.y, x=part.box.x - whole.box.x))
            self._taken[number] = sink = next(one for one in self._sinks[number // self._rows] if one.kinds & _CUT)
            output = sink.output(number % self._rows)
            if isinstance(output, Planes):
                planes.cut(inside.box, index, output)
                continue
            assert isinstance(output, RgbRow)
            info = plan.info(row)
            converter.convert(info, *as_decoded(info.coded, inside, planes, index, buffer.open(output)))
            buffer.finish(output)
        self._memory.converters.append((converter, buffer))

    def finish(self) -> list[Video]:
        """Return each stream on its device. Called once, after every row is done, within `LoaderStream.use`."""
        return [self._finish(number * self._rows, sinks) for number, sinks in enumerate(self._sinks)]

    def _finish(self, first: int, sinks: Sequence[Sink]) -> Video:
        taken = list(map(self._taken.get, range(first, first + self._rows)))
        video = sinks[0].finish([one is sinks[0] for one in taken])
        for sink in sinks[1:]:
            other = sink.finish([one is sink for one in taken])
            # Copied row by row: an index list would be copied to the device, and the host would wait for that.
            for row, one in enumerate(taken):
                if one is sink:
                    video[row] = other[row]
        return video


class BatchSound:
    """The sound of one batch in the making, and its memory."""

    def __init__(self, memory: CanvasMemory, audio: Audio, plan: Plan) -> None:
        rows, samples = len(plan.samples), plan.sound_samples
        self._stream, self._shape = memory.stream, (rows, audio.channels, samples)
        size = rows * samples * (4 * audio.channels + 1)
        self._host = host = _on_host(size, memory.stream, memory.pool).zero_()
        data, mask = self._split(host)
        values, heard = data.numpy(), mask.numpy()
        # With views there is no sound, so rows of the first stream are rows of the batch.
        self.tasks: dict[int, Sequence[SoundTask]] = {
            first: [SoundTask(plan.windows[row], values[row], heard[row]) for row in range(first, stop)]
            for first, stop in plan.reads.items()
            if first < rows
        }

    def finish(self, failed: Collection[int]) -> dict[str, Tensor]:
        """Return the entries of the batch, on the device. Called once, within `LoaderStream.use`.

        `failed`: rows that failed, which become silent.
        """
        data, mask = self._split(upload(self._host, self._stream.device))
        for row in failed:
            data[row].zero_()
            mask[row].zero_()
        # From here on only the tensors keep the memory alive.
        self.tasks.clear()
        del self._host
        return {"audio": data, "audio_mask": mask}

    def _split(self, block: Tensor) -> tuple[Tensor, Tensor]:
        rows, _, samples = self._shape
        stop = 4 * int(np.prod(self._shape))
        return block[:stop].view(torch.float32).view(self._shape), block[stop:].view(torch.bool).view(rows, samples)
