"""Messages between processes as plain data: a JSON header and binary blobs, with lengths and a checksum.

A child process reads untrusted files, so its messages are parsed and checked, and never unpickled.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from fastvid.errors import FormatError

# Size of the header, size of all blobs, CRC-32 of both.
_FRAME: Final = struct.Struct("<IQI")
HEADER_BYTES: Final = _FRAME.size
_MAX_HEADER: Final = 64 << 20


class Inbox:
    """Assembles messages from the bytes received from a process."""

    def __init__(self, max_bytes: int = 1 << 40) -> None:
        self._max_bytes, self._buffer = max_bytes, bytearray()

    def add(self, data: bytes) -> Iterator[tuple[dict[str, Any], memoryview]]:
        """Add received bytes; yield the messages that they complete."""
        self._buffer += data
        while len(self._buffer) >= HEADER_BYTES:
            size = piece_size(memoryview(self._buffer)[:HEADER_BYTES])
            if size > self._max_bytes:
                raise FormatError(f"a message has {size} bytes, at most {self._max_bytes} are allowed")
            if len(self._buffer) < size:
                return
            piece = bytes(self._buffer[:size])
            del self._buffer[:size]
            yield unpack(piece)


def pack(header: Mapping[str, Any], *blobs: bytes) -> bytes:
    """Return a header and blobs as one message with lengths and a checksum."""
    text = json.dumps(header).encode("ascii")
    checksum = zlib.crc32(text)
    for blob in blobs:
        checksum = zlib.crc32(blob, checksum)
    return b"".join([_FRAME.pack(len(text), sum(map(len, blobs)), checksum), text, *blobs])


def piece_size(start: bytes | memoryview) -> int:
    """Return the size of a message, from its first HEADER_BYTES."""
    text, blobs, _ = _FRAME.unpack_from(start)
    if text > _MAX_HEADER or blobs > 1 << 40:
        raise FormatError(f"a message claims a header of {text} bytes and {blobs} bytes of blobs")
    return HEADER_BYTES + int(text) + int(blobs)


def unpack(data: bytes | memoryview) -> tuple[dict[str, Any], memoryview]:
    """Return the header and the blobs of one complete message."""
    view = memoryview(data)
    if len(view) < HEADER_BYTES or len(view) != piece_size(view):
        raise FormatError("a message is truncated")
    text, _, checksum = _FRAME.unpack_from(view)
    body = view[HEADER_BYTES:]
    if zlib.crc32(body) != checksum:
        raise FormatError("a message does not match its checksum")
    try:
        header = json.loads(bytes(body[:text]))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the header of a message is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise FormatError(f"the header of a message is a {type(header).__name__}, expected an object")
    return header, body[text:]
