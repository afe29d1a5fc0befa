"""Convert Arrow tables to Parquet bytes and back."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from fastvid.errors import FormatError


def to_parquet(table: pa.Table, *, row_group: int | None = None) -> bytes:
    """Return a table as the bytes of a zstd-compressed Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", row_group_size=row_group)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def from_parquet(data: bytes, *, file: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a table from the bytes of a Parquet file.

    Arrow's thread pool is not used: a thread that still references a Python object at interpreter exit requests the
    GIL, and the process aborts ("terminate called without an active exception").

    `data`: the file's bytes.
    """
    try:
        with pq.ParquetFile(pa.BufferReader(data), pre_buffer=False) as found:
            missing = [name for name in columns or () if name not in found.schema_arrow.names]
            if missing:
                raise FormatError(f"table has no column {missing[0]!r}", file=file)
            return found.read(columns=columns if columns is None else list(columns), use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FormatError(f"cannot parse the Parquet file: {error}", file=file) from error
