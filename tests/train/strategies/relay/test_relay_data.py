"""A sweep's schedule and its data: every unit once, in parallel, with the partitions where they are read."""

import heapq
import itertools
import random
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.load.slow_server import slow_server, totals
from fastvid.errors import StateError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.clips.crops import CenterCrop
from fastvid.load.clips.sampling import Segments
from fastvid.train.strategies.relay.scheduler import Ownership, Scheduler, Unit
from fastvid.train.strategies.relay.stage import Partition, deal_shards, local_copies, samples_by_shard
from tests.load.loaders import clip_loader
from tests.train import small


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    small.pack(folder, 10, 2, 5, 8, kinds=2)
    return folder


@given(samples=st.lists(st.integers(0, 9), max_size=12), partitions=st.integers(1, 4))
def test_shards_are_assigned_once_and_evenly(samples, partitions):
    useful = [shard for shard, count in enumerate(samples) if count]
    if len(useful) < partitions:
        with pytest.raises(UsageError, match=f"fewer than {partitions} partitions"):
            deal_shards(samples, partitions)
        return
    dealt = deal_shards(samples, partitions)
    assert sorted(sum(dealt, ())) == useful
    sizes = [sum(samples[shard] for shard in shards) for shards in dealt]
    assert max(sizes) - min(sizes) <= max(samples)


def test_the_union_of_partitions_is_the_split(folder):
    whole = Dataset(str(folder / "shards"), split="train")
    counts = samples_by_shard(whole)
    assert counts == [5, 3, 2]
    parts = [Partition(whole, shards, whole.storage) for shards in deal_shards(counts, 2)]
    assert [part.keys.to_pylist() for part in parts] == [
        [f"clip{n:02d}" for n in range(5)], [f"clip{n:02d}" for n in range(5, 10)]
    ]  # fmt: skip
    assert [part.key(0) for part in parts] == ["clip00", "clip05"]
    assert np.concatenate([part.labels for part in parts]).tolist() == whole.labels.tolist()


def clips(dataset, epoch):
    loader = clip_loader(
        dataset, frames=Segments(2), spatial=CenterCrop(32), global_batch_size=2, num_threads=1, seed=3, rank=0,
        world_size=1,
    )  # fmt: skip
    loader.set_epoch(epoch)
    video = torch.cat([batch.video for batch in loader])
    loader.close()
    return video


def test_a_remote_partition_is_read_once(folder):
    local = Dataset(str(folder / "shards"), split="train")
    with slow_server(folder / "shards", 0) as (url, _):
        whole = Dataset(url, split="train")
        # As control, without copies on a disk every epoch reads its bytes.
        for storage, copied in ((whole.storage, False), (local_copies(url), True)):
            part = Partition(whole, (0, 2), storage)
            if copied:
                names = [f"{whole.generation.shards[shard].name}.{end}" for shard in (0, 2) for end in ("tar", "pkt")]
                assert part.load() == sum((folder / "shards" / name).stat().st_size for name in names)
            before = totals(url)["bytes"]
            for epoch in range(2):
                assert clips(part, epoch).equal(clips(Partition(local, (0, 2), local.storage), epoch))
            assert (totals(url)["bytes"] == before) == copied


def test_partitions_are_reassigned_when_stages_join_and_leave():
    owners = Ownership(3, start_s=10.0, adopt_s=5.0)
    owners.join(0)
    owners.join(1)
    assert (owners.of(0), owners.of(1)) == ((0,), (1,))
    assert not owners.adopt(9.9)
    assert owners.adopt(10.0)
    assert owners.of(0) == (0, 2)
    owners.leave(1, 20.0)
    assert not owners.adopt(24.9)
    owners.join(2)
    assert owners.of(2) == (1,)
    owners.join(3)
    assert (owners.of(0), owners.of(3)) == ((0,), (2,))
    owners.join(4)
    assert owners.of(4) == ()
    for stage in (0, 2, 3):
        owners.leave(stage, 30.0)
    assert owners.adopt(35.0)
    assert owners.of(4) == (0, 1, 2)


SIZES = st.tuples(st.integers(1, 7), st.integers(1, 4), st.integers(1, 4))
ORDERS = ("ring", "hopper")


@dataclass(frozen=True, slots=True)
class Visit:
    """A simulated visit."""

    unit: Unit
    stage: int
    start: float
    end: float


def simulate(scheduler, duration, *, score=lambda _: 0.0, stages=None):
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
