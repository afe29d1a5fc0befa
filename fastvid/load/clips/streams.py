"""Which streams of a sample a clip is made of, and which flow belongs to its frames. Decided before decoding.

A clip's flow covers the same frames and the same crop as its pictures. Each frame has a stack of L flows, half before
and half behind it, as the temporal net of two-stream models takes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastvid.decode.request import Box, ClipRequest
from fastvid.errors import FormatError, UsageError
from fastvid.format.packets import StreamInfo
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.checks import check_least


def check_streams(streams: Sequence[str], stack: int, present: Sequence[str]) -> tuple[str, ...]:
    """The streams a user asked for.

    Raises:
        UsageError: There is no such stream, or one comes twice.
    """
    names = (streams,) if isinstance(streams, str) else tuple(streams)
    missing = [name for name in names if name not in present]
    if missing or not names or len(set(names)) != len(names):
        raise UsageError(
            f"streams are {names!r}, the dataset has {', '.join(present)}",
            hint="`fastvid shard --streams rgb,flow` makes a dataset with optical flow",
        )
    check_least(1, flow_stack=stack)
    return names


def stack_frames(frames: IntArray, num_frames: int, stack: int) -> IntArray:
    """The flows of each frame of a clip, int64 [T * L], those of a frame together.

    Flow i is the motion from frame i to i + 1. Of frame f the flows f - L // 2 to f - L // 2 + L - 1 are taken: for an
    even L as many before the frame as behind it, for L = 1 the flow to the next frame. Beyond the ends of the video
    the first and the last flow are repeated.

    Args:
        frames: int64 [T].
        num_frames: Of the video.
        stack: L >= 1.
    """
    first = frames[:, None] - stack // 2 + np.arange(stack, dtype=np.int64)
    flows: IntArray = np.clip(first, 0, num_frames - 1).reshape(-1)
    return flows


def flow_request(
    sample: int, frames: IntArray, box: Box, size: tuple[int, int], info: StreamInfo, *, flip: bool
) -> ClipRequest:
    """The request that brings both halves of the stacked picture, in one crop from the top of x to the end of y.

    Args:
        sample: Row of the sample.
        frames: Flows, int64 [T * L].
        box: Crop of the picture.
        size: Output height and width of the picture.
        info: The flow stream.
        flip: Mirror left and right.
    """
    half = info.height // 2
    tall = Box(box.y, box.x, half + box.height, box.width)
    return ClipRequest(sample, frames, tall, size, flip, "flow")


def check_flow(info: StreamInfo, picture: StreamInfo | None) -> None:
    """Whether a stream is flow, and that of the picture beside it.

    Raises:
        FormatError: It is not.
    """
    if not info.flow_bound or info.height % 4:
        raise FormatError(
            f"a flow stream of {info.width}x{info.height} with bound {info.flow_bound} cannot be",
            hint="rebuild the index with `fastvid index`",
        )
    if picture is not None:
        wanted = (picture.width, 2 * picture.height, picture.num_frames)
        if (info.width, info.height, info.num_frames) != wanted:
            raise FormatError(
                f"flow has {info.width}x{info.height} pixels and {info.num_frames} frames, its picture needs"
                f" {wanted[0]}x{wanted[1]} and {wanted[2]}"
            )
