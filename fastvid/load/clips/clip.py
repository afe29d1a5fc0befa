"""Rows of a batch and their planned clips, before anything is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastvid.audio.window import AudioWindow
from fastvid.decode.request import ClipRequest
from fastvid.format.packets import StreamInfo
from fastvid.format.shard import Shard
from fastvid.load.clips.video_info import NO_ANNOTATIONS
from fastvid.load.order.batches import ClipShape
from fastvid.runtime.arrays import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class BatchRow:
    """A row of a batch whose clip is not planned yet."""

    row: int  # row in the batch; of a planned clip the row of the canvas, see `ClipPlanner.decide`
    key: str
    shard: Shard
    shard_row: int  # row of the sample in the shard
    sample: int
    position: int  # position of the row in the epoch's order
    annotations: Mapping[str, Any] = field(default_factory=lambda: NO_ANNOTATIONS, kw_only=True)
    shape: ClipShape | None = field(default=None, kw_only=True)
    # frame of the video that the row is about; None if it is about the video.
    anchor: int | None = field(default=None, kw_only=True)

    @property
    def failing(self) -> tuple[int, ...]:
        """Rows of the batch that fail if this one does."""
        return (self.row,)


@dataclass(frozen=True, slots=True, eq=False)
class Clip(BatchRow):
    """One planned stream of one row of a batch."""

    info: StreamInfo
    request: ClipRequest  # the frames, crop and flip to decode
    frames: IntArray  # frames that the clip shows, int64 [T]
    parts: tuple[Clip, ...] = ()
    rows: tuple[int, ...] = ()  # rows of the batch that fail if this clip does; empty means only `row`
    read: Clip | None = None
    window: AudioWindow | None = None

    @property
    def clip_shape(self) -> ClipShape:
        """Frames, height and width of the clip."""
        height, width = self.request.size
        return len(self.frames), height, width

    @property
    def failing(self) -> tuple[int, ...]:
        """Rows of the batch that fail if this one does."""
        return self.rows or (self.row,)


def as_clips(rows: Sequence[BatchRow | None]) -> list[Clip | None]:
    """Return the rows as clips; all must be planned."""
    clips = [row for row in rows if row is None or isinstance(row, Clip)]
    assert len(clips) == len(rows)
    return clips


def clips_to_decode(rows: Iterable[BatchRow | None]) -> list[BatchRow]:
    """Return the clips to decode for these rows, each once."""
    return list(dict.fromkeys((row.read if isinstance(row, Clip) else None) or row for row in rows if row is not None))
