"""Checkpoints: whole or absent, checked against their checksum, readable without unpickling.

A file is an ordinary ``torch.save`` and loads with ``torch.load(path, weights_only=True)``. Its name carries the
samples seen and the start of its SHA-256: ``checkpoint-000000012288-9f86d081884c7d65.pt``.
"""

from __future__ import annotations

import hashlib
import io
import logging
import pickle
import re
from dataclasses import dataclass
from typing import Any, Final

import torch

from fastvid import faults
from fastvid.errors import FormatError, StateError, StorageError, VersionError
from fastvid.storage import open_storage

log = logging.getLogger(__name__)

CHECKPOINT_VERSION: Final = 1
"""Raised when a checkpoint of before cannot be read any more."""

_NAME: Final = re.compile(r"checkpoint-(\d{12})-([0-9a-f]{16})\.pt")


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that passed its check.

    Attributes:
        name: File name.
        data: The file's bytes.
    """

    name: str
    data: bytes


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: Where they lie, a path or URL.
        keep: How many of the newest stay.
    """

    def __init__(self, folder: str, keep: int = 3) -> None:
        self.storage = open_storage(folder)
        self.keep = keep

    def names(self) -> list[str]:
        """File names, oldest first."""
        return [name for name in self.storage.list("checkpoint-") if _NAME.fullmatch(name)]

    def sweep(self) -> None:
        """Removes what writers that were killed left behind; nobody may be writing."""
        self.storage.sweep()

    def save(self, state: dict[str, Any], samples: int) -> str:
        """Writes a checkpoint; a process killed meanwhile leaves those of before untouched.

        Args:
            state: Dicts, lists, scalars and tensors.
            samples: Samples seen; orders the files.

        Returns:
            Its file name.
        """
        buffer = io.BytesIO()
        torch.save({"version": CHECKPOINT_VERSION, **state}, buffer)
        data = buffer.getbuffer()
        name = f"checkpoint-{samples:012d}-{_digest(data)}.pt"
        with self.storage.create(name) as file:
            file.write(data[: len(data) // 2])
            file.flush()
            faults.reach("checkpoint")
            file.write(data[len(data) // 2 :])
        # Another file of the same samples holds the same state, written before a restart.
        others = [other for other in self.names() if other != name]
        stale = [other for other in others if _samples(other) == samples]
        kept = [other for other in others if other not in stale]
        for other in stale + kept[: max(0, len(kept) - self.keep + 1)]:
            self.storage.delete(other)
        return name

    def newest(self) -> Found | None:
        """The newest checkpoint that is whole; those that are not are named in the log and passed over.

        Returns:
            None when there is no checkpoint at all.

        Raises:
            StateError: There are checkpoints, and none of them is whole.
        """
        names = self.names()
        for name in reversed(names):
            try:
                return self.read(name)
            except (FormatError, StorageError) as error:
                log.warning("checkpoint refused: %s", error)
        if names:
            raise StateError(
                f"none of {len(names)} checkpoints is whole",
                file=self.storage.url,
                hint="look at the disk; to start over, remove them or choose another run.out",
            )
        return None

    def read(self, name: str) -> Found:
        """A checkpoint's bytes.

        Raises:
            FormatError: They differ from what was written.
            StorageError: They cannot be read.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise FormatError("name of a checkpoint is checkpoint-SAMPLES-SHA256.pt", file=name)
        data = self.storage.read(name)
        if _digest(memoryview(data)) != match[2]:
            raise FormatError("checkpoint differs from what was written", file=f"{self.storage.url}/{name}")
        return Found(name, data)


def decode(data: bytes, name: str) -> dict[str, Any]:
    """What a checkpoint holds, its tensors on the CPU.

    Raises:
        VersionError: It was written by a newer fastvid.
        FormatError: It is no checkpoint.
    """
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        version = state["version"]
    except (pickle.UnpicklingError, RuntimeError, KeyError, TypeError, EOFError) as error:
        raise FormatError(f"file is no checkpoint of fastvid: {error}", file=name) from error
    if version != CHECKPOINT_VERSION:
        raise VersionError(f"checkpoint has version {version}, this fastvid reads {CHECKPOINT_VERSION}", file=name)
    return dict(state)


def _samples(name: str) -> int:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1])


def _digest(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
