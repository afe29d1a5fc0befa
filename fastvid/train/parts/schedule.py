"""The learning rate as a pure function of the samples seen, independent of world size and restarts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastvid.errors import UsageError
from fastvid.runtime.import_names import check_keywords, first_argument, import_name
from fastvid.train.config.optim import OptimConfig

# Progress at which a schedule of the user's own is tried before the run.
_TRIED = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Schedule:
    """A learning rate schedule: linear warm-up, then decay."""

    rate: float
    total: int  # samples of the whole run
    warmup: int = 0  # samples of warm-up
    warmup_start: float = 0.1
    decay: str = "constant"
    milestones: tuple[int, ...] = ()  # samples at which "step" multiplies the rate by `gamma`, ascending
    gamma: float = 0.1
    final: float = 0.0
    factor: Callable[[float], Any] | None = None

    @classmethod
    def of(cls, optim: OptimConfig, *, epochs: int, samples_per_epoch: int, global_batch_size: int) -> Schedule:
        """Return the schedule of a configuration.

        `samples_per_epoch`: samples trained on per epoch.
        """
        if optim.warmup_epochs > epochs:
            raise UsageError(
                f"optim.warmup_epochs is {optim.warmup_epochs}, the run has {epochs} epochs",
                hint="shorten optim.warmup_epochs or raise run.epochs",
            )
        return cls(
            rate=optim.base_lr * global_batch_size / optim.base_batch_size,
            total=epochs * samples_per_epoch,
            warmup=round(optim.warmup_epochs * samples_per_epoch),
            warmup_start=optim.warmup_start,
            decay=optim.decay,
            milestones=tuple(round(epoch * samples_per_epoch) for epoch in optim.milestones),
            gamma=optim.gamma,
            final=optim.final,
            factor=_foreign(optim) if ":" in optim.decay else None,
        )

    def lr(self, samples: int) -> float:
        """Return the learning rate of the step that starts after `samples` samples.

        Warm-up rises linearly from ``warmup_start * rate`` at sample 0 to the full rate at sample `warmup`. "cosine"
        decreases from there to ``final * rate`` at sample `total` and stays there.
        """
        factor = 1.0
        if samples < self.warmup:
            factor = self.warmup_start + (1.0 - self.warmup_start) * samples / self.warmup
        if self.decay == "step":
            factor *= self.gamma ** sum(samples >= milestone for milestone in self.milestones)
        elif samples < self.warmup:
            pass
        elif self.factor is not None:
            factor = _checked(self.decay, self.factor, self._progress(samples))
        elif self.decay == "cosine":
            progress = self._progress(samples)
            factor = self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.rate * factor

    def _progress(self, samples: int) -> float:
        return min(1.0, (samples - self.warmup) / max(1, self.total - self.warmup))


def _foreign(optim: OptimConfig) -> Callable[[float], Any]:
    """Return the schedule that ``module:name`` names, with its options, after trying it."""
    function = import_name("optim.decay", optim.decay)
    if not callable(function):
        raise UsageError(
            f"optim.decay is {optim.decay!r}, which is not callable", hint="name a function of the progress, 0 to 1"
        )
    check_keywords("optim.decay_options", optim.decay, function, optim.decay_options, always=first_argument(function))
    factor = functools.partial(function, **optim.decay_options)
    for progress in _TRIED:
        _checked(optim.decay, factor, progress)
    return factor


def _checked(name: str, factor: Callable[[float], Any], progress: float) -> float:
    value = factor(progress)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise UsageError(
            f"optim.decay {name!r} returned {value!r} at progress {progress:g}",
            hint="return a finite factor of the rate, at least 0",
        )
    return number
