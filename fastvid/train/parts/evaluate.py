"""Evaluation of every sample exactly once over all ranks, without padding or replacement."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastvid.errors import StateError
from fastvid.train.config.run import Amp
from fastvid.train.parts.loader_protocol import Loader, inputs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Score:
    """The result of an evaluation.

    Attributes:
        loss: Mean cross-entropy of the scored samples, in nats; nan if none was scored.
        top1_percent: Percentage of scored samples whose label has the highest logit.
        top5_percent: Percentage of scored samples whose label is among the five highest logits.
        scored: Samples scored; fewer than `total` only if clips failed to decode and the loader skips such clips.
        total: Number of samples in the split.
    """

    loss: float
    top1_percent: float
    top5_percent: float
    scored: int
    total: int

    def as_row(self) -> dict[str, Any]:
        """Return the fields as a row of metrics."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"top1 {self.top1_percent:.2f} %  top5 {self.top5_percent:.2f} %  loss {self.loss:.4f}  "
            f"({self.scored:,} of {self.total:,} scored)"
        )


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
    add_up: Callable[[Tensor], Tensor] = lambda values: values,
) -> Score:
    """Score one epoch of a loader.

    Args:
        model: Maps clips [b, C, T, H, W], one tensor per stream, to logits [b, classes]. Its training mode is restored.
        loader: At the start of an epoch; delivers every sample once over all ranks (``last="keep"``).
        total: Number of samples in the split.
        device: Device of the clips.
        amp: Precision.
        add_up: Sums a float64 CPU tensor over the ranks.

    Raises:
        StateError: If the ranks together did not receive every sample once.
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
            f"evaluation received {int(seen)} samples, the split has {total}",
            hint="start the loader at the beginning of an epoch, with last='keep'",
        )
    if scored < total:
        log.warning("only %d of %d samples were scored: the others failed to decode", int(scored), total)
    share = 100.0 / max(1.0, scored)
    return Score(loss / scored if scored else float("nan"), share * top1, share * top5, int(scored), total)


def count(logits: Tensor, label: Tensor, valid: Tensor) -> Tensor:
    """Return float64 [4]: cross-entropy, top-1 hits, top-5 hits and rows, summed over scored rows.

    A row is scored if it is valid and has a label. A row with non-finite logits is never a hit.

    Args:
        logits: [b, classes].
        label: int64 [b]; negative for no label.
        valid: bool [b].
    """
    valid = valid & (label >= 0)
    label = label.where(valid, 0)
    losses = functional.cross_entropy(logits.double(), label, reduction="none")
    # A logit equal to the label's counts as above it, so that ties (for example constant logits) are never hits.
    own = logits.gather(1, label[:, None])
    above = (logits >= own).sum(1) - 1
    finite = logits.isfinite().all(1)
    hits = [(finite & (above < most)).double() for most in (1, 5)]
    rows = torch.stack([losses, *hits, torch.ones_like(losses)])
    return torch.where(valid, rows, 0.0).sum(1)
