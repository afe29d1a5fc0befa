"""Evaluation: every sample once over all ranks, counted exactly, none replaced by another."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastvid.errors import StateError
from fastvid.train.config.config import Amp
from fastvid.train.parts.loader_protocol import Loader, inputs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Score:
    """What an evaluation found.

    Attributes:
        loss: Mean cross-entropy of the scored samples, in nats; nan when none was scored.
        top1_percent: Scored samples whose label has the highest logit, in percent.
        top5_percent: Scored samples whose label is among the five highest logits, in percent.
        scored: Samples scored. Fewer than `total` only where clips did not decode and the loader was told to skip them.
        total: Samples of the split.
    """

    loss: float
    top1_percent: float
    top5_percent: float
    scored: int
    total: int

    def as_row(self) -> dict[str, Any]:
        """The fields, for a metrics row."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"top1 {self.top1_percent:.2f} %  top5 {self.top5_percent:.2f} %  loss {self.loss:.4f}  "
            f"({self.scored:,} of {self.total:,} scored)"
        )


def autocast(device: torch.device, amp: Amp) -> torch.autocast:
    """The autocast context of a precision; "off" gives one that does nothing."""
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
    add_up: Callable[[Tensor], Tensor] = lambda values: values,
) -> Score:
    """Scores one epoch of a loader.

    Args:
        model: Clips [b, C, T, H, W], one of each stream, to logits [b, classes]; left in the mode it was in.
        loader: Stands at the start of an epoch and gives every sample once over all ranks (``last="keep"``).
        total: Samples of the split.
        device: Where clips are.
        amp: Precision.
        add_up: Sums a float64 CPU tensor over the ranks.

    Raises:
        StateError: The ranks together were not given every sample once.
    """
    training = model.training
    model.eval()
    numbers = torch.zeros(4, dtype=torch.float64, device=device)
    delivered = 0
    try:
        for batch in loader:
            delivered += int((batch.position >= 0).sum())
            with autocast(device, amp):
                logits = model(*inputs(batch))
            numbers += count(logits, batch.label, batch.valid)
    finally:
        model.train(training)
    sums = add_up(torch.cat([numbers.cpu(), torch.tensor([float(delivered)], dtype=torch.float64)])).tolist()
    loss, top1, top5, scored, seen = sums
    if int(seen) != total:
        raise StateError(
            f"evaluation was given {int(seen)} samples of a split of {total}",
            hint="the loader must start at an epoch's beginning and have last='keep'",
        )
    if scored < total:
        log.warning("%d of %d samples scored: the others did not decode", int(scored), total)
    share = 100.0 / max(1.0, scored)
    return Score(loss / scored if scored else float("nan"), share * top1, share * top5, int(scored), total)


def count(logits: Tensor, label: Tensor, valid: Tensor) -> Tensor:
    """Sums over the rows of a batch that can be scored: cross-entropy, top-1 hits, top-5 hits, rows; float64 [4].

    A row is scored when it is valid and has a label. One whose logits are not finite is no hit.

    Args:
        logits: [b, classes].
        label: int64 [b]; below 0 for none.
        valid: bool [b].
    """
    valid = valid & (label >= 0)
    label = label.where(valid, 0)
    losses = functional.cross_entropy(logits.double(), label, reduction="none")
    # A logit equal to the label's counts as above it: ties, as between constant logits, are never hits by luck.
    own = logits.gather(1, label[:, None])
    above = (logits >= own).sum(1) - 1
    finite = logits.isfinite().all(1)
    hits = [(finite & (above < most)).double() for most in (1, 5)]
    rows = torch.stack([losses, *hits, torch.ones_like(losses)])
    return torch.where(valid, rows, 0.0).sum(1)
