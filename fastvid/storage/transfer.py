"""Copy, link and hash whole files in pieces."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from typing import Final

from fastvid.errors import FormatError
from fastvid.runtime.hashing import sha256_of_pieces
from fastvid.storage.local import LocalStorage
from fastvid.storage.protocol import Storage

PIECE_BYTES: Final = 16 * 2**20
"""The size of one part of an upload."""


def copy_file(source: Storage, name: str, target: Storage, target_name: str | None = None) -> None:
    """Copy a file from one storage to another; it appears whole or not at all."""
    with target.create(target_name or name) as file:
        for piece in read_pieces(source, name):
            file.write(piece)


def link_or_copy(source: Storage, name: str, target: Storage, target_name: str, sha256: str | None = None) -> None:
    """Make a file appear in another folder: by a hard link on one local disk, else as a copy.

    For files that never change. A link costs no space; deleting one name leaves the other.
    """
    if (
        isinstance(source, LocalStorage)
        and isinstance(target, LocalStorage)
        and _link(source, name, target, target_name)
    ):
        return
    digest = hashlib.sha256()
    with target.create(target_name) as file:
        for piece in read_pieces(source, name):
            digest.update(piece)
            file.write(piece)
        if sha256 not in (None, digest.hexdigest()):
            raise FormatError(
                "file differs from its checksum; copying it would hide the damage",
                file=f"{source.url}/{name}",
                hint="run `fastvid verify` to see what is damaged",
            )


def _link(source: LocalStorage, name: str, target: LocalStorage, target_name: str) -> bool:
    """Link a file atomically; return whether the file systems allow it."""
    path = target.path(target_name)
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(source.path(name), new)
        try:
            os.replace(new, path)  # does nothing if both are links to one file
        finally:
            new.unlink(missing_ok=True)
    except OSError:  # another file system, or one without links: the copy names what is wrong
        return False
    return True


def sha256_of(storage: Storage, name: str) -> str:
    """Return the SHA-256 of a file, in hex."""
    return sha256_of_pieces(read_pieces(storage, name))


def read_pieces(storage: Storage, name: str) -> Iterator[bytes]:
    """Yield a file's bytes in order, all from one version."""
    size = storage.size(name)
    for start in range(0, size, PIECE_BYTES):
        piece = bytearray(min(PIECE_BYTES, size - start))
        storage.read_into(name, [(start, memoryview(piece))])
        yield bytes(piece)
