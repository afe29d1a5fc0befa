"""Each task learns what it should, alike on any number of ranks; one's own is trained, resumed and evaluated."""

import json
import os
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fastvid.cli.main import main as fastvid_command
from fastvid.errors import UsageError
from fastvid.load.batch.batch import Batch
from fastvid.train import Classification, MultiLabel, Phase, Regression, Task, fit
from fastvid.train.config import overrides
from fastvid.train.parts.evaluate import Gathered
from fastvid.train.records import records as metrics
from fastvid.train.run import dry_run, scoring
from fastvid.train.tasks.multi_label import average_precision
from fastvid.train.tasks.task import Sums
from tests.datasets import REPOSITORY
from tests.train import toy
from tests.train.strategies import lab
from tests.train.tasks import own

REACHED = {
    "classification": ("top1_percent", 100.0, 100.0),
    "multi_label": ("map_percent", 100.0, 100.0),
    "regression": ("r2", 0.9, 1.0),
    "masks": ("loss", 0.0, 0.9),  # of pixels whose variance is about 1
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    own.make(folder)
    sys.path.insert(0, str(REPOSITORY / "examples"))
    yield folder
    sys.path.remove(str(REPOSITORY / "examples"))


@pytest.fixture(scope="module")
def runs(folder):
    """What each task's run on one and on two ranks left, by world size and task."""
    two = folder / "two"
    two.mkdir()
    (two / "shards").symlink_to(folder / "shards")
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "examples")])
    assert toy.spawn(2, two, *own.TASKS, module=own.__name__, PYTHONPATH=path) == [0, 0]
    alone = {name: own.trained(name, folder / name, toy.ALONE) for name in own.TASKS}
    return {1: alone, 2: {name: lab.results(two, name, 2)[0] for name in own.TASKS}}


@pytest.mark.parametrize("name", own.TASKS)
def test_a_task_learns_alike_on_one_and_on_two_ranks(runs, name):
    one, two = runs[1][name], runs[2][name]
    metric, least, most = REACHED[name]
    assert least <= one["score"][metric] <= most
    assert one["losses"][-1] < 0.5 * one["losses"][0]
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-3)
    for number, value in one["score"].items():
        assert two["score"][number] == pytest.approx(value, rel=1e-3, abs=1e-4), number


def test_evaluation_agrees_with_that_of_the_run(folder, runs):
    for name in ("classification", "multi_label", "regression"):
        config = own.config(folder, name)
        score, inside = scoring.score(config).score, runs[1][name]["score"]
        for number, value in score.numbers.items():
            assert value == pytest.approx(inside[number], rel=1e-4, abs=1e-4), (name, number)
        assert scoring.score(config, "best", protocol="2x1").num_views == 2
    with pytest.raises(UsageError, match="`fastvid eval` needs predictions, but task Restore makes none"):
        scoring.score(own.config(folder, "masks"))


def test_the_best_checkpoint_follows_the_metric_of_the_task(folder, runs):
    for name in ("multi_label", "regression"):
        rows = metrics.curve(metrics.read(folder / name / "metrics.jsonl"), "eval")
        task = own.TASKS[name]
        best = json.loads((folder / name / "checkpoints" / "best.json").read_text())
        assert best["score"] == max(task.value(row) for row in rows)


OWN_TASK = """
from dataclasses import dataclass

import torch
from torch import nn

from fastvid.train import Task


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1)

    def forward(self, video, scale):
        return {"mean": self.head(video.mean((2, 3, 4)) * scale[:, None])}


@dataclass(frozen=True)
class Darkness(Task):
    factor: float = 1.0

    metric = "far_percent"

    def prepare(self, batch, phase):
        return type(batch)(batch, scale=torch.full((batch.num_rows,), self.factor))

    def inputs(self, batch):
        return batch.video, batch.scale

    def loss(self, outputs, batch):
        return (outputs["mean"][:, 0] - self.target(batch)[:, 0]).square()

    def measure(self, outputs, batch):
        return {"far": (self.loss(outputs, batch) > 0.5).float()}

    def metrics(self, sums):
        return {"far_percent": 100 * sums["far"] / max(1, sums["clips"])}

    def predict(self, outputs):
        return outputs["mean"]

    def target(self, batch):
        return batch.video.flatten(1).mean(1, keepdim=True)

    def score(self, predictions, targets):
        errors = (predictions - targets).square()
        return {"loss": float(errors.mean()), "far_percent": 100 * float((errors > 0.5).double().mean())}
"""
OWN_RECIPE = """
from tests.train.tasks import own
from pathlib import Path

def recipe():
    return own.config(Path({folder!r}), "classification")
"""


def test_a_task_of_ones_own_is_checked_trained_resumed_and_evaluated(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "my_task.py").write_text(OWN_TASK)
    (tmp_path / "recipe.py").write_text(OWN_RECIPE.format(folder=str(folder)))
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [str(tmp_path / "recipe.py"), f"run.out={tmp_path / 'run'}", "task=my_task:Darkness", "task.factor=2"]
    words += ["model.name=my_task:Pair", "run.epochs=3"]
    assert fastvid_command(["train", *words, "--dry-run"]) == 0
    assert not (tmp_path / "run").exists()
    assert fastvid_command(["train", *words]) == 0
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert all(0 <= row["far_percent"] <= 100 for row in rows if row["kind"] in ("train", "eval"))
    assert rows[0]["metric"] == "far_percent"
    assert fastvid_command(["train", *words, "run.epochs=4"]) == 2, "a key that is given twice"
    assert fastvid_command(["train", *words[:-1], "run.epochs=4"]) == 0
    starts = [row["samples"] for row in metrics.read(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "start"]
    assert starts == [0, 3 * own.TRAIN]
    capsys.readouterr()
    assert fastvid_command(["eval", *words[:-1], "--json", "--report", str(tmp_path / "eval.html")]) == 0
    assert json.loads(capsys.readouterr().out)["scored"] == own.HELD_OUT
    assert fastvid_command(["report", str(tmp_path / "run")]) == 0
    assert "held-out far" in (tmp_path / "run" / "report.html").read_text()
    saved = json.loads((tmp_path / "run" / "config.json").read_text())["task"]
    assert saved == {"type": "Darkness", "factor": 2.0}
    sys.modules.pop("my_task", None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["task=clasification"], "unknown task 'clasification'"),
        (["task=tests.train.tasks.own:Nope"], "has no 'Nope'"),
        (["task=no_such_module:Task"], "there is no module 'no_such_module'"),
        (["task=tests.train.tasks.own:make"], "is not a task"),
        (["task.mixup=-1"], "task.mixup is -1.0"),
        (["task.mixxup=1"], "did you mean task.mixup"),
        (["task=multi_label", "task.colum=actions"], "did you mean task.column"),
        (["task=multi_label", "task=regression"], "'task' is given twice"),
        (["task.mixup=0.2"], "mixing needs groups of clips, data.group_size is 1"),
        (["task=regression"], "name the columns"),
        (["task=regression", "task.columns=angle,actions"], "no finite number in column 'actions'"),
        (["task=regression", "task.columns=nothing"], "no column 'nothing'"),
        (["task=regression", "task.columns=angle", "model.num_classes=3"], "task.columns has 1"),
        (["task=multi_label", "task.column=angle"], "contains double, not lists"),
        (["task=multi_label", "task.column=actions", "model.num_classes=9"], "has 2 classes"),
        (["model.options.sidee=3"], "did you mean side?"),
    ],
)
def test_a_dry_run_refuses_what_a_run_refuses(folder, tmp_path, changes, message):
    for start in (lambda config: dry_run.check([config]), fit):
        with toy.refused(message):
            start(overrides.apply(own.config(folder, "classification"), [*changes, f"run.out={tmp_path}"]))
    config = SimpleNamespace(data=SimpleNamespace(label="label"), model=SimpleNamespace(num_classes=None))
    with toy.refused("the samples have no classes"):
        Classification().check_data(None, config)
    assert not (tmp_path / "metrics.jsonl").exists()


class Flat(nn.Module):
    """One output per clip, whatever the task."""

    def __init__(self, width=1):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, video):
        return video.mean((1, 2, 3, 4))[:, None] * self.scale


@dataclass(frozen=True)
class Scalar(Task):
    def loss(self, outputs, batch):
        return outputs.mean()


def test_fit_trains_a_module_or_a_function_and_names_what_does_not_fit(folder, tmp_path):
    config = own.config(folder, "regression", epochs=1)
    config = replace(config, run=replace(config.run, out=str(tmp_path / "run")))
    model = Flat(2)
    result = fit(config, model=model)
    assert result.finished
    assert result.model is model
    assert not torch.equal(model.scale.detach(), torch.ones(2)), "the module itself is trained"
    assert result.score is not None
    assert result.summary["samples"] == own.TRAIN
    again = fit(config, model=lambda num_classes: Flat(num_classes))
    assert torch.equal(again.model.scale, model.scale), "resumed at the end"
    fresh = replace(config, run=replace(config.run, out=str(tmp_path / "other")))
    for task, message in (
        (Scalar(), r"Scalar.loss returned float32 \[\], expected floating point \[8\]"),
        (MultiLabel("actions"), r"logits \[8, 1\], expected \[8, 2\]"),
        (Classification(), r"logits \[8, 1\], fewer than there are classes"),
        (Task(), "expected a tensor or something with 'loss'"),
    ):
        with pytest.raises(UsageError, match=message):
            fit(fresh, model=Flat() if not isinstance(task, Task) or type(task) is not Task else Dicts(), task=task)
    with pytest.raises(UsageError, match="task is 3, which is not a task"):
        fit(fresh, task=3)


class Dicts(Flat):
    def forward(self, video):
        return {"something": super().forward(video)}


def test_average_precision_is_the_sum_over_thresholds_also_with_ties():
    generator = torch.Generator().manual_seed(0)
    for levels in (3, 1000):
        scores = torch.randint(levels, (50,), generator=generator).double() / levels
        true = torch.rand(50, generator=generator) < 0.3
        expected, before = 0.0, 0.0
        for threshold in sorted(set(scores.tolist()), reverse=True):  # the definition: recall gained times precision
            found = scores >= threshold
            recall = float((found & true).sum() / true.sum())
            expected += (recall - before) * float((found & true).sum() / found.sum())
            before = recall
        assert average_precision(scores, true) == pytest.approx(expected, abs=1e-6)
    assert average_precision(torch.zeros(3).double(), torch.zeros(3, dtype=torch.bool)) is None


def test_metrics_of_sums_are_those_of_all_predictions():
    generator = torch.Generator().manual_seed(1)
    outputs, labels = (torch.randn(20, 3, generator=generator).double() for _ in range(2))
    cases = [
        (Regression(("a", "b", "c"), error="l1"), {"numbers": labels}),
        (Regression(("a", "b", "c")), {"numbers": labels}),
        (MultiLabel(), {"labels": (labels > 0).float()}),
        (Classification(), {"label": labels.argmax(1)}),
    ]
    for task, entries in cases:
        valid = torch.ones(20, dtype=torch.bool)
        batch = Batch({"label": labels.argmax(1), "sample": torch.arange(20), "valid": valid, **entries})
        halves = [batch.rows(slice(0, 13)), batch.rows(slice(13, 20))]
        parts = [task.sums(outputs[:13], halves[0]), task.sums(outputs[13:], halves[1])]
        row = task.row((parts[0] + parts[1]).numbers())
        gathered = Gathered(20)
        for half, out in zip(halves, (outputs[:13], outputs[13:]), strict=True):
            gathered.add(task.predict(out), half.valid, half.sample, task.target(half))
        score = task.score(*gathered.means(1)[:2])
        assert row.items() <= {name: pytest.approx(value, abs=1e-9) for name, value in score.items()}.items()


def test_masked_clips_count_in_no_sum():
    rows = {"loss": torch.tensor([1.0, float("nan"), 3.0]), "far": torch.tensor([True, True, False])}
    sums = Sums.over(rows, torch.tensor([True, False, True]))
    assert sums.numbers() == {"loss": 4.0, "far": 1.0, "clips": 2.0}
    assert [float(sums[name]) for name in ("clips", "loss")] == [2.0, 4.0]
    with pytest.raises(KeyError, match="there is no sum 'top1'; there are loss, far, clips"):
        sums["top1"]


def test_seeds_follow_positions_in_training_and_samples_in_evaluation():
    batch = Batch(epoch=1, position=torch.tensor([4, 5]), sample=torch.tensor([9, 2]))
    later = Batch(epoch=2, position=torch.tensor([4, 5]), sample=torch.tensor([2, 9]))
    training, evaluation = Phase(training=True, seed=3), Phase(training=False, seed=3)
    assert training.seeds(batch) == training.seeds(batch)
    assert not set(training.seeds(batch)) & set(training.seeds(later))
    assert evaluation.seeds(batch) == evaluation.seeds(later)[::-1]
    assert len({*training.seeds(batch), *evaluation.seeds(batch), *Phase(training=True, seed=4).seeds(batch)}) == 6
