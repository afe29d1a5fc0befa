"""The learning rate as a pure function of the samples seen, independent of world size and restarts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastvid.errors import UsageError
from fastvid.train.config.optim import Decay, OptimConfig


@dataclass(frozen=True)
class Schedule:
    """A learning rate schedule: linear warm-up, then decay.

    Attributes:
        rate: Learning rate after warm-up: the base rate scaled to the global batch size.
        total: Samples of the whole run.
        warmup: Samples of warm-up.
        warmup_start: Fraction of the rate at sample 0.
        decay: "constant", "step" or "cosine".
        milestones: Samples at which "step" multiplies the rate by `gamma`, ascending.
        gamma: Factor of "step".
        final: Fraction of the rate at which "cosine" ends.
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
        """Return the schedule of a configuration.

        Args:
            optim: Rates and milestones, in epochs.
            epochs: Epochs of the run.
            samples_per_epoch: Samples trained on per epoch.
            global_batch_size: Clips per step over all ranks; the base rate is scaled by its ratio to
                `optim.base_batch_size`.

        Raises:
            UsageError: If warm-up is longer than the run.
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
        elif self.decay == "cosine" and samples >= self.warmup:
            progress = min(1.0, (samples - self.warmup) / max(1, self.total - self.warmup))
            factor = self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.rate * factor
