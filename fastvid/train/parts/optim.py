"""Optimizers and their parameter groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from fastvid.errors import UsageError
from fastvid.train.config.optim import Groups, OptimConfig
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


def sgd(model: nn.Module, config: OptimConfig) -> SGD:
    """Return SGD over the parameter groups of a model.

    Each group has ``name`` and ``lr_mult``; the rate itself is set before each step.

    Raises:
        UsageError: If the groups do not fit the model.
    """
    groups = parameter_groups(model, config.groups, config.weight_decay, config.head_lr_mult, config.no_decay)
    return SGD(groups, lr=config.base_lr, momentum=config.momentum, nesterov=config.nesterov, fused=_fused(model))


def make_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """Return the optimizer of a configuration, over the groups described at `sgd`.

    Raises:
        UsageError: If the groups do not fit the model.
    """
    if config.name == "sgd":
        return sgd(model, config)
    groups = parameter_groups(model, config.groups, config.weight_decay, config.head_lr_mult, config.no_decay)
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


def _fused(model: nn.Module) -> bool | None:
    """Return True on a GPU: one kernel updates many parameters, and fp16 steps need no host synchronisation."""
    return True if all(parameter.is_cuda for parameter in model.parameters()) else None


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Restore an optimizer's state, which may come from another device; its own kernels stay chosen.

    Raises:
        ValueError: If it belongs to other parameters.
    """
    chosen = [{name: group[name] for name in _KERNELS if name in group} for group in optimizer.param_groups]
    optimizer.load_state_dict(dict(state))
    for group, own in zip(optimizer.param_groups, chosen, strict=True):
        group |= own


def parameter_groups(
    model: nn.Module, kind: Groups, weight_decay: float, head_lr_mult: float = 1.0, no_decay: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the trainable parameters in non-empty groups by learning rate and weight decay.

    Args:
        model: Its last linear layer is the head.
        kind: "plain" applies weight decay to weights, but not to biases and norm layers. "tsm" also multiplies the rate
            of biases by 2, of the head's weight by 5 and of the head's bias by 10.
        weight_decay: Weight decay of the groups that have it.
        head_lr_mult: Additional factor of the head's rate.
        no_decay: Parts of dotted names of parameters without weight decay. Those that ``no_weight_decay()`` of the
            model, or of a module in it, names have none either.

    Raises:
        UsageError: If "tsm" or a head factor is given for a model without a linear layer.
    """
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    tsm = kind == "tsm"
    if (tsm or head_lr_mult != 1.0) and not linear:
        given = "optim.groups is 'tsm'" if tsm else f"optim.head_lr_mult is {head_lr_mult}"
        raise UsageError(
            f"{given}, but the model has no linear layer", hint="set optim.groups=plain and optim.head_lr_mult=1"
        )
    head = linear[-1] if tsm or head_lr_mult != 1.0 else None
    groups: dict[str, dict[str, Any]] = {
        "weight": {"lr_mult": 1.0, "weight_decay": weight_decay},
        "bias": {"lr_mult": _TSM_BIAS if tsm else 1.0, "weight_decay": 0.0},
        "norm": {"lr_mult": 1.0, "weight_decay": 0.0},
        "head_weight": {"lr_mult": head_lr_mult * (_TSM_HEAD_WEIGHT if tsm else 1.0), "weight_decay": weight_decay},
        "head_bias": {"lr_mult": head_lr_mult * (_TSM_HEAD_BIAS if tsm else 1.0), "weight_decay": 0.0},
    }
    seen: set[int] = set()
    exempt = _exempt(model)
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            full = f"{path}.{name}" if path else name
            group = _group(module, name, parameter.ndim, module is head)
            if group == "weight" and (full in exempt or not set(no_decay).isdisjoint(full.split("."))):
                group = "norm"  # the group with the plain rate and no weight decay
            groups[group].setdefault("params", []).append(parameter)
    return [{"name": name, **group} for name, group in groups.items() if "params" in group]


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
