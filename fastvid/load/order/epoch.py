"""Combine shuffling, class or dataset shares, and clips per video into the sample order of each epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.order.blocks import BLOCKS_VERSION, BlockOrder, BlockShuffle
from fastvid.load.order.mixture import Mixture
from fastvid.load.order.permutation import ORDER_VERSION, Order
from fastvid.load.order.shares import GROUPED_VERSION, GroupedOrder, Members, apportion
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.checks import check_least

_SMALL_SET: Final = 2**32


class EpochOrder(Protocol):
    """The order of one epoch."""

    seed: int
    epoch: int

    @property
    def num_samples(self) -> int:
        """Number of positions in the epoch."""
        ...

    def ids(self, positions: npt.ArrayLike, /) -> IntArray:
        """Return the samples at these positions, int64 [N]."""
        ...


@dataclass(frozen=True)
class ClassBalanced:
    """Rebalance the classes of an epoch.

    A class with n samples gets a share proportional to n**power: 0 makes all classes equal, 0.5 is the square-root
    rule, 1 keeps the dataset's distribution. Samples without a label are dropped. Shares are exact in every epoch;
    within a class every sample is visited once before any is visited again, also across epochs.

    Args:
        power: 0 to 1.
        num_samples: Positions per epoch; by default the number of labelled samples.

    Raises:
        UsageError: If an argument is out of range.

    Source:
        Kang et al., Decoupling representation and classifier for long-tailed recognition, ICLR 2020, section 3.1.
    """

    power: float = 0.0
    num_samples: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.power <= 1:
            raise UsageError(f"power is {self.power}, expected 0 (equal classes) to 1 (as in the dataset)")
        check_least(1, num_samples=self.num_samples)


@dataclass(frozen=True)
class _GroupShares:
    sizes: list[int]
    counts: list[int]
    members: Members


class EpochOrders:
    """The sample orders of a loader's epochs.

    `dataset`: the samples.
    """

    def __init__(
        self,
        dataset: Dataset | Mixture,
        *,
        shuffle: bool | BlockShuffle = True,
        balance: ClassBalanced | None = None,
        clips_per_video: int = 1,
    ) -> None:
        check_least(1, clips_per_video=clips_per_video)
        mixture = dataset if isinstance(dataset, Mixture) and dataset.weights is not None else None
        if (balance or mixture) and shuffle is not True:
            raise UsageError(
                f"shuffle={shuffle} cannot be combined with {'balance=' if balance else 'a weighted mixture'}",
                hint="remove balance= or weights= for evaluation; orders with shares are always random",
            )
        if balance and mixture:
            raise UsageError("balance= was given for a weighted mixture", hint="use balance= or weights=, not both")
        self._dataset, self._shuffle, self.clips_per_video = dataset, shuffle, clips_per_video
        self._groups: _GroupShares | None = None
        self.text = f"{ORDER_VERSION} shuffle={shuffle}"
        if mixture is not None:
            self._groups = _by_dataset(mixture)
            self.text += f" {GROUPED_VERSION} weights={mixture.weights} num_samples={mixture.num_samples}"
        elif balance is not None:
            self._groups = _by_class(dataset.labels, balance)
            self.text += f" {GROUPED_VERSION} {balance}"
        elif isinstance(shuffle, BlockShuffle):
            self._shard_sizes = dataset.shard_sizes
            self.text += f" {BLOCKS_VERSION}"
        if clips_per_video > 1:
            self.text += f" clips_per_video={clips_per_video}"
        base = sum(self._groups.counts) if self._groups else len(dataset)
        self.num_samples = base * clips_per_video

    def order(self, seed: int, epoch: int) -> EpochOrder:
        """Return the order of one epoch."""
        base: EpochOrder
        if self._groups is not None:
            base = GroupedOrder(self._groups.sizes, self._groups.counts, self._groups.members, seed, epoch)
        elif isinstance(self._shuffle, BlockShuffle):
            base = BlockOrder(self._shard_sizes, self._shuffle.window, seed, epoch)
        else:
            base = Order(len(self._dataset), seed, epoch, shuffle=self._shuffle)
        return base if self.clips_per_video == 1 else _SeveralClips(base, self.clips_per_video)


class _SeveralClips:
    """Visit each sample of another order several times in a row."""

    def __init__(self, base: EpochOrder, clips_per_video: int) -> None:
        self.seed, self.epoch = base.seed, base.epoch
        self._base, self._clips_per_video = base, clips_per_video

    @property
    def num_samples(self) -> int:
        return self._base.num_samples * self._clips_per_video

    def ids(self, positions: npt.ArrayLike, /) -> IntArray:
        return self._base.ids(np.atleast_1d(np.asarray(positions, dtype=np.int64)) // self._clips_per_video)


def _by_dataset(mixture: Mixture) -> _GroupShares:
    assert mixture.weights is not None
    starts = np.asarray(mixture.starts, dtype=np.int64)

    def members(groups: IntArray, indices: IntArray) -> IntArray:
        return starts[groups] + indices

    sizes = [len(dataset) for dataset in mixture.datasets]
    return _GroupShares(sizes, apportion(mixture.num_samples, mixture.weights), members)


def _by_class(labels: IntArray, balance: ClassBalanced) -> _GroupShares:
    # uint32 when it suffices: this index is the memory cost of class shares.
    kind = np.uint32 if len(labels) < _SMALL_SET else np.int64
    by_class = np.argsort(labels, kind="stable").astype(kind)
    by_class = by_class[np.count_nonzero(labels < 0) :]
    if not len(by_class):
        raise UsageError("no sample has a label, so classes cannot be balanced")
    counts = np.bincount(labels[labels >= 0])
    counts = counts[counts > 0]
    starts = np.cumsum(counts) - counts

    def members(groups: IntArray, indices: IntArray) -> IntArray:
        samples: IntArray = by_class[starts[groups] + indices].astype(np.int64)
        return samples

    sizes = counts.tolist()
    shares = apportion(balance.num_samples or len(by_class), [size**balance.power for size in sizes])
    return _GroupShares(sizes, shares, members)
