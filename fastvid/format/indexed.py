"""The indexed form of a sample: the input of the sidecars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastvid.format.audio import AudioInfo
from fastvid.format.packets import StreamInfo
from fastvid.format.tar import TarMember
from fastvid.runtime.arrays import RecordArray


@dataclass(frozen=True, slots=True)
class IndexedStream:
    """A video stream of an indexed sample."""

    name: str
    member: TarMember
    info: StreamInfo
    records: RecordArray


@dataclass(frozen=True, slots=True)
class IndexedAudio:
    """The audio track of an indexed sample."""

    member: TarMember
    info: AudioInfo


@dataclass(frozen=True, slots=True)
class IndexedSample:
    """A sample's key, parsed JSON, video streams and, if it has one, audio track."""

    key: str
    meta: Mapping[str, Any]
    streams: tuple[IndexedStream, ...]
    audio: IndexedAudio | None = None
