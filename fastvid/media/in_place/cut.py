"""Cut a part out of a video's index: the packets that its frames need, and nothing of the file changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fastvid.errors import SourceError
from fastvid.format.packets import PacketTable
from fastvid.format.schema import PacketFlag, StreamFlag
from fastvid.media.prove import IndexedVideo
from fastvid.media.reasons import Reason

_HIDDEN = np.uint8(PacketFlag.HIDDEN)


def cut_index(found: IndexedVideo, first: int, count: int) -> IndexedVideo:
    """Return the index of some consecutive frames of a video, numbered from 0.

    Packets before the first frame on which it depends are kept, but show no frame of the part.

    `count`: number of its frames, at least 1.
    """
    total = found.info.num_frames
    if count < 1 or first < 0 or first + count > total:
        raise SourceError(
            f"the part of frames {first} to {first + count - 1} is not in the {total} frames of the video",
            reason=Reason.OUT_OF_RANGE,
        )
    if (first, count) == (0, total):
        return found
    whole = bool(found.info.flags & StreamFlag.WHOLE)
    packets = PacketTable(found.records, whole=whole).plan(range(first, first + count)).packets
    records = found.records[packets].copy()
    frames = records["frame"].astype(np.int64) - first
    outside = (records["frame"] < 0) | (frames < 0) | (frames >= count)
    records["frame"] = np.where(outside, -1, frames)
    records["flags"] |= np.where(outside, _HIDDEN, 0)
    info = replace(found.info, num_frames=count, flags=found.info.flags | StreamFlag.PART)
    seconds = None if found.seconds is None else found.seconds[first : first + count]
    return replace(found, info=info, records=records, seconds=seconds, digests=found.digests[first : first + count])


def frames_between(found: IndexedVideo, start: float | None, end: float | None) -> tuple[int, int]:
    """Return the first frame and the number of frames that are shown from `start` until before `end`, in seconds."""
    times = found.seconds
    if times is None:
        times = np.arange(found.info.num_frames) / float(found.info.fps)
    # Times are fractions of a clock's ticks; a frame at the bound itself belongs to the part that it begins.
    slack = 1e-6
    first = 0 if start is None else int(np.searchsorted(times, start - slack))
    stop = len(times) if end is None else int(np.searchsorted(times, end - slack))
    if stop <= first:
        raise SourceError(
            f"no frame is shown between {start or 0:g} s and {'the end' if end is None else f'{end:g} s'}",
            reason=Reason.OUT_OF_RANGE,
        )
    return first, stop - first
