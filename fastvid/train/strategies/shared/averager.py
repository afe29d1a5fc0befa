"""Averages a model over ranks: parameters, norm statistics, moments and a few words in one message.

torch's own averagers (`torch.distributed.algorithms.model_averaging`, 2.13) are not used. They average after steps 1,
K + 1, 2K + 1 and so on; omit parameters without a gradient, buffers and optimizer state; and rebind each parameter to a
part of a new buffer, so that code with the old address uses stale memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fastvid.train.strategies.shared.flat import Flat
from fastvid.train.strategies.shared.traffic import Traffic
from fastvid.train.strategies.shared.wire import Compressor, Counted, Half, Integers, Mean, Whole

CODECS: Final[dict[str, Callable[[], Compressor]]] = {
    "fp16": lambda: Half(torch.float16),
    "bf16": lambda: Half(torch.bfloat16),
    "int8": lambda: Integers(8),
    "int4": lambda: Integers(4),
}
"""How parameters may be sent, by name."""


class Averager:
    """Averages tensors over a group of ranks; every rank of the group must call it with the same shapes.

    `parameters`: [n], the part of the buffer that belongs to the parameters.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        others: Sequence[Tensor],
        *,
        words: int = 0,
        codec: Compressor | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self.flat = Flat([*parameters, *others], words)
        self._split = sum(parameter.numel() for parameter in parameters)
        self.parameters = self.flat.buffer[: self._split]
        self._codec = codec
        self._traffic = traffic or Traffic()

    def reduce(self, size: int, group: dist.ProcessGroup | None, purpose: str, anchor: Tensor | None = None) -> None:
        """Average the buffer over the ranks, and wait for the mean; see `start`."""
        self.start(size, group, purpose, anchor).finish()

    @torch.no_grad()
    def start(
        self,
        size: int,
        group: dist.ProcessGroup | None,
        purpose: str,
        anchor: Tensor | None = None,
        *,
        whole: bool = False,
    ) -> Averaging:
        """Start to average the buffer over the ranks. It must not be used until the result is finished.

        `anchor`: [n], parameters that are the same on all ranks of the group; required by a codec.
        """
        if size == 1:
            return Averaging([])
        if self._codec is None or anchor is None:
            return Averaging([self._mean(self.flat.buffer.div_(size), group, purpose)])
        # Differences are small, so rounding them costs little, and the result is the same on all ranks.
        difference = self.parameters.sub_(anchor)
        if whole:
            self._codec.drain(difference)
            means: list[Mean] = [self._mean(self.flat.buffer.div_(size), group, purpose)]
        else:
            means = [self._codec.begin(difference, size, group, Counted(self._traffic, purpose))]
            if len(rest := self.flat.buffer[self._split :]):
                means.append(self._mean(rest.div_(size), group, f"{purpose}_rest"))
        return Averaging(means, difference, anchor)

    def _mean(self, message: Tensor, group: dist.ProcessGroup | None, purpose: str) -> Mean:
        return Whole(message, group, Counted(self._traffic, purpose))


class Averaging:
    """An average in flight.

    `difference`: [n], part of the buffer that contains a difference. `anchor`: [n], what is to be added to it.
    """

    def __init__(self, means: Sequence[Mean], difference: Tensor | None = None, anchor: Tensor | None = None) -> None:
        self._means, self._difference, self._anchor = means, difference, anchor

    def advance(self) -> None:
        """Start the second of two messages, if there are two; every rank must call it at the same point."""
        for mean in self._means:
            mean.advance()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait until the buffer contains the mean."""
        for mean in self._means:
            mean.finish()
        if self._difference is not None and self._anchor is not None:
            self._difference.add_(self._anchor)


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
