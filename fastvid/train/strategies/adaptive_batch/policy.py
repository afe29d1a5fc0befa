"""When the global batch grows: by schedule, by the gradient's noise, or when the loss no longer falls.

The 2018 system of Cong et al. has an adaptive batch size whose rule is not known; these policies are not it.

    schedule   grows where the learning rate would decay, or at given epochs: AdaBatch (Devarakonda et al. 2017), Smith
               et al. 2018
    noise      grows while the gradient noise scale (`fastvid.train.strategies.shared.noise`) is above the batch:
               McCandlish et al. 2018
    plateau    grows when the loss of the evaluation split has not improved for some evaluations

A policy is arithmetic: it sees numbers that are the same on every rank, so its sizes are. Sizes never fall and are the
first size times a power of the growth.
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
    """The size of the global batch. Every method is called on every rank with the same numbers.

    Args:
        growth: Factor of one growth, a whole number of at least 2, so that a batch stays a multiple of the first.
        largest: No growth goes beyond it; None for no limit.

    Attributes:
        first: Size that the run begins with, in clips.
        growths: How often it has grown.

    Raises:
        UsageError: A value is out of range.
    """

    def __init__(self, growth: int = 2, largest: int | None = None) -> None:
        if not isinstance(growth, int) or growth < 2:
            raise UsageError(f"sync option batch_growth is {growth}, expected a whole number of at least 2")
        self.growth, self.largest = growth, largest
        self.first = 1
        self.growths = 0

    def begin(self, first: int, samples_per_epoch: int, milestones: Sequence[int]) -> None:  # noqa: ARG002
        """Before the first batch, also of a run that goes on.

        Args:
            first: Size that the run began with, in clips.
            samples_per_epoch: Samples of an epoch.
            milestones: Samples at which the learning rate decays.

        Raises:
            UsageError: The policy does not go with the run.
        """
        if self.largest is not None and self.largest < first:
            raise UsageError(f"sync option batch_max is {self.largest}, the run begins with batches of {first} clips")
        self.first = first

    @abstractmethod
    def size(self, samples: int) -> int:
        """Size of the batch that begins after `samples` samples of the run."""

    def observe_noise(self, scale: float, samples: int) -> None:  # noqa: B027
        """The gradient noise scale since the last time, in clips; it may be infinite or nan."""

    def observe_loss(self, loss: float, samples: int) -> None:  # noqa: B027
        """The mean loss of an evaluation; it may be nan."""

    def grown(self, times: int) -> int:
        """The size after so many growths, as many of them as the largest allows."""
        size = self.first
        for _ in range(times):
            if self.largest is not None and size * self.growth > self.largest:
                break
            size *= self.growth
        return size

    def state_dict(self) -> dict[str, Any]:
        """What was decided."""
        return {"growths": self.growths}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a state over."""
        self.growths = int(state["growths"])


class Scheduled(BatchPolicy):
    """Grows once at each of some places of the run: a pure function of the samples seen.

    Args:
        growth: See `BatchPolicy`.
        largest: See `BatchPolicy`.
        at: Epochs, such as "30,60,80.5"; None takes those at which the learning rate decays.
    """

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
                "batch=schedule has nowhere to grow: the learning rate has no milestones",
                hint="set sync_options.batch_at to epochs, or optim.decay=step and optim.milestones",
            )
        self.milestones = tuple(milestones)

    def size(self, samples: int) -> int:
        return self.grown(sum(samples >= milestone for milestone in self.milestones))


class Measured(BatchPolicy):
    """Grows when a measurement says so."""

    def size(self, samples: int) -> int:  # noqa: ARG002
        return self.grown(self.growths)

    def _grow(self, samples: int, why: str) -> None:
        before, after = self.grown(self.growths), self.grown(self.growths + 1)
        if after > before:
            self.growths += 1
            log.info("batch of %d clips grows to %d after %d clips: %s", before, after, samples, why)


class Noise(Measured):
    """Grows, once a measurement, while the noise scale is above `threshold` times the batch.

    Args:
        growth: See `BatchPolicy`.
        largest: See `BatchPolicy`.
        threshold: Above 0. At 1 a step's noise is as large as its signal.
    """

    def __init__(self, growth: int = 2, largest: int | None = None, threshold: float = 1.0) -> None:
        super().__init__(growth, largest)
        self.threshold = _positive("batch_threshold", threshold)

    def observe_noise(self, scale: float, samples: int) -> None:
        if scale > self.threshold * self.size(samples):
            self._grow(samples, f"gradient noise scale is {scale:.3g}")


class Plateau(Measured):
    """Grows when so many evaluations in a row were not better than the best before by a relative `threshold`.

    Args:
        growth: See `BatchPolicy`.
        largest: See `BatchPolicy`.
        threshold: Share of the best loss by which an evaluation must be lower to count as better, above 0.
        patience: Evaluations.
    """

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
    """The policy of that name; values that are None are its own defaults.

    Raises:
        UsageError: The name is unknown, a value is out of range, or the policy does not have it.
    """
    kinds: dict[str, type[BatchPolicy]] = {"schedule": Scheduled, "noise": Noise, "plateau": Plateau}
    if name not in kinds:
        raise UsageError(f"sync option batch is {name!r}", hint=f"known are {', '.join(kinds)}")
    given = {"at": at, "threshold": threshold, "patience": patience}
    options = {option: value for option, value in given.items() if value is not None}
    known = inspect.signature(kinds[name]).parameters
    for option in options:
        if option not in known:
            raise UsageError(f"batch={name} has no option batch_{option}")
    return kinds[name](growth=growth, largest=largest, **options)


def epochs_of(text: str | float) -> tuple[float, ...]:
    """Epochs of an option, such as "30,60,80.5": ascending, above 0.

    Raises:
        UsageError: The text is no such list.
    """
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
