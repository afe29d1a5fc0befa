"""The commit record of a dataset, ``dataset.json``: which generation is current, and the tags of others.

It is replaced atomically and only while it is still the record that a change started from, so of two changes that start
from the same record one wins. Like a generation's record it contains a SHA-256 of its other fields.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastvid.errors import ConflictError, FormatError, StorageError
from fastvid.format.schema import DATASET_JSON, FORMAT, FORMAT_VERSION, check_version
from fastvid.runtime.hashing import sha256
from fastvid.storage import Storage


@dataclass(frozen=True, slots=True)
class Head:
    """The commit record, ``dataset.json``."""

    dataset_id: str
    generation: int
    revision: int
    content: bytes  # the record's bytes as read; a swap succeeds only while the file still contains them
    major: int = FORMAT_VERSION[0]
    tags: Mapping[str, int] = field(default_factory=dict)


def read_head(storage: Storage, *, oldest: int = FORMAT_VERSION[0]) -> Head:
    """Read the commit record of a dataset."""
    if not storage.exists(DATASET_JSON):
        raise StorageError(
            f"there is no dataset: {DATASET_JSON} is missing",
            file=storage.url,
            hint="create one with `fastvid shard`; to resume an interrupted job, run its command again",
        )
    content = storage.read(DATASET_JSON)
    with malformed(DATASET_JSON, storage):
        record = json.loads(content)
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']!r} is not {FORMAT!r}")
        major, minor = map(int, record["version"].split("."))
        check_version(major, minor, file=DATASET_JSON, oldest=oldest)
        check_seal(record, major)
        generation, revision = as_count(record["generation"]), as_count(record.get("revision", 0))
        tags = {str(name): as_count(number) for name, number in record.get("tags", {}).items()}
        return Head(record["dataset_id"], generation, revision, bytes(content), major, tags)


def swap_head(
    storage: Storage, head: Head | None, *, dataset_id: str, generation: int, tags: Mapping[str, int] | None = None
) -> Head:
    """Replace the commit record if it is still `head`; None means a folder without a dataset."""
    revision = head.revision + 1 if head else 1
    tags = dict(head.tags if head and tags is None else tags or {})
    record: dict[str, Any] = {
        "format": FORMAT,
        "version": ".".join(map(str, FORMAT_VERSION)),
        "dataset_id": dataset_id,
        "generation": generation,
        "revision": revision,
    }
    content = sealed(record | ({"tags": tags} if tags else {}))
    if not storage.swap(DATASET_JSON, content, head.content if head else None):
        raise ConflictError(
            "another process changed the dataset in the meantime; nothing was written",
            file=storage.url,
            hint="run the command again",
        )
    return Head(dataset_id, generation, revision, content, tags=tags)


def as_count(value: object) -> int:
    """Return a number of a record; raise ValueError if it is none."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a count")
    return value


@contextlib.contextmanager
def malformed(name: str, storage: Storage) -> Iterator[None]:
    """Raise FormatError for anything that is wrong with a record."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{name} is malformed: {type(error).__name__}: {error}",
            file=storage.url,
            hint="restore the file from a copy of the dataset",
        ) from error


def check_seal(record: dict[str, Any], major: int) -> None:
    """Raise ValueError if a record differs from its SHA-256; fastvid 0.1 wrote none."""
    if major > 1 and record["sha256"] != _seal(record):
        raise ValueError("it differs from its SHA-256")


def _seal(record: Mapping[str, Any]) -> str:
    return sha256(_json({name: value for name, value in record.items() if name != "sha256"}))


def sealed(record: Mapping[str, Any]) -> bytes:
    return _json({**record, "sha256": _seal(record)})


def _json(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, indent=1, sort_keys=True) + "\n").encode()
