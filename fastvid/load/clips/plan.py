"""Positions to rows, and rows to clips: all that is known about a batch before a byte of it is read.

Pure functions of the dataset, the order, the sampler and the crop, so any thread, process or rank may make any batch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np

from fastvid.errors import FastvidError
from fastvid.format.dataset import Dataset
from fastvid.load.clips.clip import Row, decided
from fastvid.load.clips.joint import join_neighbours
from fastvid.load.clips.planner import ClipPlanner
from fastvid.load.order.batches import MASKED, Batches, Share
from fastvid.load.order.epoch import EpochOrder
from fastvid.load.order.mixture import Mixture
from fastvid.runtime.arrays import IntArray

_ROWS_AHEAD: Final = 256
"""Rows whose samples are found at once."""

MOST_FETCHERS: Final = 32
"""At 20 ms a request, 32 threads make 1,600 clips a second, more than 16 cores decode; 64 only cost switches."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One rank's part of a batch.

    Attributes:
        share: Positions of the rows.
        samples: Number of the sample in each row, MASKED where there is none.
        keys: Key of each row's sample, empty where there is none.
        clips: For each row of a canvas its clip, see `ClipPlanner.decide`; a `Row` where it is not decided yet; None:
            masked, or not decided because of an error.
        errors: What kept a row from being decided, by row of the canvas.
    """

    share: Share
    samples: list[int]
    keys: list[str]
    clips: list[Row | None]
    errors: dict[int, Exception]


@dataclass(frozen=True)
class Planner:
    """Makes the plans of an epoch.

    Attributes:
        dataset: The samples.
        order: Which samples when.
        clips: Which frames, crop and flip.
        join: Decode neighbours that show one sample, as views do, together.
        decide: Decide clips, which takes most of the time of planning; otherwise whoever decodes a row does.
    """

    dataset: Dataset | Mixture
    order: EpochOrder
    clips: ClipPlanner
    join: bool = False
    decide: bool = True

    def plans(self, batches: Batches, position: int) -> Iterator[Plan]:
        """The plans of all batches from `position` to the end of the epoch, each made when it is asked for."""
        shares = (batches.share(position + number * batches.size) for number in range(batches.count(position)))
        # What arithmetic on a few numbers costs does not depend on how many they are.
        while some := list(itertools.islice(shares, max(1, _ROWS_AHEAD * batches.world.size // batches.size))):
            samples = self._samples(np.concatenate([share.positions for share in some]))
            ends = np.cumsum([len(share.positions) for share in some])
            for share, part in zip(some, np.split(samples, ends[:-1]), strict=True):
                yield self._plan(share, part)

    def plan(self, share: Share) -> Plan:
        """The plan of one rank's part of a batch."""
        return self._plan(share, self._samples(share.positions))

    def _samples(self, positions: IntArray) -> IntArray:
        present = positions != MASKED
        samples = np.full(len(positions), MASKED, dtype=np.int64)
        samples[present] = self.order.ids(positions[present])
        return samples

    def _plan(self, share: Share, samples: IntArray) -> Plan:
        present = samples != MASKED
        shards, rows = self.dataset.locate(samples[present])
        self._open(np.unique(shards).tolist())
        views = self.clips.views.num_views
        empty: list[Row | None] = [None] * (len(samples) * len(self.clips.streams) * views)
        plan = Plan(share, samples.tolist(), [""] * len(samples), empty, {})
        for number, shard, shard_row in zip(
            np.flatnonzero(present).tolist(), shards.tolist(), rows.tolist(), strict=True
        ):
            sample = plan.samples[number]
            plan.keys[number] = key = self.dataset.key(sample)
            try:
                row = Row(number, key, self.dataset.shard(shard), shard_row, sample, int(share.positions[number]))
                if not self.decide:
                    plan.clips[number] = row
                    continue
                for clip in self.clips.decide(row, len(samples)):
                    plan.clips[clip.row] = clip
            except Exception as error:  # noqa: BLE001 - belongs to this clip; the consumer decides
                place(error, self.dataset.shard_name(shard), key)
                plan.errors[number * views] = error
            # Lets decode threads have the interpreter between clips; unasked it would change hands every 5 ms only.
            time.sleep(0)
        if self.join:
            plan.clips[:] = join_neighbours(decided(plan.clips))
        return plan

    def _open(self, shards: list[int]) -> None:
        """Opens shards side by side where each costs a request; errors come again where the shard is used."""
        at_once = reads_at_once(self.dataset)
        closed = [index for index in shards if not self.dataset.is_open(index)] if at_once else []
        if len(closed) > 1:
            with ThreadPoolExecutor(min(at_once, len(closed)), thread_name_prefix="fastvid-open") as pool:
                for opened in [pool.submit(self.dataset.shard, index) for index in closed]:
                    opened.exception()


def reads_at_once(dataset: Dataset | Mixture, asked: int | None = None) -> int:
    """Threads that should read ahead from a dataset's storage; 0 where a reader may as well wait for each read."""
    if asked is not None:
        return asked
    sets = dataset.datasets if isinstance(dataset, Mixture) else (dataset,)
    at_once = max(part.storage.concurrency for part in sets)
    return 0 if at_once == 1 else min(at_once, MOST_FETCHERS)


def place(error: Exception, shard: str, key: str) -> None:
    """Tells an error which clip it is about."""
    if isinstance(error, FastvidError):
        error.at(shard=shard, key=key)
    else:
        error.add_note(f"while loading {key} of {shard}")
