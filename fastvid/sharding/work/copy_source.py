"""Takes a source over without encoding it: the file as it is, or its packets in an MP4.

What is written is proved like the tars of other tools (`fastvid.media.prove`): every frame must be the one that a
player shows for the source, and a stream whose parts do not decode alone is marked to be decoded whole. What the index
needs and an MP4's tables do not say stands in the sample's JSON, so that the tar alone gives the index again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fastvid.errors import FormatError, SourceError
from fastvid.format.indexed import proved_info
from fastvid.format.mp4.demux import index_mp4, read_track
from fastvid.format.schema import StreamFlag
from fastvid.media.limits import Limits
from fastvid.media.playback import ENCODE_HINT, Playback, play
from fastvid.media.promises import Promised, broken_tables
from fastvid.media.prove import IndexedVideo, index_video, number_packets, why_decode_whole
from fastvid.media.reasons import Reason
from fastvid.media.remux import Remuxer
from fastvid.media.source_file import OpenSource

# Times come from clocks that round.
_ROUNDING: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Copied:
    """A sample that was taken over."""

    video: bytes
    start: float | None  # seconds into the source at which it begins; None for the whole source
    found: IndexedVideo
    conforms: bool
    remuxed: bool

    @property
    def notes(self) -> tuple[str, ...]:
        """Why it does not conform."""
        return self.found.notes or (() if self.conforms else ("tables",))

    def meta(self) -> dict[str, Any]:
        """What the sample's JSON says of it."""
        info = self.found.info
        return {
            "num_frames": info.num_frames,
            "fps": str(info.fps),
            "width": info.width,
            "height": info.height,
            "pix_fmt": self.found.pix_fmt,
            "conforms": self.conforms,
            "differs": list(self.notes),
            "proved": _proved(self.found),
        }


class CopiedSource:
    """A source that decodes without an error, to be taken over in parts."""

    def __init__(self, source: OpenSource, limits: Limits) -> None:
        if source.size > limits.output_bytes:
            raise SourceError(f"a video of {source.size} bytes, {limits.output_bytes} at most", reason=Reason.TOO_LONG)
        self._data, self._container, self._limits = _contents(source), source.container, limits
        self._remuxer: tuple[Playback, Remuxer] | None = None

    def cut(
        self, start: float | None, end: float | None, *, max_seconds: float, frames: tuple[int, int] | None = None
    ) -> list[Copied]:
        """Take over the source, or a clip of it, in parts that keep a bound.

        `start`: seconds where the clip begins; None for the beginning. `end`: seconds where the clip ends; None
        for the end. `frames`: the first frame of the clip and their number, instead of seconds.
        """
        data, limits = self._data, self._limits
        if start is None and end is None and frames is None and self._container == "mov":
            found = _as_it_is(data, limits) if _seems_short(data, max_seconds) else None
            if found is not None and found.info.num_frames / found.info.fps <= max_seconds:
                return [Copied(data, None, found, _conforms(data, found), remuxed=False)]
        played, muxer = self._remuxer = self._remuxer or self._play()
        seconds = muxer.seconds
        made = []
        if frames is not None:
            if sum(frames) > len(seconds):
                raise SourceError(
                    f"frames {frames[0]} to {sum(frames)} are not in a video of {len(seconds)}",
                    reason=Reason.OUT_OF_RANGE,
                )
            parts = iter([(frames[0], sum(frames))])
        else:
            parts = _ranges(seconds, 1 / float(played.rate), start, end, max_seconds)
        for first, last in parts:
            video = muxer.part(first, last)
            found = index_video(video, limits)
            if list(found.digests) != played.digests[first:last] or not _agrees(video, found):
                raise SourceError(
                    "its frames decode differently after remuxing to MP4", reason=Reason.NO_INDEX, hint=ENCODE_HINT
                )
            begins = None if last - first == len(seconds) else float(seconds[first])
            made.append(Copied(video, begins, found, _conforms(video, found), remuxed=True))
        return made

    def _play(self) -> tuple[Playback, Remuxer]:
        played = play(self._data, self._container, self._limits, unpack=True)
        numbered = number_packets(played)
        whole = bool(numbered.whole or why_decode_whole(played, numbered))
        return played, Remuxer(self._data, self._container, played, numbered, whole=whole)


def _ranges(
    seconds: npt.NDArray[np.float64], step: float, start: float | None, end: float | None, max_seconds: float
) -> Iterator[tuple[int, int]]:
    """The frames of each part, half-open; the fewest parts of about equal numbers of frames that keep the bound."""
    # A frame belongs to a clip when it is shown at most half a step before it begins.
    first = 0 if start is None else int(np.searchsorted(seconds, start - step / 2))
    last = len(seconds) if end is None else int(np.searchsorted(seconds, end - step / 2))
    if first >= last:
        raise SourceError(
            f"the clip {start} s to {end} s is not in {seconds[-1] + step:.2f} s of video", reason=Reason.OUT_OF_RANGE
        )
    count = max(1, ceil((seconds[last - 1] + step - seconds[first]) / max_seconds - _ROUNDING))
    yield from pairwise(first + (last - first) * number // count for number in range(count + 1))


def _seems_short(data: bytes, max_seconds: float) -> bool:
    """Whether the header of an MP4 gives it about this length, or none; to prove a video by decoding is expensive."""
    try:
        info, _ = index_mp4(data, whole=False)
    except FormatError:
        return True
    return info.num_frames / info.fps <= max_seconds + 1.0


def _as_it_is(data: bytes, limits: Limits) -> IndexedVideo | None:
    """The index of a source that can go into a shard unchanged."""
    try:
        found = index_video(data, limits)
    except SourceError as error:
        if error.reason == Reason.NO_INDEX:
            return None
        raise
    return found if _agrees(data, found) else None


def _agrees(video: bytes, found: IndexedVideo) -> bool:
    """Whether the index that a shard computes from an MP4 and its sample's JSON is the one that was proved."""
    try:
        info, records = index_mp4(video, whole=bool(found.info.flags & StreamFlag.WHOLE))
        info = proved_info(replace(info, fps=found.info.fps), _proved(found))
    except FormatError:
        return False
    return info == found.info and np.array_equal(records, found.records)


def _proved(found: IndexedVideo) -> dict[str, Any]:
    info = found.info
    return {
        "width": info.width,
        "height": info.height,
        "color_range": info.range.name.lower(),
        "color_matrix": info.matrix.name.lower(),
        "whole": bool(info.flags & StreamFlag.WHOLE),
    }


def _conforms(video: bytes, found: IndexedVideo) -> bool:
    return not found.notes and not list(broken_tables(Promised.of(read_track(memoryview(video)), found.info)))


def _contents(source: OpenSource) -> bytes:
    data, position = bytearray(source.size), 0
    view = memoryview(data)
    while position < source.size:
        got = os.preadv(source.descriptor, [view[position:]], position)
        if not got:
            break
        position += got
    return bytes(data[:position])
