"""Optimizers and their parameter groups, and the learning rate as a pure function of the samples seen.

LARS and LAMB, for very large batches, scale each layer's step by weight norm / update norm. Parameters of groups
without weight decay (biases and norms) take the unscaled step, as in the authors' code. All parameters of a group are
updated together by torch's ``_foreach`` functions, which compute the same operations in the same order as a loop over
the parameters.

A model's last layers, and the depth of each parameter, are found from the names of modules and parameters.
"""

from __future__ import annotations

import functools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from fastvid.errors import UsageError
from fastvid.runtime.names import accepted, check_keywords, first_argument, import_name
from fastvid.train.config.config import OptimConfig


class _Layerwise(Optimizer, ABC):
    """Base class of optimizers that update many parameters together."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step; there is no closure."""
        assert closure is None
        for group in self.param_groups:
            for parameters, gradients in _alike(group["params"]):
                self._update(group, parameters, gradients)

    @abstractmethod
    def _update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Update parameters of one group, dtype and device."""


class Lars(_Layerwise):
    """LARS, SGD with layer-wise rates: You, Gitman, Ginsburg 2017, arXiv 1708.03888, algorithm 1.

    For a weight w with gradient g, decay b and rate r:
    ``v = momentum * v + r * trust * |w| / (|g| + b |w|) * (g + b w)`` and ``w = w - v``.
    As in the paper, the rate is inside the momentum.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "adapt": True}
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        velocities = [_state(self.state[parameter], parameter, "momentum_buffer")[0] for parameter in parameters]
        updates, decay = gradients, group["weight_decay"]
        if group["adapt"] or decay:
            updates = list(torch._foreach_add(gradients, parameters, alpha=decay))
        if group["adapt"]:
            sizes, lengths = _norms(parameters), _norms(gradients)
            ratios = _ratio(group["trust"] * sizes, lengths + decay * sizes)
            torch._foreach_mul_(updates, ratios.unbind())
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, updates, alpha=group["lr"])
        torch._foreach_sub_(parameters, velocities)


class Lamb(_Layerwise):
    """LAMB, Adam with layer-wise rates: You et al. 2019, arXiv 1904.00962, algorithm 2.

    With Adam's bias-corrected direction ``r = m / (sqrt(v) + eps)`` and decay b:
    ``u = r + b w``, ``w = w - lr * |w| / |u| * u``.

    `eps`: added to the square root of the second moment; the paper uses 1e-6.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": True}
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        first, second = group["betas"]
        states = [self.state[parameter] for parameter in parameters]
        moments = [_state(state, one, "exp_avg", "exp_avg_sq") for state, one in zip(states, parameters, strict=True)]
        means, squares = [mean for mean, _ in moments], [square for _, square in moments]
        # On the CPU, as in torch's optimizers, so that reading the numbers does not wait for a GPU.
        for state in states:
            if "step" not in state:
                state["step"] = torch.tensor(0.0)
        counts = [state["step"] for state in states]
        torch._foreach_add_(counts, 1)
        steps = [float(count) for count in counts]
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        roots = torch._foreach_div(squares, [1 - second**number for number in steps])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        updates = list(torch._foreach_div(means, [1 - first**number for number in steps]))
        torch._foreach_div_(updates, roots)
        torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])
        if group["adapt"]:
            torch._foreach_mul_(updates, _ratio(_norms(parameters), _norms(updates)).unbind())
        torch._foreach_sub_(parameters, updates, alpha=group["lr"])


def _alike(parameters: Iterable[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return pairs of parameters and their gradients, one pair per device and dtype; parameters without one are left
    out. Each pair can be updated by a few kernels."""
    found: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            own, gradients = found.setdefault((parameter.device, parameter.dtype), ([], []))
            own.append(parameter)
            gradients.append(parameter.grad)
    return list(found.values())


def _state(state: dict[str, Any], parameter: Tensor, *names: str) -> tuple[Tensor, ...]:
    """Return the named tensors of a parameter's optimizer state, created as zeros on first use."""
    return tuple(
        state[name] if name in state else state.setdefault(name, torch.zeros_like(parameter)) for name in names
    )


def _norms(tensors: list[Tensor]) -> Tensor:
    """Return the norm of each tensor, [tensors]."""
    return torch.stack(torch._foreach_norm(tensors))


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the ratio, or one where either is zero, without a device sync."""
    safe = torch.where(denominator > 0, denominator, 1)
    return torch.where((numerator > 0) & (denominator > 0), numerator / safe, 1.0)


# A user-defined schedule is tried at these points of its progress before the run starts.
_TRIED = (0.0, 0.25, 0.5, 0.75, 1.0)


class Schedule:
    """A learning rate schedule: linear warm-up, then decay.

    `samples_per_epoch`: samples trained on per epoch. `rate`: the rate at the end of warm-up. `total`: samples of the
    whole run. `milestones`: numbers of samples after which "step" multiplies the rate, ascending.
    """

    def __init__(self, optim: OptimConfig, *, epochs: int, samples_per_epoch: int, global_batch_size: int) -> None:
        if optim.warmup_epochs > epochs:
            raise UsageError(
                f"optim.warmup_epochs is {optim.warmup_epochs}, the run has {epochs} epochs",
                hint="shorten optim.warmup_epochs or raise run.epochs",
            )
        self.optim, self.total = optim, epochs * samples_per_epoch
        self.rate = optim.base_lr * global_batch_size / optim.base_batch_size
        self.milestones = tuple(round(epoch * samples_per_epoch) for epoch in optim.milestones)
        self._warmup = round(optim.warmup_epochs * samples_per_epoch)
        self._factor = _foreign(optim) if ":" in optim.decay else None

    def lr(self, samples: int) -> float:
        """Return the learning rate of the step that starts after `samples` samples.

        Warm-up rises linearly from ``warmup_start * rate`` at sample 0 to the full rate at its end. "cosine"
        decreases from there to ``final * rate`` at sample `total` and stays there.
        """
        optim, factor = self.optim, 1.0
        if samples < self._warmup:
            factor = optim.warmup_start + (1.0 - optim.warmup_start) * samples / self._warmup
        if optim.decay == "step":
            factor *= optim.gamma ** sum(samples >= milestone for milestone in self.milestones)
        elif samples < self._warmup:
            pass
        elif self._factor is not None:
            factor = _checked(optim.decay, self._factor, self._progress(samples))
        elif optim.decay == "cosine":
            progress = self._progress(samples)
            factor = optim.final + (1.0 - optim.final) * 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.rate * factor

    def _progress(self, samples: int) -> float:
        return min(1.0, (samples - self._warmup) / max(1, self.total - self._warmup))


def _foreign(optim: OptimConfig) -> Callable[[float], Any]:
    """Return the user-defined schedule that ``optim.decay=module:name`` names, with its options, after trying it."""
    function = import_name("optim.decay", optim.decay)
    if not callable(function):
        raise UsageError(
            f"optim.decay is {optim.decay!r}, which is not callable", hint="name a function of the progress, 0 to 1"
        )
    check_keywords("optim.decay_options", optim.decay, function, optim.decay_options, always=first_argument(function))
    factor = functools.partial(function, **optim.decay_options)
    for progress in _TRIED:
        _checked(optim.decay, factor, progress)
    return factor


def _checked(name: str, factor: Callable[[float], Any], progress: float) -> float:
    value = factor(progress)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise UsageError(
            f"optim.decay {name!r} returned {value!r} at progress {progress:g}",
            hint="return a finite factor of the rate, at least 0",
        )
    return number


# The first number in a dotted name, with everything before it: "backbone.layer1.0", "encoder.layer.11", "blocks.3".
_BLOCK = re.compile(r"^(?:.*?\.)?\d+(?=\.)")


def heads(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Return the dotted name and the module of each last layer (head): one for each net of a model of several streams.

    A module names its last layer by the attribute ``head_name``, a dotted name inside the module, as fastvid's nets do.
    Without that, the head is the model's last linear layer. Returns an empty list for a model without linear layers.
    """
    named = dict(model.named_modules())
    found: dict[str, nn.Linear] = {}
    for path, module in named.items():
        own = getattr(module, "head_name", None)
        name = f"{path}.{own}" if path else str(own)
        if isinstance(own, str) and isinstance(head := named.get(name), nn.Linear):
            found[name] = head
    if found:
        return list(found.items())
    return [(name, module) for name, module in named.items() if isinstance(module, nn.Linear)][-1:]


def layer_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """Return the factor of each parameter's learning rate, ``decay ** (layers above it)``.

    The stem (patch embedding, tokens, first convolution) is the lowest layer, each block is one layer, and everything
    after the last block is the highest layer, whose factor is 1: Clark et al. 2020 (ELECTRA, arXiv 2003.10555). BEiT,
    MAE and VideoMAE fine-tune in this way.

    The dotted name of a block ends at the first number: ``encoder.layer.11`` in transformers, ``blocks.11`` in timm,
    ``layer4.1`` in fastvid's ResNets. Blocks are in the order of the parameters; with two streams, the layers of each
    net are counted separately. A model with other names has a method ``parameter_layers()``. It returns, for each layer
    from the input on, the prefixes of its parameters' names; parameters that match no prefix are in the highest layer.
    """
    names = [name for name, _ in model.named_parameters()]
    own = getattr(model, "parameter_layers", None)
    if callable(own):
        depths = _depths_of(names, own())
    else:
        head_names = [name for name, _ in heads(model)]
        depths = {}
        for branch in _branches(model):
            inside = [name for name in names if name.startswith(branch)]
            depths |= _depths(inside, head_names)
    if not any(depths.values()):
        raise UsageError(
            "optim.layer_decay is set, but the model has no blocks: no parameter has a number in its dotted name",
            hint="give the model a method parameter_layers(), or remove optim.layer_decay",
        )
    return {name: decay ** depths.get(name, 0) for name in names}


def _branches(model: nn.Module) -> list[str]:
    """Return the name prefixes of the nets whose layers are counted separately: those with a ``head_name`` if there
    are several, else "", the whole model."""
    nets = [f"{path}." for path, module in model.named_modules() if path and hasattr(module, "head_name")]
    return nets if len(nets) > 1 else [""]


def _depths(names: Sequence[str], head_names: Iterable[str]) -> dict[str, int]:
    """Return the number of layers above each parameter, by name, from the blocks' numbers in the names."""
    last = tuple(f"{name}." for name in head_names)
    blocks = {name: match[0] for name in names if (match := _BLOCK.match(name)) and not name.startswith(last)}
    order = list(dict.fromkeys(blocks.values()))
    above: dict[str, int] = {}
    begun = 0
    for name in names:
        if name in blocks:
            begun = order.index(blocks[name]) + 1
        above[name] = len(order) + 1 - begun
    for name in reversed(names):
        if name in blocks:
            break
        above[name] = 0
    return above | {name: 0 for name in names if name.startswith(last)} if order else {}


def _depths_of(names: Sequence[str], layers: Any) -> dict[str, int]:
    """Return the number of layers above each parameter, by name, from the model's ``parameter_layers()``."""
    prefixes = [(layer,) if isinstance(layer, str) else tuple(layer) for layer in layers]
    above: dict[str, int] = {}
    for depth, layer in enumerate(prefixes):
        for prefix in layer:
            inside = [name for name in names if name == prefix or name.startswith(f"{prefix}.")]
            if not inside:
                raise UsageError(
                    f"parameter_layers() of the model names {prefix!r}, which matches no parameter",
                    hint=f"name parameters or modules, such as {names[0] if names else 'blocks.0'}",
                )
            above |= dict.fromkeys(inside, len(prefixes) - depth)
    return above


# TSM's learning rate multipliers (mit-han-lab/temporal-shift-module ops/models.py, get_optim_policies, with
# fc_lr5): biases of convolutions, weight and bias of the last layer.
_TSM_BIAS = 2.0
_TSM_HEAD_WEIGHT = 5.0
_TSM_HEAD_BIAS = 10.0

# Settings of the groups of a user's optimizer that are fastvid's, or choose one of torch's kernels.
_OURS = ("lr_mult", "weight_decay", "foreach", "fused", "capturable")

# Groups with weight decay, whose steps LARS and LAMB scale by layer.
_ADAPTED = ("weight", "head_weight")

# Numbers that an optimizer stores per weight, in addition to the weight and its gradient.
_MOMENTS = {"sgd": 1, "lars": 1, "adam": 2, "adamw": 2, "adagrad": 1, "lamb": 2}

# Rows and columns of the weights on which a user-defined optimizer is tried: enough for a step counter not to matter.
_PROBE = 64


def make_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """Return the optimizer of a configuration.

    Each parameter group has a ``name`` and the multiplier ``lr_mult``; `Replica.set_lr` sets ``lr`` before each step.
    """
    groups = parameter_groups(model, config)
    if ":" in config.name:
        return _foreign_optim(groups, config)
    # On a GPU one kernel updates many parameters, and fp16 steps need no host synchronisation.
    fused = True if all(parameter.is_cuda for parameter in model.parameters()) else None
    if config.name == "sgd":
        return SGD(groups, lr=config.base_lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused)
    for group in groups:
        group["adapt"] = group["name"] in _ADAPTED
    rest: dict[str, Any] = {"lr": config.base_lr, "eps": config.eps}
    if config.name == "lars":
        return Lars(groups, lr=config.base_lr, momentum=config.momentum, trust=config.trust)
    if config.name == "adagrad":
        return Adagrad(groups, **rest)
    rest["betas"] = (config.beta1, config.beta2)
    if config.name == "lamb":
        return Lamb(groups, **rest)
    kind: type[Adam] = {"adam": Adam, "adamw": AdamW}[config.name]
    return kind(groups, **rest, fused=fused)


def state_per_weight(config: OptimConfig) -> float:
    """Return how many numbers an optimizer stores for each weight, such as 1 for momentum and 2 for Adam's moments.

    For a user-defined optimizer they are counted after a step on some weights.
    """
    if config.name in _MOMENTS:
        return _MOMENTS[config.name]
    weights = nn.Parameter(torch.zeros(_PROBE, _PROBE))
    optimizer = _foreign_optim([{"params": [weights], "lr_mult": 1.0, "weight_decay": 0.0}], config)
    weights.grad = torch.zeros_like(weights)
    optimizer.step()
    state = optimizer.state[weights]
    return sum(value.numel() for value in state.values() if isinstance(value, torch.Tensor)) / weights.numel()


def _foreign_optim(groups: list[dict[str, Any]], config: OptimConfig) -> Optimizer:
    """Return the user-defined optimizer that ``optim.name=module:name`` creates for the parameter groups."""
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
            hint="pass the groups to the optimizer unchanged, with their lr_mult",
        )
    return optimizer


def _facts(group: Mapping[str, Any]) -> tuple[float | None, list[int]]:
    return group.get("lr_mult"), [id(parameter) for parameter in group["params"]]


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any], config: OptimConfig | None = None) -> None:
    """Restore an optimizer's state, which may come from another device; the settings are those of this run.

    `config`: of an optimizer that may be a user's own, whose groups may also hold numbers that steps change.
    """
    own = config is not None and ":" in config.name
    decided = (*_OURS, *config.options) if config is not None and own else ()
    chosen = [
        {name: value for name, value in group.items() if name != "params" and (name in decided or not own)}
        for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(dict(state))
    for group, settings in zip(optimizer.param_groups, chosen, strict=True):
        group |= settings


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Return the trainable parameters in non-empty groups by learning rate and weight decay."""
    tsm, weight_decay, head_lr_mult = config.groups == "tsm", config.weight_decay, config.head_lr_mult
    last = {id(head) for _, head in heads(model)} if tsm or head_lr_mult != 1.0 else set()
    if (tsm or head_lr_mult != 1.0) and not last:
        given = "optim.groups is 'tsm'" if tsm else f"optim.head_lr_mult is {head_lr_mult}"
        raise UsageError(
            f"{given}, but the model has no linear layer", hint="set optim.groups=plain and optim.head_lr_mult=1"
        )
    scales = {} if config.layer_decay is None else layer_scales(model, config.layer_decay)
    rules: dict[str, tuple[float, float]] = {  # factor of the rate, weight decay
        "weight": (1.0, weight_decay),
        "bias": (_TSM_BIAS if tsm else 1.0, 0.0),
        "norm": (1.0, 0.0),
        "head_weight": (head_lr_mult * (_TSM_HEAD_WEIGHT if tsm else 1.0), weight_decay),
        "head_bias": (head_lr_mult * (_TSM_HEAD_BIAS if tsm else 1.0), 0.0),
    }
    found: dict[tuple[str, float], list[nn.Parameter]] = {}
    exempt = _exempt(model)
    for full, parameter in model.named_parameters():
        if parameter.requires_grad:
            path, _, name = full.rpartition(".")
            module = model.get_submodule(path)
            group = _group(module, name, parameter.ndim, id(module) in last)
            if group == "weight" and (full in exempt or not set(config.no_decay).isdisjoint(full.split("."))):
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
    # Any other vector is treated as a scale, like the weight of a norm, whatever the type of its module.
    return "norm" if _is_norm(module) or ndim < 2 else "weight"


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()
