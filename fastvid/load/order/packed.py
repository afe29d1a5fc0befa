"""`Packed`: clips of any size in bins of a fixed number of tokens, planned from the sizes of all clips.

The epoch's order is cut into blocks of a fixed number of samples, and each block is planned alone: its clips are
packed into bins, its bins sorted by cost and cut into steps, which are global batches. So the block of a position is
found by a division, and resuming costs the planning of one block.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, get_args

import numpy as np

from fastvid.errors import UsageError
from fastvid.load.order.buckets import Block, ClipSizes, Planned, Unfit, check_fit, check_shape
from fastvid.load.order.draws import Draws, Purpose
from fastvid.load.order.epoch import MASKED, ClipShape, EpochOrder, Last, Share, rank_slice
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.processes import World
from fastvid.runtime.values import check_choice, check_integer


def best_fit(lengths: IntArray, capacity: int, window: int) -> list[list[int]]:
    """Pack clips into bins, each clip in the fullest bin that has room for it, the longest clips first.

    `lengths`: tokens of each clip, int64 [N], each 1 to `capacity`. `window`: clips that are packed together. Returns
    the clips of each bin, indices of `lengths`; each clip in one bin, no bin empty.
    """
    bins: list[list[int]] = []
    for begin in range(0, len(lengths), window):
        clips = np.arange(begin, min(begin + window, len(lengths)))
        if begin:
            clips = np.append(np.asarray(bins.pop(), dtype=np.int64), clips)
        clips = clips[np.argsort(-lengths[clips], kind="stable")]
        bins += _best_fit(clips.tolist(), lengths[clips].tolist(), capacity)
    return bins


def _best_fit(clips: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the bins of one window, the one with the most room last; `lengths` descends."""
    count, shortest = len(clips), lengths[-1]
    bins: list[list[int]] = []
    rooms: list[int] = []
    # Sorted integers room * count + bin: bisection finds the fullest bin with enough room.
    usable: list[int] = []
    for clip, length in zip(clips, lengths, strict=True):
        place = bisect_left(usable, length * count)
        if place == len(usable):
            number = len(bins)
            bins.append([clip])
            rooms.append(capacity - length)
        else:
            number = usable.pop(place) % count
            bins[number].append(clip)
            rooms[number] -= length
        if rooms[number] >= shortest:  # else no later clip fits
            insort(usable, rooms[number] * count + number)
    bins.append(bins.pop(rooms.index(max(rooms))))
    return bins


def cost(lengths: IntArray, quadratic_from: int) -> IntArray:
    """Return what clips cost a transformer that attends within each clip, in units of 1 / quadratic_from tokens.

    `lengths`: tokens of each clip, int64 [N]. Returns lengths * quadratic_from + lengths**2, int64 [N]: integers,
    so that sums are the same on any machine.
    """
    return lengths * quadratic_from + lengths * lengths


def in_steps(packed: list[list[int]], costs: IntArray, bins: int, *, split: bool) -> list[list[list[int]]]:
    """Order bins by cost and cut them into steps, so that the bins of a step cost about the same.

    `costs`: cost of each clip. `bins`: bins of a step. `split`: whether to divide bins rather than add empty ones.
    Returns the bins of each step, most expensive first; only the last step can have empty bins.
    """
    if split:
        packed = _split(packed, costs, -len(packed) % bins)
    packed = sorted(packed + [[]] * (-len(packed) % bins), key=lambda clips: -costs[clips].sum())
    return [packed[first : first + bins] for first in range(0, len(packed), bins)]


def _split(packed: list[list[int]], costs: IntArray, more: int) -> list[list[int]]:
    """Divide each of the `more` bins with the most clips into two of about equal cost; return all bins."""
    by_count = sorted(range(len(packed)), key=lambda number: (-len(packed[number]), number))
    chosen = [number for number in by_count[:more] if len(packed[number]) > 1]
    divided = set(chosen)
    found = [one for number, one in enumerate(packed) if number not in divided]
    for number in chosen:
        halves: tuple[list[int], list[int]] = ([], [])
        sums = [0, 0]
        for clip in sorted(packed[number], key=lambda one: (-int(costs[one]), one)):
            lighter = int(sums[1] < sums[0])
            halves[lighter].append(clip)
            sums[lighter] += int(costs[clip])
        found += halves
    return found


def bins_of_rank(costs: Sequence[int], world: World) -> list[int]:
    """Return the bins of a step that a rank gets: the longest processing time first, each to the least loaded rank.

    Source:
        Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 1969, here with equal numbers of jobs.

    `costs`: cost of each bin, at least as many as ranks. Returns numbers of the rank's bins, ascending. All ranks
    get the same number of bins if the world size divides it, else numbers that differ by one.
    """
    room = [stop - start for start, stop in (rank_slice(len(costs), other, world.size) for other in range(world.size))]
    loads = [(0, other) for other in range(world.size)]
    mine = []
    for number in sorted(range(len(costs)), key=lambda one: (-costs[one], one)):
        load, other = heapq.heappop(loads)
        if other == world.rank:
            mine.append(number)
        room[other] -= 1
        if room[other]:
            heapq.heappush(loads, (load + costs[number], other))
    return sorted(mine)


_STEPS_OF_BLOCK: Final = 256
"""Approximate number of steps of a block. At the end of a block about half the bins of a step are half empty, on
average 0.2 % of the block."""

_MOST_TOKENS: Final = 2**24
"""Largest bin: the costs of a block then add up to less than 2**63 with any number of bins that fits in memory."""


@dataclass(frozen=True)
class Packed:
    """Batches of bins, each filled with whole clips of any size up to a number of tokens.

    A clip has ceil(T / pt) * ceil(H / ph) * ceil(W / pw) tokens, one for each patch of pt frames and ph x pw pixels. A
    global batch is `bins` bins; ranks share them so that their costs are about equal. The cost of a clip of n tokens is
    n + n**2 / quadratic_from.

    Batches do not depend on the world size, and all ranks take the same number of steps. If `bins` is not a multiple of
    the world size, some ranks get one bin more. With last="mask" the last batch has empty bins, and a rank that gets
    only those has one masked row; with last="keep" bins are divided in two instead.

    A batch has bins of similar cost, so clips of similar length share a batch more often than by chance. Otherwise the
    order is random: which clips are near each other in the epoch, and the order of the batches of a block (about 256).

    Args:
        tokens: Tokens of a bin, 1 to 2**24.
        patch: Frames, height and width of a patch, as the model takes them.
        merge: Patches in each direction of a picture that the model merges later, 2 for Qwen2-VL: they follow each
            other in a batch, and sides are rounded up to multiples of them.
        bins: Bins of a global batch, at least the world size; None for one bin per rank of the world that the loader is
            created in. With None a state can be resumed only in a world of the same size.
        window: Clips that are packed together. The larger, the less padding.
        quadratic_from: Tokens of a clip from which on attention costs more than the rest of the model: 6 times the
            width of a transformer whose layer has 24 * width**2 operations per token in its projections, and
            4 * n * width in its attention; 6,144 for a width of 1,024.
        unfit: What to do with clips larger than a bin: "raise" an error before the epoch begins, or "skip" them in
            every epoch and log their number and the first keys.

    Raises:
        UsageError: If an argument is out of range.
    """

    tokens: int
    patch: ClipShape = (2, 14, 14)
    merge: int = 1
    bins: int | None = None
    window: int = 2048
    quadratic_from: int = 6144
    unfit: Unfit = "raise"

    def __post_init__(self) -> None:
        for name, least, most in (
            ("tokens", 1, _MOST_TOKENS), ("merge", 1, 2**10), ("window", 1, 2**31), ("quadratic_from", 1, _MOST_TOKENS)
        ):  # fmt: skip
            object.__setattr__(self, name, check_integer(name, getattr(self, name), least, most))
        if self.bins is not None:
            object.__setattr__(self, "bins", check_integer("bins", self.bins, 1))
        object.__setattr__(self, "patch", check_shape("patch", self.patch))
        check_choice("unfit", self.unfit, get_args(Unfit))

    @property
    def shapes(self) -> Sequence[ClipShape]:
        """Shapes that sampler and crop must be able to make: none, each clip keeps its own."""
        return ()

    def plan(self, sizes: ClipSizes, world: World, last: Last, key: Callable[[int], str]) -> Planned:
        """Count the tokens of a dataset's samples.

        Args:
            sizes: The sizes of the clips.
            world: The rank and the world size.
            last: How to treat the bins that do not fill a batch at the end of an epoch; see `Packed`.
            key: Returns the key of a sample, for messages.

        Raises:
            UsageError: If a clip is larger than a bin and `unfit` is "raise", or if there are fewer bins than ranks.
        """
        packed = replace(self, bins=self.bins or world.size)
        assert packed.bins
        if packed.bins < world.size:
            hint = "give every rank at least one bin: raise bins"
            raise UsageError(f"a global batch has {packed.bins} bins, fewer than the world of {world.size}", hint=hint)
        tokens = sizes.tokens(self.patch, self.merge)
        what = f"have more than {self.tokens} patches of {self.patch}"
        hint = "raise tokens, choose fewer frames or smaller pictures, or use unfit='skip'"
        check_fit(tokens <= self.tokens, sizes, self.unfit, what, key, hint)
        tokens = np.where(tokens <= self.tokens, tokens, 0)
        # Blocks are whole windows, because a window that is cut short packs worse.
        each = self.window * max(1, int(tokens.sum()))
        size = max(1, round(_STEPS_OF_BLOCK * packed.bins * self.tokens * len(tokens) / each)) * self.window
        block = partial(_planned, packed, tokens, size, world, last)
        return Planned(packed, tokens.astype("<i8"), block, size)


def _planned(
    packed: Packed, tokens: IntArray, size: int, world: World, last: Last, order: EpochOrder, begin: int
) -> Block:
    """Return the block of an epoch that begins at position `begin`; `tokens`: of each sample, 0 if it is skipped."""
    assert packed.bins
    positions = np.arange(begin, min(begin + size, order.num_samples))
    tokens = tokens[order.ids(positions)]
    skipped = np.count_nonzero(tokens == 0)
    positions, tokens = positions[tokens > 0], tokens[tokens > 0]
    is_last, costs = begin + size >= order.num_samples, cost(tokens, packed.quadratic_from)
    bins = best_fit(tokens, packed.tokens, packed.window)
    steps = in_steps(bins, costs, packed.bins, split=not is_last or last == "keep")
    # The most expensive steps are complete. Only the last one can have empty bins.
    whole = len(steps) - int(is_last and last != "keep" and not all(map(all, steps)))
    words = Draws(order.seed, order.epoch, begin // size).words(Purpose.BINS, whole)
    chosen = sorted(range(whole), key=words.__getitem__)
    steps = [steps[number] for number in (*chosen, *range(whole, len(steps) if last == "mask" else whole))]
    edges = begin + int(skipped) + np.cumsum([0, *(sum(map(len, step)) for step in steps)])

    def share(number: int) -> Share:
        step = steps[number]
        own = bins_of_rank([int(costs[clips].sum()) for clips in step], world)
        rows = [positions[step[one]] for one in own]
        if not any(map(len, rows)):
            rows[0] = np.full(1, MASKED, dtype=np.int64)
        stops = np.cumsum([0, *map(len, rows)])
        return Share(int(edges[number]), int(edges[number + 1]), np.concatenate(rows), bins=stops)

    return Block(edges[:-1], edges[1:], share)
