"""Makespan of whole sweeps with the real hub, links and stages, in which a visit is a sleep."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import TCPStore

from fastvid.train.strategies.relay import packed_state as tokens
from fastvid.train.strategies.relay.halving import Halving
from fastvid.train.strategies.relay.hub import Hub
from fastvid.train.strategies.relay.scheduler import Order, Scheduler, Unit
from fastvid.train.strategies.relay.simulate import ring_makespan
from fastvid.train.strategies.relay.stage import serve
from fastvid.train.strategies.relay.state_store import TokenStore

pytestmark = pytest.mark.soak  # timings, which want an idle machine

TIMEOUT_S = 60.0
VISIT_S = 0.25
ATTEMPTS = 3  # the fastest counts: what else the machine does only slows


class Sleeper:
    """A stage worker whose visits take a given time. The score of a model is its number."""

    def __init__(self, seconds: Callable[[Unit], float]) -> None:
        self._seconds = seconds

    def assign(self, partitions: tuple[int, ...]) -> dict[str, Any]:
        return {}

    def visit(self, unit: Unit, token: bytes | None) -> tuple[bytes, dict[str, Any]]:
        time.sleep(self._seconds(unit))
        done = 0 if token is None else tokens.unpack(token)["done"]
        return tokens.pack({"done": done + 1}), {"score": float(unit.model), "loss": 0.0}


def makespan(
    models: int,
    stages: int,
    epochs: int,
    order: Order = "ring",
    seconds: Callable[[Unit], float] = lambda _: VISIT_S,
    halving: Halving | None = None,
) -> tuple[float, float]:
    """Return the seconds from the first visit to the end of the last, and the seconds spent in visits."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    scheduler = Scheduler(models, stages, epochs, order=order, halving=halving)
    hub = Hub(scheduler, store, TokenStore(models), timeout_s=TIMEOUT_S, start_s=TIMEOUT_S)
    workers = [
        threading.Thread(target=serve, args=(store.clone(), Sleeper(seconds), TIMEOUT_S), daemon=True)  # type: ignore[attr-defined]
        for _ in range(stages)
    ]
    for worker in workers:
        worker.start()
    visits = hub.run().visits
    for worker in workers:
        worker.join(TIMEOUT_S)
    if halving is None:
        assert len(visits) == models * stages * epochs
    else:
        counts = halving.contenders(models)
        ends = [*halving.rungs, epochs]
        assert [len(model.visits) for model in scheduler.models] == [
            stages * ends[sum(models - model <= count for count in counts) - 1] for model in range(models)
        ]
    span = max(visit["end"] for visit in visits) - min(visit["start"] for visit in visits)
    return span, sum(visit["seconds"] for visit in visits)


@pytest.mark.parametrize(("models", "stages", "epochs"), [(2, 2, 3), (4, 2, 3), (5, 3, 2), (1, 2, 4), (2, 3, 3)])
def test_measured_ring_makespan_matches_the_formula(models: int, stages: int, epochs: int) -> None:
    """(M E + S - 1) t with at least as many models as stages; with fewer there are bubbles, as predicted."""
    expected = ring_makespan(models, stages, epochs) * VISIT_S
    found, worked = min(makespan(models, stages, epochs) for _ in range(ATTEMPTS))
    assert expected * 0.99 <= found <= 1.1 * expected
    busy = worked / (stages * found)
    assert busy == pytest.approx(models * epochs / ring_makespan(models, stages, epochs), rel=0.1)


def test_a_hopper_beats_a_ring_of_uneven_models() -> None:
    draw = random.Random(4)
    speed = [draw.uniform(1, 8) for _ in range(6)]

    def seconds(unit: Unit) -> float:
        return 0.03 * speed[unit.model]

    ring, _ = makespan(6, 3, 3, "ring", seconds)
    hopper, _ = makespan(6, 3, 3, "hopper", seconds)
    assert hopper < 0.95 * ring


def test_dropped_models_free_their_slots() -> None:
    """The worse half of four models is dropped after one of three epochs: 4 + 2 * 2 visits per stage, not 12."""
    stages = 2
    whole, _ = min(makespan(4, stages, 3) for _ in range(ATTEMPTS))
    halved, _ = min(makespan(4, stages, 3, halving=Halving((1,), 0.5)) for _ in range(ATTEMPTS))
    for found, visits in ((whole, 4 * 3), (halved, 4 + 2 * 2)):
        expected = (visits + stages - 1) * VISIT_S
        assert expected * 0.99 <= found <= 1.1 * expected
