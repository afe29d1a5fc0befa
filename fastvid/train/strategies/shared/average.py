"""A buffer that concatenates many tensors, so that one message can transfer them.

Averages a model over ranks: parameters, norm statistics, moments and a few words in one message.

torch's own averagers (`torch.distributed.algorithms.model_averaging`, 2.13) are not used. They average after steps 1,
K + 1, 2K + 1 and so on; omit parameters without a gradient, buffers and optimizer state; and rebind each parameter to a
part of a new buffer, so that code with the old address uses stale memory.

Numbers that each rank sums locally and that are occasionally summed over all ranks.

Measures the gradient noise scale from gradients that the ranks compute anyway, at no extra cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fastvid.train.strategies.shared.wire import Compressor, Half, Integers, Traffic, add_up


class Flat:
    """A buffer with a range for each of some tensors, followed by further values.

    The buffer is allocated once. Tensors are copied from and to it and never rebound.

    `buffer`: [n + extra], float64 if any tensor is float64, else float32. `values`: [n], the part of the buffer
    that belongs to the tensors, in order. `words`: [extra], the part after it.
    """

    def __init__(self, tensors: Sequence[Tensor], extra: int = 0) -> None:
        self.tensors = tuple(tensors)
        wide = any(tensor.dtype == torch.float64 for tensor in self.tensors)
        sizes = [tensor.numel() for tensor in self.tensors]
        device = self.tensors[0].device if self.tensors else None
        dtype = torch.float64 if wide else torch.float32
        self.buffer = torch.zeros(sum(sizes) + extra, dtype=dtype, device=device)
        self.values, self.words = self.buffer[: sum(sizes)], self.buffer[sum(sizes) :]
        parts = torch.split_with_sizes(self.values, sizes)
        self._views = [part.view(tensor.shape) for part, tensor in zip(parts, self.tensors, strict=True)]

    def consists_of(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether the tensors of this buffer are the same objects as these."""
        return [id(tensor) for tensor in tensors] == [id(tensor) for tensor in self.tensors]

    @torch.no_grad()
    def collect(self) -> None:
        """Copy the tensors into the buffer."""
        for view, tensor in zip(self._views, self.tensors, strict=True):
            view.copy_(tensor)

    @torch.no_grad()
    def spread(self) -> None:
        """Copy the buffer into the tensors."""
        for view, tensor in zip(self._views, self.tensors, strict=True):
            tensor.copy_(view)


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

    @torch.no_grad()
    def reduce(
        self,
        size: int,
        group: dist.ProcessGroup | None,
        purpose: str,
        anchor: Tensor | None = None,
        *,
        whole: bool = False,
    ) -> None:
        """Replace the buffer by its mean over the ranks of a group.

        `anchor`: [n], parameters that are the same on all ranks of the group; required by a codec. `whole`: whether to
        send parameters in full precision, together with what the codec has withheld.
        """
        if size == 1:
            return
        if self._codec is None or anchor is None:
            add_up(self.flat.buffer.div_(size), group, self._traffic, purpose)
            return
        # Differences are small, so rounding them costs little, and the result is the same on all ranks.
        difference = self.parameters.sub_(anchor)
        if whole:
            self._codec.drain(difference)
            add_up(self.flat.buffer.div_(size), group, self._traffic, purpose)
        else:
            self._codec.average(difference, size, group, self._traffic, purpose)
            if len(rest := self.flat.buffer[self._split :]):
                add_up(rest.div_(size), group, self._traffic, f"{purpose}_rest")
        difference.add_(anchor)


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


class RankSums:
    """Sums over ranks and over a part of the run. `gather` returns the same values on every rank."""

    def __init__(self, size: int, device: torch.device, total: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        self._own = torch.zeros(size, dtype=torch.float64, device=device)
        self._gathered = torch.zeros(size, dtype=torch.float64)
        self._total = total
        self._added = False

    def add(self, values: Tensor) -> None:
        """Add this rank's values, [size]."""
        self._own += values
        self._added = True

    def gather(self) -> list[float]:
        """Return the sums over all ranks since `clear`. Every rank must call it at the same point."""
        if self._added:
            self._gathered += self._total(self._own.cpu())()
            self._own.zero_()
            self._added = False
        return [float(value) for value in self._gathered]

    def clear(self) -> None:
        """Reset the sums."""
        self._own.zero_()
        self._gathered.zero_()
        self._added = False

    def state_dict(self) -> dict[str, Any]:
        """Return the sums as last gathered."""
        return {"gathered": self._gathered.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self.clear()
        self._gathered += torch.tensor(state["gathered"], dtype=torch.float64)


_EMPTY = 1e-12  # a share below this contains no clip: nonempty shares are at least one over the global batch size


class NoiseMeter:
    """Estimates the gradient noise scale of McCandlish et al. 2018 (appendix A.1).

    It is S / G2, the variance of one clip's gradient over the squared gradient, in units of a batch size: at that
    batch size, noise and signal of a step are equal.

    The estimate compares gradients of two batch sizes: each rank's and their mean. With x_p the gradient of rank p's
    b_p clips, and x the mean over the B clips of all P ranks::

        E|x_p|^2 = G2 + S / b_p      S  = sum_p b_p (|x_p|^2 - |x|^2) / (P - 1)
        E|x|^2   = G2 + S / B        G2 = |x|^2 - S / B

    Both are unbiased, even if shares are uneven, and the result is the ratio of their means over many steps. With local
    steps, x_p is the distance that rank p has moved in a round, per step and unit of the learning rate, and b_p the
    clips of all its steps; this is accurate if the gradient hardly changes within a round. Momentum makes the estimate
    too small unless a round is longer than 1 / (1 - momentum) steps; with Adam, it is in Adam's metric.

    `world_size`: P, at least 2; with one rank nothing is measured.
    """

    def __init__(self, world_size: int, device: torch.device, total: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        self.world_size = world_size
        self.count = 0
        self._window = RankSums(4, device, total)

    def add(self, own: Tensor, mean: Tensor, share: Tensor, clips: int) -> None:
        """Add a measurement."""
        if self.world_size < 2:
            return
        # A rank without clips contributes 0, because b_p |x_p|^2 is 0.
        single = own / (self.world_size * share.clamp_min(_EMPTY)).square()
        values = torch.stack([share * clips * single, share * clips * mean, share * single, share * mean])
        # A step that overflowed in fp16 is skipped on every rank, because the mean over all ranks is not finite either.
        finite = torch.isfinite(mean)
        self._window.add(torch.where(finite & torch.isfinite(values), values, 0.0))
        self.count += 1

    def scale(self) -> float:
        """Return S / G2 since `clear`, in clips; infinite without signal, nan without noise too.

        The result is the same on every rank. Every rank must call it at the same point.
        """
        own, mean, own_share, mean_share = self._window.gather()
        others = max(1, self.world_size - 1)
        noise = (own - mean) / others
        signal = mean_share - (own_share - mean_share) / others
        if noise <= 0:
            return math.nan if signal <= 0 else 0.0
        return math.inf if signal <= 0 else noise / signal

    def clear(self) -> None:
        """Discard all measurements."""
        self._window.clear()
        self.count = 0

    def gather(self) -> None:
        """Sum the measurements over the ranks, before a checkpoint."""
        self._window.gather()

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements as last gathered, and the world size."""
        return {"window": self._window.state_dict(), "count": self.count, "world_size": self.world_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; measurements made with a different world size cannot be combined and are discarded."""
        self.clear()
        if state["world_size"] == self.world_size:
            self._window.load_state_dict(state["window"])
            self.count = int(state["count"])


class GradientNorms:
    """Measures the squared norms of this rank's gradient and of the mean, in DDP's all-reduce."""

    def __init__(self, wrapped: DistributedDataParallel, device: torch.device) -> None:
        self.wrapped = wrapped
        self._norms = torch.zeros(2, dtype=torch.float64, device=device)
        # A lambda without annotations, because torch versions differ in the annotations that they accept.
        wrapped.register_comm_hook(None, lambda _, bucket: self._average(bucket))

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the squared norms of this rank's gradient and of the mean since the last call."""
        own, mean = self._norms.clone()
        self._norms.zero_()
        return own, mean

    def _average(self, bucket: Any) -> torch.futures.Future[Tensor]:
        message = bucket.buffer()
        self._norms[0] += message.double().square().sum()
        work: Any = dist.all_reduce(message.div_(dist.get_world_size()), async_op=True)

        def done(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            mean = future.value()[0]
            self._norms[1] += mean.double().square().sum()
            return mean

        averaged: torch.futures.Future[Tensor] = work.get_future().then(done)
        return averaged
