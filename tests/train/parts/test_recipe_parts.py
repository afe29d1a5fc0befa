"""Parts of a recipe: groups, rates and schedules, LARS, LAMB, averages, mixing, freezing, ghost batch norm."""

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
from fastvid.train.parts.optim import Schedule, make_optimizer, parameter_groups
from fastvid.train.parts.replica import Average, Freezer, Replica
from fastvid.train.tasks.classification import Classification, Mixer
from tests.train import toy

DECAY = 1e-4


def groups_of(model, kind, head_lr_mult=1.0):
    config = OptimConfig(base_lr=0.1, base_batch_size=1, weight_decay=DECAY, groups=kind, head_lr_mult=head_lr_mult)
    return parameter_groups(model, config)


def numbers(groups):
    return {group["name"]: (len(group["params"]), group["lr_mult"], group["weight_decay"]) for group in groups}


def test_tsm_groups_of_a_resnet_18_have_the_published_multipliers():
    model = zoo.build("tsm-r18", num_classes=10, num_frames=8, width=8)
    # 20 convolutions without bias: stem, 16 in blocks, 3 downsamples; a norm with weight and bias after each.
    head = {"head_weight": (1, 5.0, DECAY), "head_bias": (1, 10.0, 0.0)}
    assert numbers(groups_of(model, "tsm")) == {"weight": (20, 1.0, DECAY), "norm": (40, 1.0, 0.0)} | head
    plain = {"weight": (21, 1.0, DECAY), "bias": (1, 1.0, 0.0), "norm": (40, 1.0, 0.0)}
    assert numbers(groups_of(model, "plain")) == plain


@pytest.mark.parametrize("kind", ["plain", "tsm"])
def test_every_trainable_parameter_is_in_one_group(kind):
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Conv3d(3, 4, 1), nn.GroupNorm(2, 4), nn.LayerNorm(4), shared, shared, nn.PReLU())
    model[0].weight.requires_grad_(False)
    groups = groups_of(model, kind)
    found = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(found) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    undecayed = {id(p) for group in groups if group["weight_decay"] == 0 for p in group["params"]}
    # Biases, norms and PReLU's slope have no weight decay; only the linear layer's matrix has.
    assert set(found) - undecayed == {id(shared.weight)}


def test_the_rate_is_multiplied_by_lr_mult_per_group():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False)).double()
    config = optim(base_lr=0.1, base_batch_size=256, momentum=0.0, weight_decay=0.0, groups="tsm", warmup_epochs=0.0)
    replica = Replica(model, make_optimizer(model, config), schedule(config))
    replica.set_lr()
    before = model[1].weight.detach().clone()
    model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    replica.optimizer.step()
    assert torch.allclose(before - model[1].weight, torch.full_like(before, 0.5), atol=1e-15)
    with toy.refused("no linear layer"):
        groups_of(nn.Conv3d(3, 4, 1), "tsm")


class Tokens(nn.Module):
    """A transformer's parameters: tokens, positions, a table that the model itself exempts, and a matrix."""

    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 4))
        self.position_embeddings = nn.Embedding(5, 4)
        self.table = nn.Parameter(torch.zeros(3, 4))
        self.my_pos_embed_matrix = nn.Linear(4, 4, bias=False)

    def no_weight_decay(self):
        return {"table", "my_pos_embed_matrix"}  # the second names a module, not a parameter


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb"])
def test_tokens_and_positions_of_a_transformer_have_no_weight_decay(name):
    model = nn.Sequential(Tokens(), nn.Linear(4, 2))
    config = OptimConfig(base_lr=0.1, base_batch_size=4, name=name, weight_decay=DECAY)
    names = {id(parameter): full for full, parameter in model.named_parameters()}

    def decayed(changed):
        groups = make_optimizer(model, changed).param_groups
        assert sum(len(group["params"]) for group in groups) == len(names)
        return {names[id(one)] for group in groups if group["weight_decay"] for one in group["params"]}

    matrices = {"0.my_pos_embed_matrix.weight", "1.weight"}
    assert decayed(config) == matrices
    # Without the list, only what the model names itself is exempt.
    assert decayed(replace(config, no_decay=())) == matrices | {
        "0.cls_token", "0.pos_embed", "0.position_embeddings.weight",
    }  # fmt: skip
    assert decayed(replace(config, no_decay=("my_pos_embed_matrix", "1"))) == {
        "0.cls_token", "0.pos_embed", "0.position_embeddings.weight",
    }  # fmt: skip


# An epoch of 1,000 samples; base rate 0.02 at 128 clips, so 0.04 at 256. Warm-up of 2 epochs from a tenth of the rate,
# a quarter of the way is 0.004 + 0.036 / 4; then constant until epoch 5, a tenth until epoch 8, a hundredth afterwards.
STEP = {
    0: 0.004, 500: 0.013, 1000: 0.022, 1999: 0.039982, 2000: 0.04, 4999: 0.04, 5000: 0.004, 7999: 0.004, 8000: 0.0004,
    10_000: 0.0004, 99_999: 0.0004,
}  # fmt: skip
# 8,000 samples from 0.04 down to a tenth; cos(60 degrees) = 1/2 after a third of them.
COSINE = {
    0: 0.004, 2000: 0.04, 4000: 0.004 + 0.036 * (1 + 0.5**0.5) / 2, 6000: 0.022,
    8000: 0.004 + 0.036 * (1 - 0.5**0.5) / 2, 10_000: 0.004, 12_000: 0.004,
}  # fmt: skip


def optim(**changes):
    values = {"base_lr": 0.02, "base_batch_size": 128, "warmup_epochs": 2.0, "milestones": (5.0, 8.0)} | changes
    return OptimConfig(**values)


def schedule(config):
    return Schedule(config, epochs=10, samples_per_epoch=1000, global_batch_size=256)


@pytest.mark.parametrize(
    ("changes", "table"),
    [
        ({}, STEP),
        ({"decay": "cosine", "final": 0.1}, COSINE),
        ({"decay": "constant", "warmup_epochs": 0.0}, dict.fromkeys((0, 1, 5000, 99_999), 0.04)),
        ({"milestones": (1.0,)}, {1000: 0.0022, 2000: 0.004}),  # during the warm-up
        ({"base_batch_size": 2, "warmup_epochs": 0.0}, {0: 2.56}),  # the linear scaling rule
    ],
)
def test_schedules_match_the_table(changes, table):
    made = schedule(optim(**changes))
    assert {samples: made.lr(samples) for samples in table} == pytest.approx(table, rel=1e-12)
    with toy.refused("the run has 10 epochs"):
        schedule(optim(warmup_epochs=11.0))


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_undecayed_groups_are_not_scaled_and_zero_weights_are_updated(name):
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    nn.init.zeros_(model[0].weight)
    optimizer = make_optimizer(model, OptimConfig(base_lr=0.1, base_batch_size=1, name=name))
    adapted = {"weight": True, "bias": False, "norm": False}
    assert {group["name"]: group["adapt"] for group in optimizer.param_groups} == adapted
    model(torch.ones(2, 3)).pow(3).sum().backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert not torch.equal(parameter, old) or not parameter.grad.any()


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


def test_invalid_freeze_rules_are_refused():
    for rules, message in (("9", "no parameter"), ("0:x", "PREFIX:EPOCHS"), ("0 1 4", "the whole"), ("0:-1", "PREFIX")):
        with toy.refused(message):
            Freezer(toy.net(norm=True), rules.split(), 10)


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

    with toy.refused("mixing needs groups"):
        replace(base, task=Classification(mixup=0.2))
    with toy.refused("ghost_norm needs groups"):
        replace(base, model=replace(base.model, ghost_norm=True))
