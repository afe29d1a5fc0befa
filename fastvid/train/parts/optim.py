"""Optimizers and their parameter groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from fastvid.errors import UsageError
from fastvid.runtime.import_names import accepted, check_keywords, first_argument, import_name
from fastvid.train.config.optim import Groups, OptimConfig
from fastvid.train.parts.layers import heads, layer_scales
from fastvid.train.parts.optim_large import Lamb, Lars

# TSM's learning rate multipliers (mit-han-lab/temporal-shift-module ops/models.py, get_optim_policies, with
# fc_lr5): biases of convolutions, weight and bias of the last layer.
_TSM_BIAS = 2.0
_TSM_HEAD_WEIGHT = 5.0
_TSM_HEAD_BIAS = 10.0

# Settings of torch's optimizers that choose kernels, not results.
_KERNELS = ("foreach", "fused", "capturable")

# Groups with weight decay: LARS and LAMB scale their layers.
_ADAPTED = ("weight", "head_weight")

# Values that an optimizer stores per weight, in addition to the weight and its gradient.
_MOMENTS = {"sgd": 1, "lars": 1, "adam": 2, "adamw": 2, "adagrad": 1, "lamb": 2}

# Rows and columns of the weights that show how much an optimizer stores: a step counter hardly matters.
_PROBE = 64


def sgd(model: nn.Module, config: OptimConfig) -> SGD:
    """Return SGD over the parameter groups of a model.

    Each group has ``name`` and ``lr_mult``; the rate itself is set before each step.
    """
    return SGD(
        _groups(model, config), lr=config.base_lr, momentum=config.momentum, nesterov=config.nesterov,
        fused=_fused(model),
    )  # fmt: skip


def make_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """Return the optimizer of a configuration, over the groups described at `sgd`."""
    if config.name == "sgd":
        return sgd(model, config)
    groups = _groups(model, config)
    if ":" in config.name:
        return _foreign(groups, config)
    for group in groups:
        group["adapt"] = group["name"] in _ADAPTED
    betas = (config.beta1, config.beta2)
    if config.name == "lars":
        return Lars(groups, lr=config.base_lr, momentum=config.momentum, trust=config.trust)
    if config.name == "lamb":
        return Lamb(groups, lr=config.base_lr, betas=betas, eps=config.eps)
    if config.name == "adagrad":
        return Adagrad(groups, lr=config.base_lr, eps=config.eps)
    kind: type[Adam] = {"adam": Adam, "adamw": AdamW}[config.name]
    return kind(groups, lr=config.base_lr, betas=betas, eps=config.eps, fused=_fused(model))


def state_per_weight(config: OptimConfig) -> float:
    """Return how many numbers an optimizer stores for each weight, such as 1 for momentum and 2 for Adam's moments.

    One of the user's own takes a step on a square of weights to see.
    """
    if config.name in _MOMENTS:
        return _MOMENTS[config.name]
    weights = nn.Parameter(torch.zeros(_PROBE, _PROBE))
    optimizer = _foreign([{"params": [weights], "lr_mult": 1.0, "weight_decay": 0.0}], config)
    weights.grad = torch.zeros_like(weights)
    optimizer.step()
    state = optimizer.state[weights]
    return sum(value.numel() for value in state.values() if isinstance(value, torch.Tensor)) / weights.numel()


def _groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    return parameter_groups(
        model, config.groups, config.weight_decay, config.head_lr_mult, config.no_decay, config.layer_decay
    )


def _foreign(groups: list[dict[str, Any]], config: OptimConfig) -> Optimizer:
    """Return the optimizer that ``module:name`` makes of the groups."""
    make = import_name("optim.name", config.name)
    if not callable(make):
        raise UsageError(
            f"optim.name is {config.name!r}, which is not callable", hint="name a function or a class of optimizers"
        )
    rate = {"lr": config.base_lr} if accepted(make, ["lr"]) and "lr" not in config.options else {}
    check_keywords("optim.options", config.name, make, config.options, always=[*first_argument(make), *rate])
    # A copy, because an optimizer adds its defaults to the groups that it is given.
    optimizer = make([dict(group) for group in groups], **rate, **config.options)
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"optim.name {config.name!r} returned {type(optimizer).__name__}, not a torch.optim.Optimizer",
            hint="return the optimizer",
        )
    if [_facts(group) for group in optimizer.param_groups] != [_facts(group) for group in groups]:
        raise UsageError(
            f"the optimizer of optim.name {config.name!r} has other parameter groups than it was given",
            hint="pass the groups on as they are, with their lr_mult",
        )
    return optimizer


def _facts(group: Mapping[str, Any]) -> tuple[float | None, list[int]]:
    return group.get("lr_mult"), [id(parameter) for parameter in group["params"]]


def _fused(model: nn.Module) -> bool | None:
    """Return True on a GPU: one kernel updates many parameters, and fp16 steps need no host synchronisation."""
    return True if all(parameter.is_cuda for parameter in model.parameters()) else None


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Restore an optimizer's state, which may come from another device; its own kernels stay chosen."""
    chosen = [{name: group[name] for name in _KERNELS if name in group} for group in optimizer.param_groups]
    optimizer.load_state_dict(dict(state))
    for group, own in zip(optimizer.param_groups, chosen, strict=True):
        group |= own


def parameter_groups(
    model: nn.Module,
    kind: Groups,
    weight_decay: float,
    head_lr_mult: float = 1.0,
    no_decay: Sequence[str] = (),
    layer_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Return the trainable parameters in non-empty groups by learning rate and weight decay."""
    tsm = kind == "tsm"
    last = {id(head) for _, head in heads(model)} if tsm or head_lr_mult != 1.0 else set()
    if (tsm or head_lr_mult != 1.0) and not last:
        given = "optim.groups is 'tsm'" if tsm else f"optim.head_lr_mult is {head_lr_mult}"
        raise UsageError(
            f"{given}, but the model has no linear layer", hint="set optim.groups=plain and optim.head_lr_mult=1"
        )
    scales = {} if layer_decay is None else layer_scales(model, layer_decay)
    rules: dict[str, tuple[float, float]] = {  # factor of the rate, weight decay
        "weight": (1.0, weight_decay),
        "bias": (_TSM_BIAS if tsm else 1.0, 0.0),
        "norm": (1.0, 0.0),
        "head_weight": (head_lr_mult * (_TSM_HEAD_WEIGHT if tsm else 1.0), weight_decay),
        "head_bias": (head_lr_mult * (_TSM_HEAD_BIAS if tsm else 1.0), 0.0),
    }
    found: dict[tuple[str, float], list[nn.Parameter]] = {}
    seen: set[int] = set()
    exempt = _exempt(model)
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            full = f"{path}.{name}" if path else name
            group = _group(module, name, parameter.ndim, id(module) in last)
            if group == "weight" and (full in exempt or not set(no_decay).isdisjoint(full.split("."))):
                group = "norm"  # the group with the plain rate and no weight decay
            found.setdefault((group, scales.get(full, 1.0)), []).append(parameter)
    order = list(rules)
    return [
        {"name": name, "lr_mult": rules[name][0] * scale, "weight_decay": rules[name][1], "params": parameters}
        for (name, scale), parameters in sorted(found.items(), key=lambda item: (order.index(item[0][0]), -item[0][1]))
    ]


def _exempt(model: nn.Module) -> set[str]:
    """Return the names of the parameters that the model itself exempts from weight decay, as timm's models do."""
    names = set()
    for path, module in model.named_modules():
        own = getattr(module, "no_weight_decay", None)
        if callable(own):
            names |= {f"{path}.{name}" if path else str(name) for name in own()}
    return names


def _group(module: nn.Module, name: str, ndim: int, is_head: bool) -> str:
    bias = name.endswith("bias")
    if is_head:
        return "head_bias" if bias else "head_weight"
    if bias and not _is_norm(module):
        return "bias"
    # Treat any other vector as a scale, like the weight of a norm, whatever the name of its module.
    return "norm" if _is_norm(module) or ndim < 2 else "weight"


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()
