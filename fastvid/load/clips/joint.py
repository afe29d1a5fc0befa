"""Clips of one video that are decoded together: evaluation views and repeated augmentation.

Each packet that any of them needs is decoded once. The decoder writes planes of all requested frames in the bounding
box of all crops; the same thread then cuts each clip out of them into that clip's own row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fastvid.decode.recut import can_cut
from fastvid.decode.request import Box
from fastvid.load.clips.clip import Clip


def join_neighbours(clips: Sequence[Clip | None]) -> list[Clip | None]:
    """Return the clips, with neighbours that show the same stream of the same sample set to be decoded together."""
    joined = list(clips)
    for _, group in itertools.groupby(clips, lambda clip: clip and (clip.sample, clip.request.stream)):
        parts = [clip for clip in group if clip is not None]
        if len(parts) > 1 and can_cut(parts[0].info) and not parts[0].request.levels:
            whole = _merged(parts)
            for clip in parts:
                joined[clip.row] = replace(clip, read=whole)
    return joined


def _merged(parts: Sequence[Clip]) -> Clip:
    """Return the joint clip to decode for several clips of one stream of a video."""
    first = parts[0]
    boxes = [part.request.box for part in parts]
    y, x = min(box.y for box in boxes), min(box.x for box in boxes)
    height = max(box.y + box.height for box in boxes) - y
    width = max(box.x + box.width for box in boxes) - x
    frames = np.unique(np.concatenate([part.request.frames for part in parts]))
    request = replace(first.request, frames=frames, box=Box(y, x, height, width), size=(height, width), flip=False)
    return replace(first, request=request, parts=tuple(parts), rows=tuple(part.row for part in parts))
