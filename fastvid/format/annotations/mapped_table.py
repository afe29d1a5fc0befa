"""Arrow tables in files that are mapped into memory without a copy.

    an Arrow IPC file, uncompressed
    trailer    the size of the Arrow file in bytes, and a CRC-32 of pages spread over it

Every file is written once and never changed. Arrow checks the structure; the trailer notices a file that was cut, or
that lost pages, without reading all of it.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import pyarrow as pa

from fastvid.errors import FormatError

_TRAILER: Final = struct.Struct("<QI")
_PAGE: Final = 4096
# At most 64 pages are read for the checksum: a millisecond on a cold disk's cache of a file of any size.
_PAGES: Final = 64
# Rows of a chunk, as in Parquet's row groups: offsets of strings fit 32 bits up to 2 KiB a row.
_CHUNK: Final = 2**20


def write_table(path: Path, table: pa.Table, *, chunk: int = _CHUNK) -> None:
    """Write a table to a new file.

    `chunk`: maximum rows of a chunk of the table that `map_table` returns.
    """
    options = pa.ipc.IpcWriteOptions(unify_dictionaries=True)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=chunk)
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        crc = _checksum(file, size)
        file.seek(size)
        file.write(_TRAILER.pack(size, crc))


def map_table(path: Path) -> pa.Table:
    """Map the table of a file; the file may be deleted meanwhile, but never cut."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END) - _TRAILER.size
        file.seek(max(size, 0))
        if size < 0 or file.read() != _TRAILER.pack(size, _checksum(file, size)):
            raise FormatError("damaged file of mapped annotations", file=str(path), hint="delete the file")
    try:
        table: pa.Table = pa.ipc.open_file(pa.memory_map(str(path)), footer_offset=size).read_all()
    except pa.ArrowException as error:
        raise FormatError(f"cannot parse mapped annotations: {error}", file=str(path), hint="delete it") from error
    return table


def _checksum(file: BinaryIO, size: int) -> int:
    crc = 0
    for start in np.unique(np.linspace(0, max(size - _PAGE, 0), _PAGES, dtype=np.int64)).tolist():
        file.seek(start)
        crc = zlib.crc32(file.read(min(_PAGE, size - start)), crc)
    return crc
