"""Read single sidecar records as Python numbers, ten times as fast as through numpy arrays."""

from __future__ import annotations

import struct
from collections import namedtuple
from typing import Any, Final

import numpy as np

_CODES: Final = {"u1": "B", "u2": "H", "u4": "I", "u8": "Q", "i4": "i", "f4": "f"}


class RecordReader:
    """Reads records of a packed little-endian dtype."""

    def __init__(self, dtype: np.dtype[Any], name: str) -> None:
        fields = dtype.names or ()
        codes = [_code(dtype[field]) for field in fields]
        self._struct = struct.Struct("<" + "".join(codes))
        assert self._struct.size == dtype.itemsize
        # Field names come from the dtype, so that each field is defined once.
        record: Any = namedtuple(name, fields)  # type: ignore[misc]
        self._make = record._make

    def read(self, data: memoryview, offset: int) -> Any:
        """Return the record at a byte offset as a named tuple."""
        return self._make(self._struct.unpack_from(data, offset))


def _code(field: np.dtype[Any]) -> str:
    if field.kind == "S":
        return f"{field.itemsize}s"
    return _CODES[field.str[1:]]
