"""Averages a model over ranks: parameters, norm statistics, moments and a few words in one message.

torch's own averagers (`torch.distributed.algorithms.model_averaging`, 2.13) are not used. They average after steps 1,
K + 1, 2K + 1 and so on; omit parameters without a gradient, buffers and optimizer state; and rebind each parameter to a
part of a new buffer, so that code with the old address uses stale memory.
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
"""Half-precision dtypes in which parameters may be sent, by name."""


class Averager:
    """Averages tensors over a group of ranks; every rank of the group must call it with the same shapes.

    Args:
        parameters: Tensors that may be sent in half precision.
        others: Tensors that may not: norm statistics and moments, whose small values would be lost.
        words: Number of further values.
        half: Dtype in which parameters are sent, as differences to an anchor; None sends them uncompressed.
        traffic: Counts the messages.

    Attributes:
        flat: The buffer of all values; contains the mean after `reduce`.
        parameters: [n], the part of the buffer that belongs to the parameters.
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
        """Average the buffer over the ranks.

        Each rank divides by the number of ranks before the sum, so that half precision does not overflow.

        Args:
            size: Number of ranks in the group.
            group: Process group; None for all ranks.
            purpose: Purpose under which `Traffic` counts the message.
            anchor: [n], parameters that are the same on all ranks of the group; required for half precision.
        """
        if size == 1:
            return
        if self._half is None:
            self._sum(self.flat.buffer.div_(size), group, purpose)
            return
        assert anchor is not None
        # Differences are small, so rounding them costs little, and the result is the same on all ranks.
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
    """Return the floating-point buffers of a model, such as running statistics.

    Counters are excluded: they count steps, which are the same on every rank.
    """
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def moments(optimizer: Optimizer) -> list[Tensor]:
    """Return momentum buffers and Adam's moments: state tensors with their parameter's shape.

    Step counters are excluded.
    """
    return [
        value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for name, value in sorted(optimizer.state.get(parameter, {}).items())
        if name != "step" and isinstance(value, Tensor) and value.shape == parameter.shape
    ]


@torch.no_grad()
def reset_moments(optimizer: Optimizer) -> None:
    """Set moments and step counters to zero, in place, as before the optimizer's first step."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()
