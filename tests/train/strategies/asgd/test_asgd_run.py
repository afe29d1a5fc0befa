"""``sync=asgd`` under the real trainer: alone, with ranks that share a job, and with clients that die."""

import pytest
import torch

from fastvid.errors import StateError, UsageError
from fastvid.models.pipeline import place_on_devices
from fastvid.train.records import records as metrics
from fastvid.train.records.checkpoint import Checkpoints, decode
from fastvid.train.strategies.asgd.weights import WeightRange, Weights
from tests.train import toy
from tests.train.strategies import lab
from tests.train.strategies.asgd import jobs
from tests.train.strategies.asgd.kit import SGD_RULE

RANKS = 3
pytestmark = pytest.mark.usefixtures("one_thread")


def case(**changes):
    return lab.Case(sync="asgd", **changes)


def same(a, b):
    return all(torch.equal(value, b["weights"][name]) for name, value in a["weights"].items())


def newest(folder):
    found = Checkpoints(str(folder / "checkpoints")).newest()
    assert found is not None
    return decode(found.data, found.name)


@pytest.mark.parametrize(
    "optim",
    [{"groups": "tsm", "nesterov": True}, {"name": "adam", "clip_norm": 0.5}, {"name": "adagrad"}],
    ids=lambda o: str(o),
)
def test_one_rank_trains_like_ddp(tmp_path, optim):
    """Equal bit for bit: momentum, weight decay, schedule, groups, norm statistics, masked rows, lineage, metrics."""
    shared = {"optim": optim, "norm": True, "data": {"last": "mask", "bad": (3, 40)}}
    runs = {
        name: lab.run(lab.Case(sync=name, options=options, **shared), tmp_path / name, jobs.ALONE)
        for name, options in (("ddp", {}), ("asgd", {"push": "gradients", "lease_batches": 2}))
    }
    assert same(runs["ddp"], runs["asgd"])
    for key in ("over", "samples", "lineage", "score"):
        assert runs["asgd"][key] == runs["ddp"][key]
    rows = {name: metrics.curve(metrics.read(tmp_path / name / metrics.METRICS_FILE)) for name in runs}
    for plain, row in zip(rows["ddp"], rows["asgd"], strict=True):
        assert [row[key] for key in ("samples", "loss", "lr", "skipped")] == [
            plain[key] for key in ("samples", "loss", "lr", "skipped")
        ]
        assert (row["staleness_mean"], row["clients"], row["updates"]) == (0, 1, row["step"])


def in_a_row(made):
    place_on_devices(made.replica.model, [torch.device("cpu")] * 2, 2)


def test_a_replica_may_span_several_devices(tmp_path):
    """With a pipeline of blocks and two micro-batches, the server receives the gradient of the whole batch."""
    runs = {
        "whole": lab.run(case(options=jobs.GRADIENTS), tmp_path / "whole", jobs.ALONE),
        "row": lab.run(case(options=jobs.GRADIENTS, setup=in_a_row), tmp_path / "row", jobs.ALONE),
        "ddp": lab.run(lab.Case(sync="ddp", setup=in_a_row), tmp_path / "ddp", jobs.ALONE),
    }
    assert same(runs["row"], runs["ddp"])
    assert runs["row"]["lineage"] == runs["whole"]["lineage"]
    # Sums over micro-batches round differently.
    differences = [
        float((runs["row"]["weights"][name] - value).abs().max()) for name, value in runs["whole"]["weights"].items()
    ]
    assert 0 < max(differences) < 1e-12


def test_a_stopped_run_resumes(tmp_path):
    made = case(options=jobs.GRADIENTS, norm=True)
    whole = lab.run(made, tmp_path / "whole", jobs.ALONE)
    stopped = lab.run(made, tmp_path / "again", jobs.ALONE, toy.StopAfter(6))
    assert not stopped["over"]
    state = newest(tmp_path / "again")
    assert state["replica"]["samples"] == sum(entry["samples"] for entry in state["lineage"]) == 7 * toy.BATCH
    again = lab.run(made, tmp_path / "again", jobs.ALONE)
    assert again["over"]
    assert again["lineage"] == whole["lineage"]
    assert same(whole, again)


def test_server_statistics_are_the_running_average_of_the_clients():
    shard = Weights(4, SGD_RULE, [WeightRange(0, 2), WeightRange(2, 4, averaged=True)], dtype=torch.float64)
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
    return lab.run(lab.Case(sync="ddp"), tmp_path_factory.mktemp("ddp"), jobs.ALONE)


def test_ranks_train_on_every_sample_once(folder, expected):
    first, *_ = lab.results(folder, "plain", RANKS)
    assert first["over"]
    # The same samples at the same positions of the same epochs as with ddp, each acknowledged once.
    assert first["lineage"] == expected["lineage"] == newest(folder / "plain")["lineage"]
    assert first["samples"] == expected["samples"]
    untrained = toy.score(jobs.ALONE, bad=())
    assert first["score"]["scored"] == toy.NUM_SAMPLES
    assert first["score"]["loss"] < 0.9 * untrained.loss
    # The other ranks took part.
    rows = metrics.curve(metrics.read(folder / "plain" / metrics.METRICS_FILE))
    assert max(row["clients"] for row in rows) == RANKS
    assert rows[-1]["step"] < expected["samples"] // toy.BATCH
    assert rows[-1]["lost"] == rows[-1]["returned"] == 0
    assert max(row.get("staleness_mean", 0.0) for row in rows) > 1


def test_conflicting_options_are_refused(tmp_path):
    for options, message in (
        ({"n_push": 8}, "no option 'n_push'"),
        ({"push": "deltas"}, "push is 'deltas'"),
        ({"shards": 2, "bound": 1}, "no option 'bound', 'shards'"),
        ({"lease_batches": 0}, "lease_batches is 0"),
        ({"server": "nowhere"}, "expected host:port"),
        ({"batch": "schedule"}, "no option 'batch'"),
    ):
        with pytest.raises(UsageError, match=message):
            lab.build(case(options=options), tmp_path, jobs.ALONE)
    lab.run(case(options=jobs.GRADIENTS), tmp_path / "one", jobs.ALONE, toy.StopAfter(3))
    other = lab.build(case(), tmp_path / "one", jobs.ALONE)
    state = newest(tmp_path / "one")
    own = state["strategy"]["state"]
    for changes, message in (
        ({"push": "deltas"}, "push=deltas, which is unknown"),
        ({"servers": own["servers"] * 2}, "written with 2 server shards, which are gone"),
    ):
        with pytest.raises(StateError, match=message):
            other.load_state_dict({**state, "strategy": {"name": "asgd", "state": {**own, **changes}}})
    other.recorder.close()
