"""The mean of a model over ranks: parameters, norm statistics, moments and a few words in one message.

torch's own averagers (`torch.distributed.algorithms.model_averaging`, 2.13) were not used. They average after steps 1,
K + 1, 2K + 1 and so on; leave out parameters without a gradient, buffers and the state of the optimiser; and rebind
each parameter to a part of a new buffer, so that whatever kept its address works on stale memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fastvid.train.strategies.shared.flat import Flat
from fastvid.train.strategies.shared.traffic import Traffic

HALVES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Types that parameters may travel in, by name."""


class Averager:
    """Brings tensors to their mean over a group of ranks; every rank of the group must call it with the same shapes.

    Args:
        parameters: What may travel in half precision.
        others: What may not: norm statistics and moments, whose small values half precision would lose.
        words: Further numbers.
        half: The type that parameters travel in, as differences to an anchor; None sends them as they are.
        traffic: Counts.

    Attributes:
        flat: Everything; holds the mean after `reduce`.
        parameters: [n], the part of it that belongs to the parameters.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        others: Sequence[Tensor],
        *,
        words: int = 0,
        half: torch.dtype | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self.flat = Flat([*parameters, *others], words)
        self._split = sum(parameter.numel() for parameter in parameters)
        self.parameters = self.flat.buffer[: self._split]
        self._half = None if half is None else torch.empty_like(self.parameters, dtype=half)
        self._traffic = traffic or Traffic()

    @torch.no_grad()
    def reduce(self, size: int, group: dist.ProcessGroup | None, purpose: str, anchor: Tensor | None = None) -> None:
        """The mean of what the ranks have collected.

        Each rank divides by the number of ranks before anything is added, so that half precision does not overflow.

        Args:
            size: Ranks of the group.
            group: Of the ranks; None is all.
            purpose: What the message is counted as.
            anchor: [n], parameters that all ranks of the group hold alike; needed for half precision.
        """
        if size == 1:
            return
        if self._half is None:
            self._sum(self.flat.buffer.div_(size), group, purpose)
            return
        assert anchor is not None
        # Differences are small, so rounding them costs little; and the ranks' sums of the same numbers stay the same.
        self._half.copy_(self.parameters.sub_(anchor).div_(size))
        self._sum(self._half, group, purpose)
        torch.add(anchor, self._half, out=self.parameters)
        rest = self.flat.buffer[self._split :]
        if len(rest):
            self._sum(rest.div_(size), group, f"{purpose}_rest")

    def _sum(self, message: Tensor, group: dist.ProcessGroup | None, purpose: str) -> None:
        self._traffic.count(purpose, message)
        dist.all_reduce(message, group=group)


def statistics(model: nn.Module) -> list[Tensor]:
    """The buffers that have a mean: those of floating type, such as running statistics. Counters are left out: they
    count steps, which are the same on every rank."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def moments(optimizer: Optimizer) -> list[Tensor]:
    """Momentum buffers and Adam's moments: the optimiser's tensors that have the shape of their parameter. Step
    counters are left out."""
    return [
        value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for name, value in sorted(optimizer.state.get(parameter, {}).items())
        if name != "step" and isinstance(value, Tensor) and value.shape == parameter.shape
    ]


@torch.no_grad()
def reset_moments(optimizer: Optimizer) -> None:
    """Sets moments and step counters to zero, in place: the next step is the optimiser's first."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()
