"""Convert decoded levels into the depth tensor of a batch.

Values are whole millimetres, as LeRobot delivers them. Crops and flips are those of the pictures of the same clip.
Where a crop is resized the nearest level is taken: between an object and what is behind it nothing is to average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fastvid.decode.colours import Layout
from fastvid.decode.request import ClipRequest, Levels
from fastvid.format.depth import DepthScale
from fastvid.load.batch.sinks import HostPlanes
from fastvid.load.batch.video import one_shape
from fastvid.load.clips.clip import BatchRow
from fastvid.load.memory.device import LoaderStream
from fastvid.load.order.batches import ClipShape


@dataclass(frozen=True, slots=True)
class DepthSpec:
    """Shape, type and device of a batch's depth tensor."""

    scale: DepthScale
    shape: ClipShape | None  # frames per clip, height and width in pixels; None if the plan of each batch decides them
    layout: Layout
    dtype: torch.dtype
    stream: LoaderStream
    tables: dict[torch.device, Tensor] = field(default_factory=dict)

    def table(self) -> Tensor:
        """Return the distance of each level, [4096], on the device."""
        device = self.stream.device
        if device not in self.tables:
            self.tables[device] = torch.from_numpy(self.scale.millimetres()).to(device, self.dtype)
        return self.tables[device]


class DepthSink(HostPlanes):
    """Collects levels as decoded; they are copied to the device and converted there."""

    kinds: ClassVar[frozenset[type]] = frozenset({Levels})

    def __init__(self, spec: DepthSpec, clips: Sequence[BatchRow | None], shape: ClipShape | None) -> None:
        super().__init__(clips, spec.stream)
        self._spec, self._shape = spec, one_shape(clips, shape or spec.shape)

    def finish(self) -> Tensor:
        """See `fastvid.load.batch.sinks.Sink`."""
        spec, (frames, height, width) = self._spec, self._shape
        depth = torch.zeros((len(self._clips), frames, height, width), dtype=spec.dtype, device=spec.stream.device)
        moved = spec.stream.upload(self._take())
        for row, (clip, good) in enumerate(zip(self._clips, self._good, strict=True)):
            if clip is not None and good:
                start, stop = self._spans[row]
                box = clip.request.box
                # torch has few operations on uint16: the bits are those of a positive int16.
                levels = moved[start:stop].view(torch.int16).view(frames, box.height, box.width)
                depth[row] = to_depth(levels, clip.request, spec.table())
        return depth.unsqueeze(1 if spec.layout == "BCTHW" else 2)


def to_depth(levels: Tensor, request: ClipRequest, table: Tensor) -> Tensor:
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
