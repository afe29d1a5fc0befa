"""`Buckets`: batches of several shapes, each clip in the shape that suits it, planned from the sizes of all clips; and
what `Buckets` and `Packed` have in common.

A plan puts the positions of the epoch's order into an order of its own, the planned order, in which `position` of a
loader's state counts. Samples that no batch can contain come first in it, samples that last="drop" discards come last,
so `stop - start` of a batch is the number of its samples.

Each sample belongs to one bucket. The positions of an epoch's order are sorted by bucket, and the samples of each
bucket are cut into global batches. Batches are ordered by the position of their last sample, as a bucketer with
unlimited memory would emit them if samples arrived one by one. Incomplete batches, at most one per bucket, come last.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from fastvid.errors import StateError, UsageError
from fastvid.load.order.epoch import MASKED, ClipShape, EpochOrder, Last, Share, rank_rows
from fastvid.runtime.arrays import AnyArray, BoolArray, IntArray
from fastvid.runtime.processes import World
from fastvid.runtime.values import check_choice, check_integer, check_kind

Unfit = Literal["raise", "skip"]
"""What to do with samples that no batch can contain: raise an error before the epoch begins, or skip and log them."""

_NAMED: Final = 5
"""Number of unfit samples that a message names."""


@dataclass(frozen=True, slots=True, eq=False)
class ClipSizes:
    """The size of the clip that sampler and crop make of each sample."""

    frames: IntArray  # frames, int64 [N]
    heights: IntArray  # height in pixels, int64 [N]
    widths: IntArray  # width in pixels, int64 [N]

    def __post_init__(self) -> None:
        shapes = [getattr(self, one.name).shape for one in fields(self)]
        if len(set(shapes)) != 1 or len(shapes[0]) != 1:
            raise UsageError(f"clip sizes have shapes {shapes}, expected [N]")

    def __len__(self) -> int:
        return len(self.frames)

    def tokens(self, patch: ClipShape, merge: int = 1) -> IntArray:
        """Return the patches that cover each clip, int64 [N].

        `patch`: frames, height and width of a patch.
        """
        count = -(-self.frames // patch[0]) * merge**2
        count *= -(-self.heights // (patch[1] * merge))
        count *= -(-self.widths // (patch[2] * merge))
        return count


def patches(shape: ClipShape, patch: ClipShape) -> int:
    """Return the number of patches that cover a clip."""
    return int(np.prod([-(-side // step) for side, step in zip(shape, patch, strict=True)], dtype=np.int64))


def check_shape(name: str, shape: object) -> ClipShape:
    """Return (frames, height, width) as a tuple, after checking that they are three positive integers."""
    if not isinstance(shape, Sequence) or len(shape) != 3:
        raise UsageError(f"{name} is {shape!r}, expected (frames, height, width)", hint="give three integers")
    frames, height, width = (check_integer(name, side, 1) for side in shape)
    return frames, height, width


_log = logging.getLogger(__name__)

PLAN_VERSION: Final = "fastvid-plan-1"
"""Part of a loader's fingerprint; must change when Buckets or Packed plan other batches from the same clip sizes."""


def check_fit(fits: BoolArray, sizes: ClipSizes, unfit: Unfit, what: str, key: Callable[[int], str], hint: str) -> None:
    """Log samples that no batch can contain, or raise.

    `fits`: whether each sample fits, bool [N]. `what`: what is wrong with the others, for the message.
    """
    found = np.flatnonzero(~fits)
    if not len(found):
        return
    named = "; ".join(
        f"{key(sample)} ({sizes.frames[sample]} frames of {sizes.heights[sample]}x{sizes.widths[sample]})"
        for sample in found[:_NAMED].tolist()
    )
    more = f"; and {len(found) - _NAMED:,} more" if len(found) > _NAMED else ""
    text = f"{len(found):,} of {len(sizes):,} samples {what}: {named}{more}"
    if unfit == "raise" or len(found) == len(sizes):
        raise UsageError(text, hint=hint)
    _log.warning("%s; they are skipped in every epoch", text)


def check_boundary(position: int, starts: IntArray, stops: IntArray) -> int:
    """Return the index of the first batch from `position` on, `len(starts)` if none.

    Raises StateError if `position` is inside a batch.

    `position`: samples delivered. `starts`: first position of each batch, int64 [S], ascending. `stops`: one past
    the last position of each batch, int64 [S].
    """
    number = int(np.searchsorted(starts, position))
    if number and stops[number - 1] > position:
        raise StateError(
            f"position {position} is inside the batch of positions {starts[number - 1]} to {stops[number - 1] - 1}",
            hint="resume from a state_dict() of a loader with the same batches=, which is always between two batches",
        )
    return number


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Consecutive batches of a planned epoch, as one rank sees them."""

    starts: IntArray  # first position of each batch, int64 [S], ascending
    stops: IntArray  # one past its last position, int64 [S]
    share: Callable[[int], Share]  # returns this rank's rows of a batch


class Planned:
    """How epochs are divided into batches that are planned from the sizes of all clips, as one rank sees them.

    `batches`: `Buckets` or `Packed`. `facts`: what they computed from the sizes, for the fingerprint. `block`: plans
    batches from a position of an epoch on. `size`: positions per block; None for all.
    """

    def __init__(
        self, batches: object, facts: AnyArray, block: Callable[[EpochOrder, int], Block], size: int | None = None
    ) -> None:
        self._batches, self._block, self._size = batches, block, size
        self.text = f"{PLAN_VERSION} {batches} {hashlib.blake2b(facts.tobytes(), digest_size=16).hexdigest()}"

    def __repr__(self) -> str:
        return repr(self._batches)

    def epoch(self, order: EpochOrder) -> PlannedEpoch:
        """Return the batches of an epoch."""
        return PlannedEpoch(order, self._block, self._size or max(1, order.num_samples))


class PlannedEpoch:
    """The batches of one epoch. A position counts its samples in the order of delivery.

    `count` plans all blocks that were not planned before; the other methods plan one block at a time.
    """

    def __init__(self, order: EpochOrder, block: Callable[[EpochOrder, int], Block], size: int) -> None:
        self._order, self._block, self._size = order, block, size
        self._blocks = -(-order.num_samples // size)
        self._lengths: dict[int, int] = {}
        self._planned = lru_cache(1)(self._plan)

    def count(self, position: int) -> int:
        """Return the number of batches from `position` to the end of the epoch."""
        first, count = position // self._size, 0
        if position < self._order.num_samples:
            block = self._planned(first)
            count = len(block.starts) - check_boundary(position, block.starts, block.stops)
        for number in range(first + 1, self._blocks):
            if number not in self._lengths:
                self._planned(number)
            count += self._lengths[number]
        return count

    def is_over(self, position: int) -> bool:
        """Return whether no batch follows `position`; costs much less than `count`."""
        return next(self.shares(position), None) is None

    def shares(self, position: int) -> Iterator[Share]:
        """Yield this rank's rows of each global batch from `position` to the end of the epoch, computed lazily."""
        for number in range(position // self._size, self._blocks):
            block = self._planned(number)
            for batch in range(check_boundary(position, block.starts, block.stops), len(block.starts)):
                yield block.share(batch)

    def _plan(self, number: int) -> Block:
        block = self._block(self._order, number * self._size)
        self._lengths[number] = len(block.starts)
        return block


_MOST: Final = 2**15 - 1
"""Most buckets: an int16 per sample is sorted by radix, many times faster than larger integers by comparison."""

_CHUNK: Final = 2**20
"""Positions looked up at a time, to bound the memory of planning."""

_SAME_RATIO: Final = 1e-9
"""Largest difference of the logarithms of two aspect ratios that count as equal."""


@dataclass(frozen=True)
class Buckets:
    """Batches whose clips all have one of several shapes, with as many clips as the shape allows.

    The sampler counts the frames of a sample, which goes to the shapes with the most frames up to that count. Of these,
    to the one whose aspect ratio is nearest to its own, by the difference of the logarithms of height / width (of two
    equally near ones, the wider). Of several with that ratio, to the largest that does not enlarge it, or the smallest
    if all do. The sampler then makes exactly the shape's frames, and the crop its height and width.

    Batches do not depend on the world size, and all ranks take the same number of steps. If a batch's clips are not a
    multiple of the world size, some ranks get one row more; `multiple` prevents this.

    Args:
        shapes: (frames, height, width) of each bucket, without duplicates.
        per_batch: Clips of a global batch: one number for all shapes, or a list or mapping with one for each.
        tokens: Patches of a global batch, in place of `per_batch`: as many clips as fit.
        patch: Frames, height and width of a patch, for `tokens`; sides are rounded up to whole patches.
        multiple: Round the clips that fit into `tokens` down to a multiple of this, such as the largest world size.
        unfit: What to do with samples shorter than every shape: "raise" an error before the epoch begins, or "skip"
            them in every epoch and log their number and the first keys.

    Raises:
        UsageError: If an argument is out of range.
    """

    shapes: Sequence[ClipShape]
    per_batch: int | Sequence[int] | Mapping[ClipShape, int] | None = None
    tokens: int | None = None
    patch: ClipShape = (1, 16, 16)
    multiple: int = 1
    unfit: Unfit = "raise"

    def __post_init__(self) -> None:
        check_kind("shapes", self.shapes, Sequence, use="Buckets([(8, 224, 224)], per_batch=4)")
        shapes = tuple(check_shape("a shape of Buckets", shape) for shape in self.shapes)
        if not 1 <= len(shapes) <= _MOST or len(set(shapes)) < len(shapes):
            hint = f"give 1 to {_MOST:,} different shapes (frames, height, width)"
            raise UsageError(f"shapes are {shapes}", hint=hint)
        given = self.per_batch
        if isinstance(given, Mapping):
            named = {check_shape("a shape of per_batch", shape): number for shape, number in given.items()}
            if named.keys() != set(shapes):
                hint = "give the clips of a batch for each shape"
                raise UsageError(f"per_batch has the shapes {sorted(named)}, expected {sorted(shapes)}", hint=hint)
            given = [named[shape] for shape in shapes]
        if isinstance(given, Sequence):
            if len(given) != len(shapes):
                hint = "give the clips of a batch for each shape, or one number for all"
                raise UsageError(f"per_batch has {len(given)} numbers for {len(shapes)} shapes", hint=hint)
            given = tuple(check_integer("per_batch", number, 1) for number in given)
        elif given is not None:
            given = check_integer("per_batch", given, 1)
        if (given is None) == (self.tokens is None):
            hint = "give the one or the other"
            raise UsageError(f"Buckets has per_batch={given} and tokens={self.tokens}", hint=hint)
        check_choice("unfit", self.unfit, get_args(Unfit))
        # Normalise, so that equal arguments have the same fingerprint.
        tokens = None if self.tokens is None else check_integer("tokens", self.tokens, 1)
        own = {"shapes": shapes, "per_batch": given, "tokens": tokens, "patch": check_shape("patch", self.patch)}
        for name, value in (own | {"multiple": check_integer("multiple", self.multiple, 1)}).items():
            object.__setattr__(self, name, value)
        for shape, clips in zip(shapes, self.clips, strict=True):
            if not clips:
                most, each = f"{self.tokens} tokens", patches(shape, self.patch)
                raise UsageError(
                    f"shape {shape} has {each} patches of {self.patch} per clip, so {most} contain fewer clips than"
                    f" {self.multiple}",
                    hint="raise tokens, or drop the shape",
                )

    @property
    def clips(self) -> tuple[int, ...]:
        """Clips of a global batch of each shape."""
        if self.tokens is not None:
            each = (self.tokens // patches(shape, self.patch) for shape in self.shapes)
            return tuple(clips // self.multiple * self.multiple for clips in each)
        if isinstance(self.per_batch, int):
            return (self.per_batch,) * len(self.shapes)
        assert isinstance(self.per_batch, tuple)
        return self.per_batch

    def assign(self, sizes: ClipSizes) -> npt.NDArray[np.int16]:
        """Return each sample's bucket, the index of its shape, int16 [N]; -1 if every shape has more frames."""
        found = np.full(len(sizes), -1, dtype=np.int16)
        frames = np.asarray([shape[0] for shape in self.shapes])
        levels = np.unique(frames)
        level = np.searchsorted(levels, sizes.frames, side="right") - 1
        for number, count in enumerate(levels.tolist()):
            samples = np.flatnonzero(level == number)
            if len(samples):
                choices = np.flatnonzero(frames == count)
                found[samples] = choices[self._nearest(choices, sizes.heights[samples], sizes.widths[samples])]
        return found

    def _nearest(self, choices: IntArray, heights: IntArray, widths: IntArray) -> IntArray:
        """Return the shape that suits each sample, int64 [N], as indices of `choices`, shapes with equal frames."""
        own = np.asarray(self.shapes, dtype=np.float64)[choices]
        ratios, areas = np.log(own[:, 1] / own[:, 2]), own[:, 1] * own[:, 2]
        order = np.lexsort((areas, ratios))
        firsts = np.flatnonzero(np.diff(ratios[order], prepend=-np.inf) > _SAME_RATIO)
        distinct = ratios[order][firsts]
        wanted = np.log(heights / widths)
        # A ratio exactly in the middle between two goes to the wider one.
        group = np.searchsorted((distinct[1:] + distinct[:-1]) / 2 + _SAME_RATIO, wanted, side="left")
        stops = np.append(firsts[1:], len(order))
        place: IntArray = firsts[group].astype(np.int64)
        for number in np.flatnonzero(stops - firsts > 1).tolist():
            inside = np.flatnonzero(group == number)
            shapes = own[order[firsts[number] : stops[number]]]
            # Pictures are scaled to cover the shape: enlarged if a side of the shape is longer than theirs.
            most = ((heights[inside, None] >= shapes[:, 1]) & (widths[inside, None] >= shapes[:, 2])).sum(axis=1)
            place[inside] += np.maximum(most, 1) - 1
        return order[place]

    def plan(self, sizes: ClipSizes, world: World, last: Last, key: Callable[[int], str]) -> Planned:
        """Assign a dataset's samples to buckets.

        Args:
            sizes: The sizes of the clips.
            world: The rank and the world size.
            last: How to treat the incomplete batches at the end of an epoch, at most one of each shape; see `Batches`.
            key: Returns the key of a sample, for messages.

        Raises:
            UsageError: If a sample fits no shape and `unfit` is "raise", or if a batch is smaller than the world.
        """
        for shape, clips in zip(self.shapes, self.clips, strict=True):
            if clips < world.size:
                raise UsageError(
                    f"a global batch of shape {shape} has {clips} clips, fewer than the world of {world.size}",
                    hint="give every rank at least one clip of each batch: raise per_batch or tokens",
                )
        buckets = self.assign(sizes)
        what = f"have fewer frames than the shortest shape, {min(shape[0] for shape in self.shapes)}"
        hint = "add a shorter shape, exclude the samples with where=, or use unfit='skip'"
        check_fit(buckets >= 0, sizes, self.unfit, what, key, hint)
        block = partial(_all_batches, self, buckets, world, last)
        return Planned(self, buckets.astype("<i2"), block)


def _all_batches(
    buckets: Buckets, assigned: npt.NDArray[np.int16], world: World, last: Last, order: EpochOrder, _begin: int
) -> Block:
    """Return the batches of a whole epoch, in 4 bytes a sample.

    `assigned`: the bucket of each sample, int16 [N]; -1 for none.
    """
    shapes, num_samples = buckets.shapes, order.num_samples
    kind = np.uint32 if num_samples < 2**32 else np.int64
    bucket = np.empty(num_samples, dtype=np.int16)
    for begin in range(0, num_samples, _CHUNK):
        end = min(begin + _CHUNK, num_samples)
        bucket[begin:end] = assigned[order.ids(np.arange(begin, end))]
    places = np.argsort(bucket, kind="stable").astype(kind)
    counts = np.bincount(bucket + 1, minlength=len(shapes) + 1)
    del bucket
    runs = np.cumsum(counts)[:-1]  # where each bucket's run begins; unfit samples precede the first
    counts, sizes = counts[1:], np.asarray(buckets.clips, dtype=np.int64)
    full, rest = np.divmod(counts, sizes)
    whole = np.repeat(np.arange(len(sizes)), full)
    number = np.arange(len(whole)) - np.repeat(np.cumsum(full) - full, full)
    firsts = runs[whole] + sizes[whole] * number
    due = np.argsort(places[firsts + sizes[whole] - 1])
    some = np.flatnonzero(rest if last != "drop" else np.zeros_like(rest))
    some = some[np.argsort(places[runs[some] + counts[some] - 1])]
    chosen = np.concatenate([whole[due], some])
    firsts = np.concatenate([firsts[due], runs[some] + full[some] * sizes[some]])
    lengths = np.concatenate([sizes[whole[due]], rest[some]])
    rows = lengths if last == "keep" else sizes[chosen]
    stops = runs[0] + np.cumsum(lengths)
    starts = stops - lengths

    def share(number: int) -> Share:
        start, stop, first = (int(one[number]) for one in (starts, stops, firsts))
        own = rank_rows(int(rows[number]), stop - start, world)
        positions = np.full(len(own), MASKED, dtype=np.int64)
        positions[own != MASKED] = places[first + own[own != MASKED]]
        return Share(start, stop, positions, shape=shapes[chosen[number]])

    return Block(starts, stops, share)
