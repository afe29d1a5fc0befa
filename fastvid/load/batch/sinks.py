"""From decoded clips to the tensor that a step sees: where decoders write, and what is done to it afterwards.

Two ways, by what the decoder writes:

- RGB: the thread that decoded a clip also normalises it into the batch, while it is in that core's cache.
- Planes: YUV 4:2:0 of all clips lies packed in one buffer (pinned for CUDA), goes to the device in one copy, and is
  converted, resized, flipped and normalised there.
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
from fastvid.load.clips.clip import Row, decided
from fastvid.load.memory.buffers import BufferPool
from fastvid.load.memory.row_layout import RowLayout, SharedRow
from fastvid.runtime.arrays import UInt8Array

_ALIGN: Final = 64  # bytes; a cache line, and wide enough for any vector load on a device

# Normalisation that leaves levels as they are: (level / 255 - 0) / (1 / 255).
_LEVELS: Final = ((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255))


@dataclass(frozen=True)
class Product:
    """What a batch's tensor looks like.

    Attributes:
        num_frames: T.
        size: Height and width in pixels.
        layout: Order of the axes.
        pixels: How values are normalised; None for uint8 levels 0 to 255 as decoded.
        device: Where the tensor lies.
    """

    num_frames: int
    size: tuple[int, int]
    layout: Layout
    pixels: Pixels | None
    device: torch.device


class Sink(Protocol):
    """The memory of one stream of a batch while it is made."""

    def output(self, row: int, kinds: Set[type], /) -> Output | SharedRow:
        """Where a decoder that writes some of `kinds` puts a clip, or a process the whole row."""
        ...

    def done(self, row: int, *, good: bool) -> None:
        """The clip lies where it belongs, or (not `good`) becomes zeros."""
        ...

    def finish(self) -> torch.Tensor:
        """The stream on its device. Called once, after every row is done."""
        ...


OpenSink = Callable[[Sequence[Row | None]], Sink]
"""Memory for the rows of a stream; None is a masked row, which is zeros."""


class RgbMemory:
    """Where RGB of a loader's batches goes on the host.

    Args:
        product: What is wanted.
        batches: Where the memory of batches comes from.
        threads: Threads that decode at once.
    """

    def __init__(self, product: Product, batches: BufferPool, *, threads: int) -> None:
        self.product, self.batches, self.clips = product, batches, BufferPool(threads)
        on_host, pixels = product.device.type == "cpu", product.pixels
        # To another device one byte a value is sent, as decoders write them; there a batch gets its layout. On the host
        # half precision is made from float32 at the end: numpy has no bfloat16, and its float16 is slow.
        channels = tuple(pixels.channels()) if pixels is not None and on_host else None
        frames_first = product.layout == "BTCHW" and on_host
        self.layout = RowLayout(product.num_frames, product.size, frames_first, channels)


class RgbSink:
    """RGB from decoders, or whole rows from processes: a stream that is made on the host."""

    def __init__(self, memory: RgbMemory, clips: Sequence[Row | None]) -> None:
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
        product, pixels = self._memory.product, self._memory.product.pixels
        # The tensor alone keeps the memory from here on.
        video = torch.from_numpy(self._video)
        del self._video
        if product.device.type == "cpu":
            return video if pixels is None else video.to(pixels.dtype)
        video = video.to(product.device)
        if pixels is not None:
            video = finish_rgb(video, pixels)
            video[self._blank] = 0
            return video
        return video if product.layout == "BCTHW" else video.transpose(1, 2).contiguous()


class DeviceSink:
    """Finished frames from decoders that leave them on the device."""

    def __init__(self, product: Product, clips: Sequence[Row | None]) -> None:
        self._product = product
        self._good = [False] * len(clips)
        shape = (len(clips), 3, product.num_frames, *product.size)
        self._video = torch.empty(shape, dtype=torch.uint8, device=product.device)

    def output(self, row: int, _kinds: Set[type]) -> Output:
        """See `Sink`."""
        return DeviceRgb(self._video[row])

    def done(self, row: int, *, good: bool) -> None:
        """See `Sink`."""
        self._good[row] = good

    def finish(self) -> torch.Tensor:
        """See `Sink`."""
        product = self._product
        if product.pixels is None:
            video = self._video if product.layout == "BCTHW" else self._video.transpose(1, 2).contiguous()
        else:
            video = finish_rgb(self._video, product.pixels)
        for row, good in enumerate(self._good):
            if not good:
                video[row] = 0
        return video


class PlanesBuffer:
    """Room on the host for the planes of each clip of a batch, one behind the other; pinned where they travel on.

    Args:
        clips: Of the rows; None where there is none.
        device: Where they go.
    """

    def __init__(self, clips: Sequence[Row | None], device: torch.device) -> None:
        clips = self._clips = decided(clips)
        self._good = [False] * len(clips)
        self._spans: list[tuple[int, int]] = []
        at = 0
        for clip in clips:
            size = Planes.nbytes(len(clip.request.frames), clip.request.box) if clip else 0
            self._spans.append((at, at + size))
            at += -(-size // _ALIGN) * _ALIGN
        # torch keeps pinned memory and gives it out again only after the copies from it have ended on the device.
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
    """Planes from decoders, 1.5 bytes a pixel."""

    def __init__(self, product: Product, clips: Sequence[Row | None]) -> None:
        super().__init__(clips, product.device)
        self._product = product

    def finish(self) -> torch.Tensor:
        """See `Sink`."""
        product = self._product
        pixels = product.pixels or Pixels(*_LEVELS, layout=product.layout)
        moved = self._host.to(product.device, non_blocking=True)
        rows = [row for row, good in enumerate(self._good) if good]
        planes = [self._planes(moved, row) for row in rows]
        if len(rows) == len(self._clips):
            video = finish_planes(planes, product.size, pixels)
        else:
            video = pixels.empty(len(self._clips), product.num_frames, product.size, product.device).zero_()
            if rows:
                video[rows] = finish_planes(planes, product.size, pixels)
        return video if product.pixels else video.to(torch.uint8)

    def _planes(self, moved: torch.Tensor, row: int) -> ClipPlanes:
        clip = self._clips[row]
        assert clip is not None
        box, (start, stop) = clip.request.box, self._spans[row]
        return ClipPlanes.packed(
            moved[start:stop],
            self._product.num_frames,
            box.height,
            box.width,
            flip=clip.request.flip,
            matrix=clip.info.matrix,
            sample_range=clip.info.range,
        )
