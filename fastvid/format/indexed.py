"""What an index finds of a sample, before it is written into the sidecars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastvid.format.audio import AudioInfo
from fastvid.format.packets import StreamInfo
from fastvid.format.tar import Member
from fastvid.runtime.arrays import RecordArray


@dataclass(frozen=True, slots=True)
class IndexedStream:
    """A video stream of a sample as the index found it."""

    name: str
    member: Member
    info: StreamInfo
    records: RecordArray


@dataclass(frozen=True, slots=True)
class IndexedAudio:
    """The sound of a sample as the index found it."""

    member: Member
    info: AudioInfo


@dataclass(frozen=True, slots=True)
class IndexedSample:
    """A sample as the index found it: its key, its JSON, its video streams, and its sound if it has any."""

    key: str
    meta: Mapping[str, Any]
    streams: tuple[IndexedStream, ...]
    audio: IndexedAudio | None = None
