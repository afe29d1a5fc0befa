"""From decoded flow to the tensor that a step sees, and batches of several streams.

What the model gets: pixels a frame of the *output* picture. So a crop that is resized scales x by W/w and y by H/h, and
a mirrored clip has x negated: flow stays the motion that is seen in the clip. (The TSN code resizes without scaling.)
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from fastvid.decode.colours import Layout
from fastvid.decode.pixels import resize
from fastvid.decode.request import ClipRequest, Output
from fastvid.format.flow import STEPS, ZERO
from fastvid.format.packets import StreamInfo
from fastvid.load.batch.canvases import Canvas, Finisher, PlanesBuffer
from fastvid.load.clips.clip import Clip, Row, decided


@dataclass(frozen=True, slots=True)
class FlowProduct:
    """What a batch's flow looks like.

    Attributes:
        num_frames: T.
        stack: L.
        size: Height and width in pixels.
        layout: Order of the axes.
        dtype: A floating type.
        device: Where it lies.
    """

    num_frames: int
    stack: int
    size: tuple[int, int]
    layout: Layout
    dtype: torch.dtype
    device: torch.device


class FlowFinisher:
    """Takes planes of flow from decoders; they go to the device as they are and become numbers there.

    Args:
        product: What is wanted.
    """

    def __init__(self, product: FlowProduct) -> None:
        self.product = product

    def open(self, clips: Sequence[Row | None]) -> Canvas:
        """See `fastvid.load.batch.canvases.Finisher`."""
        return _FlowCanvas(self.product, decided(clips))


class _FlowCanvas(PlanesBuffer):
    def __init__(self, product: FlowProduct, clips: Sequence[Clip | None]) -> None:
        super().__init__(clips, product.device)
        self._product = product

    def finish(self) -> Tensor:
        product = self._product
        order = (2 * product.stack, product.num_frames)
        axes = order if product.layout == "BCTHW" else order[::-1]
        flow = torch.zeros((len(self._clips), *axes, *product.size), dtype=product.dtype, device=product.device)
        moved = self._host.to(product.device, non_blocking=True)
        for row, (clip, good) in enumerate(zip(self._clips, self._good, strict=True)):
            if clip is None or not good:
                continue
            # Luma comes first.
            box, start = clip.request.box, self._spans[row][0]
            count = len(clip.request.frames)
            luma = moved[start : start + count * box.height * box.width].view(count, box.height, box.width)
            value = to_flow(luma, clip.info, clip.request)
            # [T * L, 2, H, W] to channels x1 y1 x2 y2 ... of each frame.
            value = value.view(product.num_frames, 2 * product.stack, *product.size)
            flow[row] = value.transpose(0, 1) if product.layout == "BCTHW" else value
        return flow


def to_flow(luma: Tensor, info: StreamInfo, request: ClipRequest) -> Tensor:
    """Levels of stacked pictures as flow of the output picture.

    Args:
        luma: uint8 [N, h', w], cut out by `flow_request`.
        info: The stream.
        request: What was asked for.

    Returns:
        float32 [N, 2, H, W]: x and y, pixels a frame.
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


class StreamsFinisher:
    """Several streams of a batch: rows of the first, then rows of the second, and so on.

    Args:
        finishers: One for each stream.
    """

    def __init__(self, finishers: Sequence[Finisher]) -> None:
        self.finishers = tuple(finishers)

    def open(self, clips: Sequence[Row | None]) -> Canvas:
        """Memory for the clips of all streams."""
        rows = len(clips) // len(self.finishers)
        parts = [clips[number * rows : (number + 1) * rows] for number in range(len(self.finishers))]
        return StreamsCanvas([one.open(part) for one, part in zip(self.finishers, parts, strict=True)], rows)


class StreamsCanvas:
    """The memory of one batch of several streams."""

    def __init__(self, canvases: Sequence[Canvas], rows: int) -> None:
        self._canvases, self._rows = canvases, rows

    def output(self, row: int, kinds: Set[type]) -> Output:
        """See `Canvas`."""
        return self._canvases[row // self._rows].output(row % self._rows, kinds)

    def done(self, row: int, *, good: bool) -> None:
        """See `Canvas`."""
        self._canvases[row // self._rows].done(row % self._rows, good=good)

    def finish(self) -> Tensor:
        """The first stream."""
        return self.finish_all()[0]

    def finish_all(self) -> list[Tensor]:
        """Every stream on its device."""
        return [canvas.finish() for canvas in self._canvases]
