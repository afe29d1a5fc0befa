"""Ranks that read different data, or have other settings, refuse to train together; two runs share no folder."""

import json
from dataclasses import replace

import pytest
import torch

from fastvid.errors import JobError, StateError
from fastvid.format.dataset import Dataset
from fastvid.runtime.processes import World
from fastvid.train.config import config as recipes
from fastvid.train.loop import loop
from fastvid.train.parts.evaluate import Score
from fastvid.train.ranks import Member
from fastvid.train.run import assemble, launch
from tests import forks
from tests.train import small

RANK_0 = Member(World(0, 3), torch.device("cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two datasets of the same keys and labels but other videos, and a recipe whose rank 1 reads the second."""
    folder = tmp_path_factory.mktemp("agreement")
    for number, size in enumerate(("48x48", "64x48")):
        small.pack(folder, 8, 4, kinds=2, size=size, name=f"shards{number}")
    recipe = small.RECIPE.format(data="DATA", out=str(folder / "run")).replace("'DATA'", "DATA")
    data = f'import os\nDATA = {str(folder / "shards")!r} + os.environ.get("RANK", "0")\n'
    (folder / "recipe.py").write_text(data + recipe)
    return folder


def test_ranks_that_read_other_data_do_not_train(folder):
    done = forks.ranks(2, "fastvid.train", folder / "recipe.py", folder=folder)
    assert all(rank.returncode for rank in done)
    assert any("rank 1 differs from rank 0 in generation's files" in rank.stderr for rank in done), done
    # Nothing was trained, and the folder is free for the next attempt.
    assert not list((folder / "run").iterdir())


def facts(folder, *changes, edit=lambda dataset: dataset):
    config = recipes.load(str(folder / "recipe.py"), list(changes))
    train = edit(Dataset(str(folder / "shards0"), split="train"))
    return assemble.facts(config, {"dataset": "one"}, train, Dataset(str(folder / "shards0"), split="val"))


def other_shard(dataset):
    class Stale:
        generation = replace(
            dataset.generation, shards=tuple(replace(shard, sha256="0" * 64) for shard in dataset.generation.shards)
        )
        classes = dataset.classes

        def __len__(self):
            return len(dataset)

    return Stale()


def check(monkeypatch, *ranks):
    gathered = [json.dumps(rank).encode() for rank in ranks]
    monkeypatch.setattr(assemble, "gather_bytes", lambda _data, _member: gathered)
    assemble.check_agreement(ranks[0], RANK_0)


def test_the_rank_and_the_first_difference_are_named(folder, monkeypatch):
    same = facts(folder)
    for changed, name in (
        (facts(folder, "optim.base_lr=0.5"), "optim.base_lr: it has 0.5, rank 0 has 0.02"),
        (facts(folder, "run.seed=3"), "run.seed: it has 3, rank 0 has 0"),
        (facts(folder, "sync=kavg"), "sync"),
        (facts(folder, edit=other_shard), "generation's files"),
    ):
        with pytest.raises(StateError, match=f"rank 2 differs from rank 0 in {name}"):
            check(monkeypatch, same, same, changed)
    with pytest.raises(StateError, match=r"rank 1 differs .* so do ranks 2"):
        check(monkeypatch, same, facts(folder, "run.seed=3"), facts(folder, "run.seed=4"))


def test_paths_and_threads_may_differ_between_nodes(folder, monkeypatch):
    node = ("run.out=/scratch/run", "data.path=/scratch/data", "data.num_threads=7", "data.workers=process")
    check(monkeypatch, facts(folder), facts(folder, *node), facts(folder))


def test_a_second_run_in_the_same_folder_is_refused(folder, tmp_path):
    config = recipes.load(str(folder / "recipe.py"), [f"run.out={tmp_path}", "run.epochs=1"])
    with launch.only_run(tmp_path):
        with pytest.raises(JobError, match="another run is writing here") as error:
            launch.train(config)
        assert error.value.hint is not None
        assert [path.name for path in tmp_path.iterdir()] == [launch.LOCK_FILE]
    assert launch.train(config) == 0
    assert not (tmp_path / launch.LOCK_FILE).exists()


def test_the_summary_of_a_run_that_scored_nothing_is_json(folder, tmp_path, monkeypatch, capsys):
    nothing = Score({"loss": float("nan")}, float("nan"), 0, 4)
    monkeypatch.setattr(loop, "evaluate", lambda *_words, **_options: nothing)
    config = recipes.load(str(folder / "recipe.py"), [f"run.out={tmp_path}", "run.epochs=1"])
    assert launch.start([config], as_json=True) == 0
    for text in (capsys.readouterr().out, (tmp_path / "summary.json").read_text()):
        assert json.loads(text, parse_constant=pytest.fail)["eval"]["loss"] is None
