"""Sinks for decoders that leave their frames on the device of the batch.

Their memory is allocated on the loader's stream, where earlier batches may still read what the allocator hands out
again. So each output carries an event of that stream, which the decoder's own stream waits for before it writes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import ClassVar

import numpy as np
import torch

from fastvid.decode.colours import ClipPlanes
from fastvid.decode.pixels import finish_rgb
from fastvid.decode.request import DecoderOutput, DevicePlanes, DeviceRgb
from fastvid.load.batch.sinks import PlanesBuffer, video_of
from fastvid.load.batch.video import Video, VideoSpec
from fastvid.load.clips.clip import BatchRow
from fastvid.load.order.batches import ClipShape


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
