"""Copy and hash whole files in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fastvid.runtime.hashing import sha256_of_pieces
from fastvid.storage.protocol import Storage

PIECE_BYTES: Final = 16 * 2**20
"""The size of one part of an upload."""


def copy_file(source: Storage, name: str, target: Storage, target_name: str | None = None) -> None:
    """Copy a file from one storage to another; it appears whole or not at all."""
    with target.create(target_name or name) as file:
        for piece in read_pieces(source, name):
            file.write(piece)


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
