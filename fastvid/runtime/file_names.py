"""File names as text that tables and logs can store: a name on a POSIX system may contain any bytes."""

from __future__ import annotations

import os
from typing import Final
from urllib.parse import quote_from_bytes, unquote_to_bytes

_RAW_NAME: Final = "bytes:"


def encode_name(name: str) -> str:
    """Return a file name as valid Unicode: unchanged if UTF-8, else ``bytes:`` and percent-encoding."""
    raw = os.fsencode(name)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return _RAW_NAME + quote_from_bytes(raw)
    return _RAW_NAME + quote_from_bytes(raw) if text.startswith(_RAW_NAME) else text


def decode_name(text: str) -> str:
    """Return the file name that `encode_name` encoded."""
    if text.startswith(_RAW_NAME):
        return os.fsdecode(unquote_to_bytes(text[len(_RAW_NAME) :]))
    return text
