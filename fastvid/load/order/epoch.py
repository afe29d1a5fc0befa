"""The samples of an epoch in order, its global batches, and each rank's share of a batch. Pure arithmetic.

`EpochOrders` combines shuffling, class or dataset shares, and clips per video. `BlockShuffle` is for storage with slow
random reads: shards are put in random order, their samples laid out one after the other and cut into windows, and the
samples of each window shuffled, so that a reader touches the shards of one window at a time. `EveryFrame` makes each
frame of a dataset an item of its own, as robot policies are trained.

A global batch is a range of positions of the epoch's order. It does not depend on the world size, so ranks may join and
leave between batches, and the batch size may change at any position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import InitVar, dataclass
from functools import lru_cache
from typing import Any, Final, Literal, NoReturn, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastvid.errors import StateError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.schema import arrow_integers
from fastvid.load.order.draws import (
    GROUPED_VERSION,
    MASK64,
    ORDER_VERSION,
    GroupedOrder,
    Permutation,
    apportion,
    check_positions,
    mix64_int,
)
from fastvid.load.order.mixture import Mixture
from fastvid.runtime.arrays import AnyArray, IntArray
from fastvid.runtime.processes import World
from fastvid.runtime.values import check_choice, check_integer, check_integers, check_kind, check_share

BLOCKS_VERSION: Final = "fastvid-blocks-1"
"""Part of a loader's fingerprint; must change when the algorithm changes."""

_SHARDS_TAG: Final = int.from_bytes(b"shards-1", "little")
_WINDOW_TAG: Final = int.from_bytes(b"window-1", "little")

_KEPT_WINDOWS: Final = 4
"""Windows whose order is cached: a batch that crosses a boundary needs two, and a planner that looks ahead one more."""


@dataclass(frozen=True)
class BlockShuffle:
    """Shuffle shards, then the samples within windows.

    Args:
        window: Samples per window; the order is uniform within a window. Make it several shards long: with windows
            of ten shards a batch comes from ten shards. Memory is 8 bytes per sample of the window, at most half a
            megabyte.

    Raises:
        UsageError: If `window` is below 1.
    """

    window: int = 16_384

    def __post_init__(self) -> None:
        check_integer("window", self.window, 1)


class BlockOrder:
    """Block-shuffled order of one epoch.

    `sizes`: samples in each shard, int64 [S]; samples are numbered through the shards in this order. `window`:
    maximum samples per window; window sizes of an epoch differ by at most one sample.
    """

    def __init__(self, sizes: IntArray, window: int, seed: int, epoch: int) -> None:
        self.seed, self.epoch = seed, epoch
        self.num_samples = int(sizes.sum())
        order = Permutation(len(sizes), _keyed(seed, _SHARDS_TAG), epoch).ids(np.arange(len(sizes)))
        firsts = np.cumsum(sizes) - sizes
        self._ends = np.cumsum(sizes[order])
        # Sample number minus its place in the shuffled layout: constant within a shard.
        self._shifts = firsts[order] - (self._ends - sizes[order])
        self._windows = -(-self.num_samples // window)
        self._order = lru_cache(_KEPT_WINDOWS)(self._window)

    def ids(self, positions: npt.ArrayLike) -> IntArray:
        """Return the samples at these positions, int64 [N]; see `Permutation.ids`."""
        wanted = check_positions(positions, self.num_samples)
        # Window w begins at w * N // windows, so position p is in window ((p + 1) * windows - 1) // N.
        windows = ((wanted + 1) * self._windows - 1) // max(1, self.num_samples)
        places = np.empty_like(wanted)
        for window in np.unique(windows).tolist():
            inside = windows == window
            begin = window * self.num_samples // self._windows
            places[inside] = begin + self._order(window).ids(wanted[inside] - begin)
        return places + self._shifts[np.searchsorted(self._ends, places, side="right")]

    def _window(self, window: int) -> Permutation:
        begin, end = (number * self.num_samples // self._windows for number in (window, window + 1))
        return Permutation(end - begin, _keyed(_keyed(self.seed, _WINDOW_TAG), window), self.epoch)


def _keyed(seed: int, word: int) -> int:
    return mix64_int(mix64_int(seed) + word & MASK64)


_SMALL_SET: Final = 2**32  # below it, sample numbers fit in uint32


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
    column: InitVar[str | None] = None

    def __post_init__(self, column: str | None) -> None:
        if column not in (None, "label"):
            hint = "make them the labels by `fastvid relabel`"
            raise UsageError(f"column is {column!r}, but the classes are those of the labels", hint=hint)
        check_share("power", self.power)
        check_integers(1, num_samples=self.num_samples)


Last = Literal["drop", "mask", "keep"]


@dataclass(frozen=True)
class Order:
    """Which samples an epoch visits, in which order, and how it ends.

    Args:
        shuffle: True for a uniformly random order, a `BlockShuffle` for one that touches few shards at a time, False
            for dataset order, as in evaluation.
        balance: Class shares of the epoch; None visits every sample once.
        clips_per_video: K clips of each visited video, for contrastive learning. They are neighbours in `Batch.video`
            [n * K, 3, T, H, W], never split between ranks, and each has its own frames, crop, flip and transforms.
        group_size: Consecutive clips of a batch that always go to the same rank; must divide the batch, and above 1
            requires last="drop".
        last: How to treat the remaining samples at the end of an epoch: "drop", "mask" (pad the batch with masked rows)
            or "keep" (a smaller batch). "mask" and "keep" count each video once.

    Raises:
        UsageError: If an argument is out of range.
    """

    shuffle: bool | BlockShuffle = True
    balance: ClassBalanced | None = None
    clips_per_video: int = 1
    group_size: int = 1
    last: Last = "drop"

    def __post_init__(self) -> None:
        check_choice("last", self.last, get_args(Last))
        check_kind("shuffle", self.shuffle, bool, BlockShuffle, use="True, False or BlockShuffle()")
        check_kind("balance", self.balance, ClassBalanced, type(None), use="ClassBalanced()")
        for name in ("group_size", "clips_per_video"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), 1))


class EpochOrders:
    """The sample orders of a loader's epochs; `text` is their part of the loader's fingerprint."""

    def __init__(self, dataset: Dataset | Mixture, order: Order = Order()) -> None:
        shuffle, balance, clips_per_video = order.shuffle, order.balance, order.clips_per_video
        mixture = dataset if isinstance(dataset, Mixture) and dataset.weights is not None else None
        if (balance or mixture) and shuffle is not True:
            raise UsageError(
                f"shuffle={shuffle} cannot be combined with {'balance=' if balance else 'a weighted mixture'}",
                hint="remove balance= or weights= for evaluation; orders with shares are always random",
            )
        if balance and mixture:
            raise UsageError("balance= was given for a weighted mixture", hint="use balance= or weights=, not both")
        self._dataset, self._shuffle, self.clips_per_video = dataset, shuffle, clips_per_video
        # Samples in each group, positions of each group in an epoch, and the samples, see `GroupedOrder`.
        self._groups: tuple[list[int], list[int], AnyArray | None] | None = None
        self.text = f"{ORDER_VERSION} shuffle={shuffle}"
        if mixture is not None:
            assert mixture.weights is not None
            sizes = [len(dataset) for dataset in mixture.datasets]
            self._groups = sizes, apportion(mixture.num_samples, mixture.weights), None
            self.text += f" {GROUPED_VERSION} weights={mixture.weights} num_samples={mixture.num_samples}"
        elif balance is not None:
            self._groups = _by_class(dataset.labels[np.arange(len(dataset))], balance)
            self.text += f" {GROUPED_VERSION} {balance}"
        elif isinstance(shuffle, BlockShuffle):
            self._shard_sizes = dataset.shard_sizes
            self.text += f" {BLOCKS_VERSION}"
        if clips_per_video > 1:
            self.text += f" clips_per_video={clips_per_video}"
        base = sum(self._groups[1]) if self._groups else len(dataset)
        self.num_samples = base * clips_per_video

    def order(self, seed: int, epoch: int) -> EpochOrder:
        """Return the order of one epoch."""
        base: _Plain
        if self._groups is not None:
            base = GroupedOrder(*self._groups, seed, epoch)
        elif isinstance(self._shuffle, BlockShuffle):
            base = BlockOrder(self._shard_sizes, self._shuffle.window, seed, epoch)
        else:
            base = Permutation(len(self._dataset), seed, epoch, shuffle=self._shuffle)
        return base if self.clips_per_video == 1 else _SeveralClips(base, self.clips_per_video)


_Plain = Permutation | BlockOrder | GroupedOrder


class _SeveralClips:
    """An order that visits each sample of another order several times in a row."""

    def __init__(self, base: _Plain, clips_per_video: int) -> None:
        self.seed, self.epoch, self.num_samples = base.seed, base.epoch, base.num_samples * clips_per_video
        self._base, self._clips_per_video = base, clips_per_video

    def ids(self, positions: npt.ArrayLike) -> IntArray:
        return self._base.ids(np.atleast_1d(np.asarray(positions, dtype=np.int64)) // self._clips_per_video)


EpochOrder = _Plain | _SeveralClips
"""The order of one epoch."""


def _by_class(labels: IntArray, balance: ClassBalanced) -> tuple[list[int], list[int], AnyArray]:
    # uint32 if possible: this array, of one number per sample, is what class shares cost in memory.
    kind = np.uint32 if len(labels) < _SMALL_SET else np.int64
    by_class = np.argsort(labels, kind="stable").astype(kind)
    by_class = by_class[np.count_nonzero(labels < 0) :]
    if not len(by_class):
        raise UsageError("no sample has a label, so classes cannot be balanced")
    counts = np.bincount(labels[labels >= 0])
    sizes = counts[counts > 0].tolist()
    return sizes, apportion(balance.num_samples or len(by_class), [size**balance.power for size in sizes]), by_class


class EveryFrame(Dataset):
    """A dataset whose items are the frames of another's samples, sample after sample: item i is frame f of sample s.

    A `ClipLoader` of it visits every item once per epoch and delivers a clip of the frames around it, see
    `fastvid.Deltas`. The order is computed, not stored. Keys, labels and columns are those of the sample.

        items = fastvid.EveryFrame(fastvid.open("shards/pusht"))
        loader = fastvid.ClipLoader(items, frames=fastvid.Deltas([-0.1, 0.0]), ...)

    Args:
        dataset: The samples; to choose among them, use its `select`, or `where=` of `fastvid.open`.

    Raises:
        UsageError: If it is a mixture.

    Attributes:
        samples: The samples.
    """

    def __init__(self, dataset: Dataset) -> None:
        if isinstance(dataset, Mixture) or not isinstance(dataset, Dataset):
            hint = "give it one dataset, of `fastvid.open`"
            raise UsageError(f"EveryFrame was given a {type(dataset).__name__}", hint=hint)
        self.samples = dataset
        self._stops: IntArray = np.cumsum(dataset.num_frames, dtype=np.int64)
        self.storage, self.root, self.dataset_id = dataset.storage, dataset.root, dataset.dataset_id
        self.generation, self.split, self.where = dataset.generation, dataset.split, dataset.where
        self.selection = f"{dataset.selection} every frame".strip()
        self._shards, self._annotations, self._ends = dataset._shards, dataset._annotations, dataset._ends

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    def __reduce__(self) -> tuple[object, ...]:
        return EveryFrame, (self.samples,)

    def place(self, items: npt.ArrayLike) -> tuple[IntArray, IntArray]:
        """Return the sample and the frame of items, both int64 [N]."""
        wanted = np.asarray(items, dtype=np.int64)
        samples = np.searchsorted(self._stops, wanted, side="right")
        return samples, wanted - np.where(samples > 0, self._stops[samples - 1], 0)

    def locate(self, samples: npt.ArrayLike) -> tuple[IntArray, IntArray]:
        """Return the shard index and the row inside the shard of the items' samples, both int64 [N]."""
        return self.samples.locate(self.place(samples)[0])

    def key(self, sample: int) -> str:
        """Return the key of an item's sample."""
        return self.samples.key(int(self.place(sample)[0]))

    def keys_of(self, samples: IntArray) -> list[str]:
        """Return the keys of the samples of items, given by their numbers, int64 [N]."""
        return self.samples.keys_of(self.place(samples)[0])

    def column(self, name: str) -> Any:
        """Return a column, in which each value stands for all frames of its sample.

        Raises:
            UsageError: If there is no such column.
        """
        values = self.samples.column(name)
        whole = values.combine_chunks()
        stops = arrow_integers(self._stops)
        kind = pa.run_end_encoded(stops.type, whole.type)
        # `from_arrays` fails in pyarrow 16.
        return pa.RunEndEncodedArray.from_buffers(kind, len(self), [None], children=[stops, whole])

    @property
    def labels(self) -> Any:
        """Label of each item's sample, indexed like an array; -1 for a sample without a label."""
        return self.repeat(self.samples.labels)

    @property
    def identity(self) -> str:
        """Text that identifies the samples, see `Dataset.identity`."""
        return self.samples.identity

    @property
    def num_frames(self) -> Any:
        """Frames of each item's sample, indexed like an array."""
        return self.repeat(self.samples.num_frames)

    def repeat(self, values: npt.NDArray[Any]) -> Any:
        """Return one value per item, taken from its sample's in `values`; the result is indexed like an array."""
        return _OfSamples(self, values)

    @property
    def shard_sizes(self) -> IntArray:
        """Number of items in each shard, int64 [S]."""
        counts = np.concatenate([[0], self._stops])
        return np.diff(counts[np.cumsum(self.samples.shard_sizes)], prepend=0)

    def select(self, samples: object) -> NoReturn:  # noqa: ARG002
        """Raise UsageError: samples are selected before their frames are items."""
        hint = "write EveryFrame(dataset.select(...)), or use where="
        raise UsageError("the frames of EveryFrame cannot be selected", hint=hint)


class _OfSamples:
    """An array with a value for each sample, indexed by the number of an item: a frame gets the value of its sample."""

    def __init__(self, items: EveryFrame, values: npt.NDArray[Any]) -> None:
        self._items, self._values = items, values

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, items: npt.ArrayLike) -> Any:
        return self._values[self._items.place(items)[0]]


MASKED = -1
"""The position, or the sample, of a row that has none."""

ClipShape = tuple[int, int, int]
"""Frames, height and width of a clip."""


def rank_slice(batch: int, rank: int, world: int, group: int = 1) -> tuple[int, int]:
    """Return the rows [start, stop) of a global batch that belong to a rank.

    The slices of all ranks cover the batch in rank order, and their sizes differ by at most one group of rows.
    """
    groups = batch // group
    return rank * groups // world * group, (rank + 1) * groups // world * group


def rank_rows(rows: int, samples: int, world: World, group: int = 1) -> IntArray:
    """Return which samples of a global batch a rank gets.

    `rows`: rows of the global batch over all ranks. `samples`: samples in it, at most `rows`; the rows after them
    are masked. `group`: consecutive rows that stay on one rank. Returns numbers of the samples within the batch,
    int64 [b], b >= 1; MASKED for a row without a sample.
    """
    first, end = rank_slice(rows, world.rank, world.size, group)
    # A rank without rows gets one group of masked rows: they are masked because they belong to the next rank.
    numbers = np.arange(first, max(end, first + group), dtype=np.int64)
    numbers[(numbers >= samples) | (numbers >= end)] = MASKED
    return numbers


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One rank's rows of one global batch."""

    start: int
    stop: int
    # positions of this rank's rows in the epoch's order, int64 [b], b >= 1; MASKED for a row without a sample.
    # Those of a planned batch are not consecutive.
    positions: IntArray
    shape: ClipShape | None = None  # shape that all rows of the global batch get; None if sampler and crop decide it
    # first row of each of this rank's bins, and the number of rows, int64 [n + 1]; None if rows are not packed.
    bins: IntArray | None = None


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of an epoch that have one size: ranges of its order. Any position may begin a batch.

    A position counts the samples of the epoch in the order of delivery.
    """

    num_samples: int  # samples per epoch
    size: int  # samples per global batch
    # how to treat the remaining samples at the end of the epoch: "drop" discards them; "mask" pads the batch with
    # masked rows, so that every batch has the same shape; "keep" makes a smaller batch in which every rank has at
    # least one row, masked if there are fewer samples than ranks, or `clips_per_video` of them.
    last: Last
    world: World
    group: int = 1  # consecutive rows that stay on one rank; must divide `size`, and above 1 requires last="drop"
    clips_per_video: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", check_integer("global_batch_size", self.size, 1))
        if self.size % self.group or (self.group > 1 and self.last != "drop"):
            raise UsageError(
                f"group_size is {self.group} with global_batch_size {self.size} and last={self.last!r}",
                hint="choose a group_size that divides global_batch_size, and last='drop' if it is above 1",
            )
        if self.size % self.unit:
            raise UsageError(
                f"global_batch_size is {self.size} with group_size={self.group} and"
                f" clips_per_video={self.clips_per_video}",
                hint=f"choose a multiple of {self.unit}: global_batch_size counts clips",
            )
        if self.size // self.unit < self.world.size:
            groups = f" in groups of {self.unit}" if self.unit > 1 else ""
            raise UsageError(
                f"global_batch_size {self.size}{groups} is smaller than the world of {self.world.size}",
                hint=f"give every rank at least one {'clip' if self.unit == 1 else 'group'} of each batch",
            )
        if not self.count(0):
            told = f"{self.num_samples} samples do not fill one batch of {self.size} with last='drop'"
            raise UsageError(told, hint="use a smaller global_batch_size, or last='mask'")

    @classmethod
    def of(cls, orders: EpochOrders, size: int, order: Order, world: World) -> Batches:
        """Build from the orders and the options of a loader."""
        return cls(orders.num_samples, size, order.last, world, order.group_size, orders.clips_per_video)

    @property
    def unit(self) -> int:
        """Consecutive rows that stay on one rank: whole groups of whole videos."""
        return math.lcm(self.group, self.clips_per_video)

    @property
    def text(self) -> str:
        """Their part of the loader's fingerprint: none, because a state may continue with batches of any size."""
        return ""

    def epoch(self, _order: EpochOrder) -> Batches:
        """Return the batches of an epoch: all epochs have the same."""
        return self

    def count(self, position: int) -> int:
        """Return the number of batches from `position` to the end of the epoch."""
        if position % self.clips_per_video:
            hint = "resume from a state_dict() of a loader, which is always between two batches"
            raise StateError(f"position {position} is between the {self.clips_per_video} clips of a video", hint=hint)
        left = max(0, self.num_samples - position)
        return left // self.size if self.last == "drop" else -(-left // self.size)

    def is_over(self, position: int) -> bool:
        """Return whether no batch follows `position`."""
        return not self.count(position)

    def shares(self, position: int) -> Iterator[Share]:
        """Yield this rank's rows of each global batch from `position` to the end of the epoch, computed lazily."""
        return (self.share(position + number * self.size) for number in range(self.count(position)))

    def share(self, position: int) -> Share:
        """Return this rank's rows of the global batch that starts at `position`, which must be inside the epoch."""
        stop = min(position + self.size, self.num_samples)
        assert 0 <= position < stop, position
        samples = stop - position
        numbers = rank_rows(samples if self.last == "keep" else self.size, samples, self.world, self.unit)
        return Share(position, stop, np.where(numbers == MASKED, MASKED, position + numbers))
