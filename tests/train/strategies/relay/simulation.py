"""Runs the scheduler with a simulated clock, to predict the duration and the timeline of a sweep."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastvid.train.strategies.relay.scheduler import Scheduler, Unit


@dataclass(frozen=True, slots=True)
class Visit:
    """A simulated visit."""

    unit: Unit
    stage: int
    start: float
    end: float


def simulate(
    scheduler: Scheduler,
    duration: Callable[[Unit], float],
    *,
    score: Callable[[Unit], float] = lambda _: 0.0,
    stages: Sequence[Sequence[int]] | None = None,
) -> list[Visit]:
    """Simulate a sweep.

    Returns all visits in the order of their ends; the last end is the makespan.
    """
    kept = stages if stages is not None else [[partition] for partition in range(scheduler.num_partitions)]
    now, free, visits = 0.0, list(range(len(kept))), list[Visit]()
    busy: list[tuple[float, int, Visit]] = []
    while True:
        for stage in list(free):
            unit = scheduler.take(kept[stage])
            if unit is not None:
                free.remove(stage)
                end = now + duration(unit)
                heapq.heappush(busy, (end, stage, Visit(unit, stage, now, end)))
        if not busy:
            return visits
        now = busy[0][0]
        # Finish all visits that end now before starting new ones, so that the order of stages has no influence.
        while busy and busy[0][0] == now:
            _, stage, visit = heapq.heappop(busy)
            scheduler.done(visit.unit, seconds=visit.end - visit.start, score=score(visit.unit))
            free.append(stage)
            visits.append(visit)
        free.sort()


def ring_makespan(models: int, partitions: int, epochs: int) -> int:
    """Return the makespan of a ring in which every visit takes 1.

    With at least as many models as stages, the first stage never waits, and the last model finishes S - 1 later. With
    fewer, no model ever waits, and the last one starts M - 1 later than the first.
    """
    if models >= partitions:
        return models * epochs + partitions - 1
    return epochs * partitions + models - 1
