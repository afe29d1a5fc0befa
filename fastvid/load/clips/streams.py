"""Streams of a clip: the pictures of one camera or several, and the optical flow that belongs to its frames.

All streams of a sample show the same moments: frame f of one camera is frame f of another. A clip's flow covers the
same frames and the same crop as its pictures. Each frame has a stack of L flow pictures, half before and half after it,
as in the temporal network of two-stream models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastvid.decode.request import Box, ClipRequest
from fastvid.errors import FormatError, UsageError
from fastvid.format.depth import DepthScale
from fastvid.format.packets import StreamInfo
from fastvid.format.schema import FLOW, PICTURES
from fastvid.load.clips.crop_size import Size
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.checks import check_least


def check_streams(streams: Sequence[str] | str | None, stack: int, present: Sequence[str]) -> tuple[str, ...]:
    """Return the stream names that a user requested; by default all but flow."""
    if streams is None:
        streams = [name for name in present if name != FLOW] or present[:1]
    names = (streams,) if isinstance(streams, str) else tuple(streams)
    missing = [name for name in names if name not in present]
    if missing or not names or len(set(names)) != len(names):
        raise UsageError(
            f"streams are {names!r}, the dataset has {', '.join(present)}",
            hint="run `fastvid shard --streams rgb,flow` to make a dataset with optical flow"
            if FLOW in missing
            else None,
        )
    check_least(1, flow_stack=stack)
    return names


def depth_of(dataset: Any, streams: Sequence[str]) -> dict[str, DepthScale]:
    """Return the streams that show depth, and how their levels become distances."""
    parts = [part.depth for part in getattr(dataset, "datasets", [dataset])]
    found = {stream: parts[0][stream] for stream in streams if stream in parts[0]}
    for part in parts[1:]:
        if {stream: part[stream] for stream in streams if stream in part} != found:
            raise UsageError(
                f"datasets of a mixture store depth differently: {', '.join(found) or 'one of them has none'}",
                hint="load them by themselves, or without the streams of depth",
            )
    return found


def picture_size(info: StreamInfo, stream: str) -> Size:
    """Return the height and width of a stream's pictures in pixels: flow has one half above the other."""
    return (info.height // 2 if stream == FLOW else info.height), info.width


def streams_text(names: Sequence[str], stack: int) -> str:
    """Return the streams of a loader as text, for the fingerprint of its state."""
    return ",".join(names) + (f" flow_stack={stack}" if FLOW in names else "")


def stack_frames(frames: IntArray, num_frames: int, stack: int) -> IntArray:
    """Return the flow indices of each frame of a clip, int64 [T * L], those of a frame together.

    Flow i is the motion from frame i to i + 1. Frame f has flows f - L // 2 to f - L // 2 + L - 1: for an even L as
    many before the frame as after it, for L = 1 the flow to the next frame. Beyond the ends of the video the first and
    the last flow are repeated.

    `frames`: int64 [T]. `num_frames`: frames of the video.
    """
    first = frames[:, None] - stack // 2 + np.arange(stack, dtype=np.int64)
    flows: IntArray = np.clip(first, 0, num_frames - 1).reshape(-1)
    return flows


def flow_request(
    sample: int, frames: IntArray, box: Box, size: tuple[int, int], info: StreamInfo, *, flip: bool
) -> ClipRequest:
    """Return the request for both halves (x above y) of the stacked flow picture, as a single tall crop.

    `sample`: row of the sample. `frames`: flows, int64 [T * L].
    """
    half = info.height // 2
    tall = Box(box.y, box.x, half + box.height, box.width)
    return ClipRequest(sample, frames, tall, size, flip, FLOW)


def check_lengths(infos: Mapping[str, StreamInfo]) -> None:
    """Check that the streams of a sample belong together."""
    flow = infos.get(FLOW)
    if flow is not None:
        check_flow(flow, infos.get(PICTURES))
    if len(infos) == 1:
        return
    cameras = {name: info for name, info in infos.items() if name != FLOW}
    if len({(info.num_frames, info.fps) for info in cameras.values()}) > 1:
        found = ", ".join(f"{name} {info.num_frames} at {info.fps}/s" for name, info in cameras.items())
        raise FormatError(
            f"the cameras of a sample have different numbers of frames or rates: {found}",
            hint="open a loader of one of them, or index the dataset again",
        )


def check_flow(info: StreamInfo, picture: StreamInfo | None) -> None:
    """Check that a stream is optical flow and matches the picture stream."""
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
