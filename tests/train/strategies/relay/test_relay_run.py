"""Whole sweeps on real clips, by the command that users type: three models, two stages, and stages that are killed."""

import contextlib
import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.common.ports import reserved_port
from fastvid.train.config import config as recipes
from fastvid.train.loop.loop import Stepper
from fastvid.train.records import records as metrics
from fastvid.train.records.checkpoint import decode
from fastvid.train.strategies.ddp import Ddp
from fastvid.train.strategies.relay.hub import TokenStore
from fastvid.train.strategies.relay.scheduler import Unit
from fastvid.train.strategies.relay.stage import Clips, check_shared
from fastvid.train.strategies.relay.sweep import Relay, prepare
from tests import forks
from tests.skips import soak_but
from tests.train import small, toy

ROOT = Path(__file__).parents[4]
EPOCHS, STAGES, MODELS = 2, 2, 3
TRAIN, HELD_OUT = 22, 5
TOKEN = "0123456789abcdef"

RECIPE = """
from dataclasses import replace
from tests.train import small

def sweep():
    models = [
        small.config(
            {data!r}, "sweep", options={{"width": width}}, optim={{"base_lr": rate, "name": name, "ema_decay": ema}},
            run={{"seed": width}}, global_batch_size=batch,
        )
        for width, name, rate, batch, ema in (
            (8, "sgd", 0.02, 4, None), (16, "adamw", 0.001, 3, 0.9), (12, "sgd", 0.05, 5, None)
        )
    ]
    return [replace(model, sync="relay") for model in models]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    small.pack(folder, TRAIN, HELD_OUT, 8, 16)
    (folder / "recipe.py").write_text(RECIPE.format(data=str(folder / "shards")))
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """Both processes are killed at about the third visit of the second one, and started again."""
    arguments = ("fastvid.train", folder / "recipe.py", f"run.out={folder / 'out'}", "--json")
    killed = forks.ranks(STAGES, *arguments, folder=folder, FASTVID_FAULT="visit:5")
    assert all(rank.returncode for rank in killed), killed
    result, _ = done = forks.ranks(STAGES, *arguments, folder=folder)
    assert [rank.returncode for rank in done] == [0] * STAGES, done
    printed, written = json.loads(result.stdout), json.loads((folder / "out" / "results.json").read_text())
    assert printed == written
    return dict(written)


def same(one, other):
    """Return whether two states are equal bit by bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def check_against_training_alone(folder, out):
    """Weights, moments and counters are those of a plain loop over the partitions in the recorded order."""
    token_store = TokenStore(MODELS, str(out / "tokens"))
    alone = Clips(recipes.load_all(str(folder / "recipe.py")), STAGES, torch.device("cpu"))
    alone.assign(tuple(range(STAGES)))
    member = toy.ALONE
    visits, _ = token_store.history()
    for number in range(MODELS):
        replica = alone.replica(number, fresh=True)
        stepper = Stepper(alone.configs[number], member, Ddp(member))
        with torch.random.fork_rng(devices=[]):
            for index, partition in enumerate(visits[number]):
                with contextlib.closing(alone.loader(Unit(number, index // STAGES, partition))) as loader:
                    for batch in loader:
                        stepper.step(replica, batch)
                        replica.samples += batch.stop - batch.start
        token = token_store.get(number)
        assert token is not None
        assert same(decode(token, "token")["replica"], replica.state_dict())
        weights = torch.load(out / "weights" / f"model-{number:04d}.pt", weights_only=True)
        with replica.averaged():
            assert same(dict(weights), dict(replica.model.state_dict()))


@pytest.mark.usefixtures("one_thread")
def test_models_equal_those_of_a_plain_loop_when_processes_are_killed(folder, found):
    rows = metrics.read(folder / "out" / metrics.METRICS_FILE)
    starts = [row["visits"] for row in rows if row["kind"] == "start"]
    assert len(starts) == 2
    assert starts[0] == 0 < starts[1]
    check_against_training_alone(folder, folder / "out")


def test_results_contain_scores_losses_and_bytes(folder, found):
    models = found["models"]
    assert sorted(model["model"] for model in models) == list(range(MODELS))
    assert [model["status"] for model in models] == ["over"] * MODELS
    assert [model["score"] for model in models] == sorted((model["score"] for model in models), reverse=True)
    for model in models:
        assert [sorted(model["visits"][:2]), sorted(model["visits"][2:])] == [[0, 1], [0, 1]]
        assert len(model["scores"]) == EPOCHS
        assert set(model["settings"]) >= {"model.options.width", "optim.name", "optim.base_lr"}
    assert found["dataset_bytes"]["loaded"] > 0
    # Every visit has a row with the samples that it trained on.
    rows = metrics.read(folder / "out" / metrics.METRICS_FILE)
    done = {(row["model"], row["epoch"], row["partition"]): row for row in rows if row["kind"] == "visit"}
    assert sorted(done) == [(m, e, s) for m in range(MODELS) for e in range(EPOCHS) for s in range(STAGES)]
    sizes = [model.data.global_batch_size for model in recipes.load_all(str(folder / "recipe.py"))]
    for (model, _, _), row in done.items():
        assert row["samples"] > 0
        assert row["samples"] % sizes[model] == 0
        assert row["lineage"][0]["samples"] == row["samples"]
    assert len([row for row in rows if row["kind"] == "eval"]) >= MODELS * EPOCHS


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_a_folder_with_a_sweep_is_refused_if_nothing_may_be_resumed(folder, found, words):
    changes = (f"run.out={folder / 'out'}", "run.resume=false", *words)
    wrong = forks.run("fastvid.train", folder / "recipe.py", *changes, folder=folder)
    assert wrong.returncode == 2
    assert "already contains a sweep" in wrong.stderr


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("fault", soak_but(["visit:2", "visited:2"], "visited:2"))
def test_a_killed_stage_of_another_job_does_not_stop_the_sweep(folder, fault):
    """Run a hub with a stage, and one in a separate job that dies in a visit, or before it has said what it trained."""
    out = folder / fault
    run = ("fastvid.train", folder / "recipe.py", f"run.out={out}")
    options = ["sync_options.partitions=2", "sync_options.adopt_s=0.5", "sync_options.order=ring"]
    with reserved_port() as port:
        hub = forks.start(*run, *options, f"sync_options.port={port}", folder=folder, FASTVID_TOKEN=TOKEN)
        stage = forks.start(
            *run, f"sync_options.hub=127.0.0.1:{port}", folder=folder, FASTVID_FAULT=fault, FASTVID_TOKEN=TOKEN
        )
        assert forks.wait(stage) == -signal.SIGKILL
        assert forks.wait(hub) == 0
    results = json.loads((out / "results.json").read_text())
    (lost,) = results["lost"]
    assert [model["status"] for model in results["models"]] == ["over"] * MODELS
    names = ("model", "epoch", "partition")
    again = [visit for visit in results["timeline"] if all(visit[name] == lost[name] for name in names)]
    assert len(again) == 1
    assert again[0]["stage"] != lost["stage"]
    check_against_training_alone(folder, out)


def test_a_model_whose_last_step_is_not_finite_fails(folder):
    first = recipes.load_all(str(folder / "recipe.py"))[0]
    data = replace(first.data, global_batch_size=TRAIN, last="keep")
    optim = replace(first.optim, base_lr=1e37, weight_decay=1e4)
    clips = Clips([replace(first, data=data, optim=optim)], 1, torch.device("cpu"))
    clips.assign((0,))
    token, report = clips.visit(Unit(0, 0, 0, ends_epoch=True), None)
    assert token == b""
    assert f"is not finite after {TRAIN} samples" in report["reason"]


def test_data_errors_are_raised_before_the_first_visit(folder, tmp_path):
    changes = (f"run.out={tmp_path}", "data.split=none", "data.where=nothing > 1")
    wrong = forks.run("fastvid.train", folder / "recipe.py", *changes, folder=folder)
    assert wrong.returncode != 0
    assert "nothing" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    (tmp_path / "file").touch()
    wrong = forks.run("fastvid.train", folder / "recipe.py", f"run.out={tmp_path / 'file'}", folder=folder)
    assert "Traceback" not in wrong.stderr
    assert f"{tmp_path / 'file'}/sweep.json" in wrong.stderr


def test_models_with_different_shared_settings_are_refused(folder, monkeypatch):
    monkeypatch.setenv("FASTVID_TOKEN", TOKEN)
    first, second, _ = recipes.load_all(str(folder / "recipe.py"))
    with toy.refused("share run.epochs, but it is 2 and 3"):
        check_shared([first, replace(second, run=replace(second.run, epochs=3)), first])
    with toy.refused("share data.split"):
        check_shared([first, replace(second, data=replace(second.data, split=None))])
    with toy.refused("fewer than 4 partitions"):
        Clips([first], 4, torch.device("cpu"))
    with toy.refused("a partition has"):
        Clips([replace(first, data=replace(first.data, global_batch_size=20))], 2, torch.device("cpu"))
    for options, message in (({"order": "star"}, "order is 'star'"), ({"hub": "here"}, "expected host:port")):
        with toy.refused(message):
            Relay.check(replace(first, sync_options=options))
    for name, value in (("loggers", ("jsonl", "wandb")), ("callbacks", ("my:Own",)), ("checkpoints", "s3://b/c")):
        with toy.refused(f"does not use run.{name}"):
            Relay.check(replace(first, run=replace(first.run, **{name: value})))


def test_a_refused_start_leaves_nothing_and_is_reported_once(folder, tmp_path):
    """The training split has three shards, too few for four partitions; the folder then takes another sweep."""
    out = tmp_path / "out"
    words = ("fastvid.train", folder / "recipe.py", f"run.out={out}", "sync_options.partitions=4")
    refused = forks.ranks(STAGES, *words, folder=folder)
    assert all(rank.returncode for rank in refused)
    assert "".join(rank.stderr for rank in refused).count("fewer than 4 partitions") == 1
    assert not out.exists()
    configs = [
        replace(config, run=replace(config.run, out=str(out)), sync_options={"partitions": 2})
        for config in recipes.load_all(str(folder / "recipe.py"))
    ]
    relay = Relay(toy.ALONE, partitions=2)
    assert prepare(configs, relay, STAGES)[0]["partitions"] == 2
    assert not out.exists()
