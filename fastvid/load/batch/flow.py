"""Convert decoded flow pictures into the flow tensor of a batch.

Values are in *output* pixels per frame: resizing a crop scales x by W/w and y by H/h, and a flip negates x, so that the
flow matches the motion visible in the clip. (The TSN code resizes without scaling.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastvid.decode.colours import Layout, empty_batch
from fastvid.decode.pixels import resize
from fastvid.decode.request import ClipRequest
from fastvid.format.flow import STEPS, ZERO
from fastvid.format.packets import StreamInfo
from fastvid.load.batch.sinks import HostPlanes
from fastvid.load.batch.video import one_shape
from fastvid.load.clips.clip import BatchRow
from fastvid.load.memory.device import LoaderStream
from fastvid.load.order.batches import ClipShape


@dataclass(frozen=True, slots=True)
class FlowSpec:
    """Shape, type and device of a batch's flow tensor."""

    shape: ClipShape | None  # frames per clip, height and width in pixels; None if the plan of each batch decides them
    stack: int
    layout: Layout
    dtype: torch.dtype
    stream: LoaderStream
    channels_last: bool = False


class FlowSink(HostPlanes):
    """Collects flow pictures as decoded; they are copied to the device and converted there."""

    def __init__(self, spec: FlowSpec, clips: Sequence[BatchRow | None], shape: ClipShape | None) -> None:
        super().__init__(clips, spec.stream)
        self._spec, self._shape = spec, one_shape(clips, shape or spec.shape)

    def finish(self) -> Tensor:
        """See `fastvid.load.batch.sinks.Sink`."""
        spec, (frames, *size) = self._spec, self._shape
        shape = (len(self._clips), 2 * spec.stack, *self._shape)
        flow = empty_batch(shape, spec.layout, spec.dtype, spec.stream.device, channels_last=spec.channels_last).zero_()
        moved = spec.stream.upload(self._take())
        for row, (clip, good) in enumerate(zip(self._clips, self._good, strict=True)):
            if clip is None or not good:
                continue
            # Luma precedes chroma, which carries no flow.
            box, start = clip.request.box, self._spans[row][0]
            count = len(clip.request.frames)
            luma = moved[start : start + count * box.height * box.width].view(count, box.height, box.width)
            value = to_flow(luma, clip.info, clip.request)
            # [T * L, 2, H, W] to channels x1 y1 x2 y2 ... of each frame.
            value = value.view(frames, 2 * spec.stack, *size)
            flow[row] = value.transpose(0, 1) if spec.layout == "BCTHW" else value
        return flow


def to_flow(luma: Tensor, info: StreamInfo, request: ClipRequest) -> Tensor:
    """Convert pictures of x above y to flow in pixels of the output picture.

    `luma`: uint8 [N, h', w], cropped by `flow_request`. Returns float32 [N, 2, H, W]: x and y, in pixels per frame.
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
