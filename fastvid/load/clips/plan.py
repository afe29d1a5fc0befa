"""Turns positions of an epoch into batch plans: samples, shards and clips, before anything is read.

Plans are pure functions of the dataset, order, sampler and crop, so any thread, process or rank can compute any batch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, cast

import numpy as np

from fastvid.errors import FastvidError
from fastvid.format.dataset import Dataset
from fastvid.format.shard import Shard
from fastvid.load.clips.clip import BatchRow, as_clips
from fastvid.load.clips.joint import join_neighbours
from fastvid.load.clips.planner import ClipPlanner
from fastvid.load.clips.sample_annotations import SampleAnnotations
from fastvid.load.clips.sound import LongestSound
from fastvid.load.order.batches import MASKED, ClipShape, EpochBatches, Share
from fastvid.load.order.epoch import EpochOrder
from fastvid.load.order.every_frame import EveryFrame
from fastvid.load.order.mixture import Mixture, parts_of
from fastvid.load.order.sizes import ClipSizes
from fastvid.runtime.arrays import IntArray

_ROWS_AHEAD: Final = 256
"""Rows whose samples are looked up in one call."""

MOST_FETCHERS: Final = 32
"""At 20 ms a request, 32 threads fetch 1,600 clips a second, more than 16 cores decode; 64 add context switches."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """One rank's share of a batch."""

    share: Share  # positions of the rows
    samples: list[int]  # number of the sample in each row; MASKED for an empty row
    keys: list[str]  # key of each row's sample; "" for an empty row
    # the clip of each canvas row, see `ClipPlanner.decide`; a `BatchRow` if it is not planned yet; None if it is
    # masked or planning it failed.
    clips: list[BatchRow | None]
    errors: dict[int, Exception]  # planning errors, by canvas row
    # exact frames per second of each row's video as numerator and denominator, int64 [B, 2]; -1 for an empty row,
    # and if its shard cannot be read.
    rates: IntArray
    sizes: IntArray  # height and width of each row's video in pixels, int64 [B, 2]; -1 likewise
    sound_samples: int = 0  # samples of the longest sound of the global batch; 0 without sound


@dataclass(frozen=True)
class BatchPlanner:
    """Computes the batch plans of an epoch."""

    dataset: Dataset | Mixture  # the samples
    order: EpochOrder  # order of the samples
    clips: ClipPlanner  # plans frames, crop and flip
    join: bool = False
    # whether to plan clips here, which takes most of the planning time; otherwise the lane that decodes a row
    # plans its clip.
    decide: bool = True
    # the sizes of all samples' clips, if they differ: each share then gets the shape of the largest clip of its
    # global batch, which ranks cannot know from their own rows.
    clip_sizes: ClipSizes | None = None

    def plans(self, batches: EpochBatches, position: int) -> Iterator[BatchPlan]:
        """Yield the plans of all batches from `position` to the end of the epoch, computed lazily."""
        shares = batches.shares(position)
        # Look up many rows per call: numpy's overhead per call hardly depends on their number.
        for first in shares:
            some = [first, *itertools.islice(shares, _ROWS_AHEAD // len(first.positions))]
            samples = self._samples(np.concatenate([share.positions for share in some]))
            ends = np.cumsum([len(share.positions) for share in some])
            for share, part in zip(some, np.split(samples, ends[:-1]), strict=True):
                yield self._plan(share, part)

    def plan(self, share: Share) -> BatchPlan:
        """Return the plan of one rank's share of a batch."""
        return self._plan(share, self._samples(share.positions))

    def _samples(self, positions: IntArray) -> IntArray:
        present = positions != MASKED
        samples = np.full(len(positions), MASKED, dtype=np.int64)
        samples[present] = self.order.ids(positions[present])
        return samples

    def _shaped(self, share: Share) -> Share:
        if share.shape is not None or self.clip_sizes is None:
            return share
        samples = self.order.ids(np.arange(share.start, share.stop))
        sizes = self.clip_sizes
        shape = tuple(int(side[samples].max()) for side in (sizes.frames, sizes.heights, sizes.widths))
        return replace(share, shape=cast(ClipShape, shape))

    def _plan(self, share: Share, samples: IntArray) -> BatchPlan:
        present = samples != MASKED
        wanted = samples[present]
        shards, rows = self.dataset.locate(wanted)
        self._open(np.unique(shards).tolist())
        frames = (
            self.dataset.place(wanted)[1].tolist() if isinstance(self.dataset, EveryFrame) else [None] * len(wanted)
        )
        views = self.clips.views.num_views
        empty: list[BatchRow | None] = [None] * (len(samples) * len(self.clips.streams) * views)
        facts = np.full((2, len(samples), 2), -1, dtype=np.int64)
        plan = BatchPlan(self._shaped(share), samples.tolist(), [""] * len(samples), empty, {}, *facts)
        positions, opened = share.positions.tolist(), dict[int, Shard]()
        for number, key, shard, shard_row, anchor in zip(
            np.flatnonzero(present).tolist(),
            self.dataset.keys_of(wanted),
            shards.tolist(),
            rows.tolist(),
            frames,
            strict=True,
        ):
            sample = plan.samples[number]
            plan.keys[number] = key
            try:
                if shard not in opened:
                    opened[shard] = self.dataset.shard(shard)
                place = (number, key, opened[shard], shard_row, sample, positions[number])
                annotations = SampleAnnotations(self.dataset, sample)
                row = BatchRow(*place, annotations=annotations, shape=share.shape, anchor=anchor)
                infos = self.clips.infos(row)
                plan.rates[number], plan.sizes[number] = self.clips.facts(infos)
                if not self.decide:
                    plan.clips[number] = row
                    continue
                for clip in self.clips.decide(row, len(samples), infos):
                    plan.clips[clip.row] = clip
            except Exception as error:  # noqa: BLE001 - belongs to this clip; the consumer handles it
                add_location(error, self.dataset.shard_name(shard), key)
                plan.errors[number * views] = error
            # Yield the GIL to decode threads between clips; otherwise it switches only every 5 ms.
            time.sleep(0)
        if self.join:
            plan.clips[:] = join_neighbours(as_clips(plan.clips))
        if self.clips.audio is None:
            return plan
        return replace(plan, sound_samples=self._sounds.samples(share, plan.clips, self.clips))

    @cached_property
    def _sounds(self) -> LongestSound:
        return LongestSound(self.dataset, self.order)

    def _open(self, shards: list[int]) -> None:
        """Open shards in parallel if each costs a request; errors are raised again when the shard is used."""
        at_once = prefetch_threads(self.dataset)
        closed = [index for index in shards if not self.dataset.is_open(index)] if at_once else []
        if len(closed) > 1:
            with ThreadPoolExecutor(min(at_once, len(closed)), thread_name_prefix="fastvid-open") as pool:
                for opened in [pool.submit(self.dataset.shard, index) for index in closed]:
                    opened.exception()


def prefetch_threads(dataset: Dataset | Mixture, asked: int | None = None) -> int:
    """Return how many threads should prefetch from a dataset's storage; 0 if reads are fast enough without."""
    if asked is not None:
        return asked
    sets = parts_of(dataset)
    at_once = max(part.storage.concurrency for part in sets)
    return 0 if at_once == 1 else min(at_once, MOST_FETCHERS)


def add_location(error: Exception, shard: str, key: str) -> None:
    """Add the clip's shard and key to an error."""
    if isinstance(error, FastvidError):
        error.at_sample(shard, key)
    else:
        error.add_note(f"while loading {key} of {shard}")
