"""Positions to clips: all that is decided about a batch before a byte of it is read.

Pure functions of the dataset, the order, the sampler and the crop, so any thread, process or rank may make any batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fastvid.decode.backends import Backend
from fastvid.decode.request import ClipRequest
from fastvid.errors import FastvidError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.packets import StreamInfo
from fastvid.format.shard import Shard
from fastvid.load.augment import Spatial
from fastvid.load.batches import MASKED, Batches, Share
from fastvid.load.draws import Draws
from fastvid.load.order import Order
from fastvid.load.sampling import Sampler


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """One row of a batch, decided.

    Attributes:
        row: Row in the batch.
        key: The sample's key.
        shard: Where the sample lies.
        shard_row: Its row there.
        info: Its stream.
        request: What is wanted of it.
    """

    row: int
    key: str
    shard: Shard
    shard_row: int
    info: StreamInfo
    request: ClipRequest


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One rank's part of a batch, decided.

    Attributes:
        share: Positions of the rows.
        samples: Number of the sample in each row, MASKED where there is none.
        keys: Key of each row's sample, empty where there is none.
        clips: Each row's clip, or None: masked, or not planned because of an error.
        errors: What kept a row from being planned, by row.
    """

    share: Share
    samples: list[int]
    keys: list[str]
    clips: list[Clip | None]
    errors: dict[int, Exception]


@dataclass(frozen=True)
class Planner:
    """Makes the plans of an epoch.

    Attributes:
        dataset: The samples.
        sampler: Which frames.
        spatial: Which crop and flip.
        order: Which samples when.
        backend: What will decode them; a codec that it does not know is refused here.
    """

    dataset: Dataset
    sampler: Sampler
    spatial: Spatial
    order: Order
    backend: Backend

    def plans(self, batches: Batches, position: int) -> Iterator[Plan]:
        """The plans of all batches from `position` to the end of the epoch, each made when it is asked for."""
        for number in range(batches.count(position)):
            yield self.plan(batches.share(position + number * batches.size))

    def plan(self, share: Share) -> Plan:
        """The plan of one rank's part of a batch."""
        present = share.positions != MASKED
        samples = np.full(len(share.positions), MASKED, dtype=np.int64)
        samples[present] = self.order.ids(share.positions[present])
        shards, rows = self.dataset.locate(samples[present])
        plan = Plan(share, samples.tolist(), [""] * len(samples), [None] * len(samples), {})
        for row, shard, shard_row in zip(np.flatnonzero(present).tolist(), shards.tolist(), rows.tolist(), strict=True):
            sample = plan.samples[row]
            plan.keys[row] = self.dataset.key(sample)
            try:
                plan.clips[row] = self._clip(row, sample, plan.keys[row], shard, shard_row, int(share.positions[row]))
            except Exception as error:  # noqa: BLE001 - belongs to this clip; the consumer decides
                place(error, self.dataset.generation.shards[shard].name, plan.keys[row])
                plan.errors[row] = error
            # Lets decode threads have the interpreter between clips; unasked it would change hands every 5 ms only.
            time.sleep(0)
        return plan

    def _clip(self, row: int, sample: int, key: str, shard_index: int, shard_row: int, position: int) -> Clip:
        shard = self.dataset.shard(shard_index)
        info = shard.info(shard_row)
        if info.codec not in self.backend.codecs:
            known = ", ".join(sorted(codec.label for codec in self.backend.codecs))
            raise UsageError(
                f"decoder {self.backend.name!r} does not decode {info.codec.label}", hint=f"it decodes {known}"
            )
        draws = Draws(self.order.seed, self.order.epoch, position)
        view = self.spatial.draw(info.height, info.width, draws)
        frames = self.sampler.draw(info.num_frames, draws)
        return Clip(row, key, shard, shard_row, info, ClipRequest(sample, frames, view.box, view.size, view.flip))


def place(error: Exception, shard: str, key: str) -> None:
    """Tells an error which clip it is about."""
    if isinstance(error, FastvidError):
        error.at(shard=shard, key=key)
    else:
        error.add_note(f"while loading {key} of {shard}")
