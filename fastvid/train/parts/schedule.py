"""The learning rate as a pure function of the samples seen, so that it does not depend on the world or on restarts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastvid.errors import UsageError
from fastvid.train.config.config import Decay, OptimConfig


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then decay.

    Attributes:
        rate: Learning rate after warm-up: the base rate, scaled to the global batch.
        total: Samples of the whole run.
        warmup: Samples of warm-up.
        warmup_start: Share of the rate at sample 0.
        decay: "constant", "step" or "cosine".
        milestones: Samples at which "step" multiplies the rate by `gamma`, ascending.
        gamma: Factor of "step".
        final: Share of the rate at which "cosine" ends.
    """

    rate: float
    total: int
    warmup: int = 0
    warmup_start: float = 0.1
    decay: Decay = "constant"
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1
    final: float = 0.0

    @classmethod
    def of(cls, optim: OptimConfig, *, epochs: int, samples_per_epoch: int, global_batch_size: int) -> Schedule:
        """A configuration's schedule.

        Args:
            optim: Rates and epochs.
            epochs: Of the run.
            samples_per_epoch: Samples that an epoch trains on.
            global_batch_size: Clips of a step over all ranks; the base rate is scaled by it over its own base.

        Raises:
            UsageError: Warm-up is longer than the run.
        """
        if optim.warmup_epochs > epochs:
            raise UsageError(f"optim.warmup_epochs is {optim.warmup_epochs}, the run has {epochs} epochs")
        return cls(
            rate=optim.base_lr * global_batch_size / optim.base_batch_size,
            total=epochs * samples_per_epoch,
            warmup=round(optim.warmup_epochs * samples_per_epoch),
            warmup_start=optim.warmup_start,
            decay=optim.decay,
            milestones=tuple(round(epoch * samples_per_epoch) for epoch in optim.milestones),
            gamma=optim.gamma,
            final=optim.final,
        )

    def lr(self, samples: int) -> float:
        """Learning rate of the step that starts after `samples` samples.

        Warm-up rises linearly from ``warmup_start * rate`` at sample 0 to the full rate at sample `warmup`. "cosine"
        falls from there to ``final * rate`` at sample `total` and stays.
        """
        factor = 1.0
        if samples < self.warmup:
            factor = self.warmup_start + (1.0 - self.warmup_start) * samples / self.warmup
        if self.decay == "step":
            factor *= self.gamma ** sum(samples >= milestone for milestone in self.milestones)
        elif self.decay == "cosine" and samples >= self.warmup:
            progress = min(1.0, (samples - self.warmup) / max(1, self.total - self.warmup))
            factor = self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.rate * factor
