"""The loader interface of the trainer, and the lineage: a record of the samples it trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from fastvid.load.batch.batch import Batch


class Loader(Protocol):
    """Loads the batches of one rank, as `fastvid.ClipLoader` does."""

    @property
    def epoch(self) -> int:
        """The current epoch, or between epochs the next one."""
        ...

    @property
    def global_batch_size(self) -> int:
        """Samples per global batch."""
        ...

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the epoch, then move to the next one."""
        ...

    @property
    def steps_left(self) -> int:
        """Batches of the current iteration, or else of the next one."""
        ...

    def set_batch_size(self, global_batch_size: int) -> None:
        """Change the batch size from the current position on; ends a running iteration."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position after the last delivered batch."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position of a state."""
        ...

    def go(self, epoch: int, start: int, stop: int) -> None:
        """Move to positions [start, stop) of an epoch: the next iteration delivers exactly these."""
        ...


_MASK: Final = 2**64 - 1


class Lineage:
    """The samples that a model was trained on: per epoch, their number and a digest.

    The digest is the sum modulo 2**64 of a 64-bit hash of each sample's position and key, so it can be summed in any
    order over steps and ranks. Two runs with the same digest trained on the same samples at the same positions.
    """

    def __init__(self) -> None:
        self.epochs: dict[int, tuple[int, int]] = {}

    @staticmethod
    def of(batch: Batch) -> tuple[int, int]:
        """Return the number of samples of a batch and their digest as a signed 64-bit integer."""
        count = digest = 0
        for position, key in zip(batch.position.tolist(), batch.key, strict=True):
            if position >= 0:
                count += 1
                word = hashlib.blake2b(f"{position}:{key}".encode(), digest_size=8).digest()
                digest += int.from_bytes(word, "little")
        return count, _signed(digest)

    def add(self, epoch: int, count: int, digest: int) -> None:
        """Add samples of an epoch."""
        samples, before = self.epochs.get(epoch, (0, 0))
        self.epochs[epoch] = samples + count, (before + digest) & _MASK

    def rows(self) -> list[tuple[int, int]]:
        """Return samples and digest of each epoch, ascending; digests as signed 64-bit integers."""
        return [(samples, _signed(digest)) for _, (samples, digest) in sorted(self.epochs.items())]

    def state_dict(self) -> list[dict[str, int | str]]:
        """Return one entry per epoch, with the digest in hexadecimal."""
        return [
            {"epoch": epoch, "samples": samples, "digest": f"{digest:016x}"}
            for epoch, (samples, digest) in sorted(self.epochs.items())
        ]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore a state."""
        self.epochs = {int(entry["epoch"]): (int(entry["samples"]), int(entry["digest"], 16)) for entry in state}


def _signed(word: int) -> int:
    """Return a word's low 64 bits as a two's complement integer, as int64 tensors require."""
    word &= _MASK
    return word - 2**64 if word >= 2**63 else word
