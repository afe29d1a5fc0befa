"""List the files of a shard of videos in place.

A dataset of videos in place does not contain its videos, but lists their files:

    data-000000.files     one row for each stream of each sample: the path or URL of its file, and its version
    data-000000.parquet   facts, the properties of each sample's streams, as for any shard
    data-000000.pkt       index for the loader; offsets count from the start of the file

The list takes the place of the tar: the generation and the `.pkt` record its SHA-256. Files are named by absolute paths
or URLs below one root, which a reader may replace by another: the videos may have been moved.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import pyarrow as pa

from fastvid.errors import FormatError, UsageError
from fastvid.format.schema import IN_PLACE, from_parquet, to_parquet
from fastvid.runtime.names import decode_name, encode_name
from fastvid.storage.protocol import Version
from fastvid.storage.urls import is_remote

FILES_SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("stream", pa.string(), nullable=False),
        pa.field("file", pa.string(), nullable=False),  # absolute path or URL; `encode_name` makes it valid Unicode
        pa.field("size", pa.int64(), nullable=False),  # bytes
        # The store's tag, or the time of the last change of a local file in nanoseconds; null if a server sends none.
        pa.field("tag", pa.string()),
        pa.field("modified", pa.string()),  # the server's date, for servers that send no tag
    ]
)


@dataclass(frozen=True, slots=True)
class ListedFile:
    """The file that contains a stream of a sample, and the version of it that was indexed."""

    key: str
    stream: str
    file: str  # absolute path or URL
    size: int  # size in bytes
    tag: str | None  # see FILES_SCHEMA
    modified: str | None = None  # see FILES_SCHEMA

    @property
    def version(self) -> Version:
        """The version of the file that was indexed."""
        return Version.parse(self.tag, self.modified, self.size)


@dataclass(frozen=True, slots=True)
class Root:
    """The folder or URL below which the videos of a dataset are."""

    listed: str  # in the list of files
    current: str  # where they are now

    def locate(self, file: str) -> str:
        """Return the current path or URL of a listed file."""
        if self.listed == self.current:
            return file
        if not file.startswith(f"{self.listed}/"):
            raise FormatError("listed file is not below the root of the dataset's videos", file=file, root=self.listed)
        return self.current + file[len(self.listed) :]


def pack_files(files: Iterable[ListedFile]) -> bytes:
    """Return the bytes of the list of a shard's files, sample by sample and in the order of the streams."""
    rows = [asdict(file) | {"file": encode_name(file.file)} for file in files]
    return to_parquet(pa.Table.from_pylist(rows, schema=FILES_SCHEMA))


def read_files(data: bytes | memoryview, *, file: str) -> list[ListedFile]:
    """Return the rows of a list of files; `file`: its name, for messages."""
    table = from_parquet(bytes(data), file=file)
    if table.schema != FILES_SCHEMA:
        raise FormatError("list of files has other columns than expected", file=file)
    columns = [column.to_pylist() for column in table.columns]
    columns[2] = list(map(decode_name, columns[2]))
    return [ListedFile(*row) for row in zip(*columns, strict=True)]


def parse_root(listed: str, current: str | None) -> Root:
    """Return the root of a dataset's videos, from the listed one and the one given by the user who opens it, if any."""
    if current is None:
        return Root(listed, listed)
    if not current.strip("/"):
        raise UsageError(f"root of the videos is {current!r}", hint="give the folder or URL that replaces it")
    return Root(listed, current.rstrip("/") if is_remote(current) else os.path.abspath(current))


def root_extra(root: str) -> dict[str, dict[str, str]]:
    """Return the field of a generation's extras that records the root of its videos."""
    return {IN_PLACE: {"root": encode_name(root)}}


def common_root(files: Sequence[str]) -> str:
    """Return the longest folder or URL that all files are below, without a slash at its end."""
    folders = [file.split("/")[:-1] for file in (min(files), max(files))]
    same = 0
    while same < min(map(len, folders)) and folders[0][same] == folders[1][same]:
        same += 1
    return "/".join(folders[0][:same])
