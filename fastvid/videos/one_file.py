"""A video file without a dataset: indexed in memory, and read like the sample of a shard."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import ClassVar, NoReturn

import pyarrow as pa

from fastvid.errors import FastvidError, SourceError, UsageError
from fastvid.format.annotations import fact_columns
from fastvid.format.in_place import Root
from fastvid.format.packets import PacketTable, StreamInfo
from fastvid.format.schema import PICTURES, StreamFlag
from fastvid.format.shard import StreamReader
from fastvid.media.describe import HDR
from fastvid.media.ffmpeg import Limits
from fastvid.media.file_tables import FileReader
from fastvid.media.index_video import Proof, index_in_place
from fastvid.media.reasons import Reason
from fastvid.runtime.values import check_choice, path_text
from fastvid.storage.protocol import Version
from fastvid.storage.urls import is_remote, open_file


@dataclass(frozen=True, slots=True)
class OneFile:
    """The index of a file, with the methods of `Shard` that `Video` uses; it has one row."""

    stem: str  # the path or URL
    version: Version
    indexed: StreamInfo
    packets: PacketTable

    streams: ClassVar[tuple[str, ...]] = (PICTURES,)
    num_streams: ClassVar[int] = 1
    root: ClassVar[Root] = Root("", "")

    def info(self, _row: int, stream: str = "") -> StreamInfo:
        """Return the description of the video."""
        if stream not in ("", PICTURES):
            raise UsageError(f"a file has no stream {stream!r}", file=self.stem, hint="only datasets have others")
        return self.indexed

    def table(self, row: int, stream: str = "") -> PacketTable:
        """Return the packets of the video."""
        self.info(row, stream)
        return self.packets

    def member(self, _row: int, _stream: str = "") -> tuple[int, int]:
        """Return the offset and size of the stream in the file, in bytes: all of it."""
        return 0, self.version.size

    def reader(self, _row: int, _stream: str = "") -> StreamReader:
        """Return a reader of the file's bytes."""
        version = self.version if self.indexed.flags & StreamFlag.UNCHECKED else None
        return StreamReader(*open_file(self.stem), *self.member(0), version, listed=self.stem)

    def audio(self, _row: int) -> NoReturn:
        """Raise UsageError: the sound of a file is not indexed."""
        raise UsageError("a file is indexed without its sound", file=self.stem, hint="run `fastvid shard --audio aac`")

    def annotations(self) -> tuple[pa.Table, int]:
        """Return a table of one row with facts about the video, like a dataset's annotations, and the row's number."""
        info = self.indexed
        facts = fact_columns(info.num_frames, info.fps, info.width, info.height)
        return pa.Table.from_pylist([{"key": PurePosixPath(self.stem).stem, **facts}]), 0


def index_file(source: str | os.PathLike[str], *, prove: str, hdr: str) -> OneFile:
    """Index a video file; for the arguments and errors see `Video`."""
    check_choice("prove", prove, [proof.value for proof in Proof])
    check_choice("hdr", hdr, HDR)
    path = path_text("source", source)
    path = path if is_remote(path) else os.path.abspath(path)
    try:
        file = FileReader.open(path)
        if not file.size:
            raise SourceError("the file has no bytes", reason=Reason.EMPTY)
        found = index_in_place(file, Limits(), Proof(prove), hdr=hdr)
    except FastvidError as error:
        error.hint = error.hint or "check the path, and that the file plays"
        # The frames of probing and proving say nothing about the file, and the message has their cause.
        raise error.at(file=path).with_traceback(None) from None
    table = PacketTable(found.records, whole=bool(found.info.flags & StreamFlag.WHOLE))
    return OneFile(path, file.version, found.info, table)
