"""Pack clips into bins and bins into steps: pure functions of the clips' tokens."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastvid.load.order.batches import rank_slice
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.world import World


def best_fit(lengths: IntArray, capacity: int, window: int) -> list[list[int]]:
    """Pack clips into bins, each clip in the fullest bin that has room for it, the longest clips first.

    `lengths`: tokens of each clip, int64 [N], each 1 to `capacity`. Returns the clips of each bin, indices of
    `lengths`; each clip in one bin, no bin empty.
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
    # Room * count + bin, ascending: one integer that finds the fullest bin with enough room by bisection.
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


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """The bins of some steps, each step of the same number of bins."""

    clips: IntArray  # the clips of all bins one after the other, int64 [N]
    # the clips of bin b are clips[edges[b]:edges[b + 1]], int64 [S * R + 1]; bins are in the order of steps.
    edges: IntArray
    costs: IntArray  # cost of each bin, int64 [S * R]
    bins: int

    def __len__(self) -> int:
        return len(self.costs) // self.bins

    @property
    def step_edges(self) -> IntArray:
        """The clips of step s are clips[step_edges[s]:step_edges[s + 1]], int64 [S + 1]."""
        return self.edges[:: self.bins]

    def rows(self, step: int, world: World) -> tuple[IntArray, IntArray]:
        """Return what a rank gets of a step.

        `world`: the rank and the world size, at most R. Returns the clips of the rank's bins, int64 [b], b >=
        1, and where they begin in it and where the last one ends, int64 [n + 1]. If all its bins are empty,
        there is one clip -1 in the first.
        """
        first = step * self.bins
        own = bins_of_rank(self.costs[first : first + self.bins].tolist(), world)
        parts = [self.clips[self.edges[first + number] : self.edges[first + number + 1]] for number in own]
        if not any(map(len, parts)):
            parts[0] = np.full(1, -1, dtype=np.int64)
        return np.concatenate(parts), np.cumsum([0, *map(len, parts)])

    @property
    def is_complete(self) -> bool:
        """Whether no bin is empty."""
        return bool(np.all(np.diff(self.edges)))

    def chosen(self, steps: IntArray) -> Steps:
        """Return some of the steps, int64 [S'], in this order."""
        return self.arranged((steps[:, None] * self.bins + np.arange(self.bins)).reshape(-1))

    def arranged(self, order: IntArray) -> Steps:
        """Return some of the bins, int64 [S' * R], in this order."""
        counts = np.diff(self.edges)[order]
        edges = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        clips = self.clips[np.repeat(self.edges[order] - edges[:-1], counts) + np.arange(edges[-1])]
        return Steps(clips, edges, self.costs[order], self.bins)


def in_steps(packed: list[list[int]], costs: IntArray, bins: int, *, split: bool) -> Steps:
    """Order bins by cost and cut them into steps, so that the bins of a step cost about the same.

    Returns the steps, most expensive first; only the last one can have empty bins.
    """
    missing = -len(packed) % bins
    if split and missing:
        packed = _split(packed, costs, missing)
        missing = -len(packed) % bins
    packed = packed + [[]] * missing
    clips = np.asarray([clip for one in packed for clip in one], dtype=np.int64)
    edges = np.cumsum([0, *map(len, packed)])
    sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(costs[clips])])
    total = np.diff(sums[edges])
    return Steps(clips, edges, total, bins).arranged(np.argsort(-total, kind="stable"))


def _split(packed: list[list[int]], costs: IntArray, more: int) -> list[list[int]]:
    """Return the bins with the `more` that have the most clips each divided into two of about equal cost."""
    by_count = sorted(range(len(packed)), key=lambda number: (-len(packed[number]), number))
    chosen = [number for number in by_count[:more] if len(packed[number]) > 1]
    found = [one for number, one in enumerate(packed) if number not in set(chosen)]
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
