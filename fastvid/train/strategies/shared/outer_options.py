"""The options ``outer``, ``outer_momentum`` and ``outer_lr``, which mean the same in every strategy that has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from fastvid.errors import UsageError

# DiLoCo (Douillard et al. 2023, arXiv 2311.08105), section 3.
_NESTEROV: Final = (0.9, 0.7)


def outer_options(kind: str, momentum: float | None, lr: float | None, kinds: Sequence[str]) -> tuple[float, float]:
    """Return momentum and rate of the step from one common model to the next."""
    if kind not in kinds:
        raise UsageError(f"sync option outer is {kind!r}", hint=f"use one of {', '.join(kinds)}")
    usual = _NESTEROV if kind == "nesterov" else (0.0, 1.0)
    momentum, lr = usual[0] if momentum is None else momentum, usual[1] if lr is None else lr
    if not 0 <= momentum < 1:
        raise UsageError(f"sync option outer_momentum is {momentum}, expected 0 <= momentum < 1")
    if not 0 < lr < math.inf:
        raise UsageError(f"sync option outer_lr is {lr}, expected more than 0")
    return momentum, lr
