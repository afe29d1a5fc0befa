"""Average a model over ranks: parameters, norm statistics, moments and a few control numbers in one message.

Parameters may be sent in 8 or 4 bits, as differences from the last common model, with error feedback: the rounding
error of a message (the withheld part) is kept on the rank and added to its next message. The sum of all messages plus
the withheld part thus equals the sum of all values (Karimireddy et al. 2019). Before a checkpoint, which contains one
rank's state only, the withheld parts are sent in full precision, see `Integers.drain`.

Integers: a number is stored as an integer level times the scale of its block of `BLOCK` numbers, a float32: the block's
largest magnitude divided by the largest level, 127 or 7. Of P ranks, each owns about 1/P of the blocks: it receives the
levels of its blocks from all ranks, sums them in the vector's own precision and sends the mean to all, in integers
again. Each rank thus sends 2 (P - 1) / P times the bytes of its vector in integers, for any P a fourth or an eighth of
a ring all-reduce of float32. Sending all integers to all ranks would take P / 2 times as much.

torch's own averagers (`torch.distributed.algorithms.model_averaging`, 2.13) are not used, for three reasons: they
average after steps 1, K + 1, 2K + 1 and so on; they omit parameters without a gradient, buffers and optimizer state;
and they rebind each parameter to a part of a new buffer, so that code with the old address uses stale memory.

`NoiseMeter` measures the gradient noise scale from gradients that the ranks compute anyway, at no extra cost.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

BLOCK: Final = 4096
"""Numbers that share one scale. The scales add 0.1 % to 8-bit messages and 0.2 % to 4-bit messages."""

_SCALE_BYTES: Final = 4


class Integers:
    """Averages vectors over the ranks, sent as integers of 8 or 4 bits with a scale per `BLOCK` numbers.

    All vectors must have the same length.

    The rounding error of each message is kept (withheld) and added to the next one.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self._withheld: Tensor | None = None
        self._mean_withheld: Tensor | None = None  # rounding error of the means of the blocks that this rank owns
        self._owned = slice(0)

    def average(self, values: Tensor) -> None:
        """Replace a vector [n] by its mean over the ranks."""
        rank, size = dist.get_rank(), dist.get_world_size()
        parts = shares(len(values), size)
        if self._withheld is None or self._mean_withheld is None:
            self._withheld = torch.zeros_like(values)
            self._owned = parts[rank]
            self._mean_withheld = torch.zeros_like(values[self._owned])
        values.add_(self._withheld)
        encoded = [encode(values[part] / size, self.bits) for part in parts]
        for part, message in zip(parts, encoded, strict=True):
            sent = decode(message, part.stop - part.start, self.bits, values.dtype)
            torch.sub(values[part], sent, alpha=size, out=self._withheld[part])
        sizes = [len(part) for part in encoded]
        received = self._exchanged(torch.cat(encoded), sizes, rank, self._mean_withheld)
        # Every rank decodes the same bytes, so that all have the same bits.
        for part, message in zip(parts, torch.split_with_sizes(received, sizes), strict=True):
            values[part] = decode(message, part.stop - part.start, self.bits, values.dtype)

    def _exchanged(self, message: Tensor, sizes: list[int], rank: int, mean: Tensor) -> Tensor:
        """Send each rank the blocks it owns, and return the encoded means of all blocks.

        `mean`: the withheld part of this rank's own blocks, to which the received values are added; replaced by the new
        rounding error.
        """
        ranks, own = len(sizes), sizes[rank]
        received = message.new_empty(own * ranks)
        dist.all_to_all_single(received, message, [own] * ranks, sizes)
        for part in torch.split(received, own) if own else ():
            mean.add_(decode(part, len(mean), self.bits, mean.dtype))
        message = encode(mean, self.bits)
        mean.sub_(decode(message, len(mean), self.bits, mean.dtype))
        received = message.new_empty(sum(sizes))
        dist.all_to_all_single(received, message.repeat(ranks), sizes, [own] * ranks)
        return received

    def drain(self, values: Tensor) -> bool:
        """Add the withheld parts to a vector [n], whose mean over the ranks is then taken, and clear them.

        The error of a block's mean is multiplied by P, because the mean divides the vector by P. Returns False if
        nothing was ever withheld.
        """
        if self._withheld is None or self._mean_withheld is None:
            return False
        values[self._owned].add_(self._mean_withheld, alpha=dist.get_world_size())
        values.add_(self._withheld)
        self._mean_withheld.zero_()
        self._withheld.zero_()
        return True


def shares(length: int, size: int) -> list[slice]:
    """Return the range of a vector [length] that each of `size` ranks owns: whole blocks, except at its end."""
    blocks = -(-length // BLOCK)
    ends = [min(length, rank * blocks // size * BLOCK) for rank in range(size)] + [length]
    return [slice(first, end) for first, end in itertools.pairwise(ends)]


def encode(values: Tensor, bits: int) -> Tensor:
    """Return a vector [n] as a uint8 tensor: the scales of its blocks in float32, then n levels of 8 or 4 bits.

    A block with a value that is not finite decodes to values that are not finite.
    """
    most, length = 2 ** (bits - 1) - 1, len(values)
    blocks = functional.pad(values, (0, -length % BLOCK)).view(-1, BLOCK)
    scales = (blocks.abs().amax(1) / most).float() if len(blocks) else values.new_empty(0).float()
    ratio = blocks / scales.to(values.dtype)[:, None]
    levels = torch.where(scales[:, None] > 0, ratio, 0.0).nan_to_num(0.0).round().clamp(-most, most)
    packed = (levels.flatten()[:length] + 2 ** (bits - 1)).to(torch.uint8)
    if bits == 4:
        pairs = functional.pad(packed, (0, length % 2)).view(-1, 2)
        packed = pairs[:, 0] | (pairs[:, 1] << 4)
    return torch.cat([scales.view(torch.uint8), packed])


def decode(message: Tensor, length: int, bits: int, dtype: torch.dtype) -> Tensor:
    """Return the vector [length] that `encode` turned into `message`, in `dtype`."""
    count = -(-length // BLOCK)
    scales = message[: count * _SCALE_BYTES].clone().view(torch.float32).to(dtype)
    packed = message[count * _SCALE_BYTES :]
    if bits == 4:
        packed = torch.stack([packed & 15, packed >> 4], 1).flatten()
    levels = packed[:length].to(dtype) - 2 ** (bits - 1)
    padded = functional.pad(levels, (0, -length % BLOCK)).view(-1, BLOCK)
    return (padded * scales[:, None]).flatten()[:length]


BITS: Final = {"int8": 8, "int4": 4}
"""Bits of a parameter in a compressed message, by the name of the compression."""


class Averager:
    """Averages tensors over the ranks; every rank must call each method, with tensors of the same shapes.

    It has one buffer: the parameters, the other tensors, then `words` further numbers, which are averaged too. Tensors
    are copied from and to the buffer and never rebound.

    `buffer`: [n + words], float64 if any tensor is float64, else float32. `parameters`: view of the parameters in the
    buffer. `words`: [words], view of the further numbers. `size`: number of ranks.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        others: Sequence[Tensor],
        size: int,
        *,
        words: int = 0,
        codec: Integers | None = None,
    ) -> None:
        self.tensors = (*parameters, *others)
        wide = any(tensor.dtype == torch.float64 for tensor in self.tensors)
        sizes = [tensor.numel() for tensor in self.tensors]
        device = self.tensors[0].device if self.tensors else None
        self.buffer = torch.zeros(sum(sizes) + words, dtype=torch.float64 if wide else torch.float32, device=device)
        *parts, self.words = torch.split_with_sizes(self.buffer, [*sizes, words])
        self._views = [part.view(tensor.shape) for part, tensor in zip(parts, self.tensors, strict=True)]
        self._split = sum(sizes[: len(parameters)])
        self.parameters = self.buffer[: self._split]
        self._codec, self._size = codec, size

    def consists_of(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether this averages the same tensor objects as `tensors`, in the same order."""
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

    def average(self) -> None:
        """Replace the tensors by their means over the ranks."""
        self.collect()
        self.reduce()
        self.spread()

    @torch.no_grad()
    def reduce(self, anchor: Tensor | None = None, *, whole: bool = False) -> None:
        """Replace the buffer by its mean over the ranks.

        `anchor`: [n], the parameters of the last common model, the same on all ranks. With a codec (`Integers`) and an
        anchor, only the differences from the anchor are sent, compressed. `whole`: whether to send them in full
        precision, together with what the codec has withheld.
        """
        if self._size == 1:
            return
        if self._codec is None or anchor is None:
            self._mean(self.buffer)
            return
        # Differences are small, so their rounding errors are too; all ranks get the same, as their anchors are equal.
        difference = self.parameters.sub_(anchor)
        if whole:
            self._codec.drain(difference)
            self._mean(self.buffer)
        else:
            self._codec.average(difference)
            if len(rest := self.buffer[self._split :]):
                self._mean(rest)
        difference.add_(anchor)

    def _mean(self, values: Tensor) -> None:
        dist.all_reduce(values.div_(self._size))


def statistics(model: nn.Module) -> list[Tensor]:
    """Return the floating-point buffers of a model, such as running statistics.

    Integer buffers are left out: they count steps, which are the same on every rank.
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


_EMPTY = 1e-12  # a smaller share of a batch has no clips: one clip is 1 / (global batch size)


class NoiseMeter:
    """Estimates the gradient noise scale of McCandlish et al. 2018 (appendix A.1).

    It is S / G2, the variance of one clip's gradient over the squared gradient, in units of a batch size: at that
    batch size, noise and signal of a step are equal.

    The estimate compares gradients of two batch sizes: each rank's and their mean. With x_p the gradient of rank p's
    b_p clips, and x the mean over the B clips of all P ranks::

        E|x_p|^2 = G2 + S / b_p      S  = sum_p b_p (|x_p|^2 - |x|^2) / (P - 1)
        E|x|^2   = G2 + S / B        G2 = |x|^2 - S / B

    S and G2 are unbiased, even if shares are uneven, and the result is the ratio of their means over many steps. With
    local steps (kavg), x_p is the distance that rank p has moved in a round, per step and unit of the learning rate,
    and b_p the clips of all its steps; this is accurate if the gradient hardly changes within a round. Momentum makes
    the estimate too small unless a round is longer than 1 / (1 - momentum) steps. With Adam, norms are those of Adam's
    scaled updates.

    `world_size`: P, at least 2; with one rank nothing is measured.
    """

    def __init__(self, world_size: int, device: torch.device, total: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        self.world_size, self._total = world_size, total
        self.count = 0
        self._own = torch.zeros(4, dtype=torch.float64, device=device)  # this rank's sums since the last `gather`
        self._gathered = torch.zeros(4, dtype=torch.float64)
        self._added = False

    def add(self, own: Tensor, mean: Tensor, share: Tensor, clips: int) -> None:
        """Add a measurement.

        `own`: squared norm of this rank's gradient, which is x_p times P b_p / B, because of the factor of its loss.
        `mean`: |x|^2. `share`: b_p / B. `clips`: B.
        """
        if self.world_size < 2:
            return
        # A rank without clips contributes 0, because b_p |x_p|^2 is 0.
        single = own / (self.world_size * share.clamp_min(_EMPTY)).square()
        values = torch.stack([share * clips * single, share * clips * mean, share * single, share * mean])
        # A step that overflowed in fp16 is left out on every rank, because the mean over all ranks is not finite.
        finite = torch.isfinite(mean)
        self._own += torch.where(finite & torch.isfinite(values), values, 0.0)
        self._added = True
        self.count += 1

    def scale(self) -> float:
        """Return S / G2 since `clear`, in clips; 0 if S is not positive, infinite if G2 is not, nan if neither is.

        The result is the same on every rank. Every rank must call it at the same point.
        """
        self.gather()
        own, mean, own_share, mean_share = self._gathered.tolist()
        others = max(1, self.world_size - 1)
        noise = (own - mean) / others
        signal = mean_share - (own_share - mean_share) / others
        if noise <= 0:
            return math.nan if signal <= 0 else 0.0
        return math.inf if signal <= 0 else noise / signal

    def clear(self) -> None:
        """Discard all measurements."""
        self._own.zero_()
        self._gathered.zero_()
        self._added = False
        self.count = 0

    def gather(self) -> None:
        """Sum the measurements over the ranks; every rank must call it at the same point."""
        if self._added:
            self._gathered += self._total(self._own.cpu())()
            self._own.zero_()
            self._added = False

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements as last gathered, and the world size."""
        return {"window": {"gathered": self._gathered.tolist()}, "count": self.count, "world_size": self.world_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; measurements made with a different world size cannot be combined and are discarded."""
        self.clear()
        if state["world_size"] == self.world_size:
            self._gathered += torch.tensor(state["window"]["gathered"], dtype=torch.float64)
            self.count = int(state["count"])


class GradientNorms:
    """Measures the squared norms of this rank's gradient and of the mean over the ranks, in DDP's all-reduce."""

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
