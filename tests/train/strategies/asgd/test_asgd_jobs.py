"""``sync=asgd`` with deltas under the real trainer: alone, stopped, and with jobs that die and join."""

from __future__ import annotations

import math
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.common.ports import reserved_port
from fastvid.errors import UsageError
from fastvid.train.loop.loop import Trainer
from fastvid.train.loop.strategy import strategy_of
from fastvid.train.parts.replica import Freezer
from fastvid.train.records import records as metrics
from fastvid.train.records.checkpoint import Checkpoints, decode
from fastvid.train.strategies.asgd.messages import ServerMessage
from fastvid.train.strategies.shared.link import Link
from tests import forks
from tests.train import toy
from tests.train.strategies import lab
from tests.train.strategies.asgd import jobs
from tests.train.strategies.asgd.kit import TOKEN, until

STEPS = toy.EPOCHS * lab.STEPS


pytestmark = pytest.mark.usefixtures("one_thread")


def case(options: dict[str, Any], **changes: Any) -> lab.Case:
    return lab.Case(options, sync="asgd", **changes)


def near(a: dict[str, Any], b: dict[str, Any], atol: float) -> bool:
    return all(torch.allclose(value, b["weights"][name], rtol=0, atol=atol) for name, value in a["weights"].items())


def newest(folder: Path) -> dict[str, Any]:
    found = Checkpoints(str(folder / "checkpoints")).newest()
    assert found is not None
    return decode(found.data, found.name)


def test_one_client_that_pushes_each_step_is_ddp_bit_for_bit(tmp_path: Path) -> None:
    """No weight of this objective halves in a step, so w - (w - v) is v without rounding (Sterbenz's lemma)."""
    shared: dict[str, Any] = {"optim": lab.PLAIN | lab.CONSTANT, "noise": 0.0}
    plain = lab.run(lab.Case(sync="ddp", **shared), tmp_path / "ddp", jobs.ALONE)
    made = lab.run(case({"period": 1, "outer": "none"}, **shared), tmp_path / "asgd", jobs.ALONE)
    for after in ("weights", "samples", "lr"):
        pairs = list(zip(made["trace"][after], plain["trace"][after], strict=True))
        assert len(pairs) == STEPS
        assert all(torch.equal(a, b) if after == "weights" else a == b for a, b in pairs)
    assert (made["lineage"], made["score"]) == (plain["lineage"], plain["score"])


@pytest.mark.parametrize("period", [1, 4])
def test_one_client_without_an_outer_optimizer_trains_like_ddp(tmp_path: Path, period: int) -> None:
    """Momentum, schedule, norm statistics, masked rows; LARS and a part that is frozen at first."""

    def setup(made: Trainer) -> None:
        made.replica.freezer = Freezer(made.replica.model, ["0:1.5"], lab.STEPS * toy.BATCH)

    shared: dict[str, Any] = {
        "optim": {"name": "lars", "momentum": 0.9},
        "norm": True,
        "data": {"last": "mask", "bad": (3, 40)},
        "setup": setup,
    }
    plain = lab.run(lab.Case(sync="ddp", **shared), tmp_path / "ddp", jobs.ALONE)
    made = lab.run(case({"period": period, "outer": "none"}, **shared), tmp_path / "asgd", jobs.ALONE)
    assert near(made, plain, 1e-12)
    assert made["lineage"] == plain["lineage"]
    assert made["score"]["scored"] == plain["score"]["scored"]
    assert math.isclose(made["score"]["loss"], plain["score"]["loss"], abs_tol=1e-12)
    # The convolution was frozen for an epoch and a half, bit for bit.
    size = made["weights"]["0.weight"].numel() + made["weights"]["0.bias"].numel()
    trace: list[Tensor] = made["trace"]["weights"]
    still = [bool((weights[:size] == trace[0][:size]).all()) for weights in trace]
    assert 1.5 <= sum(still) / -(-toy.NUM_SAMPLES // toy.BATCH) < 1.6


def test_a_run_pushes_once_a_period_and_once_at_the_end_of_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: Counter[ServerMessage] = Counter()
    volume: Counter[ServerMessage] = Counter()
    plain = Link.send

    def send(link: Link, words: Any, payload: Tensor | None = None, checksum: int | None = None) -> None:
        if words[0] and words[0] < ServerMessage.DONE:
            sent[ServerMessage(words[0])] += 1
            volume[ServerMessage(words[0])] += 0 if payload is None else payload.nbytes
        plain(link, words, payload, checksum)

    monkeypatch.setattr(Link, "send", send)
    made = lab.run(case({"period": 4}), tmp_path, jobs.ALONE)
    pushes = toy.EPOCHS * -(-lab.STEPS // 4)
    size = sum(value.numel() for value in made["weights"].values())
    assert volume[ServerMessage.DELTA] == pushes * size * 8
    assert (sent[ServerMessage.DELTA], sent[ServerMessage.FETCH], sent[ServerMessage.LEASE]) == (
        pushes,
        pushes,
        pushes + 1,
    )
    assert not sent[ServerMessage.GRADIENT]


@pytest.mark.parametrize("stop", [2, 13])
def test_a_stopped_run_repeats_nothing_and_ends_with_the_same_bits(tmp_path: Path, stop: int) -> None:
    """It stops with the next push, so that the optimizer is not ahead of the server."""
    made = case({"period": 4}, norm=True, optim={"momentum": 0.9})
    whole = lab.run(made, tmp_path / "whole", jobs.ALONE)
    stopped = lab.run(made, tmp_path / "again", jobs.ALONE, toy.StopAfter(stop))
    assert not stopped["over"]
    state = newest(tmp_path / "again")
    # An epoch of 11 steps has pushes after 4, 8 and 11.
    done = {2: 4, 13: 15}[stop] * toy.BATCH
    assert state["replica"]["samples"] == sum(entry["samples"] for entry in state["lineage"]) == done
    again = lab.run(made, tmp_path / "again", jobs.ALONE)
    assert again["over"]
    assert again["lineage"] == whole["lineage"]
    assert near(again, whole, 0.0)


def test_deltas_allow_what_gradients_do_not(tmp_path: Path) -> None:
    config = lab.config_of(case({}), tmp_path)
    for changed, what in (
        (replace(config, run=replace(config.run, amp="fp16")), "run.amp=fp16"),
        (replace(config, optim=replace(config.optim, name="lamb")), "optim.name=lamb"),
        (replace(config, optim=replace(config.optim, freeze=("0",))), "optim.freeze"),
    ):
        strategy_of(changed)
        with pytest.raises(UsageError, match=f"push=gradients does not support {what}") as error:
            strategy_of(replace(changed, sync_options={"push": "gradients"}))
        assert "push=deltas" in (error.value.hint or "")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return lab.run(lab.Case(sync="ddp"), tmp_path_factory.mktemp("ddp"), jobs.ALONE)


def run_jobs(folder: Path, **faults: str) -> dict[str, int]:
    """Runs jobs of one process each, which take their first steps together. Exit codes by name; a name comes with what
    is to kill it, or nothing."""
    for old in folder.glob("*.steps"):
        old.unlink()
    with reserved_port() as port:
        running = {
            name: forks.start(
                jobs.__name__, folder, "job", name, port, *faults, FASTVID_FAULT=fault, FASTVID_TOKEN=TOKEN
            )
            for name, fault in faults.items()
        }
        return {name: forks.wait(process) for name, process in running.items()}


def test_a_killed_client_loses_its_lease_and_affects_no_other_client(tmp_path: Path, expected: dict[str, Any]) -> None:
    """Server and clients are separate jobs; one client dies in the middle of its third push."""
    codes = run_jobs(tmp_path, server="", steady="", doomed=f"payload-{ServerMessage.DELTA:d}:3")
    assert codes == {"server": 0, "steady": 0, "doomed": -signal.SIGKILL}
    server, steady = torch.load(tmp_path / "server.pt"), torch.load(tmp_path / "steady.pt")
    assert server["over"]
    assert server["lineage"] == expected["lineage"]
    last = metrics.curve(metrics.read(tmp_path / "server" / metrics.METRICS_FILE))[-1]
    assert last["lost"] == 1
    # The deltas of two leases were acknowledged; an epoch of 11 has leases of 3, 3, 3 and 2.
    assert last["returned"] in [batches * toy.BATCH for batches in (jobs.PERIOD, 2)]
    assert sum(entry["samples"] for entry in steady["lineage"]) > 0
    # A client of another job writes no checkpoint and scores nothing.
    assert not list((tmp_path / "steady" / "checkpoints").glob("*.pt"))
    assert steady["score"] is None


def test_a_killed_server_resumes_from_its_checkpoint(tmp_path: Path, expected: dict[str, Any]) -> None:
    codes = run_jobs(tmp_path, server="step:9", client="")
    assert codes["server"] == -signal.SIGKILL
    # The client reports that the server is gone.
    assert codes["client"] == 1
    before = newest(tmp_path / "server")
    done = sum(entry["samples"] for entry in before["lineage"])
    # It saves after its own pushes, each of which is at the end of a lease.
    assert 6 * toy.BATCH <= done < expected["samples"]
    assert run_jobs(tmp_path, server="", client="") == {"server": 0, "client": 0}
    result = torch.load(tmp_path / "server.pt")
    assert result["lineage"] == expected["lineage"]
    starts = [row for row in metrics.read(tmp_path / "server" / metrics.METRICS_FILE) if row["kind"] == "start"]
    assert [row["samples"] for row in starts] == [0, done]


def test_a_client_of_another_job_joins_in_the_middle(tmp_path: Path, expected: dict[str, Any]) -> None:
    """The server is in a step of its own until the new client is in its first one."""
    with reserved_port() as port:
        server = forks.start(jobs.__name__, tmp_path, "job", "server", port, "late", FASTVID_TOKEN=TOKEN)
        until((tmp_path / "server.middle").exists, 250)
        late = forks.start(jobs.__name__, tmp_path, "job", "late", port, FASTVID_TOKEN=TOKEN)
        assert [forks.wait(job) for job in (server, late)] == [0, 0]
    result, joined = torch.load(tmp_path / "server.pt"), torch.load(tmp_path / "late.pt")
    assert result["lineage"] == expected["lineage"]
    # What the server's rank had done before was not done again, and the new client's learning rate is as far.
    assert 0 < sum(entry["samples"] for entry in joined["lineage"]) <= (STEPS - jobs.MIDDLE) * toy.BATCH
    assert joined["trace"]["samples"][0] >= (jobs.MIDDLE - jobs.PERIOD) * toy.BATCH
    # It started with the merged weights.
    untrained = torch.cat([value.flatten() for value in toy.net().parameters()]).detach()
    assert (joined["trace"]["weights"][0] - untrained).abs().max() > 0.01
    rows = metrics.curve(metrics.read(tmp_path / "server" / metrics.METRICS_FILE))
    assert max(row["clients"] for row in rows) == 2
    assert rows[-1]["lost"] == rows[-1]["returned"] == 0


def test_a_rank_that_stands_still_stops_no_other(tmp_path: Path, expected: dict[str, Any]) -> None:
    """Of three ranks the last one stands in its second step until the first has done many; a merge needs all."""
    assert toy.spawn(3, tmp_path, "standing", module=jobs.__name__) == [0, 0, 0]
    first, second, standing = lab.results(tmp_path, "standing", 3)
    assert first["lineage"] == expected["lineage"]
    assert len(first["trace"]["weights"]) >= jobs.AHEAD
    assert len(second["trace"]["weights"]) > jobs.PERIOD
    assert len(standing["trace"]["weights"]) < jobs.AHEAD
