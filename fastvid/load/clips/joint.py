"""Clips of one video that are read and decoded together: views of an evaluation, repeats of an augmentation.

Each packet that any of them needs is fed once. The decoder writes planes of all wanted frames in the box around all
crops; each clip is then cut out of them, in the thread that decoded, into the row it would have had by itself.
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
    """The same clips, where neighbours that show one stream of one sample are to be read together."""
    joined = list(clips)
    for _, group in itertools.groupby(clips, lambda clip: clip and (clip.sample, clip.request.stream)):
        parts = [clip for clip in group if clip is not None]
        if len(parts) > 1 and can_cut(parts[0].info):
            whole = _merged(parts)
            for clip in parts:
                joined[clip.row] = replace(clip, read=whole)
    return joined


def _merged(parts: Sequence[Clip]) -> Clip:
    """The clip to decode for several of one stream of a video."""
    first = parts[0]
    boxes = [part.request.box for part in parts]
    y, x = min(box.y for box in boxes), min(box.x for box in boxes)
    height = max(box.y + box.height for box in boxes) - y
    width = max(box.x + box.width for box in boxes) - x
    frames = np.unique(np.concatenate([part.request.frames for part in parts]))
    request = replace(first.request, frames=frames, box=Box(y, x, height, width), size=(height, width), flip=False)
    return replace(first, request=request, parts=tuple(parts), rows=tuple(part.row for part in parts))
