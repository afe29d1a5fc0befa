"""Settings of the data that a run passes on to its loader: order, balance, repeats, columns, types."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from fastvid import BlockShuffle, ClassBalanced
from fastvid.errors import StateError, UsageError
from fastvid.train.config import overrides
from fastvid.train.run import assemble, dry_run, launch
from fastvid.train.run.assemble import open_datasets
from tests import datasets
from tests.train import small, toy


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Two shards, three clips of class 0 for each of class 1."""
    folder = tmp_path_factory.mktemp("settings")
    clip = datasets.make_clip(folder / "one.mp4", frames=8, size="48x48")
    samples = [(f"clip{n:02d}", clip, int(n % 4 == 3)) for n in range(16)]
    datasets.pack(folder / "shards", [samples[:8], samples[8:]], columns={"place": [f"p{n}" for n in range(16)]})
    return folder / "shards"


def config(shards, out, **data):
    return small.config(shards, out, run={"amp": "bf16"}, split=None, eval_split=None, **data)


def batches(made):
    made, train, _ = open_datasets(made, None, toy.ALONE)
    loader = assemble.make_loader(made, train, toy.ALONE, train=True)
    try:
        return list(loader)
    finally:
        loader.clips.close()


def test_repeated_clips_are_neighbours_and_an_epoch_has_as_many_videos(shards, tmp_path):
    made = config(shards, tmp_path, clips_per_video=2)
    keys = [key for batch in batches(made) for key in batch.key]
    assert keys[0::2] == keys[1::2]
    assert set(Counter(keys).values()) == {2}
    plan = dry_run.check([made])[0]
    assert plan["steps"] == 2 * 32 // 4
    assert plan["samples_dropped_per_epoch"] == 0
    assert launch.start([made]) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["samples"] == 64
    with pytest.raises(UsageError, match=r"not a multiple of data\.clips_per_video 3"):
        replace(made.data, clips_per_video=3)


def test_balanced_classes_have_equal_shares(shards, tmp_path):
    labels = torch.cat([batch.label for batch in batches(config(shards, tmp_path, balance=ClassBalanced()))])
    assert labels.bincount().tolist() == [8, 8]
    asked = overrides.apply(config(shards, tmp_path), ["data.balance.power=0.5", "data.shuffle.window=8"]).data
    assert (asked.balance, asked.shuffle) == (ClassBalanced(0.5), BlockShuffle(8))
    assert overrides.apply(asked, ["balance=none", "shuffle=false"]).shuffle is False


def test_a_block_shuffle_ends_a_window_before_the_next(shards, tmp_path):
    found = batches(overrides.apply(config(shards, tmp_path, shuffle=BlockShuffle(99)), ["data.shuffle.window=8"]))
    shard = [int(key.removeprefix("clip")) // 8 for batch in found for key in batch.key]
    assert shard in ([0] * 8 + [1] * 8, [1] * 8 + [0] * 8)


def test_batches_have_the_columns_the_type_and_the_scale(shards, tmp_path):
    plain, made = config(shards, tmp_path), config(shards, tmp_path)
    words = ["data.fields=place", "data.dtype=bfloat16", "data.mean=0.5,0.5,0.5", "data.std=0.25,0.25,0.25"]
    made = overrides.apply(made, words)
    for ours, theirs in zip(batches(made), batches(plain), strict=True):
        assert list(ours.fields["place"]) == [f"p{int(key.removeprefix('clip'))}" for key in ours.key]
        assert ours.video.dtype == torch.bfloat16
        mean, std = (torch.tensor(values).view(3, 1, 1, 1) for values in (plain.data.mean, plain.data.std))
        levels = theirs.video * std + mean
        torch.testing.assert_close(ours.video.float(), (levels - 0.5) / 0.25, rtol=0.01, atol=0.01)
    with pytest.raises(UsageError, match=r"weights are float32 and run\.amp is off"):
        overrides.apply(made, ["run.amp=off"])
    with pytest.raises(UsageError, match="a number for each of R, G and B"):
        overrides.apply(made, ["data.mean=0.5"])


def test_a_run_does_not_resume_with_another_balance(shards, tmp_path):
    made = config(shards, tmp_path, balance=ClassBalanced())
    made = replace(made, run=replace(made.run, epochs=1))
    assert launch.start([made]) == 0
    other = replace(made, data=replace(made.data, balance=None), run=replace(made.run, epochs=2))
    with pytest.raises(StateError):
        launch.start([other])
