"""The signals of the rows of a batch: around each item, or at the frames that each clip shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.batch.frame_pads import FramePads
from fastvid.load.clips.timed_sampling import Deltas
from fastvid.load.order.every_frame import EveryFrame
from fastvid.load.order.mixture import Mixture
from fastvid.runtime.arrays import BoolArray, IntArray

SignalsAsked = Mapping[str, Deltas | None] | Sequence[str]
"""Signals by name, with the seconds around each item; without any, at the frames that the clip shows."""


@dataclass(frozen=True, slots=True, eq=False)
class SignalRows:
    """Delivers signals."""

    dataset: Dataset  # the samples, or items
    # where the values of each signal are; None for those of the frames that a clip shows.
    wanted: Mapping[str, Deltas | None]
    pads: FramePads | None = None  # the masks of the frames around items; None without items

    @classmethod
    def of(
        cls, dataset: Dataset | Mixture, frames: object, streams: Sequence[str], asked: SignalsAsked, *, views: bool
    ) -> SignalRows | None:
        """Build from a loader's arguments; None without signals and items."""
        wanted = (
            dict(asked) if isinstance(asked, Mapping) else dict.fromkeys([asked] if isinstance(asked, str) else asked)
        )
        pads = FramePads.of(dataset, frames, streams)
        if not wanted and pads is None:
            return None
        if isinstance(dataset, Mixture) or views:
            what = "a mixture" if isinstance(dataset, Mixture) else "views"
            raise UsageError(f"signals were asked for with {what}", hint="use one dataset, and one clip of a sample")
        for name, deltas in wanted.items():
            dataset.signals[name]  # an error if there is none
            if deltas is not None and (not isinstance(dataset, EveryFrame) or deltas.anchor is not None):
                raise UsageError(
                    f"signal {name!r} was asked for at {deltas!r}, but there are no items to count from",
                    hint="load EveryFrame(dataset), or give the names of signals alone: those of the frames shown",
                )
        return cls(dataset, wanted, pads)

    @property
    def text(self) -> str:
        """Everything that determines the values, for the loader's fingerprint."""
        return repr(self.wanted)

    def rows(self, samples: IntArray, valid: BoolArray, shown: IntArray) -> dict[str, npt.NDArray[Any]]:
        """Return the signals, [B, T] or [B, T, A], zero in masked rows; and ``NAME_is_pad``, bool [B, T], for each with
        Deltas, and for the streams of items.

        `samples`: sample or item of each row, int64 [B]. `valid`: which rows are not masked, bool [B]. `shown`:
        frames that each row shows, int64 [B, T]; -1 for none.
        """
        chosen = np.where(valid, samples, 0)
        items = self.dataset if isinstance(self.dataset, EveryFrame) else None
        of, at = (chosen, None) if items is None else items.place(chosen)
        dataset = self.dataset if items is None else items.samples
        rows, counts = dataset.rows[of], dataset.num_frames[of]
        made: dict[str, npt.NDArray[Any]] = {} if self.pads is None else dict(self.pads.rows(samples, valid))
        for name, deltas in self.wanted.items():
            if deltas is None:
                frames, outside = shown, shown < 0
            else:
                assert at is not None
                rates = dataset.annotations["fps"].take(rows).to_numpy()
                offsets = {float(rate): deltas.offsets(float(rate)) for rate in np.unique(rates)}
                frames = at[:, None] + np.stack([offsets[float(rate)] for rate in rates])
                outside = (frames < 0) | (frames >= counts[:, None])
                made[f"{name}_is_pad"] = outside | ~valid[:, None]
            values = dataset.signals.values(name, rows, np.clip(frames, 0, counts[:, None] - 1))
            values = np.ascontiguousarray(values)
            values[~valid] = 0
            if deltas is None:
                values[outside] = 0
            made[name] = values
        return made
