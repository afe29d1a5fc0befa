"""Fine-tuning a vision transformer of transformers by the recipe: it learns, resumes, and is evaluated."""

import json
from dataclasses import replace

import pytest
import torch

from fastvid.errors import UsageError
from fastvid.models import zoo
from fastvid.models.resnet import DropPath, rates
from fastvid.train import CenterCrop, Dense, RandomResizedCrop
from fastvid.train.config import config as recipes
from fastvid.train.records import records as metrics
from fastvid.train.run import dry_run, launch, scoring
from tests import datasets
from tests.train import toy

pytest.importorskip("transformers")

SMALL = {
    "pretrained": "none", "image_size": "32", "patch_size": "16", "hidden_size": "16", "num_hidden_layers": "2",
    "num_attention_heads": "2", "intermediate_size": "32",
}  # fmt: skip
NAME = "fastvid.models.hugging_face:videomae"


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Two classes that differ in colour, so that few steps suffice."""
    folder = tmp_path_factory.mktemp("videomae")
    clips = [
        datasets.make_clip(folder / f"{n}.mp4", frames=12, size="48x48", filters=f"drawbox=color={colour}:t=fill")
        for n, colour in enumerate(("blue", "yellow"))
    ]
    samples = [(f"clip{n:02d}", clips[n % 2], n % 2) for n in range(24)]
    datasets.pack(folder / "shards", [samples], columns={"split": ["train"] * 16 + ["val"] * 8})
    return folder / "shards"


def config(shards, out, *changes):
    words = [f"model.options.{name}={value}" for name, value in SMALL.items()]
    words += [
        f"data.path={shards}", f"run.out={out}", "data.global_batch_size=4", "data.eval_batch_size=12",
        "data.clips_per_video=1",
        "optim.base_batch_size=4", "optim.base_lr=0.01", "optim.ema_decay=0.8", "optim.warmup_epochs=1",
        "data.num_threads=1", "run.epochs=4", "run.log_every_steps=1", "run.micro_batch_size=2", *changes,
    ]  # fmt: skip
    small = recipes.load("kinetics400_videomae", words)
    data = replace(
        small.data, frames=Dense(4, stride=2), eval_frames=Dense(4, stride=2, jitter=False),
        spatial=(RandomResizedCrop(32),), eval_spatial=(CenterCrop(32),),
    )  # fmt: skip
    return replace(small, data=data)


def test_the_recipe_learns_and_resumes_to_the_same_weights(shards, tmp_path):
    whole = config(shards, tmp_path / "whole")
    plan = dry_run.check([whole])[0]
    assert launch.start([whole]) == 0
    rows = metrics.read(tmp_path / "whole" / "metrics.jsonl")
    train = metrics.curve(rows)
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert plan["steps"] == len(train) == summary["samples"] // 4 == 16
    assert plan["lr_first"] == train[0]["lr"]
    assert summary["eval"]["loss"] < 0.5  # chance is 0.69; the training loss is that of mixed clips
    assert summary["eval"]["top1_percent"] == 100.0
    # The average of the weights and several views, in one report.
    report = scoring.score(whole, protocol="2x3")
    assert (report.score.total, report.score.value) == (8, 100.0)
    # The same run in two parts; drop path, mixup and crops draw the same numbers.
    parts = config(shards, tmp_path / "parts", "run.keep_checkpoints=9")
    assert launch.start([parts]) == 0
    *early, _, _ = sorted((tmp_path / "parts" / "checkpoints").glob("*.pt"))
    assert early
    for path in (tmp_path / "parts" / "checkpoints").iterdir():
        if path not in early:
            path.unlink()
    assert launch.start([parts]) == 0
    first, second = (toy.newest(tmp_path / name)["replica"]["model"] for name in ("whole", "parts"))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_drop_path_is_seeded_scaled_and_off_in_evaluation():
    drop, branch = DropPath(0.25, frames=2), torch.ones(4000, 3)
    torch.manual_seed(3)
    one = drop(branch)
    torch.manual_seed(3)
    assert torch.equal(one, drop(branch))
    # Both frames of a clip, and all its values, are dropped together; the mean stays.
    assert torch.equal(one[0::2], one[1::2])
    assert one.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert float(one.mean()) == pytest.approx(1.0, abs=5 * (0.25 / 0.75 / 2000) ** 0.5)
    assert torch.equal(drop.eval()(branch), branch)
    assert rates(0.3, 4) == pytest.approx([0.0, 0.1, 0.2, 0.3])
    with pytest.raises(UsageError, match="drop_path is 1"):
        rates(1.0, 4)


@pytest.mark.parametrize("name", ["tsm-r18", NAME])
def test_models_have_a_drop_path_that_rises_with_depth(name):
    options = {"width": 8} if name != NAME else {
        "image_size": 32, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32,
    }  # fmt: skip
    torch.manual_seed(0)
    plain = zoo.build(name, 2, 4, **options)
    torch.manual_seed(0)
    model = zoo.build(name, 2, 4, drop_path=0.4, **options)
    assert model.state_dict().keys() == plain.state_dict().keys()
    found = [module.rate for module in model.modules() if isinstance(module, DropPath) and module.rate]
    assert found == sorted(found)
    assert max(found) == pytest.approx(0.4)
    clips = torch.randn(2, 3, 4, 32, 32)
    assert torch.equal(plain.eval()(clips), model.eval()(clips))
    assert not torch.equal(model.train()(clips), model(clips))


def test_recomputed_blocks_drop_the_same_paths_again():
    clips, gradients = torch.randn(4, 3, 2, 32, 32), []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = zoo.build("tsm-r18", 2, 2, width=8, dropout=0.0, drop_path=0.5, recompute=recompute)
        torch.manual_seed(1)
        model(clips).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_wrong_options_of_transformers_are_named():
    with pytest.raises(UsageError, match="VideoMAEConfig has no 'hidden_sise'"):
        zoo.build(NAME, 2, 4, hidden_sise=8)
    with pytest.raises(UsageError, match="cannot build VideoMAE"):
        zoo.build(NAME, 2, 4, pretrained="/nonexistent/weights")
