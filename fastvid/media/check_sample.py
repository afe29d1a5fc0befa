"""Checks one sample: its MP4 must play as promised, and its index must lead to the same frames.

Every frame is decoded through libavformat's demuxer, which does not use fastvid's index; some are then decoded again
from planned packets and must be equal bit for bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fastvid.decode.clips import read_clip, reader_of
from fastvid.decode.pyav import PyAvDecoder
from fastvid.decode.request import Box, ClipRequest, Planes
from fastvid.decode.swscale import RgbConverter
from fastvid.errors import ChecksumError, FastvidError, FormatError
from fastvid.format.mp4.demux import read_track
from fastvid.format.packets import PacketTable, StreamInfo, packet_offsets
from fastvid.media.promises import FORMATS_420, Finding, Promised, broken_tables, play_stream

# Frames of each sample decoded again from planned packets.
_PLANNED: Final = 3


@dataclass(frozen=True, slots=True)
class Indexed:
    """The info and packet table of a stream, from its shard's packet sidecar."""

    info: StreamInfo
    table: PacketTable


class SampleChecker:
    """Checks samples one by one, keeping decoders open between them."""

    def __init__(self) -> None:
        self._decoder = PyAvDecoder()
        self._converter = RgbConverter()

    def check(self, key: str, name: str, data: memoryview, indexed: Indexed | None) -> list[Finding]:
        """Return the problems of a video stream of a sample.

        `key`: the sample's key; determines which frames are decoded twice.
        """
        try:
            track = read_track(data)
        except FormatError as error:
            return [("index", f"the MP4's tables are broken: {error.message}")]
        if indexed is None:
            return list(play_stream(data))
        info = indexed.info
        stream, wanted = Promised.of(track, info, name), _choose(key, info.num_frames)
        chosen, kept = set(wanted.tolist()), dict[int, Planes]()

        def keep(number: int, frame: Any) -> None:
            if number in chosen and not frame.format.is_rgb:
                kept[number] = _copy(frame if frame.format.name in FORMATS_420 else self._converter.to_420(frame, info))

        findings = list(broken_tables(stream)) if stream.conforms else []
        findings += play_stream(data, stream, keep)
        if len(kept) == len(wanted):
            findings += self._plan(name, data, indexed, wanted, kept)
        return findings

    def _plan(
        self,
        name: str,
        data: memoryview,
        indexed: Indexed,
        wanted: npt.NDArray[np.int64],
        kept: Mapping[int, Planes],
    ) -> Iterator[Finding]:
        """Decode the chosen frames from planned packets and compare them."""
        info = indexed.info
        sides = (info.height & ~1, info.width & ~1)
        box = Box(0, 0, *sides)
        try:
            clip = read_clip(ClipRequest(0, wanted, box, sides, stream=name), info, indexed.table, reader_of(data))
            output = Planes.packed(np.empty(Planes.nbytes(len(wanted), box), np.uint8), len(wanted), box)
            (error,) = self._decoder.decode([clip], [output])
        except ChecksumError:
            return  # reported by the packet check
        except FastvidError as caught:
            error = caught
        if error is not None:
            yield "plan", f"frames {wanted.tolist()} do not decode from their packets: {error.message}"
            return
        for place, frame in enumerate(wanted.tolist()):
            pairs = zip((output.y, output.u, output.v), (kept[frame].y, kept[frame].u, kept[frame].v), strict=True)
            if any((planned[place] != whole[0]).any() for planned, whole in pairs):
                yield "plan", f"frame {frame} decoded from its planned packets differs from the one a player shows"
                return


def check_packets(data: memoryview, table: PacketTable) -> Iterator[Finding]:
    """Compare every packet with its checksum."""
    wrong = []
    records = table.records
    columns = (packet_offsets(records), records["size"].tolist(), records["crc32"].tolist())
    for packet, (offset, size, crc32) in enumerate(zip(*columns, strict=True)):
        if offset + size > len(data) or zlib.crc32(data[offset : offset + size]) != crc32:
            wrong.append(packet)
    if wrong:
        listed = ", ".join(map(str, wrong[:5])) + (", ..." if len(wrong) > 5 else "")
        yield "packets", f"{len(wrong)} of {len(table)} packets differ from their checksums: {listed}"


def _choose(key: str, num_frames: int) -> npt.NDArray[np.int64]:
    """Return the last frame and some others, always the same ones, int64 [F], sorted."""
    picks = np.random.default_rng(zlib.crc32(key.encode())).integers(0, num_frames, _PLANNED - 1)
    return np.unique(np.append(picks, num_frames - 1)).astype(np.int64)


def _copy(frame: Any) -> Planes:
    """Copy a frame's planes, without the last row and column of odd sizes."""
    height, width = frame.height & ~1, frame.width & ~1
    planes = []
    for plane, (h, w) in zip(frame.planes, ((height, width), *((height // 2, width // 2),) * 2), strict=True):
        planes.append(np.ndarray((1, h, w), np.uint8, plane, 0, (0, plane.line_size, 1)).copy())
    return Planes(*planes)
