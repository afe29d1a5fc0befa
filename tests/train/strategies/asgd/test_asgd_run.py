"""``sync=asgd`` under the real trainer: alone, with ranks that share a job, and with jobs that die and join."""

import signal
from dataclasses import replace

import pytest
import torch

from bench.common.ports import reserved_port
from fastvid.errors import StateError
from fastvid.models.ghost import use_ghost_norm
from fastvid.train.loop.strategy import strategy_of
from fastvid.train.records import records as metrics
from fastvid.train.strategies.asgd.weights import Weights
from tests import forks
from tests.load.tools import until
from tests.train import toy
from tests.train.strategies import lab
from tests.train.strategies.asgd import jobs
from tests.train.strategies.asgd.kit import PLAIN, SGD_RULE, TOKEN

RANKS = 3
pytestmark = pytest.mark.usefixtures("one_thread")


def case(**changes):
    return lab.Case(sync="asgd", **changes)


def with_ghost_norm(trainer):
    use_ghost_norm(trainer.replica.model, 2)
    config = trainer.config
    trainer.config = replace(
        config, data=replace(config.data, group_size=2), model=replace(config.model, ghost_norm=True)
    )


@pytest.mark.parametrize(
    "optim",
    [{"groups": "tsm", "nesterov": True}, {"name": "adam", "clip_norm": 0.5}, {"name": "adagrad"}],
    ids=lambda o: str(o),
)
@pytest.mark.parametrize("setup", [None, with_ghost_norm])
def test_one_rank_trains_like_ddp(tmp_path, optim, setup):
    """Equal bit for bit: momentum, weight decay, schedule, groups, norm statistics, masked rows, lineage, metrics."""
    shared = {"optim": optim, "norm": True, "data": {"last": "mask", "bad": (3, 40)}, "setup": setup}
    runs = {
        name: lab.run(lab.Case(sync=name, options=options, **shared), tmp_path / name, toy.ALONE)
        for name, options in (("ddp", {}), ("asgd", {"push": "gradients", "lease_batches": 2}))
    }
    assert toy.difference(runs["ddp"], runs["asgd"]) == 0
    for key in ("over", "samples", "lineage", "score"):
        assert runs["asgd"][key] == runs["ddp"][key]
    rows = {name: metrics.curve(metrics.read(tmp_path / name / metrics.METRICS_FILE)) for name in runs}
    for plain, row in zip(rows["ddp"], rows["asgd"], strict=True):
        assert [row[key] for key in ("samples", "loss", "lr", "skipped")] == [
            plain[key] for key in ("samples", "loss", "lr", "skipped")
        ]
        assert (row["staleness_mean"], row["clients"], row["updates"]) == (0, 1, row["step"])


@pytest.mark.parametrize("steps", [7, 55])
def test_a_stopped_run_resumes_and_is_evaluated_if_it_was_stopped_after_its_last_step(tmp_path, steps):
    made = case(options=jobs.GRADIENTS, norm=True)
    whole = lab.run(made, tmp_path / "whole", toy.ALONE)
    stopped = lab.run(made, tmp_path / "again", toy.ALONE, toy.StopAfter(steps - 1))
    assert not stopped["over"]
    state = toy.newest(tmp_path / "again")
    assert state["replica"]["samples"] == sum(entry["samples"] for entry in state["lineage"]) == steps * toy.BATCH
    again = lab.run(made, tmp_path / "again", toy.ALONE)
    assert again["over"]
    assert (again["lineage"], again["score"]) == (whole["lineage"], whole["score"])
    assert toy.difference(whole, again) == 0


def test_server_statistics_are_the_running_average_of_the_clients():
    shard = Weights(4, SGD_RULE, [{"size": 2, **PLAIN}], dtype=torch.float64)
    shard.initialize(torch.tensor([1.0, 1.0, 5.0, 5.0]))
    shard.step(torch.tensor([1.0, 1.0, 7.0, 9.0]), 0.5)
    # The values of a single client have weight 1, those of one of four 1/4.
    assert shard.state_dict()["values"].tolist() == [0.5, 0.5, 7.0, 9.0]
    shard.step(torch.tensor([1.0, 1.0, 3.0, 5.0]), 0.5, share=0.25)
    assert shard.state_dict()["values"].tolist() == [0.0, 0.0, 6.0, 8.0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder with the results of three ranks of one job."""
    folder = tmp_path_factory.mktemp("asgd")
    assert toy.spawn(RANKS, folder, "plain", module=jobs.__name__) == [0] * RANKS
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return lab.run(lab.Case(sync="ddp"), tmp_path_factory.mktemp("ddp"), toy.ALONE)


def test_ranks_train_on_every_sample_once(folder, expected):
    first, *_ = lab.results(folder, "plain", RANKS)
    assert first["over"]
    # The same samples at the same positions of the same epochs as with ddp, each acknowledged once.
    assert first["lineage"] == expected["lineage"] == toy.newest(folder / "plain")["lineage"]
    assert first["samples"] == expected["samples"]
    untrained = toy.score(toy.ALONE, bad=())
    assert first["score"]["scored"] == toy.NUM_SAMPLES
    assert first["score"]["loss"] < 0.9 * untrained.loss
    # The other ranks took part.
    rows = metrics.curve(metrics.read(folder / "plain" / metrics.METRICS_FILE))
    assert max(row["clients"] for row in rows) == RANKS
    assert rows[-1]["step"] < expected["samples"] // toy.BATCH
    assert rows[-1]["lost"] == rows[-1]["returned"] == 0
    assert max(row.get("staleness_mean", 0.0) for row in rows) > 1


def test_states_of_other_versions_are_refused(tmp_path):
    lab.run(case(options=jobs.GRADIENTS), tmp_path / "one", toy.ALONE, toy.StopAfter(3))
    other = lab.build(case(), tmp_path / "one", toy.ALONE)
    state = toy.newest(tmp_path / "one")
    own = state["strategy"]["state"]
    for changes, message in (
        ({"push": "deltas"}, "push=deltas, which is unknown"),
        ({"servers": own["servers"] * 2}, "written with 2 server shards, which are gone"),
    ):
        with toy.refused(message, kind=StateError):
            other.load_state_dict({**state, "strategy": {"name": "asgd", "state": {**own, **changes}}})
    other.recorder.close()


def test_what_a_server_cannot_train_is_refused(tmp_path):
    config = lab.config_of(lab.Case(sync="asgd"), tmp_path)
    strategy_of(config)
    for changed, what in (
        (replace(config, run=replace(config.run, amp="fp16")), "run.amp=fp16"),
        (replace(config, optim=replace(config.optim, name="lamb")), "optim.name=lamb"),
        (replace(config, optim=replace(config.optim, freeze=("0",))), "optim.freeze"),
    ):
        with toy.refused(f"sync=asgd does not support {what}"):
            strategy_of(changed)


def run_jobs(folder, **faults):
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


def test_a_killed_client_loses_its_lease_and_affects_no_other_client(tmp_path, expected):
    """Server and clients are separate jobs; one client dies in its third push."""
    codes = run_jobs(tmp_path, server="", steady="", doomed="payload-push:3")
    assert codes == {"server": 0, "steady": 0, "doomed": -signal.SIGKILL}
    server, steady = torch.load(tmp_path / "server.pt"), torch.load(tmp_path / "steady.pt")
    assert server["over"]
    assert server["lineage"] == expected["lineage"]
    last = metrics.curve(metrics.read(tmp_path / "server" / metrics.METRICS_FILE))[-1]
    assert last["lost"] == 1
    # Two of the three batches of its first lease were acknowledged.
    assert last["returned"] == (jobs.PERIOD - 2) * toy.BATCH
    assert sum(entry["samples"] for entry in steady["lineage"]) > 0
    # A client of another job writes no checkpoint and scores nothing.
    assert not list((tmp_path / "steady" / "checkpoints").glob("*.pt"))
    assert steady["score"] is None


def test_a_killed_server_resumes_from_its_checkpoint(tmp_path, expected):
    codes = run_jobs(tmp_path, server="step:9", client="")
    assert codes["server"] == -signal.SIGKILL
    # The client reports that the server is gone.
    assert codes["client"] == 1
    before = toy.newest(tmp_path / "server")
    done = sum(entry["samples"] for entry in before["lineage"])
    # It saves after its own pushes.
    assert 8 * toy.BATCH <= done < expected["samples"]
    assert run_jobs(tmp_path, server="", client="") == {"server": 0, "client": 0}
    result = torch.load(tmp_path / "server.pt")
    assert result["lineage"] == expected["lineage"]
    starts = [row for row in metrics.read(tmp_path / "server" / metrics.METRICS_FILE) if row["kind"] == "start"]
    assert [row["samples"] for row in starts] == [0, done]


def test_a_client_of_another_job_joins_in_the_middle(tmp_path, expected):
    """The server is in a step of its own until the new client is in its first one."""
    with reserved_port() as port:
        server = forks.start(jobs.__name__, tmp_path, "job", "server", port, "late", FASTVID_TOKEN=TOKEN)
        until((tmp_path / "server.middle").exists, 250)
        late = forks.start(jobs.__name__, tmp_path, "job", "late", port, FASTVID_TOKEN=TOKEN)
        assert [forks.wait(job) for job in (server, late)] == [0, 0]
    result, joined = torch.load(tmp_path / "server.pt"), torch.load(tmp_path / "late.pt")
    assert result["lineage"] == expected["lineage"]
    # What the server's rank had done before was not done again, and the new client's learning rate is as far.
    assert 0 < sum(entry["samples"] for entry in joined["lineage"]) <= expected["samples"] - jobs.MIDDLE * toy.BATCH
    assert joined["trace"]["samples"][0] >= (jobs.MIDDLE - 1) * toy.BATCH
    # It started with the server's weights.
    untrained = torch.cat([value.flatten() for value in toy.net().parameters()]).detach()
    assert (joined["trace"]["weights"][0] - untrained).abs().max() > 0.01
    rows = metrics.curve(metrics.read(tmp_path / "server" / metrics.METRICS_FILE))
    assert max(row["clients"] for row in rows) == 2
    assert rows[-1]["lost"] == rows[-1]["returned"] == 0


def test_a_rank_that_stands_still_stops_no_other(tmp_path, expected):
    """Of three ranks the last one stands in its second step until the first has done many."""
    assert toy.spawn(3, tmp_path, "standing", module=jobs.__name__) == [0, 0, 0]
    first, second, standing = lab.results(tmp_path, "standing", 3)
    assert first["lineage"] == expected["lineage"]
    assert len(first["trace"]["weights"]) >= jobs.AHEAD
    assert len(second["trace"]["weights"]) > jobs.PERIOD
    assert len(standing["trace"]["weights"]) < jobs.AHEAD
