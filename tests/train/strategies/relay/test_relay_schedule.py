"""The schedule of visits, from the real scheduler with a simulated clock."""

import heapq
import itertools
import random
from collections import defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastvid.errors import StateError
from fastvid.train.strategies.relay.scheduler import Scheduler, Unit

SIZES = st.tuples(st.integers(1, 7), st.integers(1, 4), st.integers(1, 4))
ORDERS = ("ring", "hopper")


@dataclass(frozen=True, slots=True)
class Visit:
    """A simulated visit."""

    unit: Unit
    stage: int
    start: float
    end: float


def simulate(
    scheduler,
    duration,
    *,
    score=lambda _: 0.0,
    stages=None,
):
    """Simulate a sweep."""
    kept = stages if stages is not None else [[partition] for partition in range(scheduler.num_partitions)]
    now, free, visits = 0.0, list(range(len(kept))), list[Visit]()
    busy = []
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


def check(visits, models, partitions, epochs):
    """Check that every unit runs once, models and stages run one unit at a time, and epochs are in order."""
    keys = [(visit.unit.model, visit.unit.epoch, visit.unit.partition) for visit in visits]
    wanted = [(m, e, s) for m in range(models) for e in range(epochs) for s in range(partitions)]
    assert sorted(keys) == wanted
    lanes = defaultdict(list)
    for visit in visits:
        lanes["model", visit.unit.model].append(visit)
        lanes["stage", visit.stage].append(visit)
    for (kind, _), lane in lanes.items():
        lane.sort(key=lambda visit: visit.start)
        for before, after in itertools.pairwise(lane):
            assert before.end <= after.start
            if kind == "model":
                assert before.unit.epoch <= after.unit.epoch
                assert before.unit.ends_epoch == (before.unit.epoch < after.unit.epoch)


@pytest.mark.parametrize("order", ORDERS)
@given(sizes=SIZES, seed=st.integers(0, 99))
def test_every_unit_is_trained_once_and_never_in_parallel(order, sizes, seed):
    draw = random.Random(seed)
    speed = [draw.uniform(1, 8) for _ in range(sizes[0])]
    check(simulate(Scheduler(*sizes, order=order), lambda unit: speed[unit.model]), *sizes)


def test_hopper_keeps_all_stages_busy_from_the_start():
    assert simulate(Scheduler(6, 3, 4, order="hopper"), lambda _: 1.0)[-1].end == 6 * 4


def test_a_lost_unit_is_repeated_first_and_a_failed_model_is_dropped():
    scheduler = Scheduler(3, 2, 1, order="ring")
    lost = scheduler.take([0])
    assert lost == Unit(0, 0, 0)
    assert scheduler.take([1]) is None
    scheduler.lost(lost)
    assert scheduler.take([0]) == lost
    scheduler.fail(lost, "diverged")
    rest = simulate(scheduler, lambda _: 1.0)
    assert sorted({visit.unit.model for visit in rest}) == [1, 2]
    assert scheduler.models[0].reason == "diverged"


@given(sizes=SIZES, seed=st.integers(0, 99), steps=st.integers(0, 30))
def test_an_interrupted_sweep_resumes(sizes, seed, steps):
    draw = random.Random(seed)
    quality = [draw.random() for _ in range(sizes[0])]
    first = Scheduler(*sizes, order="hopper")
    for _ in range(steps):
        units = [unit for stage in range(sizes[1]) if (unit := first.take([stage])) is not None]
        draw.shuffle(units)
        for unit in units:
            first.done(unit, score=quality[unit.model])
    second = Scheduler(*sizes, order="hopper")
    second.restore([model.visits for model in first.models], [model.scores for model in first.models])
    assert [model.status for model in second.models] == [model.status for model in first.models]
    simulate(second, lambda _: 1.0, score=lambda unit: quality[unit.model])
    assert second.finished
    assert all(model.status == "over" for model in second.models)


def test_records_of_other_sweeps_are_refused():
    with pytest.raises(StateError, match="visited partition 1 in epoch 0"):
        Scheduler(1, 2, 1, order="ring").restore([[1]], [[]])
