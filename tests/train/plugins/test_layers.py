"""Rates by layer and heads of several streams, against multipliers computed by hand."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fastvid.models import zoo
from fastvid.train.config.config import OptimConfig
from fastvid.train.parts.optim import heads, layer_scales, make_optimizer, parameter_groups
from fastvid.train.parts.replica import Freezer
from tests.train import toy

CONFIG = OptimConfig(base_lr=0.1, base_batch_size=4, name="adamw", weight_decay=0.05)


def rates(model, config):
    """Return the factor of each parameter's rate in the optimizer."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = make_optimizer(model, config).param_groups
    found = {names[id(one)]: group["lr_mult"] for group in groups for one in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(found) == len(names)
    return found


def test_a_videomae_of_transformers_has_the_rates_of_its_paper():
    transformers = pytest.importorskip("transformers")
    config = transformers.VideoMAEConfig(
        image_size=16, patch_size=8, num_frames=4, hidden_size=8, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    found = rates(transformers.VideoMAEForVideoClassification(config), replace(CONFIG, layer_decay=0.5))
    # Three blocks: embeddings are four layers below the head.
    by_layer = {
        "embeddings": 1 / 16,
        "layer.0": 1 / 8,
        "layer.1": 1 / 4,
        "layer.2": 1 / 2,
        "fc_norm": 1,
        "classifier": 1,
    }
    for name, rate in found.items():
        (layer,) = [layer for layer in by_layer if layer in name]
        assert rate == by_layer[layer], name
    assert {name.split(".")[1] for name in found if name.startswith("videomae.")} == {"embeddings", "encoder"}


def test_a_resnet_counts_its_blocks_through_all_stages():
    model = zoo.build("tsm-r18", num_classes=3, num_frames=2, width=8)
    found = rates(model, replace(CONFIG, layer_decay=0.75, groups="tsm"))
    for name, rate in found.items():
        part = name.split(".")[1:]
        if part[0] == "fc":
            expected = {"weight": 5.0, "bias": 10.0}[part[1]]
        elif part[0].startswith("layer"):
            block = 2 * (int(part[0][-1]) - 1) + int(part[1])  # two blocks a stage, counted from 0
            expected = 0.75 ** (8 - block)
        else:
            assert part[0] in ("conv1", "bn1")
            expected = 0.75**9
        assert rate == pytest.approx(expected, rel=1e-15), name


def test_each_stream_counts_its_own_layers_and_has_its_own_head():
    model = zoo.build("two-stream-r18", num_classes=3, num_frames=2, width=8, flow_stack=2)
    found = rates(model, replace(CONFIG, layer_decay=0.5, head_lr_mult=3.0, groups="tsm"))
    for stream in ("spatial", "temporal"):
        assert found[f"{stream}.backbone.fc.weight"] == 15.0
        assert found[f"{stream}.backbone.fc.bias"] == 30.0
        assert found[f"{stream}.backbone.conv1.weight"] == 0.5**9
        assert found[f"{stream}.backbone.layer4.1.conv2.weight"] == 0.5
    assert [name for name, _ in heads(model)] == ["spatial.backbone.fc", "temporal.backbone.fc"]
    Freezer(model, ["all-but-head"], 8)
    assert {name for name, one in model.named_parameters() if one.requires_grad} == {
        f"{stream}.backbone.fc.{one}" for stream in ("spatial", "temporal") for one in ("weight", "bias")
    }


def test_a_joint_head_is_the_only_head():
    model = zoo.build("two-stream-r18", num_classes=3, num_frames=2, width=8, flow_stack=2, fusion="joint")
    assert [name for name, _ in heads(model)] == ["head.3"]
    found = layer_scales(model, 0.5)
    assert found["head.3.weight"] == found["head.1.weight"] == 1.0
    assert found["temporal.backbone.layer4.1.conv2.weight"] == found["spatial.backbone.layer4.1.conv2.weight"] == 0.5


class Named(nn.Module):
    """A model that names its own layers."""

    def __init__(self, *layers):
        super().__init__()
        self.low, self.mid, self.top = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        self.layers = layers

    def parameter_layers(self):
        return self.layers


def test_a_model_may_name_its_layers():
    found = layer_scales(Named("low", ["mid.weight", "mid.bias"]), 0.5)
    assert {name.split(".")[0]: scale for name, scale in found.items()} == {"low": 0.25, "mid": 0.5, "top": 1.0}
    with toy.refused("names 'high', which matches no parameter"):
        layer_scales(Named("low", "high"), 0.5)
    with toy.refused("no parameter has a number in its dotted name", "parameter_layers()"):
        parameter_groups(nn.Linear(2, 2), replace(CONFIG, layer_decay=0.5))
    for decay in (0.0, 1.5):
        with toy.refused("layer_decay"):
            replace(CONFIG, layer_decay=decay)


def test_layers_split_the_groups_but_not_the_weight_decay():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    plain = parameter_groups(model, CONFIG)
    split = parameter_groups(model, replace(CONFIG, layer_decay=0.5))

    def decays(groups):
        return {id(one): group["weight_decay"] for group in groups for one in group["params"]}

    assert decays(plain) == decays(split)
    # Linear 0, linear 2 and the norm 3 are blocks; the last linear layer is the head.
    assert [(group["name"], group["lr_mult"]) for group in split] == [
        ("weight", 1.0), ("weight", 0.25), ("weight", 0.125), ("bias", 1.0), ("bias", 0.25), ("bias", 0.125),
        ("norm", 0.5),
    ]  # fmt: skip
    assert torch.equal(split[0]["params"][0], model[4].weight)
