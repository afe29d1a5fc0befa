"""Policies that grow the global batch: by schedule, by gradient noise, or on a plateau of the loss.

The 2018 system of Cong et al. has an adaptive batch size whose rule is not published; these policies do not
reproduce it.

    schedule   grows where the learning rate would decay, or at given epochs: AdaBatch (Devarakonda et al. 2017), Smith
               et al. 2018
    noise      grows while the gradient noise scale (`fastvid.train.strategies.shared.noise`) exceeds the batch size:
               McCandlish et al. 2018
    plateau    grows when the evaluation loss has not improved for some evaluations

A policy's inputs are the same on every rank, so its sizes are too. Sizes never decrease and are the first size times
a power of the growth factor.
"""

from __future__ import annotations

import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, get_args

from fastvid.errors import UsageError

log = logging.getLogger(__name__)

PolicyName = Literal["schedule", "noise", "plateau"]
NAMES: Final = get_args(PolicyName)


class BatchPolicy(ABC):
    """Decides the size of the global batch. Every method is called on every rank with the same arguments.

    `growth`: growth factor, a whole number of at least 2, so that every size is a multiple of the first.
    """

    def __init__(self, growth: int = 2, largest: int | None = None) -> None:
        if not isinstance(growth, int) or growth < 2:
            raise UsageError(f"sync option batch_growth is {growth}, expected a whole number of at least 2")
        self.growth, self.largest = growth, largest
        self.first = 1
        self.growths = 0

    def begin(self, first: int, samples_per_epoch: int, milestones: Sequence[int]) -> None:  # noqa: ARG002
        """Prepare the policy before the first batch of a new or resumed run.

        `samples_per_epoch`: samples per epoch. `milestones`: samples at which the learning rate decays.
        """
        if self.largest is not None and self.largest < first:
            raise UsageError(
                f"sync option batch_max is {self.largest}, less than the first batch of {first} clips",
                hint="raise sync_options.batch_max or lower data.global_batch_size",
            )
        self.first = first

    @abstractmethod
    def size(self, samples: int) -> int:
        """Return the size of the batch that starts after `samples` samples of the run."""

    def observe_noise(self, scale: float, samples: int) -> None:  # noqa: B027
        """Handle the gradient noise scale since the last call, in clips; it may be infinite or nan."""

    def observe_loss(self, loss: float, samples: int) -> None:  # noqa: B027
        """Handle the mean loss of an evaluation; it may be nan."""

    def grown(self, times: int) -> int:
        """Return the size after growing `times` times, but no more than `largest`."""
        size = self.first
        for _ in range(times):
            if self.largest is not None and size * self.growth > self.largest:
                break
            size *= self.growth
        return size

    def state_dict(self) -> dict[str, Any]:
        """Return the decisions so far."""
        return {"growths": self.growths}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self.growths = int(state["growths"])


class Scheduled(BatchPolicy):
    """Grows once at each of some milestones; a pure function of the samples seen."""

    def __init__(self, growth: int = 2, largest: int | None = None, at: str | float | None = None) -> None:
        super().__init__(growth, largest)
        self._at = None if at is None else epochs_of(at)
        self.milestones: tuple[int, ...] = ()

    def begin(self, first: int, samples_per_epoch: int, milestones: Sequence[int]) -> None:
        super().begin(first, samples_per_epoch, milestones)
        if self._at is not None:
            milestones = [round(epoch * samples_per_epoch) for epoch in self._at]
        elif not milestones:
            raise UsageError(
                "batch=schedule has no epochs to grow at: the learning rate has no milestones",
                hint="set sync_options.batch_at to epochs, or optim.decay=step and optim.milestones",
            )
        self.milestones = tuple(milestones)

    def size(self, samples: int) -> int:
        return self.grown(sum(samples >= milestone for milestone in self.milestones))


class MeasuredPolicy(BatchPolicy):
    """Base class of policies that grow after a measurement."""

    def size(self, samples: int) -> int:  # noqa: ARG002
        return self.grown(self.growths)

    def _grow(self, samples: int, why: str) -> None:
        before, after = self.grown(self.growths), self.grown(self.growths + 1)
        if after > before:
            self.growths += 1
            log.info("batch of %d clips grows to %d after %d clips: %s", before, after, samples, why)


class Noise(MeasuredPolicy):
    """Grows once per measurement in which the noise scale exceeds `threshold` times the batch size."""

    def __init__(self, growth: int = 2, largest: int | None = None, threshold: float = 1.0) -> None:
        super().__init__(growth, largest)
        self.threshold = _positive("batch_threshold", threshold)

    def observe_noise(self, scale: float, samples: int) -> None:
        if scale > self.threshold * self.size(samples):
            self._grow(samples, f"gradient noise scale is {scale:.3g}")


class Plateau(MeasuredPolicy):
    """Grows after `patience` consecutive evaluations that did not improve on the best loss."""

    def __init__(self, growth: int = 2, largest: int | None = None, threshold: float = 0.01, patience: int = 2) -> None:
        super().__init__(growth, largest)
        self.threshold = _positive("batch_threshold", threshold)
        if patience < 1:
            raise UsageError(f"sync option batch_patience is {patience}, expected at least 1 evaluation")
        self.patience = patience
        self.best, self.waited = math.inf, 0

    def observe_loss(self, loss: float, samples: int) -> None:
        if loss < self.best - self.threshold * abs(self.best) or (math.isinf(self.best) and math.isfinite(loss)):
            self.best, self.waited = loss, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            self.waited = 0
            self._grow(samples, f"loss is {loss:.4g}, the best was {self.best:.4g}")

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.best, self.waited = float(state["best"]), int(state["waited"])


def make_policy(
    name: str,
    *,
    growth: int = 2,
    largest: int | None = None,
    at: str | float | None = None,
    threshold: float | None = None,
    patience: int | None = None,
) -> BatchPolicy:
    """Build the policy of that name; None keeps the policy's default."""
    kinds: dict[str, type[BatchPolicy]] = {"schedule": Scheduled, "noise": Noise, "plateau": Plateau}
    if name not in kinds:
        raise UsageError(f"sync option batch is {name!r}", hint=f"use one of {', '.join(kinds)}")
    given = {"at": at, "threshold": threshold, "patience": patience}
    options = {option: value for option, value in given.items() if value is not None}
    known = inspect.signature(kinds[name]).parameters
    for option in options:
        if option not in known:
            raise UsageError(f"batch={name} has no option batch_{option}", hint="remove it, or use another policy")
    return kinds[name](growth=growth, largest=largest, **options)


def epochs_of(text: str | float) -> tuple[float, ...]:
    """Parse the epochs of an option, for example "30,60,80.5": ascending, above 0."""
    try:
        epochs = tuple(float(part) for part in str(text).split(","))
    except ValueError:
        epochs = ()
    if not epochs or epochs[0] <= 0 or list(epochs) != sorted(set(epochs)):
        raise UsageError(f"sync option batch_at is {text!r}, expected ascending epochs above 0, such as 30,60,80.5")
    return epochs


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise UsageError(f"sync option {name} is {value}, expected more than 0")
    return value
