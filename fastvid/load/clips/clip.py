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
    """A row of a batch whose clip is not planned yet.

    Attributes:
        row: Row in the batch; of a planned clip the row of the canvas, see `ClipPlanner.decide`.
        key: The sample's key.
        shard: Shard that contains the sample.
        shard_row: Row of the sample in the shard.
        sample: Number of the sample in the dataset.
        position: Position of the row in the epoch's order.
        annotations: The sample's annotations by column; empty in worker processes.
        shape: Shape that the plan of the batch gives the clip; None if sampler and crop decide it.
        anchor: Frame of the video that the row is about; None if it is about the video.
    """

    row: int
    key: str
    shard: Shard
    shard_row: int
    sample: int
    position: int
    annotations: Mapping[str, Any] = field(default_factory=lambda: NO_ANNOTATIONS, kw_only=True)
    shape: ClipShape | None = field(default=None, kw_only=True)
    anchor: int | None = field(default=None, kw_only=True)

    @property
    def failing(self) -> tuple[int, ...]:
        """Rows of the batch that fail if this one does."""
        return (self.row,)


@dataclass(frozen=True, slots=True, eq=False)
class Clip(BatchRow):
    """One planned stream of one row of a batch.

    Attributes:
        info: The stream.
        request: The frames, crop and flip to decode.
        frames: Frames that the clip shows, int64 [T].
        parts: If this is a joint clip, the clips that are cut out of it.
        rows: Rows of the batch that fail if this clip does; empty means only `row`.
        window: The sound of the clip; None if it was not asked for, and for streams after the first.
        read: The joint clip that is decoded for this one; None if this clip is decoded by itself.
    """

    info: StreamInfo
    request: ClipRequest
    frames: IntArray
    parts: tuple[Clip, ...] = ()
    rows: tuple[int, ...] = ()
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
