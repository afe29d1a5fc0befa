"""Statistics over all frames of a dataset, as LeRobot names them: ``min``, ``max``, ``mean``, ``std``, ``count``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def join_stats(parts: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """Return the statistics of all frames of several datasets; None if one has none.

    Quantiles cannot be joined and are left out. ``std`` is that of the population.
    """
    names = ("min", "max", "mean", "std", "count")
    if not all(part is not None and all(name in part for name in names) for part in parts):
        return None
    low, high, means, stds, counts = (np.array([part[name] for part in parts if part], np.float64) for name in names)
    counts = counts.reshape(len(parts), *[1] * (means.ndim - 1))
    total = counts.sum(axis=0)
    mean = (means * counts).sum(axis=0) / total
    variance = ((stds**2 + (means - mean) ** 2) * counts).sum(axis=0) / total
    return {
        "min": low.min(axis=0).tolist(),
        "max": high.max(axis=0).tolist(),
        "mean": mean.tolist(),
        "std": np.sqrt(variance).tolist(),
        "count": [int(total.item() if total.size == 1 else total.flat[0])],
    }
