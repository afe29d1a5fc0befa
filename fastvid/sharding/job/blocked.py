"""The block list of a dataset: SHA-256 of the bytes of sources that were taken down, which no job packs again.

It is one JSON file, ``blocked.json``, swapped atomically; jobs read it when they begin and again when they commit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Final

from fastvid.errors import ConflictError, FormatError, UsageError
from fastvid.format.schema import BLOCKED
from fastvid.storage import Storage

_FORMAT: Final = "fastvid-blocked"
_VERSION: Final = 1
_ATTEMPTS: Final = 10
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


def read_blocked(storage: Storage) -> tuple[str, ...]:
    """Return the SHA-256 of blocked sources, hex, sorted; none if the folder has no block list.

    Raises:
        FormatError: If the list is damaged: a job must not take that for an empty list.
    """
    return _parse(storage.read(BLOCKED), storage) if storage.exists(BLOCKED) else ()


def block(storage: Storage, hashes: Iterable[str]) -> tuple[str, ...]:
    """Add SHA-256 of sources, hex, to the block list, and return the whole list. Nothing is ever taken off it.

    To carry a list along to a subset or a merged dataset, add the lists of the datasets that it was made from.

    Raises:
        UsageError: If one is not a SHA-256 in lowercase hex.
        FormatError: If the list is damaged.
        ConflictError: If other changes kept winning the race.
    """
    new = set(hashes)
    check_hashes(new)
    for _ in range(_ATTEMPTS):
        old = storage.read(BLOCKED) if storage.exists(BLOCKED) else None
        before = () if old is None else _parse(old, storage)
        after = tuple(sorted(new.union(before)))
        if after == before:
            return after
        revision = 1 if old is None else json.loads(old)["revision"] + 1
        record = {"format": _FORMAT, "version": _VERSION, "revision": revision, "sha256": after}
        if storage.swap(BLOCKED, (json.dumps(record, indent=1) + "\n").encode(), old):
            return after
    raise ConflictError("the block list kept being changed by others", file=storage.url, hint="run the command again")


def check_hashes(hashes: Iterable[str]) -> None:
    """Raise a UsageError unless all are SHA-256 in lowercase hex."""
    for text in hashes:
        if not _SHA256.fullmatch(text):
            raise UsageError(f"{text!r} is not a SHA-256", hint="write 64 hex digits, as `sha256sum FILE` prints them")


def _parse(data: bytes, storage: Storage) -> tuple[str, ...]:
    try:
        record = json.loads(data)
        hashes = record["sha256"]
        if record["format"] != _FORMAT or record["version"] != _VERSION or type(record["revision"]) is not int:
            raise ValueError(f"not version {_VERSION} of {_FORMAT}")
        if not all(_SHA256.fullmatch(text) for text in hashes):
            raise ValueError("an entry is not a SHA-256")
        return tuple(sorted(hashes))
    except (ValueError, LookupError, TypeError) as error:
        raise FormatError(
            f"the block list is damaged: {error}",
            file=f"{storage.url}/{BLOCKED}",
            hint="restore the file from a copy of the dataset; without it sources that were taken down could return",
        ) from error
