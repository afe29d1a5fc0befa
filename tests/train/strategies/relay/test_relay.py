"""Whole sweeps: a hub in this process, stages in others."""

from __future__ import annotations

import itertools
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from fastvid.train.records.checkpoint import decode
from fastvid.train.strategies.relay.hub import Hub, SweepRecord
from fastvid.train.strategies.relay.scheduler import Order, Scheduler
from fastvid.train.strategies.relay.state import TokenStore
from tests.train.strategies.relay import relay_lab as lab

LOADS = lab.MODELS * lab.EPOCHS * lab.STAGES  # units of a sweep
FAULTS = ("visit:4", "visited:5")
HALFWAY = ((0, 3), (1, 1), (3, 6))  # models and their visits


@dataclass(frozen=True)
class Sweep:
    """The results of one sweep."""

    scheduler: Scheduler
    record: SweepRecord
    token_store: TokenStore


class Watched(TokenStore):
    """A token store that knows how many visits had been told when each token was stored."""

    def __init__(self, num_models: int, folder: str | None = None) -> None:
        super().__init__(num_models, folder)
        self.told = self.untold = self.stored = 0

    def tell(self, _visit: dict[str, Any]) -> None:
        self.told += 1

    def put(self, model: int, token: bytes, visits: int) -> None:
        self.stored += 1
        self.untold += self.told < self.stored
        super().put(model, token, visits)


# Many processes and real waiting: a minute or two.
pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def sweeps(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sweep]:
    """All sweeps, by name. Processes start once: one stage works in all of them, one in those that nothing disturbs,
    and two are killed in one each."""
    folder = tmp_path_factory.mktemp("halfway")
    halfway = TokenStore(lab.MODELS, str(folder))
    for model, visits in HALFWAY:
        token = lab.token_after(model, ([0, 1] * lab.EPOCHS)[:visits])
        assert token is not None
        halfway.put(model, token, visits)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    steady = lab.start_stage(store.port, "ring", "hopper", *FAULTS, "resumed")
    second = lab.start_stage(store.port, "ring", "hopper")
    doomed = [lab.start_stage(store.port, fault, FASTVID_FAULT=fault) for fault in FAULTS]
    found: dict[str, Sweep] = {}
    try:
        for name in ("ring", "hopper", *FAULTS, "resumed"):
            order: Order = "hopper" if name == "hopper" else "ring"
            found[name] = run(store, name, order, folder if name == "resumed" else None)
        assert [stage.wait(timeout=300) for stage in (steady, second)] == [0, 0]
        assert [stage.wait(timeout=300) for stage in doomed] == [-signal.SIGKILL] * 2
    finally:
        for stage in (steady, second, *doomed):
            stage.kill()
            stage.wait()
    return found


def run(store: TCPStore, name: str, order: Order, folder: Path | None) -> Sweep:
    scheduler = Scheduler(lab.MODELS, lab.STAGES, lab.EPOCHS, order=order)
    token_store = Watched(lab.MODELS, None if folder is None else str(folder))
    scheduler.restore(*token_store.history())
    hub = Hub(
        scheduler, token_store, timeout_s=lab.TIMEOUT_S, adopt_s=0.2, start_s=0.2 if folder else None,
        on_visit=token_store.tell,
    )  # fmt: skip
    store.set(name, hub.address.encode().decode())
    return Sweep(scheduler, hub.run(), token_store)


@pytest.fixture
def ring(sweeps: dict[str, Sweep]) -> Sweep:
    return sweeps["ring"]


def check_against_training_alone(sweep: Sweep) -> None:
    """Weights, statistics, moments and counters are those of a plain loop over the partitions in the recorded order."""
    for progress in sweep.scheduler.models:
        token = sweep.token_store.get(progress.model)
        assert token is not None
        expected = lab.alone(progress.model, progress.visits).state_dict()
        found = decode(token, "token")["replica"]
        assert lab.same(found, expected)


def test_models_equal_sequential_training_bit_for_bit(ring: Sweep) -> None:
    assert [model.status for model in ring.scheduler.models] == ["over"] * lab.MODELS
    check_against_training_alone(ring)
    # The models differ in size.
    assert len({len(ring.token_store.get(model) or b"") for model in range(lab.MODELS)}) == lab.MODELS
    assert ring.record.lost == []


def test_a_visit_is_recorded_before_its_token_is_stored(sweeps: dict[str, Sweep]) -> None:
    """Otherwise a kill in between leaves a visit that is done and has no row in the metrics."""
    for sweep in sweeps.values():
        store = sweep.token_store
        assert isinstance(store, Watched)
        assert store.stored > 0
        assert store.untold == 0


def test_a_different_order_of_visits_changes_the_model(ring: Sweep) -> None:
    token = ring.token_store.get(0)
    assert token is not None
    weights, others = decode(token, "token")["replica"]["model"], lab.alone(0, [1, 0] * lab.EPOCHS).model.state_dict()
    assert any((weights[name] != others[name]).any() for name in weights)


def test_a_ring_visits_partitions_in_order(ring: Sweep) -> None:
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
    # Each stage loaded its partition once, and every visit ran on the stage with the partition.
    home = {entry["stage"]: entry["partitions"] for entry in record.stages}
    assert sorted(itertools.chain(*home.values())) == list(range(lab.STAGES))
    assert len(record.stages) == lab.STAGES
    assert all(visit["partition"] in home[visit["stage"]] for visit in record.visits)


def test_a_hopper_sweep_trains_each_model_as_if_alone(sweeps: dict[str, Sweep]) -> None:
    hopper = sweeps["hopper"]
    assert len(hopper.record.visits) == LOADS
    check_against_training_alone(hopper)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_killed_stage_loses_one_unit_and_changes_no_model(sweeps: dict[str, Sweep], ring: Sweep, fault: str) -> None:
    # Killed before its fourth unit; or after its fourth was trained (loading its partition counts) and before it said
    # so. The other stage takes its partition over.
    record, token_store = sweeps[fault].record, sweeps[fault].token_store
    (lost,) = record.lost
    assert [token_store.get(model) for model in range(lab.MODELS)] == [
        ring.token_store.get(model) for model in range(lab.MODELS)
    ]
    names = ("model", "epoch", "partition")
    again = [visit for visit in record.visits if all(visit[name] == lost[name] for name in names)]
    assert [visit["stage"] for visit in again] == [1 - lost["stage"]]
    assert len(record.visits) == LOADS
    assert record.stages[-1]["partitions"] == [0, 1]


def test_a_sweep_resumes_from_its_tokens(sweeps: dict[str, Sweep], ring: Sweep) -> None:
    # Tokens as left by a killed hub, with some models further than others; resumed with one stage instead of two.
    record, token_store = sweeps["resumed"].record, sweeps["resumed"].token_store
    assert len(record.visits) == LOADS - sum(visits for _, visits in HALFWAY)
    assert [token_store.get(model) for model in range(lab.MODELS)] == [
        ring.token_store.get(model) for model in range(lab.MODELS)
    ]
