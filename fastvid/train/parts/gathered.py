"""Predictions and targets of the samples of a split, summed over views and gathered from all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from fastvid.errors import StateError

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
        """Add up over the ranks, each of which has other rows, and return self."""
        # A rank of a small split may have received no rows, and does not know how wide they are.
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
        """Return predictions [n, k], targets [n, t] of the samples with all their views, and which these are, [N]."""
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
