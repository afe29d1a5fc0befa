"""From decoded flow to the tensor that a step sees.

What the model gets: pixels a frame of the *output* picture. So a crop that is resized scales x by W/w and y by H/h, and
a mirrored clip has x negated: flow stays the motion that is seen in the clip. (The TSN code resizes without scaling.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastvid.decode.colours import Layout
from fastvid.decode.pixels import resize
from fastvid.decode.request import ClipRequest
from fastvid.format.flow import STEPS, ZERO
from fastvid.format.packets import StreamInfo
from fastvid.load.batch.sinks import PlanesBuffer
from fastvid.load.clips.clip import Row


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


class FlowSink(PlanesBuffer):
    """Planes of flow from decoders; they go to the device as they are and become numbers there."""

    def __init__(self, product: FlowProduct, clips: Sequence[Row | None]) -> None:
        super().__init__(clips, product.device)
        self._product = product

    def finish(self) -> Tensor:
        """See `fastvid.load.batch.sinks.Sink`."""
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
