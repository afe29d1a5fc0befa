"""Sinks: the memory that decoders write clips into, and the conversion from there to a batch tensor.

There are two ways, depending on the decoder's output:

- RGB: the thread that decoded a clip also normalises it into the batch, while it is in that core's cache.
- Planes: the YUV 4:2:0 planes of all clips are packed into one buffer (pinned for CUDA), copied to the device at once,
  and converted, resized, flipped and normalised there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch

from fastvid.decode.colours import ClipPlanes, Layout, Pixels
from fastvid.decode.pixels import finish_planes, finish_rgb
from fastvid.decode.request import DeviceRgb, Output, Planes, Rgb
from fastvid.load.clips.clip import BatchRow, as_clips
from fastvid.load.memory.buffers import BufferPool
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
        device: Device of the tensor.
    """

    num_frames: int
    size: tuple[int, int]
    layout: Layout
    pixels: Pixels | None
    device: torch.device


class Sink(Protocol):
    """The memory of one stream of a batch in the making."""

    def output(self, row: int, kinds: Set[type], /) -> Output | SharedRow:
        """Return where to write a clip: memory for a decoder that writes some of `kinds`, or a process's whole row."""
        ...

    def done(self, row: int, *, good: bool) -> None:
        """Mark a row as written, or (not `good`) as failed: it becomes zeros."""
        ...

    def finish(self) -> torch.Tensor:
        """Return the stream on its device. Called once, after every row is done."""
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
        on_host, pixels = spec.device.type == "cpu", spec.pixels
        # Another device gets uint8 as decoded and normalises and transposes there. On the host half precision is
        # converted from float32 at the end: numpy has no bfloat16, and its float16 is slow.
        channels = tuple(pixels.channels()) if pixels is not None and on_host else None
        frames_first = spec.layout == "BTCHW" and on_host
        self.layout = RowLayout(spec.num_frames, spec.size, frames_first, channels)


class RgbSink:
    """Collects RGB from decoders, or whole rows from worker processes, in host memory."""

    def __init__(self, memory: RgbMemory, clips: Sequence[BatchRow | None]) -> None:
        layout = memory.layout
        self._memory = memory
        bytes_ = memory.batches.take(len(clips) * layout.nbytes)
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
        video = torch.from_numpy(self._video)
        del self._video
        if spec.device.type == "cpu":
            return video if pixels is None else video.to(pixels.dtype)
        video = video.to(spec.device)
        if pixels is not None:
            video = finish_rgb(video, pixels)
            video[self._blank] = 0
            return video
        return video if spec.layout == "BCTHW" else video.transpose(1, 2).contiguous()


class DeviceSink:
    """Collects RGB from decoders that write it to the device."""

    def __init__(self, spec: VideoSpec, clips: Sequence[BatchRow | None]) -> None:
        self._spec = spec
        self._good = [False] * len(clips)
        shape = (len(clips), 3, spec.num_frames, *spec.size)
        self._video = torch.empty(shape, dtype=torch.uint8, device=spec.device)

    def output(self, row: int, _kinds: Set[type]) -> Output:
        """See `Sink`."""
        return DeviceRgb(self._video[row])

    def done(self, row: int, *, good: bool) -> None:
        """See `Sink`."""
        self._good[row] = good

    def finish(self) -> torch.Tensor:
        """See `Sink`."""
        spec = self._spec
        if spec.pixels is None:
            video = self._video if spec.layout == "BCTHW" else self._video.transpose(1, 2).contiguous()
        else:
            video = finish_rgb(self._video, spec.pixels)
        for row, good in enumerate(self._good):
            if not good:
                video[row] = 0
        return video


class PlanesBuffer:
    """Host buffer for the planes of a batch's clips, one after the other; pinned if the device is CUDA.

    Args:
        clips: The clip of each row; None for a masked row.
        device: Device that the planes are copied to.
    """

    def __init__(self, clips: Sequence[BatchRow | None], device: torch.device) -> None:
        clips = self._clips = as_clips(clips)
        self._good = [False] * len(clips)
        self._spans: list[tuple[int, int]] = []
        at = 0
        for clip in clips:
            size = Planes.nbytes(len(clip.request.frames), clip.request.box) if clip else 0
            self._spans.append((at, at + size))
            at += -(-size // _ALIGN) * _ALIGN
        # torch caches pinned memory and reuses it only after the copies from it have completed on the device.
        self._host = torch.empty(at, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._bytes = self._host.numpy()

    def output(self, row: int, _kinds: Set[type]) -> Output:
        """See `Sink`."""
        clip = self._clips[row]
        assert clip is not None
        start, stop = self._spans[row]
        return Planes.packed(self._bytes[start:stop], len(clip.request.frames), clip.request.box)

    def done(self, row: int, *, good: bool) -> None:
        """See `Sink`."""
        self._good[row] = good


class PlanesSink(PlanesBuffer):
    """Collects YUV 4:2:0 planes from decoders, 1.5 bytes per pixel."""

    def __init__(self, spec: VideoSpec, clips: Sequence[BatchRow | None]) -> None:
        super().__init__(clips, spec.device)
        self._spec = spec

    def finish(self) -> torch.Tensor:
        """See `Sink`."""
        spec = self._spec
        pixels = spec.pixels or Pixels(*_LEVELS, layout=spec.layout)
        moved = self._host.to(spec.device, non_blocking=True)
        rows = [row for row, good in enumerate(self._good) if good]
        planes = [self._planes(moved, row) for row in rows]
        if len(rows) == len(self._clips):
            video = finish_planes(planes, spec.size, pixels)
        else:
            video = pixels.empty(len(self._clips), spec.num_frames, spec.size, spec.device).zero_()
            if rows:
                video[rows] = finish_planes(planes, spec.size, pixels)
        return video if spec.pixels else video.to(torch.uint8)

    def _planes(self, moved: torch.Tensor, row: int) -> ClipPlanes:
        clip = self._clips[row]
        assert clip is not None
        box, (start, stop) = clip.request.box, self._spans[row]
        return ClipPlanes.packed(
            moved[start:stop],
            self._spec.num_frames,
            box.height,
            box.width,
            flip=clip.request.flip,
            matrix=clip.info.matrix,
            sample_range=clip.info.range,
        )
