"""A model in training, together with its optimizer, schedule and averaged weights."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastvid.errors import StateError
from fastvid.train.parts.ema import Average
from fastvid.train.parts.freeze import Freezer
from fastvid.train.parts.optim import load_optimizer
from fastvid.train.parts.schedule import Schedule


class Replica:
    """A model with its optimizer and its position in the learning rate schedule.

    `schedule`: learning rate as a function of the samples seen. `samples`: samples seen, the position in the
    schedule.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        schedule: Schedule,
        *,
        scale_loss: bool = False,
        ema_decay: float | None = None,
        ema_clips: int = 1,
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
        self.ema_clips, self._pending = ema_clips, 0
        self.freezer = freezer
        # A buffer may be infinite on purpose, such as a mask of attention.
        self._infinite = {name for name, value in model.named_buffers() if not _is_finite(value)}

    def set_lr(self) -> None:
        """Set the learning rate of every group for the next step."""
        self.lr = self.schedule.lr(self.samples) * self.lr_scale
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * group.get("lr_mult", 1.0)

    def stepped(self, clips: int) -> None:
        """Count the clips, of all replicas, that the weights have changed by and the average has not taken in."""
        self._pending += clips

    def update_average(self) -> None:
        """Take the weights into their average, if there is one; call it when all ranks have the same weights.

        The average decays by the clips since the last call, so it depends on samples alone, whether it takes in the
        model after each step or, with local steps, after each round.
        """
        if self.average is not None and self._pending:
            self.average.update(self.model, self._pending / self.ema_clips)
        self._pending = 0

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the averaged weights, if there is an average."""
        return contextlib.nullcontext() if self.average is None else self.average.in_place(self.model)

    def nonfinite(self) -> list[str]:
        """Return the names of weights, running statistics, averages and moments that are NaN or infinite.

        Buffers that were so before training are not named.
        """
        return [name for name, value in self._values() if not _is_finite(value)]

    def _values(self) -> Iterator[tuple[str, Tensor]]:
        models = [("", self.model)] + ([] if self.average is None else [("average of ", self.average.module)])
        for prefix, model in models:
            for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
                if name not in self._infinite:
                    yield f"{prefix}{name}", value
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield f"{key} of {names.get(parameter, 'a parameter')}", value

    def state_dict(self) -> dict[str, Any]:
        """Return weights, their average, optimizer state, loss scale and schedule position."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "samples": self.samples,
            "average": None if self.average is None else self.average.module.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        try:
            self.model.load_state_dict(state["model"])
            load_optimizer(self.optimizer, state["optimizer"])
            if self.average is not None and state.get("average") is not None:
                # Checkpoints of fastvid 0.1 lack `num_batches_tracked` in the average.
                self.average.module.load_state_dict({**state["model"], **state["average"]})
            elif self.average is not None:
                self.average.restart(self.model)
        except (RuntimeError, ValueError, KeyError) as error:
            raise StateError(
                f"checkpoint does not fit the model: {error}",
                hint="use the model and optim.groups that wrote it, or another run.out",
            ) from error
        self.scaler.load_state_dict(dict(state["scaler"]))
        self.samples = int(state["samples"])


def _is_finite(value: Tensor) -> bool:
    return not value.is_floating_point() or bool(value.isfinite().all())
