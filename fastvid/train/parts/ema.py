"""The exponential moving average of a model's weights, which is what is evaluated where there is one."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Average(AveragedModel):
    """The average of a model's parameters and buffers, in `module`.

    All of it moves linearly, so the mean over ranks of averaged running statistics is the average of their mean.

    Args:
        model: Its values are the start.
        decay: Share of the average that stays in a step, 0 <= decay < 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        blend: Any = get_ema_multi_avg_fn  # torch does not annotate it
        super().__init__(model, multi_avg_fn=blend(decay), use_buffers=True)
        self.requires_grad_(False)
        self.restart(model)

    def restart(self, model: nn.Module) -> None:
        """Start from the model's present values, as after a model was given its weights."""
        self.n_averaged.zero_()
        self.update_parameters(model)

    @contextlib.contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Give the model the averaged values inside the block.

        `module` itself is no substitute: a compiled or a spread model's ``forward`` is not copied with it.
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
