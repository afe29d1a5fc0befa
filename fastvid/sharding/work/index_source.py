"""One video inside a tar of another tool, from bytes to its index: the work of a worker, and how its answer travels."""

from __future__ import annotations

from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from fastvid.errors import SourceError
from fastvid.format.packets import StreamInfo
from fastvid.format.schema import PACKET_DTYPE, Codec, Matrix, Range, StreamFlag
from fastvid.media.prove import IndexedVideo, index_video
from fastvid.media.reasons import Reason
from fastvid.media.source_file import unreadable
from fastvid.runtime import faults
from fastvid.runtime.hashing import sha256
from fastvid.sharding.work.attempt import Report, attempt, refuse_blocked
from fastvid.sharding.work.messages import EncodedSample, Outcome, Settings, SourceTask

# Decodes of a whole video that the proof costs: one as a player, one without the container, one by groups of pictures,
# two with packets left out.
_DECODES = 5
# How many packets a file may hold is known only by reading it; small pictures, which decode fast, have smaller ones.
_PACKET_BYTES = 1000


def index_member(task: SourceTask, settings: Settings, report: Report) -> Outcome:
    """Indexes the video at `task.member`. Never raises for what the video does."""
    limits = settings.limits
    seconds = limits.transcode_seconds(frames=task.size // _PACKET_BYTES, pixels=0)
    report("index", task.patience * _DECODES * seconds)

    digest = ""

    def index() -> Outcome:
        nonlocal digest
        data = _read(task, limits.output_bytes)
        digest = sha256(data)
        refuse_blocked(digest, settings.blocked)
        found = index_video(data, limits)
        return Outcome(task.index, (pack_found(task.key, found),), warnings=found.notes)

    return replace(attempt(task, index), source_sha256=digest)


def pack_found(key: str, found: IndexedVideo) -> EncodedSample:
    """An index as it travels."""
    info = asdict(found.info)
    extradata = info.pop("extradata")
    meta = info | {"fps": str(found.info.fps), "pix_fmt": found.pix_fmt, "container": found.container}
    return EncodedSample(key, meta, {"records": found.records.tobytes(), "extradata": extradata})


def unpack_found(sample: EncodedSample) -> tuple[StreamInfo, npt.NDArray[np.void], dict[str, Any]]:
    """The stream, its PACKET_DTYPE records [P] and other facts, from what travelled."""
    meta = dict(sample.meta)
    info = StreamInfo(
        codec=Codec(meta.pop("codec")),
        width=int(meta.pop("width")),
        height=int(meta.pop("height")),
        num_frames=int(meta.pop("num_frames")),
        fps=Fraction(meta.pop("fps")),
        extradata=sample.streams["extradata"],
        range=Range(meta.pop("range")),
        matrix=Matrix(meta.pop("matrix")),
        flags=StreamFlag(meta.pop("flags")),
    )
    return info, np.frombuffer(sample.streams["records"], PACKET_DTYPE), meta


def _read(task: SourceTask, most: int) -> bytes:
    assert task.member is not None
    offset, size = task.member
    if size > most:
        raise SourceError(f"a video of {size} bytes, {most} at most", reason=Reason.TOO_LONG)
    if not size:
        raise SourceError("the file has no bytes", reason=Reason.EMPTY)
    try:
        with open(task.path, "rb") as file:
            faults.reach("source")
            file.seek(offset)
            data = file.read(size)
    except OSError as error:
        raise unreadable(error) from error
    if len(data) != size:
        raise SourceError("the tar ends inside the video", reason=Reason.TRUNCATED)
    return data
