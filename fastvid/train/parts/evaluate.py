"""Evaluation of every sample exactly once over all ranks, without padding or replacement.

`Gathered` collects the predictions and targets of a split's samples from all ranks, summed over the views of each
sample. A view is one of several clips or crops of a video.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from fastvid.errors import StateError
from fastvid.train.config.config import Amp, Config
from fastvid.train.parts.replica import Loader
from fastvid.train.records.records import shown_number
from fastvid.train.tasks.task import CLIPS, LOSS, Phase, Sums

_EMPTY: Final = torch.zeros(0)


class Gathered:
    """Sums predictions and targets and counts views per sample, on the CPU, in float64.

    `total`: number of samples in the split, N.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._predictions: Tensor | None = None  # [N, k]
        self._targets: Tensor | None = None  # [N, t]
        self._views = torch.zeros(total, dtype=torch.float64)

    def add(self, predictions: Tensor, scored: Tensor, sample: Tensor, targets: Tensor | None = None) -> None:
        """Add a batch.

        `predictions`: [b, k]. `scored`: which rows to add, bool [b]. `sample`: number of each row's sample,
        int64 [b], on the CPU. `targets`: [b, ...]; None for none.
        """
        rows = scored.cpu()
        where = sample[rows]
        self._predictions = self._added(self._predictions, predictions, rows, where)
        if targets is not None:
            self._targets = self._added(self._targets, targets, rows, where)
        self._views.index_add_(0, where, torch.ones(len(where), dtype=torch.float64))

    def add_up(self, add_up: Callable[[Tensor], Tensor]) -> Gathered:
        """Sum over the ranks, each of which has seen different samples, and return self."""
        # With a small split a rank may have received no rows, so it must learn their width from the others.
        parts = [_EMPTY if part is None else part for part in (self._predictions, self._targets)]
        known = torch.tensor([[part.shape[-1], int(part.ndim == 2)] for part in parts], dtype=torch.float64)
        widths = [int(width / max(1, ranks)) for width, ranks in add_up(known.reshape(-1)).view(2, 2).tolist()]
        whole = [
            part if part.ndim == 2 else torch.zeros(self.total, width, dtype=torch.float64)
            for part, width in zip(parts, widths, strict=True)
        ]
        summed = add_up(torch.cat([*whole, self._views[:, None]], 1))
        self._predictions, self._targets, views = torch.split_with_sizes(summed, [*widths, 1], 1)
        self._views = views[:, 0]
        return self

    def means(self, num_views: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean predictions [n, k] and targets [n, t] of the n samples whose views were all seen, and which
        of the split's samples these are, bool [N]."""
        if bool((self._views > num_views).any()):
            raise StateError(f"a video was scored {int(self._views.max())} times, the protocol has {num_views} views")
        whole = self._views == num_views
        predictions, targets = self._predictions, self._targets
        assert predictions is not None
        none = torch.zeros(int(whole.sum()), 0, dtype=torch.float64)
        return predictions[whole] / num_views, none if targets is None else targets[whole] / num_views, whole

    def _added(self, sums: Tensor | None, values: Tensor, rows: Tensor, where: Tensor) -> Tensor:
        chosen = values.flatten(1) if values.ndim > 1 else values[:, None]
        chosen = chosen[rows.to(values.device)].double().cpu()
        if sums is None:
            sums = torch.zeros(self.total, chosen.shape[1], dtype=torch.float64)
        return sums.index_add_(0, where, chosen)


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Score:
    """The result of an evaluation."""

    # Metrics of the task by name, with units in the names; ``loss`` is the mean over the scored samples, nan if no
    # sample was scored.
    numbers: Mapping[str, float]
    value: float  # how good the model is, see `Task.value`; higher is better
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
    config: Config,
    model: nn.Module,
    loader: Loader,
    device: torch.device,
    add_up: Callable[[Tensor], Tensor] = lambda values: values,
) -> Score:
    """Score one epoch of a loader.

    `add_up`: sums a float64 CPU tensor over the ranks.
    """
    task, training = config.task, model.training
    phase = Phase(training=False, seed=config.run.seed)
    model.eval()
    sums: Sums | None = None
    delivered, total = 0, loader.num_samples
    gathered = Gathered(total) if task.scores_split else None
    try:
        for batch in loader:
            delivered += int((batch.position >= 0).sum())
            prepared = task.prepare(batch, phase)
            with autocast(device, config.run.amp):
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
