"""Clips of one video that are read and decoded together: views of an evaluation, repeats of an augmentation.

Each packet that any of them needs is fed once. The decoder writes planes of all wanted frames in the box around all
crops; each clip is then cut out of them, in the thread that decoded, into the row it would have had by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fastvid.decode.recut import check_matrix
from fastvid.decode.request import Box, ClipRequest
from fastvid.load.clips.clip import Clip


def merged(parts: Sequence[Clip], row: int, rows: Sequence[int]) -> Clip:
    """The clip to decode for several of one video.

    Args:
        parts: The clips, each with the row that it has in the finisher below.
        row: Row of the merged clip.
        rows: Rows of the batch that fail with it.

    Raises:
        DecodeError: The stream's frames cannot be converted.
    """
    first = parts[0]
    check_matrix(first.info)
    boxes = [part.request.box for part in parts]
    y, x = min(box.y for box in boxes), min(box.x for box in boxes)
    height = max(box.y + box.height for box in boxes) - y
    width = max(box.x + box.width for box in boxes) - x
    frames = np.unique(np.concatenate([part.request.frames for part in parts]))
    request = ClipRequest(first.request.sample, frames, Box(y, x, height, width), (height, width))
    return replace(first, row=row, request=request, parts=tuple(parts), rows=tuple(rows))


def join_neighbours(clips: Sequence[Clip | None]) -> list[Clip | None]:
    """The same clips, where neighbours that show one sample are to be read together."""
    joined = list(clips)
    start = 0
    while start < len(clips):
        stop = start + 1
        first = clips[start]
        while first is not None and stop < len(clips):
            other = clips[stop]
            if other is None or other.sample != first.sample:
                break
            stop += 1
        parts = [clip for clip in clips[start:stop] if clip is not None]
        if len(parts) > 1:
            whole = merged(parts, start, range(start, stop))
            for clip in parts:
                joined[clip.row] = replace(clip, read=whole)
        start = stop
    return joined
