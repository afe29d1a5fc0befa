"""What is good and bad about the batches of one epoch, whoever made them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastvid.load.order.packed import cost
from fastvid.runtime.arrays import IntArray

Steps = Sequence[Sequence[Sequence[int]]]
"""For each rank its steps, and for each step the samples."""


def score(ranks: Steps, tokens: IntArray, room: IntArray, quadratic_from: int) -> dict[str, Any]:
    """Return what can be said of the batches of an epoch.

    `ranks`: for each rank its steps, and for each step its samples; steps that only some ranks take are last.
    `tokens`: tokens of each sample as delivered, int64 [N]. `room`: tokens that each (rank, step) occupies in
    memory, padding included, int64 [W, S] for the common steps.
    """
    seen = Counter(sample for steps in ranks for step in steps for sample in step)
    common = min(map(len, ranks))
    costs = cost(tokens, quadratic_from)
    loads = np.asarray([[costs[list(step)].sum() for step in steps[:common]] for steps in ranks], dtype=np.float64)
    used = sum(int(tokens[list(step)].sum()) for steps in ranks for step in steps[:common])
    uneven = loads.max(axis=0) / loads.mean(axis=0)
    return {
        "lost": len(tokens) - len(seen),
        "doubled": sum(seen.values()) - len(seen),
        "padding": 1 - used / int(room.sum()),
        "imbalance": float(uneven.mean()),
        "imbalance_p99": float(np.quantile(uneven, 0.99)),
        "equal_steps": len({len(steps) for steps in ranks}) == 1,
        "steps": [min(map(len, ranks)), max(map(len, ranks))],
    }
