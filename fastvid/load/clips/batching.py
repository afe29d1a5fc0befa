"""The batches of a loader's epochs: of one size, or planned from the sizes of all clips."""

from __future__ import annotations

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.clips.clip_sizes import clip_sizes
from fastvid.load.clips.rules import ClipRules
from fastvid.load.clips.sampling import with_length
from fastvid.load.order.batches import Batches, Batching, EpochBatches, Last
from fastvid.load.order.buckets import Buckets
from fastvid.load.order.epoch import EpochOrders
from fastvid.load.order.mixture import Mixture
from fastvid.load.order.packed import Packed
from fastvid.runtime.checks import check_integer
from fastvid.runtime.world import World


class EpochPlans:
    """The batches of any epoch of a loader."""

    def __init__(self, orders: EpochOrders, batching: Batching) -> None:
        self.orders, self.batching = orders, batching
        self._epochs: dict[tuple[int, int], EpochBatches] = {}

    @classmethod
    def of(
        cls,
        orders: EpochOrders,
        dataset: Dataset | Mixture,
        rules: ClipRules,
        world: World,
        last: Last,
        *,
        size: int | None,
        group: int,
        planned: Buckets | Packed | None,
    ) -> EpochPlans:
        """Return batches of one size, or planned from the sizes of all clips.

        `dataset`: the samples.
        """
        if planned is None:
            size = check_integer("global_batch_size", size, 1)
            return cls(orders, Batches(orders.num_samples, size, last, world, group, orders.clips_per_video))
        if size is not None or group != 1:
            raise UsageError(
                f"global_batch_size is {size} and group_size {group} with batches={planned}",
                hint="leave out both: batches= decides the size of each batch",
            )
        if orders.clips_per_video > 1:
            raise UsageError(
                f"clips_per_video is {orders.clips_per_video} with batches={planned}",
                hint="use global_batch_size: a planned batch may divide the clips of a video",
            )
        for sampler, spatial in rules.pairs:
            for shape in planned.shapes:
                with_length(sampler, shape[0])
                spatial.of_size(shape[1:])
        return cls(orders, planned.plan(clip_sizes(dataset, rules), world, last, dataset.key))

    def __repr__(self) -> str:
        batching = self.batching
        return f"global_batch_size={batching.size}" if isinstance(batching, Batches) else f"batches={batching}"

    @property
    def of_one_size(self) -> Batches:
        """The batches of every epoch."""
        if not isinstance(self.batching, Batches):
            raise UsageError(
                "batches of varying shape have no global_batch_size",
                hint="use start and stop of each batch, and len() of the loader for the steps of an epoch",
            )
        return self.batching

    def steps(self, seed: int, epoch: int, position: int) -> int:
        """Return the number of batches from a position to the end of the epoch, or at its end those of the next."""
        return self.epoch(seed, epoch).count(position) or self.epoch(seed, epoch + 1).count(0)

    def epoch(self, seed: int, epoch: int) -> EpochBatches:
        """Return the batches of an epoch. Those of the last two epochs are kept: both are asked for between them."""
        found = self._epochs.get((seed, epoch))
        if found is None:
            found = self.batching.epoch(self.orders.order(seed, epoch))
            self._epochs = dict([*self._epochs.items(), ((seed, epoch), found)][-2:])
        return found
