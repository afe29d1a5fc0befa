"""Checkpoints: whole or absent, checked against their checksum, readable without unpickling, written beside training.

`torch.distributed.checkpoint` was not used: it unpickles its metadata (torch 2.13, filesystem.py), has no checksums,
and needs a folder that all ranks see. What it is for, states too large for one process, does not occur here: replicas
hold the same state, 200 MB for a ResNet-50 with momentum. So one rank writes one file, training goes on meanwhile, and
any number of ranks may read it.

A file is an ordinary ``torch.save`` and loads with ``torch.load(path, weights_only=True)``. Its name carries the
samples seen and the start of its SHA-256: ``checkpoint-000000012288-9f86d081884c7d65.pt``.
"""

from __future__ import annotations

import io
import json
import logging
import pickle
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from fastvid.errors import FormatError, StateError, StorageError, VersionError
from fastvid.runtime import faults
from fastvid.runtime.hashing import sha256
from fastvid.storage import open_storage

log = logging.getLogger(__name__)

CHECKPOINT_VERSION: Final = 1
"""Raised when a checkpoint of before cannot be read any more."""

BEST: Final = "best.json"
"""Names the checkpoint with the highest score, and the score."""

_DIGITS: Final = 16
_NAME: Final = re.compile(rf"checkpoint-(\d{{12}})-([0-9a-f]{{{_DIGITS}}})\.pt")


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
        folder: Where they lie, a path or URL, an object store's too.
        keep: How many of the newest stay, besides the best.
    """

    def __init__(self, folder: str, keep: int = 3) -> None:
        self.storage = open_storage(folder)
        self.keep = keep
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None

    def names(self) -> list[str]:
        """File names, oldest first."""
        return [name for name in self.storage.list("checkpoint-") if _NAME.fullmatch(name)]

    def newest_samples(self) -> int:
        """Samples of the newest checkpoint, which need not be whole; -1 when there is none."""
        names = self.names()
        return _samples(names[-1]) if names else -1

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
        name = f"checkpoint-{samples:012d}-{sha256(data)[:_DIGITS]}.pt"
        with self.storage.create(name) as file:
            file.write(data[: len(data) // 2])
            file.flush()
            faults.reach("checkpoint")
            file.write(data[len(data) // 2 :])
        # Another file of the same samples holds the same state, written before a restart.
        others = [other for other in self.names() if other != name]
        stale = [other for other in others if _samples(other) == samples]
        kept = [other for other in others if other not in stale]
        best = self.best()
        for other in stale + kept[: max(0, len(kept) - self.keep + 1)]:
            if best is None or other != best[0]:
                self.storage.delete(other)
        return name

    def begin(self, state: dict[str, Any], samples: int) -> None:
        """Starts to write a checkpoint of `state` as it is now; training may change it at once.

        One is written at a time: this waits for the one before.

        Raises:
            StorageError: The one before could not be written.
        """
        self.wait()
        copied = _snapshot(state)

        def write() -> None:
            try:
                log.info("checkpoint %s", self.save(copied, samples))
            except BaseException as error:  # noqa: BLE001 - raised by `wait`
                self._error = error

        # No daemon: a run that fails while a checkpoint is written still has it.
        self._writer = threading.Thread(target=write, name="checkpoint")
        self._writer.start()

    def wait(self) -> None:
        """Until nothing is being written.

        Raises:
            StorageError: The checkpoint could not be written.
        """
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def best(self) -> tuple[str, float] | None:
        """Name and score of the best checkpoint; None when no score was noted, or the file is gone."""
        if not self.storage.exists(BEST):
            return None
        try:
            noted = json.loads(self.storage.read(BEST))
            name, score = str(noted["name"]), float(noted["score"])
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"note of the best checkpoint cannot be read: {error}", file=BEST) from error
        return (name, score) if self.storage.exists(name) else None

    def note(self, samples: int, score: float) -> bool:
        """Notes what an evaluation of the checkpoint after `samples` samples gave; a higher one stays the best.

        Returns:
            Whether it is the best now.
        """
        self.wait()
        best = self.best()
        name = next((name for name in reversed(self.names()) if _samples(name) == samples), None)
        if name is None or (best is not None and best[0] != name and best[1] >= score):
            return False
        note = {"name": name, "score": score, "samples": samples}
        self.storage.write(BEST, (json.dumps(note) + "\n").encode())
        return True

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
        if sha256(data)[:_DIGITS] != match[2]:
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


def _snapshot(value: Any) -> Any:
    """A copy on the CPU that shares no memory with the state."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: _snapshot(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_snapshot(item) for item in value)
    return value


def _samples(name: str) -> int:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1])
