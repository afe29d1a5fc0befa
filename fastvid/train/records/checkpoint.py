"""Checkpoints: written atomically in the background, verified by checksum, loaded without unpickling.

`torch.distributed.checkpoint` is not used: it unpickles its metadata (torch 2.13, filesystem.py), has no checksums and
needs a folder that all ranks can access. Its purpose, states too large for one process, does not arise here, because
replicas have the same state (200 MB for a ResNet-50 with momentum). One rank writes one file while training continues,
and any number of ranks can read it.

A file is written with ``torch.save`` and loads with ``torch.load(path, weights_only=True)``. Its name contains the
samples seen and the start of its SHA-256: ``checkpoint-000000012288-9f86d081884c7d65.pt``.
"""

from __future__ import annotations

import io
import json
import logging
import math
import pickle
import re
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch

from fastvid.errors import FormatError, StateError, StorageError, UsageError, VersionError
from fastvid.models.weights import load_tensors
from fastvid.runtime.values import json_text, sha256
from fastvid.storage import open_storage

log = logging.getLogger(__name__)

CHECKPOINT_VERSION: Final = 1
"""Version of the format; incremented when older checkpoints can no longer be read."""

BEST: Final = "best.json"
"""File with the name and score of the checkpoint with the highest score."""

_TRIAL: Final = "trial"  # written at the start of a run
_DIGITS: Final = 16
_NAME: Final = re.compile(rf"checkpoint-(\d{{12}})-([0-9a-f]{{{_DIGITS}}})\.pt")


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """The bytes of a checkpoint that passed its checksum."""

    name: str
    data: bytes  # the file's bytes


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: Path or URL of the folder, for example in an object store.
        keep: How many of the newest checkpoints to keep, in addition to the best.
    """

    def __init__(self, folder: str, keep: int = 3) -> None:
        self.storage = open_storage(folder)
        self.keep = keep
        # At exit the interpreter waits for this thread, so a checkpoint is completed even if the run fails meanwhile.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[str] | None = None

    def names(self) -> list[str]:
        """Return the file names, oldest first."""
        return [name for name in self.storage.list("checkpoint-") if _NAME.fullmatch(name)]

    def newest_samples(self) -> int:
        """Return the number of samples that the newest checkpoint was trained on; -1 without one. It is taken from the
        file name: the file may be damaged."""
        names = self.names()
        return _samples(names[-1]) if names else -1

    def prepare(self) -> None:
        """Remove temporary files of killed writers, and try to write; no process may be writing.

        Raises:
            StorageError: If the folder cannot be written, which a run should not learn at its first checkpoint.
        """
        self.storage.sweep()
        self.storage.write(_TRIAL, b"")
        self.storage.delete(_TRIAL)

    def save(self, state: dict[str, Any], samples: int) -> str:
        """Write a checkpoint atomically: if the process is killed, earlier checkpoints stay intact.

        Args:
            state: Dicts, lists, scalars and tensors.
            samples: Number of samples seen; determines the order of the files.

        Returns:
            The file name.
        """
        name = self.write(encode(state), samples)
        log.info("checkpoint %s", name)
        return name

    def write(self, data: bytes | memoryview, samples: int) -> str:
        """Write the bytes that `encode` returned, see `save`."""
        data = memoryview(data)
        name = f"checkpoint-{samples:012d}-{sha256(data)[:_DIGITS]}.pt"
        with self.storage.create(name) as file:
            file.write(data)
        # Another file with the same number of samples was written before a restart and has the same state: remove it.
        others = [other for other in self.names() if other != name]
        stale = [other for other in others if _samples(other) == samples]
        kept = [other for other in others if other not in stale]
        try:
            best = self.best()
        except FormatError as error:
            # Which checkpoint is the best is unknown, so keep all until an evaluation writes the record again.
            log.warning("no older checkpoint is removed: %s", error)
            return name
        for other in stale + kept[: max(0, len(kept) - self.keep + 1)]:
            if best is None or other != best[0]:
                self.storage.delete(other)
        return name

    def begin(self, state: dict[str, Any], samples: int) -> None:
        """Start writing a checkpoint of a copy of `state`, which training may then modify.

        Waits for the previous checkpoint, because one is written at a time.

        Raises:
            StorageError: If the previous checkpoint could not be written.
        """
        self.wait()
        self._pending = self._writer.submit(self.save, snapshot(state), samples)

    def wait(self) -> None:
        """Wait until no checkpoint is being written.

        Raises:
            StorageError: If the checkpoint could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def best(self) -> tuple[str, float] | None:
        """Return name and score of the best checkpoint; None if no score is recorded or its file does not exist.

        Raises:
            FormatError: If the record is damaged.
        """
        if not self.storage.exists(BEST):
            return None
        try:
            record = json.loads(self.storage.read(BEST))
            name, score = str(record["name"]), float(record["score"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FormatError(
                f"record of the best checkpoint cannot be read: {error}",
                file=f"{self.storage.url}/{BEST}",
                hint="remove this file: the next evaluation writes it again",
            ) from error
        return (name, score) if self.storage.exists(name) else None

    def note(self, samples: int, score: float) -> bool:
        """Record the score of the checkpoint after `samples` samples if it is the best so far.

        A damaged record is replaced. A score that is not finite, as of no sample, is never the best.

        Returns:
            Whether it is now the best.
        """
        self.wait()
        try:
            best = self.best()
        except FormatError as error:
            log.warning("%s; replaced", error.message)
            best = None
        name = next((name for name in reversed(self.names()) if _samples(name) == samples), None)
        if name is None or not math.isfinite(score) or (best is not None and best[0] != name and best[1] >= score):
            return False
        note = {"name": name, "score": score, "samples": samples}
        self.storage.write(BEST, (json_text(note) + "\n").encode())
        return True

    def newest(self) -> CheckpointFile | None:
        """Return the newest intact checkpoint; damaged ones are skipped with a warning.

        Returns:
            None if there is no checkpoint at all.

        Raises:
            StateError: If there are checkpoints but none is intact.
        """
        names = self.names()
        for name in reversed(names):
            try:
                return self.read(name)
            except (FormatError, StorageError) as error:
                log.warning("checkpoint skipped: %s", error)
        if names:
            raise StateError(
                f"none of {len(names)} checkpoints is intact",
                file=self.storage.url,
                hint="check the disk; to start over, remove the checkpoints or choose another run.out",
            )
        return None

    def find(self, name: str | None = None) -> CheckpointFile | None:
        """Return the checkpoint with a file name, or "best"; without a name the newest intact one, or None if there is
        no checkpoint.

        Raises:
            UsageError: If `name` is "best" and no best checkpoint is recorded.
        """
        if name is None:
            return self.newest()
        if name != "best":
            return self.read(name)
        best = self.best()
        if best is None:
            raise UsageError(
                "no best checkpoint is recorded", file=self.storage.url, hint="name a checkpoint, or use the newest"
            )
        return self.read(best[0])

    def read(self, name: str) -> CheckpointFile:
        """Read a checkpoint and verify its checksum.

        Raises:
            FormatError: If the bytes differ from those written.
            StorageError: If the file cannot be read.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise FormatError("file name is not checkpoint-SAMPLES-SHA256.pt or best", file=name)
        data = self.storage.read(name)
        if sha256(data)[:_DIGITS] != match[2]:
            raise FormatError("checkpoint does not match its checksum", file=f"{self.storage.url}/{name}")
        return CheckpointFile(name, data)


def encode(state: dict[str, Any]) -> bytes:
    """Return a state as the bytes of a checkpoint."""
    buffer = io.BytesIO()
    torch.save({"version": CHECKPOINT_VERSION, **state}, buffer)
    return buffer.getvalue()


def decode(data: bytes, name: str) -> dict[str, Any]:
    """Return the state in a checkpoint, with its tensors on the CPU.

    Raises:
        VersionError: If it was written by a newer fastvid.
        FormatError: If it is not a checkpoint.
    """
    try:
        state = dict(load_tensors(io.BytesIO(data)))
        version = state["version"]
    # For bytes that are not a checkpoint, torch's unpickler and `dict` may raise any of these.
    except (pickle.UnpicklingError, RuntimeError, LookupError, TypeError, ValueError, EOFError) as error:
        raise FormatError(f"file is not a fastvid checkpoint: {error}", file=name) from error
    if version != CHECKPOINT_VERSION:
        raise VersionError(f"checkpoint has version {version}, this fastvid reads {CHECKPOINT_VERSION}", file=name)
    return state


def evaluated_weights(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights in a checkpoint's state that a run evaluates: the moving averages if it has them."""
    replica = state["replica"]
    return {**replica["model"], **(replica.get("average") or {})}


def snapshot(value: Any) -> Any:
    """Return a copy on the CPU that shares no memory with the state."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: snapshot(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(snapshot(item) for item in value)
    return value


def _samples(name: str) -> int:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1])
