"""One model in training: what moves together when a checkpoint is written or a model changes its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fastvid.errors import StateError
from fastvid.train.parts.ema import Average
from fastvid.train.parts.freeze import Freezer
from fastvid.train.parts.schedule import Schedule


class Replica:
    """A model with its optimiser, its schedule and its position in it.

    Attributes:
        model: The bare module; its state dict has its own names.
        forward: What is called in training: the model, or what a strategy has wrapped around it.
        optimizer: Has ``lr_mult`` in each group.
        schedule: Learning rate by samples seen.
        samples: Samples seen: the position in the schedule.
        lr: Learning rate of the last step.
        lr_scale: Factor of the schedule's rate, where the batch size changes during the run.
        scaler: Loss scaling for fp16; disabled otherwise.
        average: Moving average of the weights, which is what is evaluated; None for none.
        freezer: What does not move yet; None for nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        schedule: Schedule,
        *,
        scale_loss: bool = False,
        ema_decay: float | None = None,
        freezer: Freezer | None = None,
    ) -> None:
        self.model = model
        self.forward: nn.Module = model
        self.optimizer = optimizer
        self.schedule = schedule
        self.samples = 0
        self.lr = schedule.lr(0)
        self.lr_scale = 1.0
        self.scaler = torch.amp.GradScaler("cuda", enabled=scale_loss)
        self.average = None if ema_decay is None else Average(model, ema_decay)
        self.freezer = freezer

    def set_lr(self) -> None:
        """Gives every group the rate of the step that follows."""
        self.lr = self.schedule.lr(self.samples) * self.lr_scale
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * group.get("lr_mult", 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Weights, their average, optimiser, loss scale and schedule position."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "samples": self.samples,
            "average": None if self.average is None else self.average.module.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a state over.

        Raises:
            StateError: It belongs to another model or optimiser.
        """
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self.average is not None and state.get("average") is not None:
                # The average of a checkpoint of 0.1 has no counts of batches.
                self.average.module.load_state_dict({**state["model"], **state["average"]})
            elif self.average is not None:
                self.average.restart(self.model)
        except (RuntimeError, ValueError, KeyError) as error:
            raise StateError(
                f"checkpoint does not fit the model: {error}",
                hint="it was written by another model or another grouping of parameters; use another run.out",
            ) from error
        self.scaler.load_state_dict(dict(state["scaler"]))
        self.samples = int(state["samples"])
