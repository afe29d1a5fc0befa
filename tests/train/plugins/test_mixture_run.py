"""A run that trains on several datasets: shares, classes, generations, other ranks, and what it refuses."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.sharding.change.edit import remove_samples
from fastvid.storage import LocalStorage
from fastvid.train import DatasetConfig, Dense, Uniform
from fastvid.train.config import overrides
from fastvid.train.run import assemble, dry_run, launch, scoring
from fastvid.train.run import assemble as agreement
from fastvid.train.run.assemble import open_datasets
from tests import datasets
from tests.train import small, toy


@pytest.fixture
def folder(tmp_path):
    """Datasets `first` (16 to train on, 4 held out) and `second` (4), with one class in common."""
    clip = datasets.make_clip(tmp_path / "one.mp4", frames=8, size="48x48")
    samples = [(f"first{n:02d}", clip, n % 2) for n in range(20)]
    columns = {"split": ["train"] * 16 + ["val"] * 4}
    datasets.pack(tmp_path / "first", [samples], columns=columns)
    samples = [(f"second{n:02d}", clip, n % 2) for n in range(4)]
    datasets.pack(tmp_path / "second", [samples], classes=("up", "right"))
    return tmp_path


def config(folder):
    return small.config(folder / "first", folder / "run", run={"epochs": 1})


def weighted(folder):
    words = [f"data.mixture.second.path={folder / 'second'}", "data.mixture.second.split=none"]
    words += ["data.mixture.second.weight=1", "data.weight=3", "data.epoch_samples=16"]
    return overrides.apply(config(folder), words)


def test_each_dataset_has_its_share_and_classes_are_merged(folder):
    made, train, held_out = open_datasets(weighted(folder), None, toy.ALONE)
    assert (train.classes, made.model.num_classes) == (("left", "right", "up"), 3)
    assert held_out is not None
    assert [key[:5] for key in held_out.keys.to_pylist()] == ["first"] * 4
    loader = assemble.make_loader(made, train, toy.ALONE, train=True)
    found = [(name, int(label), key) for batch in loader for name, label, key in
             zip(batch.dataset, batch.label, batch.key, strict=True)]  # fmt: skip
    loader.clips.close()
    assert Counter(name for name, _, _ in found) == {"main": 12, "second": 4}
    for name, label, key in found:
        right = key[-1] in "13579"
        assert train.classes[label] == ("right" if right else "left" if name == "main" else "up")
    # Without weights every sample once.
    plain = replace(made, data=replace(made.data, mixture={"second": DatasetConfig(path=str(folder / "second"),
                    split=None)}, weight=None, epoch_samples=None))  # fmt: skip
    assert dry_run.check([plain])[0]["steps_per_epoch"] == 20 // 4


def test_a_run_resumes_at_the_generations_it_started_with(folder):
    made = weighted(folder)
    plan = dry_run.check([made])[0]
    assert (plan["steps"], plan["generation"], plan["shards"], plan["train_samples"]) == (4, "1 + 1", 2, 20)
    assert launch.start([made]) == 0
    summary = json.loads((folder / "run/summary.json").read_text())
    assert (summary["samples"], summary["eval"]["total"]) == (16, 4)
    assert json.loads((folder / "run/classes.json").read_text()) == ["left", "right", "up"]
    remove_samples(LocalStorage(folder / "second"), ["second00"])
    assert Dataset(str(folder / "second")).generation.number == 2
    assert launch.start([overrides.apply(made, ["run.epochs=2"])]) == 0
    record = json.loads((folder / "run/config.json").read_text())
    assert record["data"]["mixture"]["second"]["generation"] == 1
    report = scoring.score(made)
    assert (report.names, report.score.total) == (("left", "right", "up"), 4)


def test_ranks_compare_every_dataset_but_not_where_it_lies(folder):
    def facts(asked):
        made, train, held_out = open_datasets(asked, None, toy.ALONE)
        return agreement.facts(made, {}, train, held_out)

    made = weighted(folder)
    (folder / "second").rename(folder / "moved")
    moved = overrides.apply(made, [f"data.mixture.second.path={folder / 'moved'}"])
    before = facts(moved)
    (folder / "moved").rename(folder / "second")
    assert facts(made) == before
    remove_samples(LocalStorage(folder / "second"), ["second00"])
    after = facts(made)
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {"generation's files", "data.mixture.second.generation"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.weight=2"], r"data\.weight is set, but data\.mixture names no further dataset"),
        (["data.mixture.second=here"], r"data\.mixture\.second contains several values[\s\S]*mixture\.second\.path"),
        (["data.mixture.second.weight=2"], r"data\.mixture\.second\.path is not given"),
        (["data.mixture.second.pth=a"], r"mixture\.second\.pth is not a setting[\s\S]*mixture\.second\.path\?"),
        (["data.mixture.main.path=a"], "'main', which is the name of data.path"),
        (["data.mixture.b.path=a", "data.weight=2"], r"data\.weight is set, but data\.mixture\.b\.weight is not"),
        (["data.mixture.b.path=a", "data.mixture.b.weight=0", "data.weight=1"], r"b\.weight is 0\.0, expected a pos"),
        (["data.mixture.b.path=a", "data.epoch_samples=8"], r"a mixture without weights visits every sample once"),
    ],
)
def test_contradictory_settings_are_refused(folder, words, message):
    with pytest.raises(UsageError, match=message):
        overrides.apply(config(folder), words)
    with toy.refused("divides one dataset into partitions"):
        dry_run.check([replace(weighted(folder), sync="relay")])


def test_samplers_are_chosen_by_name(folder):
    words = ["data.frames=dense", "data.frames.num_frames=4", "data.frames.stride=2"]
    words += ["data.eval_frames=fastvid.train:Uniform", "data.eval_frames.num_frames=4"]
    made = overrides.apply(config(folder), words)
    assert (made.data.frames, made.data.eval_frames) == (Dense(4, 2), Uniform(4))
    for words, message in (
        (["data.frames=dense", "data.frames.num_frames=2"], r"data\.frames\.stride is not given"),
        (["data.frames=dens"], r"unknown sampler 'dens'[\s\S]*segments, dense"),
        (["data.frames=json:dumps"], "not a dataclass with a method draw"),
        (["data.frames=dense", "data.frames.step=2"], r"data\.frames\.step is not a setting"),
    ):
        with pytest.raises(UsageError, match=message):
            overrides.apply(config(folder), words)
