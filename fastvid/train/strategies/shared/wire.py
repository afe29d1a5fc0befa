"""How the mean of a vector over ranks travels: in half precision, or in 8 or 4 bits, with error feedback.

Error feedback: what rounding withholds from a message is kept on the rank and added to the next one, so the sum of all
messages and what is still withheld equals the sum of all values (Karimireddy et al. 2019). `drain` hands it out, for a
message in full precision before a checkpoint, which contains one rank's state only.

Integers: each block of `BLOCK` numbers has a scale in float32, its largest magnitude over the largest level, 127 or 7.
Rank r owns about 1/P of the blocks: it receives the others' levels of them, adds them in the vector's own precision and
sends the mean to all, in integers again. Each rank thus sends 2 (P - 1) / P times the bytes of its vector in integers,
a fourth or an eighth of what a ring all-reduce of float32 sends, whatever P; gathering everybody's integers everywhere
would send P / 2 times as much.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional


class Traffic:
    """Collective operations of one rank and the bytes passed to them, by purpose.

    A ring all-reduce over P ranks transfers 2 (P - 1) / P times these bytes over each rank's link, in each direction.

    `bytes`: bytes by purpose.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def count(self, purpose: str, message: Tensor) -> None:
        """Count a tensor passed to a collective operation."""
        self.calls[purpose] += 1
        self.bytes[purpose] += message.numel() * message.element_size()

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return ``{purpose: {"calls": ..., "bytes": ...}}``."""
        return {purpose: {"calls": self.calls[purpose], "bytes": self.bytes[purpose]} for purpose in sorted(self.calls)}


BLOCK: Final = 4096
"""Numbers per scale, which adds 0.1 % to 8-bit messages and 0.2 % to 4-bit messages."""

_SCALE_BYTES: Final = 4


class Compressor(Protocol):
    """Compresses the vectors of one rank, always of the same length."""

    def average(
        self, values: Tensor, size: int, group: dist.ProcessGroup | None, traffic: Traffic, purpose: str
    ) -> None:
        """Replace a vector [n] by its mean over the ranks of a group."""
        ...

    def drain(self, values: Tensor) -> bool:
        """Add what has been withheld to a vector [n], and forget it. Return whether it may not be zero."""
        ...


def add_up(values: Tensor, group: dist.ProcessGroup | None, traffic: Traffic, purpose: str) -> None:
    """Replace a vector [n] by its sum over the ranks of a group."""
    traffic.count(purpose, values)
    dist.all_reduce(values, group=group)


class Half:
    """Sends float16 or bfloat16. What the sum over the ranks rounds, on its way, is not fed back."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._withheld: Tensor | None = None

    def average(
        self, values: Tensor, size: int, group: dist.ProcessGroup | None, traffic: Traffic, purpose: str
    ) -> None:
        """See `Compressor`. Each rank divides before the sum, so that half precision does not overflow."""
        if self._withheld is None:
            self._withheld = torch.zeros_like(values)
        values.add_(self._withheld)
        sent = (values / size).to(self._dtype)
        torch.sub(values, sent.to(values.dtype), alpha=size, out=self._withheld)
        add_up(sent, group, traffic, purpose)
        values.copy_(sent)

    def drain(self, values: Tensor) -> bool:
        """See `Compressor`."""
        return _drain(self._withheld, values)


class Integers:
    """Sends integers of 8 or 4 bits with a scale per `BLOCK` numbers."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self._withheld: Tensor | None = None
        self._mean_withheld: Tensor | None = None  # of the mean of the blocks that this rank owns
        self._owned = slice(0)
        self._size = 1

    def average(
        self, values: Tensor, size: int, group: dist.ProcessGroup | None, traffic: Traffic, purpose: str
    ) -> None:
        """See `Compressor`."""
        rank, parts = dist.get_rank(group), shares(len(values), size)
        if self._withheld is None or self._mean_withheld is None:
            self._withheld = torch.zeros_like(values)
            self._owned, self._size = parts[rank], size
            self._mean_withheld = torch.zeros_like(values[self._owned])
        values.add_(self._withheld)
        encoded = [encode(values[part] / size, self.bits) for part in parts]
        for part, message in zip(parts, encoded, strict=True):
            sent = self._decoded(message, part, values)
            torch.sub(values[part], sent, alpha=size, out=self._withheld[part])
        message = torch.cat(encoded)
        traffic.count(purpose, message)
        sizes = [len(part) for part in encoded]
        received = self._exchanged(message, sizes, rank, group)
        # Every rank decodes the same bytes, so that all have the same bits.
        for part, message in zip(parts, torch.split_with_sizes(received, sizes), strict=True):
            values[part] = self._decoded(message, part, values)

    def _exchanged(self, message: Tensor, sizes: list[int], rank: int, group: dist.ProcessGroup | None) -> Tensor:
        """Send each rank its blocks, add what arrives, and return the encoded means of all blocks."""
        ranks, own, mean = len(sizes), sizes[rank], self._mean_withheld
        assert mean is not None  # what was withheld is part of this mean
        received = message.new_empty(own * ranks)
        dist.all_to_all_single(received, message, [own] * ranks, sizes, group=group)
        for part in torch.split(received, own) if own else ():
            mean.add_(decode(part, len(mean), self.bits, mean.dtype))
        message = encode(mean, self.bits)
        mean.sub_(decode(message, len(mean), self.bits, mean.dtype))
        received = message.new_empty(sum(sizes))
        dist.all_to_all_single(received, message.repeat(ranks), sizes, [own] * ranks, group=group)
        return received

    def _decoded(self, message: Tensor, part: slice, values: Tensor) -> Tensor:
        return decode(message, part.stop - part.start, self.bits, values.dtype)

    def drain(self, values: Tensor) -> bool:
        """See `Compressor`. Values count 1 / P in a mean; what the owner of a block withholds is of the mean itself."""
        if self._mean_withheld is not None:
            values[self._owned].add_(self._mean_withheld, alpha=self._size)
            self._mean_withheld.zero_()
        return _drain(self._withheld, values)


def shares(length: int, size: int) -> list[slice]:
    """Return the range of a vector that each rank owns: whole blocks, but for the end of the vector."""
    blocks = -(-length // BLOCK)
    ends = [min(length, rank * blocks // size * BLOCK) for rank in range(size)] + [length]
    return [slice(first, end) for first, end in itertools.pairwise(ends)]


def encode(values: Tensor, bits: int) -> Tensor:
    """Return a vector [n] as bytes, uint8: the scales of its blocks, then n levels of 8 or 4 bits.

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
    """Return the vector [length] of bytes that `encode` made."""
    count = -(-length // BLOCK)
    scales = message[: count * _SCALE_BYTES].clone().view(torch.float32).to(dtype)
    packed = message[count * _SCALE_BYTES :]
    if bits == 4:
        packed = torch.stack([packed & 15, packed >> 4], 1).flatten()
    levels = packed[:length].to(dtype) - 2 ** (bits - 1)
    padded = functional.pad(levels, (0, -length % BLOCK)).view(-1, BLOCK)
    return (padded * scales[:, None]).flatten()[:length]


def _drain(withheld: Tensor | None, values: Tensor) -> bool:
    if withheld is None:
        return False
    values.add_(withheld)
    withheld.zero_()
    return True
