"""SHA-256 in hex, as the format records it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from typing import Final

_BLOCK: Final = 1 << 24
"""Bytes hashed per call, so that Ctrl-C does not wait until a whole tar is hashed."""

_READ: Final = 1 << 20


def sha256(data: bytes | memoryview) -> str:
    """Return the SHA-256 of bytes; a memoryview, for example of a mapped file, is not copied."""
    view = memoryview(data)
    return sha256_of_pieces(view[start : start + _BLOCK] for start in range(0, len(view), _BLOCK))


def sha256_of_pieces(pieces: Iterable[bytes | memoryview]) -> str:
    """Return the SHA-256 of bytes given in pieces."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def sha256_of_file(descriptor: int) -> str:
    """Return the SHA-256 of an open file from start to end, without changing its position."""

    def pieces() -> Iterator[bytes]:
        position = 0
        while piece := os.pread(descriptor, _READ, position):
            yield piece
            position += len(piece)

    return sha256_of_pieces(pieces())
