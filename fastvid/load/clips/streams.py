"""Streams of a clip, and the optical flow that belongs to its frames, chosen before decoding.

A clip's flow covers the same frames and the same crop as its pictures. Each frame has a stack of L flow pictures, half
before and half after it, as in the temporal network of two-stream models.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastvid.decode.request import Box, ClipRequest
from fastvid.errors import FormatError, UsageError
from fastvid.format.packets import StreamInfo
from fastvid.load.clips.crop_size import Size
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.checks import check_least


def check_streams(streams: Sequence[str], stack: int, present: Sequence[str]) -> tuple[str, ...]:
    """Return the stream names that a user requested.

    Raises:
        UsageError: If a stream does not exist or is listed twice.
    """
    names = (streams,) if isinstance(streams, str) else tuple(streams)
    missing = [name for name in names if name not in present]
    if missing or not names or len(set(names)) != len(names):
        raise UsageError(
            f"streams are {names!r}, the dataset has {', '.join(present)}",
            hint="run `fastvid shard --streams rgb,flow` to make a dataset with optical flow",
        )
    check_least(1, flow_stack=stack)
    return names


def picture_size(info: StreamInfo, stream: str) -> Size:
    """Return the height and width of a stream's pictures in pixels: flow has one half above the other."""
    return (info.height // 2 if stream == "flow" else info.height), info.width


def streams_text(names: Sequence[str], stack: int) -> str:
    """Return the streams of a loader as text, for the fingerprint of its state."""
    return ",".join(names) + (f" flow_stack={stack}" if "flow" in names else "")


def stack_frames(frames: IntArray, num_frames: int, stack: int) -> IntArray:
    """Return the flow indices of each frame of a clip, int64 [T * L], those of a frame together.

    Flow i is the motion from frame i to i + 1. Frame f has flows f - L // 2 to f - L // 2 + L - 1: for an even L as
    many before the frame as after it, for L = 1 the flow to the next frame. Beyond the ends of the video the first and
    the last flow are repeated.

    Args:
        frames: int64 [T].
        num_frames: Frames of the video.
        stack: L >= 1.
    """
    first = frames[:, None] - stack // 2 + np.arange(stack, dtype=np.int64)
    flows: IntArray = np.clip(first, 0, num_frames - 1).reshape(-1)
    return flows


def flow_request(
    sample: int, frames: IntArray, box: Box, size: tuple[int, int], info: StreamInfo, *, flip: bool
) -> ClipRequest:
    """Return the request for both halves (x above y) of the stacked flow picture, as a single tall crop.

    Args:
        sample: Row of the sample.
        frames: Flows, int64 [T * L].
        box: Crop of the picture.
        size: Output height and width of the picture.
        info: The flow stream.
        flip: Whether to mirror left and right.
    """
    half = info.height // 2
    tall = Box(box.y, box.x, half + box.height, box.width)
    return ClipRequest(sample, frames, tall, size, flip, "flow")


def check_flow(info: StreamInfo, picture: StreamInfo | None) -> None:
    """Check that a stream is optical flow and matches the picture stream.

    Raises:
        FormatError: If it does not.
    """
    if not info.flow_bound or info.height % 4:
        raise FormatError(
            f"invalid flow stream: {info.width}x{info.height} pixels with bound {info.flow_bound}",
            hint="rebuild the index with `fastvid index`",
        )
    if picture is not None:
        wanted = (picture.width, 2 * picture.height, picture.num_frames)
        if (info.width, info.height, info.num_frames) != wanted:
            raise FormatError(
                f"flow has {info.width}x{info.height} pixels and {info.num_frames} frames, its picture needs"
                f" {wanted[0]}x{wanted[1]} and {wanted[2]}"
            )
