"""Parts of a recipe, each by itself: LARS, LAMB, averages, mixing, freezing, ghost batch norm."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

from fastvid.errors import UsageError
from fastvid.models import zoo
from fastvid.models.ghost import use_ghost_norm
from fastvid.runtime.processes import World
from fastvid.train.config.config import OptimConfig
from fastvid.train.loop.loop import micro_batches
from fastvid.train.parts.optim import Schedule, make_optimizer
from fastvid.train.parts.replica import Average, Freezer, Replica
from fastvid.train.tasks.classification import Classification, Mixer
from tests.train import toy


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_undecayed_groups_are_not_scaled_and_zero_weights_are_updated(name):
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    nn.init.zeros_(model[0].weight)
    optimizer = make_optimizer(model, OptimConfig(base_lr=0.1, base_batch_size=1, name=name))
    assert {group["name"]: group["adapt"] for group in optimizer.param_groups} == {
        "weight": True,
        "bias": False,
        "norm": False,
    }
    model(torch.ones(2, 3)).pow(3).sum().backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert all(moved) or all(
        float(parameter.grad.abs().max()) == 0 or changed
        for parameter, changed in zip(model.parameters(), moved, strict=True)
    )


def test_ema_matches_a_manual_computation_and_restores_the_weights():
    model = nn.BatchNorm1d(1)
    average = Average(model, 0.75)
    with torch.no_grad():
        model.weight.fill_(5.0)
    average.update_parameters(model)
    average.update_parameters(model)
    # 1 -> 2 -> 2.75
    assert float(average.module.weight) == pytest.approx(2.75)
    with average.in_place(model):
        assert model.weight.item() == pytest.approx(2.75)
    assert model.weight.item() == 5.0
    assert float(average.module.weight) == pytest.approx(2.75)


def test_the_average_of_a_checkpoint_of_0_1_is_restored():
    """It had no counts of batches, which are no part of what is evaluated."""
    config = toy.toy_config(Path()).optim
    schedule = Schedule(config, epochs=4, samples_per_epoch=8, global_batch_size=8)
    models = [nn.BatchNorm1d(1), nn.BatchNorm1d(1)]
    old, new = (Replica(model, SGD(model.parameters()), schedule, ema_decay=0.5) for model in models)
    assert old.average is not None
    assert new.average is not None
    with torch.no_grad():
        models[0].weight.fill_(5.0)
        models[0].running_mean.fill_(3.0)
    old.average.update_parameters(models[0])
    state = old.state_dict()
    state["average"] = {name: value for name, value in state["average"].items() if value.is_floating_point()}
    new.load_state_dict(state)
    assert new.average.module.weight.item() == 3.0
    assert new.average.module.running_mean.item() == 1.5
    assert models[1].weight.item() == 5.0


def batch_of(size, group=1, bad=()):
    loader = toy.ToyLoader(World(), size=size, group=group, bad=bad)
    return next(iter(loader))


def test_mixup_blends_mirrored_clips_of_a_group():
    batch = batch_of(8, group=4)
    mixed = Mixer(0.4, 0.0, 4, seed=1)(batch)
    video, own = batch.video, mixed.own_share.view(-1, 1, 1, 1, 1)
    mirrored = video[[3, 2, 1, 0, 7, 6, 5, 4]]
    assert torch.allclose(mixed.video, own * video + (1 - own) * mirrored)
    assert torch.equal(mixed.partner_label, batch.label[[3, 2, 1, 0, 7, 6, 5, 4]])
    # One weight per group, and a different one in the next group.
    assert len(set(mixed.own_share[:4].tolist())) == len(set(mixed.own_share[4:].tolist())) == 1
    assert mixed.own_share[0] != mixed.own_share[4]
    assert not torch.equal(mixed.video, video)
    # The batch itself is unchanged, and the draw is a function of seed and position.
    assert torch.equal(Mixer(0.4, 0.0, 4, seed=1)(batch).video, mixed.video)
    assert not torch.equal(Mixer(0.4, 0.0, 4, seed=2)(batch).video, mixed.video)


def test_cutmix_pastes_one_box_into_all_frames_and_weights_by_its_area():
    batch = batch_of(16, group=2)
    mixed = Mixer(0.0, 1.0, 2, seed=3)(batch)
    video = batch.video
    mirrored = video[torch.arange(16).view(-1, 2).flip(1).reshape(-1)]
    foreign = (mixed.video == mirrored) & (mixed.video != video)
    # The same pixels in all frames and channels.
    assert torch.equal(foreign.all(2).all(1), foreign.any(2).any(1))
    share = foreign[:, 0, 0].double().mean((1, 2))
    assert torch.allclose(1 - share, mixed.own_share)
    assert 0 < float(mixed.own_share.min()) < float(mixed.own_share.max()) <= 1


def test_a_pair_with_a_masked_clip_is_not_mixed():
    whole = batch_of(8, group=2)
    gone = int(whole.sample[0])
    batch = batch_of(8, group=2, bad=(gone,))
    mixed = Mixer(0.4, 0.0, 2, seed=1)(batch)
    assert mixed.own_share[:2].tolist() == [1.0, 1.0]
    assert torch.equal(mixed.video[:2], batch.video[:2])


def test_frozen_parts_stay_fixed_until_they_are_unfrozen():
    model = toy.net(norm=True)
    freezer = Freezer(model, ("0", "1:2"), samples_per_epoch=100)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["0.weight", "0.bias"]
    model.train()
    freezer.freeze_norms(199)
    assert not model[1].training
    model(torch.randn(4, 3, 2, 4, 4, dtype=torch.float64)).sum().backward()
    freezer.drop_gradients(199)
    assert model[1].weight.grad is None
    assert model[4].weight.grad is not None
    freezer.freeze_norms(200)
    assert model[1].training
    model(torch.randn(4, 3, 2, 4, 4, dtype=torch.float64)).sum().backward()
    freezer.drop_gradients(200)
    assert model[1].weight.grad is not None


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (("9",), "no parameter"),
        (("0:x",), "PREFIX:EPOCHS"),
        (("0", "1", "4"), "the whole model"),
        (("0:-1",), "PREFIX"),
    ],
)
def test_invalid_freeze_rules_are_refused(rules, message):
    with pytest.raises(UsageError, match=message):
        Freezer(toy.net(norm=True), rules, 10)


def test_ghost_norm_of_tsm_uses_groups_of_whole_clips():
    model = use_ghost_norm(zoo.build("tsm-r18", num_classes=3, num_frames=2, width=8, dropout=0.0), 2)
    clips = torch.randn(4, 3, 2, 32, 32)
    together = model(clips)
    apart = torch.cat([model(clips[:2]), model(clips[2:])])
    assert torch.allclose(together, apart, atol=1e-5)
    with pytest.raises(UsageError, match="3 clips cannot be split"):
        model(clips[:3])


@given(groups=st.integers(1, 100), limit=st.none() | st.integers(1, 50), group=st.integers(1, 4))
def test_micro_batches_are_the_fewest_whole_groups(groups, limit, group):
    found = micro_batches(groups * group, limit, group)
    assert [row for part in found for row in range(part.start, part.stop)] == list(range(groups * group))
    sizes = [part.stop - part.start for part in found]
    assert all(size % group == 0 for size in sizes)
    assert max(sizes) - min(sizes) <= group
    assert len(found) == (1 if limit is None else math.ceil(groups / max(1, limit // group)))


def test_mixing_and_ghost_norm_need_groups(tmp_path):
    base = toy.toy_config(tmp_path)

    def with_optim(**changes):
        return replace(base, optim=replace(base.optim, **changes))

    with pytest.raises(UsageError, match="mixing needs groups"):
        replace(base, task=Classification(mixup=0.2))
    with pytest.raises(UsageError, match="ghost_norm needs groups"):
        replace(base, model=replace(base.model, ghost_norm=True))
