"""Index a sample: the input of the sidecars."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from fastvid.errors import FormatError
from fastvid.format.audio import AudioInfo, index_m4a
from fastvid.format.demux import index_mp4
from fastvid.format.packets import StreamInfo
from fastvid.format.schema import MEMBER_SUFFIX, Matrix, Range, StreamFlag
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


def index_sample(view: memoryview, key: str, members: Sequence[TarMember], streams: tuple[str, ...]) -> IndexedSample:
    """Index a sample that fastvid wrote: its JSON, and the packets of its MP4s.

    Raises:
        FormatError: If the sample has no JSON or no video of a stream, or an MP4 cannot be indexed.
    """
    by_suffix = {member.suffix: member for member in members}
    if "json" not in by_suffix:
        raise FormatError("sample has no JSON member")
    at = by_suffix["json"]
    try:
        meta = json.loads(bytes(view[at.offset : at.offset + at.size]))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"cannot parse the sample's JSON: {error}") from error
    indexed = []
    for name in streams:
        member = by_suffix.get(MEMBER_SUFFIX[name])
        if member is None:
            raise FormatError(f"sample has no {MEMBER_SUFFIX[name]} member")
        proved = meta.get("proved") if name == "rgb" else None
        info, records = index_mp4(
            view[member.offset : member.offset + member.size],
            conforms=bool(meta.get("conforms", False)),
            whole=isinstance(proved, dict) and proved.get("whole") is True,
        )
        if "fps" in meta:
            # Use the profile's exact rate: the mean over rounded container ticks only approximates it.
            info = replace(info, fps=Fraction(meta["fps"]))
        if name == "flow":
            info = replace(info, flow_bound=_flow_bound(meta))
        if proved is not None:
            info = proved_info(info, proved)
        indexed.append(IndexedStream(name, member, info, records))
    sound = by_suffix.get(MEMBER_SUFFIX["audio"])
    if sound is None:
        return IndexedSample(key, meta, tuple(indexed))
    heard = index_m4a(view[sound.offset : sound.offset + sound.size])
    return IndexedSample(key, meta, tuple(indexed), IndexedAudio(sound, heard))


def _flow_bound(meta: Mapping[str, Any]) -> float:
    try:
        # Round to float32, the type in the sidecar.
        return float(np.float32(meta["flow"]["bound"]))
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError("the sample's JSON has no valid flow bound (flow.bound)") from error


def proved_info(info: StreamInfo, proved: Mapping[str, Any]) -> StreamInfo:
    """Update a stream's description with facts found by decoding it, which the MP4's tables cannot tell.

    Args:
        info: The description from the tables.
        proved: ``width``, ``height``, ``color_range``, ``color_matrix`` and ``whole``, from the sample's JSON.

    Raises:
        FormatError: If one of them is missing or invalid.
    """
    try:
        return replace(
            info,
            width=int(proved["width"]),
            height=int(proved["height"]),
            range=Range[proved["color_range"].upper()],
            matrix=Matrix[proved["color_matrix"].upper()],
            flags=info.flags | (StreamFlag.WHOLE if proved["whole"] else StreamFlag.NONE),
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise FormatError(f"invalid stream facts (proved) in the sample's JSON: {error!r}") from error
