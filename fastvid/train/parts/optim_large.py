"""Optimizers for very large batches: each layer's step is scaled by weight norm / update norm.

Parameters of groups without weight decay (biases and norms) take the unscaled step, as in the authors' code.
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

    Args:
        params: Parameters or groups, as in torch; ``adapt`` in a group says whether its layers are scaled.
        lr: Learning rate.
        momentum: Decay of the velocity.
        weight_decay: b.
        trust: Trust coefficient; the paper uses 0.001.
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
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                update = parameter.grad
                if group["adapt"]:
                    size, length = parameter.norm(), update.norm()
                    ratio = _ratio(group["trust"] * size, length + decay * size)
                    update = update.add(parameter, alpha=decay).mul_(ratio)
                elif decay:
                    update = update.add(parameter, alpha=decay)
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                velocity = state["momentum_buffer"].mul_(group["momentum"]).add_(update, alpha=group["lr"])
                parameter.sub_(velocity)


class Lamb(Optimizer):
    """LAMB, Adam with layer-wise rates: You et al. 2019, arXiv 1904.00962, algorithm 2.

    With Adam's bias-corrected direction ``r = m / (sqrt(v) + eps)`` and decay b:
    ``u = r + b w``, ``w = w - lr * |w| / |u| * u``.

    Args:
        params: Parameters or groups, as in torch; ``adapt`` in a group says whether its layers are scaled.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to the square root of the second moment; the paper uses 1e-6.
        weight_decay: b.
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
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
                steps = float(state["step"])
                mean = state["exp_avg"].lerp_(parameter.grad, 1 - first)
                square = state["exp_avg_sq"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                root = (square / (1 - second**steps)).sqrt_().add_(group["eps"])
                update = (mean / (1 - first**steps)).div_(root).add_(parameter, alpha=group["weight_decay"])
                if group["adapt"]:
                    update.mul_(_ratio(parameter.norm(), update.norm()))
                parameter.sub_(update, alpha=group["lr"])


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the ratio, or one where either is zero, without a device sync."""
    safe = torch.where(denominator > 0, denominator, 1)
    return torch.where((numerator > 0) & (denominator > 0), numerator / safe, 1.0)
