"""Find fragments of an MP4 that demuxers do not reach: they stop at the first box that they cannot read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fastvid.errors import SourceError
from fastvid.media.reasons import Reason

_HEADER: Final = 16
_CHUNK: Final = 1 << 20


def check_fragments(read: Callable[[int, int], bytes], size: int) -> None:
    """Raise a SourceError if fragments follow a broken box. Other bytes after the last box are padding.

    `read`: returns bytes of the file by offset and size; fewer at its end. `size`: size of the file in bytes.
    """
    position, fragmented = 0, False
    while position + 8 <= size:
        header = read(position, _HEADER)
        length, name = int.from_bytes(header[:4], "big"), header[4:8]
        if length == 1:  # a 64-bit size follows (ISO/IEC 14496-12, 4.2)
            length = int.from_bytes(header[8:], "big")
        if length < 8 or position + length > size:
            break
        fragmented |= name == b"moof"
        position += length
    if not fragmented:
        return
    for start in range(position + 8, size, _CHUNK):
        if b"moof" in read(start, _CHUNK + 3):
            raise SourceError(
                f"{size - position} bytes after a broken box at byte {position} contain fragments that cannot be read",
                reason=Reason.TRUNCATED,
            )
