"""Compare frames decoded from planned packets with what FFmpeg's demuxer and decoder make of a file by themselves."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import av
import numpy as np
from av.video.frame import VideoFrame

from fastvid.decode.pyav import open_context
from fastvid.errors import SourceError
from fastvid.format.codecs.heads import shortened
from fastvid.format.packets import PacketTable, StreamInfo, packet_offsets
from fastvid.format.schema import INPUT_PADDING, PacketFlag, StreamFlag
from fastvid.media.demuxer import ffmpeg_message, open_demuxer, video_stream
from fastvid.media.frame_digest import frame_digest
from fastvid.media.in_place.file_reader import FileReader
from fastvid.media.in_place.tables import Tables
from fastvid.media.playback import ENCODE_HINT
from fastvid.media.reasons import Reason
from fastvid.runtime.arrays import IntArray, RecordArray

CANDIDATES: Final = 8
"""Key packets among which the one is chosen whose frames are compared."""

NEAR: Final = 16
"""Packets behind that key packet whose frames are compared."""

SHORT: Final = 64
"""Packets of a video whose last frame is compared as well."""


class Comparison:
    """Decodes frames of a file in two ways."""

    def __init__(self, file: FileReader, tables: Tables) -> None:
        self.file, self.tables = file, tables
        self._numbers = {offset: number for number, offset in enumerate(tables.offsets.tolist())}

    def decoded(self, packets: IntArray, records: RecordArray) -> Iterator[tuple[int, VideoFrame]]:
        """Decode packets; yield their numbers and frames, in display order."""
        chosen = records[packets]
        places = list(zip(packet_offsets(chosen), chosen["size"].tolist(), strict=True))
        context = open_context(self.tables.codec, self.tables.extradata)
        try:
            for number, data in [*zip(packets.tolist(), self.file.parts(places), strict=True), (None, b"")]:
                packet = None
                if number is not None:
                    padded: Any = memoryview(data + bytes(INPUT_PADDING))[: len(data)]
                    packet = av.Packet(padded)
                    packet.pts = number
                for frame in context.decode(packet):
                    if frame.pts is None or frame.is_corrupt:
                        raise SourceError("a packet decodes with errors", reason=Reason.DAMAGED)
                    yield frame.pts, frame
        except (av.FFmpegError, ValueError) as error:
            raise SourceError(f"decoding failed: {ffmpeg_message(error)}", reason=Reason.DAMAGED) from error

    def begun(self, head: bytes) -> VideoFrame | None:
        """Return a picture of the size and colours of the video, decoded from the head of its first packet.

        None if the decoder makes nothing of it. Its pixels mean nothing.
        """
        context = open_context(self.tables.codec, self.tables.extradata)
        context.options = {**context.options, "ec": "0"}  # no time is spent on the rest of the picture
        try:
            packet = av.Packet(shortened(self.tables.codec, self.tables.extradata, head))
            frames = [*context.decode(packet), *context.decode(None)]
        except (av.FFmpegError, ValueError):
            return None
        return frames[0] if frames else None

    def wrong(self, info: StreamInfo, records: RecordArray, frames: Sequence[int]) -> int | None:
        """Return the first of some frames that differs from what FFmpeg makes of the file; None if none does.

        `records`: its PACKET_DTYPE records [P], with offsets from the start of the file. `frames`: frames of
        the stream.
        """
        table = PacketTable(records, whole=bool(info.flags & StreamFlag.WHOLE))
        rows = np.flatnonzero(np.isin(records["frame"], frames)).tolist()
        numbers = {row: self._numbers.get(packet_offsets(records[row : row + 1])[0]) for row in rows}
        expected = self._played([number for number in numbers.values() if number is not None])
        for row, number in numbers.items():
            frame = int(records["frame"][row])
            if number is None:
                return frame  # the file has no packet there
            try:
                decoded = self.decoded(table.plan([frame]).packets, records)
                found = next((given for place, given in decoded if place == row), None)
            except SourceError:
                return frame
            if found is None or frame_digest(found) != expected[number]:
                return frame
        return None

    def ends_alike(self) -> bool:
        """Return whether FFmpeg's demuxer finds the same frames from the last key packet to the end."""
        tables = self.tables
        keys = np.flatnonzero(tables.sync & tables.shown)
        times = np.sort(tables.pts[tables.shown]) - int(tables.pts[tables.shown].min())
        since = int(tables.pts[keys[-1]] - tables.pts[tables.shown].min()) if len(keys) else 0
        self.file.seek(0)
        with open_demuxer(self.file, tables.container) as source:
            stream = video_stream(source)
            begin = stream.start_time or 0
            try:
                if since > 0:
                    source.seek(begin + since, stream=stream)
                found = [p.pts - begin for p in source.demux(stream) if p.pts is not None and not p.is_discard]
            except av.FFmpegError as error:
                raise SourceError(f"reading failed: {ffmpeg_message(error)}", reason=Reason.DAMAGED) from error
        listed: list[int] = times[times >= since].tolist()
        return sorted(time for time in found if time >= since) == listed

    def _played(self, numbers: Sequence[int]) -> dict[int, bytes]:
        """Return the digests of the frames that packets show, decoded by FFmpeg in one pass.

        The pass begins at an earlier key packet than the plan of the last of them.
        """
        tables = self.tables
        # Times since the first frame: an empty edit delays all of them, which only the demuxer applies.
        times = tables.pts - int(tables.pts[tables.shown].min())
        keys = np.flatnonzero(tables.sync)
        first, last = (int(np.searchsorted(keys, ends, side="right")) - 1 for ends in (min(numbers), max(numbers)))
        at = max(min(first, last - 1), 0)
        # Frames that are shown before the key packet they follow are not decoded by who begins there.
        if at and any(number > keys[at] and times[number] < times[keys[at]] for number in numbers):
            at -= 1
        key = keys[at] if len(keys) else 0
        missing, found = {int(times[number]): number for number in numbers}, dict[int, bytes]()
        self.file.seek(0)
        with open_demuxer(self.file, tables.container) as source:
            stream = video_stream(source)
            stream.codec_context.thread_count = 1
            begin = stream.start_time or 0
            try:
                if times[key] > 0:
                    source.seek(begin + int(times[key]), stream=stream)
                for frame in source.decode(stream):
                    number = missing.pop(frame.pts - begin, None) if frame.pts is not None else None
                    if number is not None:
                        found[number] = frame_digest(frame)
                    if not missing:
                        return found
            except av.FFmpegError as error:
                raise SourceError(f"decoding failed: {ffmpeg_message(error)}", reason=Reason.DAMAGED) from error
        raise SourceError(
            f"FFmpeg shows no frame at the time of packet {min(missing.values())}",
            reason=Reason.NO_INDEX,
            hint=ENCODE_HINT,
        )


def chosen_frames(records: RecordArray) -> list[int]:
    """Return some frames around a key packet, always the same ones; of a short video also the last.

    Frames before the key packet prove the plans inside a GOP, those after it that decoding may start there. Of several
    key packets the one is taken before which the fewest packets have to be decoded.
    """
    rng = np.random.default_rng(zlib.crc32(records.tobytes()))
    keys, last = np.flatnonzero(records["flags"] & np.uint8(PacketFlag.KEY)), int(records["frame"].max())
    start = stop = 0
    if len(keys) > 1:
        number = min(rng.integers(1, len(keys), CANDIDATES).tolist(), key=lambda key: keys[key] - keys[key - 1])
        start, stop = int(keys[number - 1]), int(keys[number])
    before, after = (
        shown[shown >= 0].tolist() for shown in np.split(records["frame"][start : stop + NEAR], [stop - start])
    )
    drawn = [frames[int(rng.integers(0, len(frames)))] for frames in (before, after) if frames]
    return sorted({*after[:1], *drawn, *([last] if len(records) <= SHORT else [])})
