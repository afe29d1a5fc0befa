"""Parameter groups, learning rates and their schedule."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fastvid.errors import UsageError
from fastvid.models import zoo
from fastvid.train.config.config import OptimConfig
from fastvid.train.parts.optim import Schedule, make_optimizer, parameter_groups

DECAY = 1e-4


def groups_of(model, kind, head_lr_mult=1.0):
    config = OptimConfig(base_lr=0.1, base_batch_size=1, weight_decay=DECAY, groups=kind, head_lr_mult=head_lr_mult)
    return parameter_groups(model, config)


def numbers(groups):
    return {group["name"]: (len(group["params"]), group["lr_mult"], group["weight_decay"]) for group in groups}


def test_tsm_groups_of_a_resnet_18_have_the_published_multipliers():
    model = zoo.build("tsm-r18", num_classes=10, num_frames=8, width=8)
    # 20 convolutions without bias: stem, 16 in blocks, 3 downsamples; a norm with weight and bias after each.
    assert numbers(groups_of(model, "tsm")) == {
        "weight": (20, 1.0, DECAY),
        "norm": (40, 1.0, 0.0),
        "head_weight": (1, 5.0, DECAY),
        "head_bias": (1, 10.0, 0.0),
    }
    assert numbers(groups_of(model, "plain")) == {
        "weight": (21, 1.0, DECAY),
        "bias": (1, 1.0, 0.0),
        "norm": (40, 1.0, 0.0),
    }


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


def test_tsm_groups_need_a_head():
    with pytest.raises(UsageError, match="no linear layer"):
        groups_of(nn.Conv3d(3, 4, 1), "tsm")


def test_the_rate_is_multiplied_by_lr_mult_per_group():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False)).double()
    config = OptimConfig(base_lr=0.1, base_batch_size=1, momentum=0.0, weight_decay=0.0, groups="tsm")
    optimizer = make_optimizer(model, config)
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * group["lr_mult"]
    before = model[1].weight.detach().clone()
    model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert torch.allclose(before - model[1].weight, torch.full_like(before, 0.5), atol=1e-15)


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


@pytest.mark.parametrize(("changes", "table"), [({}, STEP), ({"decay": "cosine", "final": 0.1}, COSINE)])
def test_schedules_match_the_table(changes, table):
    made = schedule(optim(**changes))
    assert {samples: made.lr(samples) for samples in table} == pytest.approx(table, rel=1e-12)


def test_constant_schedule_without_warmup():
    flat = schedule(optim(decay="constant", warmup_epochs=0.0))
    assert {flat.lr(samples) for samples in (0, 1, 5000, 99_999)} == {0.04}


def test_a_milestone_during_warmup_applies():
    early = schedule(optim(milestones=(1.0,)))
    assert early.lr(1000) == pytest.approx(0.0022, rel=1e-12)
    assert early.lr(2000) == pytest.approx(0.004, rel=1e-12)


def test_rate_scales_linearly_for_the_summit_run():
    # 0.02 at 128 clips gives 1.92 at 12,288.
    config = OptimConfig(base_lr=0.02, base_batch_size=128)
    large = Schedule(config, epochs=1, samples_per_epoch=234_619, global_batch_size=12_288)
    assert large.lr(0) == pytest.approx(1.92, rel=1e-12)


def test_warmup_longer_than_the_run_is_refused():
    with pytest.raises(UsageError, match="the run has 10 epochs"):
        schedule(optim(warmup_epochs=11.0))
