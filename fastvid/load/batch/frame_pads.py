"""Which frames of a clip around an item are outside the item's video, and therefore show its first or last frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastvid.format.schema import PICTURES
from fastvid.load.clips.timed_sampling import Deltas
from fastvid.load.order.every_frame import EveryFrame
from fastvid.runtime.arrays import BoolArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class FramePads:
    """Computes the masks of a batch."""

    items: EveryFrame
    deltas: Deltas  # where the frames of a clip are
    names: tuple[str, ...]  # entries of the batch that show these frames

    @classmethod
    def of(cls, dataset: object, frames: object, streams: Sequence[str]) -> FramePads | None:
        """Build from a loader's arguments; None if the dataset has no items."""
        if not isinstance(dataset, EveryFrame):
            return None
        assert isinstance(frames, Deltas)
        return cls(dataset, frames, tuple("video" if name == PICTURES else name for name in streams))

    def rows(self, samples: IntArray, valid: BoolArray) -> dict[str, BoolArray]:
        """Return ``NAME_is_pad`` for each entry, bool [B, T]; True in masked rows.

        `samples`: item of each row, int64 [B]. `valid`: which rows are not masked, bool [B].
        """
        of, frames = self.items.place(np.where(valid, samples, 0))
        counts = self.items.samples.num_frames[of]
        rates = self.items.samples.annotations["fps"].take(self.items.samples.rows[of]).to_numpy()
        pads = np.ones((len(samples), self.deltas.num_frames), np.bool_)
        for row in np.flatnonzero(valid).tolist():
            at = frames[row] + self.deltas.offsets(float(rates[row]))
            pads[row] = (at < 0) | (at >= counts[row])
        return {f"{name}_is_pad": pads for name in self.names}
