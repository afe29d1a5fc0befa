"""One clip: the row of a batch that asks for it, and all that is decided about it before a byte of it is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastvid.decode.request import ClipRequest
from fastvid.format.packets import StreamInfo
from fastvid.format.shard import Shard
from fastvid.runtime.arrays import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A row of a batch whose clip is not decided yet.

    Attributes:
        row: Row in the batch; of a decided clip the row of the canvas, see `ClipPlanner.decide`.
        key: The sample's key.
        shard: Where the sample lies.
        shard_row: Its row there.
        sample: Its number in the dataset.
        position: Place of the row in the epoch's order.
    """

    row: int
    key: str
    shard: Shard
    shard_row: int
    sample: int
    position: int

    @property
    def failing(self) -> tuple[int, ...]:
        """Rows of the batch that fail with this one."""
        return (self.row,)


@dataclass(frozen=True, slots=True, eq=False)
class Clip(Row):
    """One stream of one row of a batch, decided.

    Attributes:
        info: Its stream.
        request: What is wanted of it.
        frames: Frames that the clip shows, int64 [T].
        parts: For clips that are decoded together, the clips that are cut out of this one.
        rows: Rows of the batch that fail when this one does; none stands for `row`.
        read: What is decoded for this clip when it is a part of another, None when it is decoded by itself.
    """

    info: StreamInfo
    request: ClipRequest
    frames: IntArray
    parts: tuple[Clip, ...] = ()
    rows: tuple[int, ...] = ()
    read: Clip | None = None

    @property
    def failing(self) -> tuple[int, ...]:
        """Rows of the batch that fail with this one."""
        return self.rows or (self.row,)


def decided(rows: Sequence[Row | None]) -> list[Clip | None]:
    """Rows whose clips are decided, as such."""
    clips = [row for row in rows if row is None or isinstance(row, Clip)]
    assert len(clips) == len(rows)
    return clips


def reads(rows: Iterable[Row | None]) -> list[Row]:
    """What is decoded for these rows, each once."""
    return list(dict.fromkeys((row.read if isinstance(row, Clip) else None) or row for row in rows if row is not None))
