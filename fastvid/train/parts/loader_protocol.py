"""What the trainer asks of a loader, and the record of what it was given."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from torch import Tensor

from fastvid.load.batch.batch import Batch


class Loader(Protocol):
    """Batches of one rank, as `fastvid.ClipLoader` gives them."""

    @property
    def epoch(self) -> int:
        """The epoch under way, or the next one to begin."""
        ...

    @property
    def global_batch_size(self) -> int:
        """Samples of a global batch."""
        ...

    def __iter__(self) -> Iterator[Batch]:
        """The rest of the epoch; then the next one begins."""
        ...

    def __len__(self) -> int:
        """Batches of the iteration under way, or else of the next."""
        ...

    def set_batch_size(self, global_batch_size: int) -> None:
        """Takes another batch size from where the loader stands; an iteration under way ends."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, after the batch that was given last."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes where a state was taken."""
        ...

    def go(self, epoch: int, start: int, stop: int) -> None:
        """Goes to positions [start, stop) of an epoch: one iteration gives them and no more."""
        ...


def inputs(batch: Batch) -> tuple[Tensor, ...]:
    """What a model gets of a batch: one tensor for each stream, pictures before flow."""
    if batch.flow is None or batch.flow is batch.video:
        return (batch.video,)
    return (batch.video, batch.flow)


_MASK: Final = 2**64 - 1


class Lineage:
    """Which samples a run's weights have seen: for each epoch their number, and a digest of their keys and positions.

    The digest is the sum modulo 2**64 of a 64-bit hash of each sample's position and key, so it can be added up in any
    order over steps and ranks: two runs with one digest trained on the same samples at the same places.
    """

    def __init__(self) -> None:
        self.epochs: dict[int, tuple[int, int]] = {}

    @staticmethod
    def of(batch: Batch) -> tuple[int, int]:
        """Number of samples of a batch, and their digest as a signed 64-bit integer."""
        count = digest = 0
        for position, key in zip(batch.position.tolist(), batch.key, strict=True):
            if position >= 0:
                count += 1
                word = hashlib.blake2b(f"{position}:{key}".encode(), digest_size=8).digest()
                digest += int.from_bytes(word, "little")
        return count, _signed(digest)

    def add(self, epoch: int, count: int, digest: int) -> None:
        """Adds samples of an epoch."""
        samples, before = self.epochs.get(epoch, (0, 0))
        self.epochs[epoch] = samples + count, (before + digest) & _MASK

    def rows(self) -> list[tuple[int, int]]:
        """Samples and digest of each epoch, ascending; the digest as a signed 64-bit integer, which tensors add up."""
        return [(samples, _signed(digest)) for _, (samples, digest) in sorted(self.epochs.items())]

    def state_dict(self) -> list[dict[str, int | str]]:
        """One entry an epoch, the digest in hexadecimal."""
        return [
            {"epoch": epoch, "samples": samples, "digest": f"{digest:016x}"}
            for epoch, (samples, digest) in sorted(self.epochs.items())
        ]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Takes a state over."""
        self.epochs = {int(entry["epoch"]): (int(entry["samples"]), int(entry["digest"], 16)) for entry in state}


def _signed(word: int) -> int:
    """The two's complement of a word's low 64 bits, which is what int64 tensors add up."""
    word &= _MASK
    return word - 2**64 if word >= 2**63 else word
