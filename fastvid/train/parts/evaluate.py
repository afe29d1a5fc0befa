"""Evaluation of every sample exactly once over all ranks, without padding or replacement."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastvid.errors import StateError
from fastvid.train.config.run import Amp
from fastvid.train.parts.gathered import Gathered
from fastvid.train.parts.loader_protocol import Loader
from fastvid.train.records.metrics import shown_number
from fastvid.train.tasks.classification import Classification
from fastvid.train.tasks.sums import CLIPS, LOSS, Sums
from fastvid.train.tasks.task import Phase, Task

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Score:
    """The result of an evaluation."""

    # the metrics of the task by name, with units in the names; ``loss`` is the mean over the scored samples, nan
    # if none was scored.
    numbers: Mapping[str, float]
    value: float
    scored: int  # samples scored; fewer than `total` only if clips failed to decode and the loader skips such clips
    total: int  # number of samples in the split

    @property
    def loss(self) -> float:
        """The mean loss."""
        return self.numbers[LOSS]

    def as_row(self) -> dict[str, Any]:
        """Return the numbers as a row of metrics."""
        return {**self.numbers, "scored": self.scored, "total": self.total}

    def __str__(self) -> str:
        shown = [shown_number(name, self.numbers[name]) for name in sorted(self.numbers, key=LOSS.__eq__)]
        return f"{'  '.join(shown)}  ({self.scored:,} of {self.total:,} scored)"


def autocast(device: torch.device, amp: Amp) -> torch.autocast:
    """Return the autocast context of a precision, disabled for "off"."""
    dtype = torch.float16 if amp == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=amp != "off")


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Loader,
    *,
    total: int,
    device: torch.device,
    amp: Amp = "off",
    task: Task | None = None,
    seed: int = 0,
    add_up: Callable[[Tensor], Tensor] = lambda values: values,
) -> Score:
    """Score one epoch of a loader.

    `total`: number of samples in the split. `add_up`: sums a float64 CPU tensor over the ranks.
    """
    task = Classification() if task is None else task
    phase, training = Phase(training=False, seed=seed), model.training
    model.eval()
    sums: Sums | None = None
    delivered = 0
    gathered = Gathered(total) if task.scores_split else None
    try:
        for batch in loader:
            delivered += int((batch.position >= 0).sum())
            prepared = task.prepare(batch, phase)
            with autocast(device, amp):
                outputs = model(*task.inputs(prepared))
            found = task.sums(outputs, prepared)
            sums = found if sums is None else sums + found
            if gathered is not None:
                gathered.add(task.predict(outputs), task.scored(prepared), batch.sample, task.target(prepared))
    finally:
        model.train(training)
    if sums is None:
        raise StateError("evaluation received no batch", hint="start the loader at the beginning of an epoch")
    added = add_up(torch.cat([sums.vector.cpu(), torch.tensor([float(delivered)], dtype=torch.float64)]))
    seen = int(added[-1])
    if seen != total:
        raise StateError(
            f"evaluation received {seen} samples, the split has {total}",
            hint="start the loader at the beginning of an epoch, with last='keep'",
        )
    by_name = sums.numbers(added[:-1])
    scored = int(by_name[CLIPS])
    if scored < total:
        log.warning("only %d of %d samples were scored: the others failed to decode", scored, total)
    numbers = task.row(by_name)
    if not scored:
        numbers[LOSS] = float("nan")
    if gathered is not None:
        numbers |= task.score(*gathered.add_up(add_up).means(1)[:2])
    return Score(numbers, task.value(numbers), scored, total)
