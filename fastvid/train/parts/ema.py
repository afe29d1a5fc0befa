"""The exponential moving average (EMA) of a model's weights, used for evaluation if enabled."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Average(AveragedModel):
    """The EMA of a model's parameters and buffers, in `module`.

    The average is linear, so averaging running statistics over ranks before or after it gives the same result.

    Args:
        model: Its values are the initial average.
        decay: Fraction of the average that an update keeps, 0 <= decay < 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, multi_avg_fn=self._blend, use_buffers=True)
        self.decay, self._updates = decay, 1.0
        self.requires_grad_(False)
        self.restart(model)

    def restart(self, model: nn.Module) -> None:
        """Reset the average to the model's current values, for example after weights were loaded."""
        self.n_averaged.zero_()
        self.update_parameters(model)

    def update(self, model: nn.Module, updates: float = 1.0) -> None:
        """Take in the model's values, with the weight that they have after so many updates with these values."""
        self._updates = updates
        self.update_parameters(model)

    def _blend(self, averaged: Any, current: Any, count: Any) -> None:
        blend: Any = get_ema_multi_avg_fn  # torch does not annotate it
        blend(self.decay**self._updates)(averaged, current, count)

    @contextlib.contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Swap the averaged values into the model inside the block.

        `module` cannot be evaluated instead, because the copy lacks the ``forward`` of a compiled or pipelined model.
        """
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    @torch.no_grad()
    def _swap(self, model: nn.Module) -> None:
        averaged = itertools.chain(self.module.parameters(), self.module.buffers())
        for own, value in zip(itertools.chain(model.parameters(), model.buffers()), averaged, strict=True):
            kept = own.detach().clone()
            own.copy_(value)
            value.copy_(kept)
