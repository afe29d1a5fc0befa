"""Outer momentum over rounds of local steps: block momentum, SlowMo and Nesterov momentum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor

from fastvid.errors import UsageError

Kind = Literal["none", "block", "slowmo", "nesterov"]

# DiLoCo (Douillard et al. 2023, arXiv 2311.08105), section 3.
_NESTEROV: Final = (0.9, 0.7)


class OuterMomentum:
    """Momentum for the step from one common model to the next.

    With anchor w, mean m of the ranks' models, momentum u and rate e::

        v = u v + (m - w)
        w = w + e v

    This is "block", as in BMUF (Chen and Huo 2016) and Cong and Liu 2021. "slowmo" (Wang et al. 2019) keeps the
    momentum in units of the gradient, so v is rescaled whenever the learning rate changes; with a constant rate they
    are the same. "nesterov" is the outer optimizer of DiLoCo (Douillard et al. 2023): torch's SGD with Nesterov
    momentum, on the pseudo-gradient w - m::

        v = u v + (m - w)
        w = w + e (m - w + u v)

    Momentum 0 and rate 1 result in the mean itself, up to rounding.
    """

    def __init__(self, kind: str, momentum: float | None = None, lr: float | None = None) -> None:
        if kind not in get_args(Kind):
            raise UsageError(f"sync option outer is {kind!r}", hint=f"use one of {', '.join(get_args(Kind))}")
        usual = _NESTEROV if kind == "nesterov" else (0.0, 1.0)
        momentum, lr = usual[0] if momentum is None else momentum, usual[1] if lr is None else lr
        if not 0 <= momentum < 1:
            raise UsageError(f"sync option outer_momentum is {momentum}, expected 0 <= momentum < 1")
        if not 0 < lr < math.inf:
            raise UsageError(f"sync option outer_lr is {lr}, expected more than 0")
        if kind == "none" and (momentum, lr) != (0.0, 1.0):
            raise UsageError(
                "sync options outer_momentum and outer_lr have no effect with outer=none",
                hint="set sync_options.outer to nesterov, block or slowmo",
            )
        self.active = kind != "none"
        self._slowmo, self._nesterov = kind == "slowmo", kind == "nesterov"
        self._momentum, self._lr = momentum, lr
        self._velocity: Tensor | None = None
        self._inner_lr = 0.0

    @torch.no_grad()
    def step(self, anchor: Tensor, mean: Tensor, inner_lr: float) -> None:
        """Replace the mean with the next common model.

        `anchor`: [n], the common model before the round. `mean`: [n], the mean of the ranks' models after the
        round; overwritten.
        """
        if self._velocity is None:
            self._velocity = torch.zeros_like(mean)
        velocity = self._velocity
        scale = inner_lr / self._inner_lr if self._slowmo and self._inner_lr > 0 else 1.0
        moved = mean.sub_(anchor)
        velocity.mul_(self._momentum * scale).add_(moved)
        if self._nesterov:
            velocity = moved.add_(velocity, alpha=self._momentum)
        torch.add(anchor, velocity, alpha=self._lr, out=mean)
        self._inner_lr = inner_lr

    def state_dict(self) -> dict[str, Any]:
        """Return the velocity (None before the first step) and the learning rate of its last step."""
        return {"velocity": self._velocity, "inner_lr": self._inner_lr}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Restore a state."""
        velocity = state["velocity"]
        self._velocity = None if velocity is None else velocity.to(device)
        self._inner_lr = float(state["inner_lr"])
