"""The exponential moving average of a model's weights, which is what is evaluated where there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


class Average:
    """A shadow of a model's parameters and floating buffers.

    All of it moves linearly, so the mean over ranks of averaged running statistics is the average of their mean.

    Args:
        model: Its values are the start.
        decay: Share of the shadow that stays in a step, 0 <= decay < 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._own = _floating(model)
        self.shadow = {name: value.detach().clone() for name, value in self._own.items()}

    @torch.no_grad()
    def update(self) -> None:
        """After a step."""
        shadows, values = list(self.shadow.values()), list(self._own.values())
        torch._foreach_lerp_(shadows, values, 1.0 - self.decay)

    def statistics(self) -> list[Tensor]:
        """The shadows of running means and variances."""
        return [value for name, value in self.shadow.items() if name.rpartition(".")[2] in _STATISTICS]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the averaged values inside the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def restart(self) -> None:
        """The model's values of now are the start, as after a model was given its weights."""
        for name, value in self._own.items():
            self.shadow[name].copy_(value)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes a state over.

        Raises:
            KeyError: A tensor of the model is missing.
        """
        for name, value in self.shadow.items():
            value.copy_(state[name])

    @torch.no_grad()
    def _swap(self) -> None:
        for name, value in self._own.items():
            kept = value.detach().clone()
            value.copy_(self.shadow[name])
            self.shadow[name].copy_(kept)


_STATISTICS = ("running_mean", "running_var")


def _floating(model: nn.Module) -> dict[str, Tensor]:
    both = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: value for name, value in both.items() if value.is_floating_point()}
