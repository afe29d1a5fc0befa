"""Optimizers for very large batches: each layer's step is scaled by weight norm / update norm.

Parameters of groups without weight decay (biases and norms) take the unscaled step, as in the authors' code. All
parameters of a group are updated together by torch's ``_foreach`` functions, whose operations and their order are those
of one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lars(Optimizer):
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

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step; there is no closure."""
        assert closure is None
        for group in self.param_groups:
            decay = group["weight_decay"]
            for parameters, gradients in _alike(group["params"]):
                velocities = [
                    _state(self.state[parameter], parameter, "momentum_buffer")[0] for parameter in parameters
                ]
                updates = gradients
                if group["adapt"] or decay:
                    updates = list(torch._foreach_add(gradients, parameters, alpha=decay))
                if group["adapt"]:
                    sizes, lengths = _norms(parameters), _norms(gradients)
                    ratios = _ratio(group["trust"] * sizes, lengths + decay * sizes)
                    torch._foreach_mul_(updates, ratios.unbind())
                torch._foreach_mul_(velocities, group["momentum"])
                torch._foreach_add_(velocities, updates, alpha=group["lr"])
                torch._foreach_sub_(parameters, velocities)


class Lamb(Optimizer):
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

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step; there is no closure."""
        assert closure is None
        for group in self.param_groups:
            for parameters, gradients in _alike(group["params"]):
                self._update(group, parameters, gradients)

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
    """Return parameters with their gradients, if any, by device and dtype: each group is updated by few kernels."""
    found: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            own, gradients = found.setdefault((parameter.device, parameter.dtype), ([], []))
            own.append(parameter)
            gradients.append(parameter.grad)
    return list(found.values())


def _state(state: dict[str, Any], parameter: Tensor, *names: str) -> tuple[Tensor, ...]:
    """Return tensors of a parameter's state, zeros at first."""
    return tuple(
        state[name] if name in state else state.setdefault(name, torch.zeros_like(parameter)) for name in names
    )


def _norms(tensors: list[Tensor]) -> Tensor:
    """Return the norm of each tensor."""
    return torch.stack(torch._foreach_norm(tensors))


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the ratio, or one where either is zero, without a device sync."""
    safe = torch.where(denominator > 0, denominator, 1)
    return torch.where((numerator > 0) & (denominator > 0), numerator / safe, 1.0)
