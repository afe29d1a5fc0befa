"""Whole sweeps: a hub in this process, stages in others."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from fastvid.train.strategies.relay import packed_state as tokens
from fastvid.train.strategies.relay.hub import Hub, Record
from fastvid.train.strategies.relay.scheduler import Order, Scheduler
from fastvid.train.strategies.relay.state_store import Shelf
from fastvid.train.strategies.relay.visit import read_weights
from tests.train.strategies.relay import relay_lab as lab

pytestmark = pytest.mark.soak  # many processes and real waiting: a minute or two

LOADS = lab.MODELS * lab.EPOCHS * lab.STAGES  # units of a sweep
FAULTS = ("visit:4", "visited:5")
HALFWAY = ((0, 3), (1, 1), (3, 6))  # models and their visits


@dataclass(frozen=True)
class Sweep:
    """What one left."""

    scheduler: Scheduler
    record: Record
    shelf: Shelf


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def sweeps(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sweep]:
    """All sweeps, by name. Processes start once: one stage works in all of them, one in those that nothing disturbs,
    and two are killed in one each."""
    folder = tmp_path_factory.mktemp("halfway")
    halfway = Shelf(lab.MODELS, str(folder))
    for model, visits in HALFWAY:
        token = lab.token_after(model, ([0, 1] * lab.EPOCHS)[:visits])
        assert token is not None
        halfway.put(model, token)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    steady = lab.start_stage(store.port, "ring", "hopper", *FAULTS, "resumed")
    second = lab.start_stage(store.port, "ring", "hopper")
    doomed = [lab.start_stage(store.port, fault, FASTVID_FAULT=fault) for fault in FAULTS]
    found: dict[str, Sweep] = {}
    try:
        for name in ("ring", "hopper", *FAULTS, "resumed"):
            order: Order = "hopper" if name == "hopper" else "ring"
            found[name] = run(PrefixStore(name, store), order, folder if name == "resumed" else None)
        assert [stage.wait(timeout=300) for stage in (steady, second)] == [0, 0]
        assert [stage.wait(timeout=300) for stage in doomed] == [-signal.SIGKILL] * 2
    finally:
        for stage in (steady, second, *doomed):
            stage.kill()
            stage.wait()
    return found


def run(store: PrefixStore, order: Order, folder: Path | None) -> Sweep:
    scheduler = Scheduler(lab.MODELS, lab.STAGES, lab.EPOCHS, order=order)
    shelf = Shelf(lab.MODELS, None if folder is None else str(folder))
    scheduler.restore(*shelf.history())
    hub = Hub(scheduler, store, shelf, timeout_s=lab.TIMEOUT_S, adopt_s=0.2, start_s=0.2 if folder else None)
    store.set("open", "")
    return Sweep(scheduler, hub.run(), shelf)


@pytest.fixture
def ring(sweeps: dict[str, Sweep]) -> Sweep:
    return sweeps["ring"]


def check_against_training_alone(sweep: Sweep) -> None:
    """Weights, statistics, moments and counters are those of a plain loop over the partitions in the recorded order."""
    for progress in sweep.scheduler.models:
        token = sweep.shelf.get(progress.model)
        assert token is not None
        expected = lab.alone(progress.model, progress.visits).state_dict()
        found = tokens.unpack(token)["replica"]
        # The checksum of everything, bit for bit.
        assert tokens.pack(found) == tokens.pack(expected)


def test_models_are_those_of_sequential_training_bit_for_bit(ring: Sweep) -> None:
    assert [model.status for model in ring.scheduler.models] == ["over"] * lab.MODELS
    check_against_training_alone(ring)
    # Bytes differ from model to model: these are different models.
    assert len({len(ring.shelf.get(model) or b"") for model in range(lab.MODELS)}) == lab.MODELS
    assert ring.record.lost == []


def test_the_order_matters_so_equality_is_no_accident(ring: Sweep) -> None:
    token = ring.shelf.get(0)
    assert token is not None
    weights, others = read_weights(token), lab.alone(0, [1, 0] * lab.EPOCHS).model.state_dict()
    assert any((weights[name] != others[name]).any() for name in weights)


def test_timeline_of_a_ring(ring: Sweep) -> None:
    record = ring.record
    keys = [(visit["model"], visit["epoch"], visit["partition"]) for visit in record.visits]
    wanted = [(m, e, s) for m in range(lab.MODELS) for e in range(lab.EPOCHS) for s in range(lab.STAGES)]
    assert sorted(keys) == wanted
    for model in range(lab.MODELS):
        mine = sorted((visit for visit in record.visits if visit["model"] == model), key=lambda visit: visit["start"])
        assert [(visit["epoch"], visit["partition"]) for visit in mine] == [
            key[1:] for key in wanted if key[0] == model
        ]
        assert all(before["end"] <= after["start"] for before, after in itertools.pairwise(mine))
    # Each stage loaded its partition once, and every visit took place where the partition is.
    home = {entry["stage"]: entry["partitions"] for entry in record.stages}
    assert sorted(itertools.chain(*home.values())) == list(range(lab.STAGES))
    assert len(record.stages) == lab.STAGES
    assert all(visit["partition"] in home[visit["stage"]] for visit in record.visits)


def test_a_hopper_gives_models_that_its_record_reproduces(sweeps: dict[str, Sweep]) -> None:
    hopper = sweeps["hopper"]
    assert len(hopper.record.visits) == LOADS
    check_against_training_alone(hopper)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_killed_stage_costs_one_unit_and_changes_nothing(sweeps: dict[str, Sweep], ring: Sweep, fault: str) -> None:
    # Killed before its fourth unit; or after its fourth was trained (loading its partition counts) and before it said
    # so. The other stage takes its partition over.
    record, shelf = sweeps[fault].record, sweeps[fault].shelf
    (lost,) = record.lost
    assert [shelf.get(model) for model in range(lab.MODELS)] == [ring.shelf.get(model) for model in range(lab.MODELS)]
    names = ("model", "epoch", "partition")
    again = [visit for visit in record.visits if all(visit[name] == lost[name] for name in names)]
    assert [visit["stage"] for visit in again] == [1 - lost["stage"]]
    assert len(record.visits) == LOADS
    assert record.stages[-1]["partitions"] == [0, 1]


def test_a_sweep_goes_on_from_its_tokens(sweeps: dict[str, Sweep], ring: Sweep) -> None:
    # As a hub leaves them that was killed, some models further than others; and with one stage instead of two.
    record, shelf = sweeps["resumed"].record, sweeps["resumed"].shelf
    assert len(record.visits) == LOADS - sum(visits for _, visits in HALFWAY)
    assert [shelf.get(model) for model in range(lab.MODELS)] == [ring.shelf.get(model) for model in range(lab.MODELS)]
