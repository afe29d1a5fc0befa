"""Remux the packets of a source into a plain MP4 with FFmpeg's muxer, without re-encoding.

The muxer converts between container conventions (start codes to lengths, decoder configuration); this module sets the
times and the hidden frames.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final

import av
import numpy as np
import numpy.typing as npt
from av.container import OutputContainer
from av.video.stream import VideoStream

from fastvid.errors import SourceError
from fastvid.format.packets import PacketTable, packet_records
from fastvid.format.schema import Codec, PacketFlag
from fastvid.media.container import ffmpeg_message, open_demuxer, video_stream
from fastvid.media.describe import ENCODE_HINT
from fastvid.media.ffmpeg import Limits
from fastvid.media.prove import NumberedPackets, Playback, clock, described, number_packets, play, why_decode_whole
from fastvid.media.reasons import Reason

# Codecs in which every packet shows a frame. A packet that decodes to none is a placeholder or lacks its references.
_NEVER_SILENT: Final = frozenset({Codec.H264, Codec.HEVC, Codec.MPEG4})
# Ticks between two displayed packets, to leave times for hidden packets.
_ROOM: Final = 8
# Movie ticks per second, fine enough for an edit list to end between two frames.
_MOVIE_TICKS: Final = 90_000


class Remuxer:
    """Writes MP4s with the packets of a source.

    `data`: bytes of the source. Attributes: `played`, its packets and frames; `shown`, how a player shows them.
    """

    def __init__(self, data: bytes, container: str, limits: Limits, hdr: str) -> None:
        self.played = played = play(data, container, limits, unpack=True)
        self.shown, _ = described(played, data, hdr=hdr)
        self._data, self._numbered = data, number_packets(played)
        frames, nothing = self._numbered.frames, np.zeros(len(played.packets), np.int64)
        records = packet_records(nothing, nothing, nothing, frames, self._numbered.flags)
        whole = bool(self._numbered.whole or why_decode_whole(played, self._numbered))
        self._table = PacketTable(records, whole=whole)
        self._base, self._ticks = _clock(played, self._numbered)
        shown = np.flatnonzero(frames >= 0)
        self._packet_of = shown[np.argsort(frames[shown])]

    @property
    def seconds(self) -> npt.NDArray[np.float64]:
        """Presentation time of each shown frame in seconds after the first, float64 [N], increasing."""
        ticks = np.asarray([self._ticks[packet] for packet in self._packet_of.tolist()], np.float64)
        seconds: npt.NDArray[np.float64] = (ticks - ticks[0]) * float(self._base)
        return seconds

    def part(self, first: int, last: int) -> bytes:
        """Return an MP4 that shows frames `first` to `last` - 1 and contains the packets that they need."""
        packets = self._table.plan(range(first, last)).packets.tolist()
        if self.played.codec in _NEVER_SILENT:
            packets = [packet for packet in packets if packet in self._ticks]
        zero = self._ticks[int(self._packet_of[first])]
        pts = [time - zero for time in self._times(packets)]
        hidden = [
            time
            for packet, time in zip(packets, pts, strict=True)
            if packet in self._ticks and not first <= self._numbered.frames[packet] < last
        ]
        end = self._ticks[int(self._packet_of[last - 1])] - zero
        if any(0 <= time <= end for time in hidden):
            raise SourceError("edit list would need several segments", reason=Reason.NO_INDEX, hint=ENCODE_HINT)
        later = [time for time in hidden if time > end]
        mp4 = self._mux(packets, pts)
        if later:
            mp4 = _end_edit(mp4, min(later) * self._base)
        return mp4

    def _times(self, packets: Sequence[int]) -> list[int]:
        """Return the tick of each packet, in decode order; a packet without a frame is just before the next packet."""
        times: list[int] = []
        following = max((self._ticks[packet] for packet in packets if packet in self._ticks), default=0) + _ROOM
        for packet in reversed(packets):
            following = self._ticks.get(packet, following - 1)
            times.append(following)
        return times[::-1]

    def _mux(self, packets: Sequence[int], pts: Sequence[int]) -> bytes:
        # A file, not memory: the muxer rereads its own output to move the tables to the front.
        with (
            tempfile.TemporaryFile(prefix="fastvid-") as file,
            open_demuxer(self._data, self.played.container) as source,
        ):
            if self.played.codec is Codec.VP8:
                raise SourceError("MP4 cannot contain vp8", reason=Reason.NO_INDEX, hint=ENCODE_HINT)
            try:
                opened = av.open(
                    f"/dev/fd/{file.fileno()}",
                    "w",
                    format="mp4",
                    container_options={
                        "movflags": "+faststart",
                        "fflags": "+bitexact",
                        "movie_timescale": str(_MOVIE_TICKS),
                    },
                )
                with opened as target:
                    self._write(target, video_stream(source), packets, pts)
            except (av.FFmpegError, ValueError) as error:
                raise SourceError(
                    f"packets do not fit into an MP4: {ffmpeg_message(error)}",
                    reason=Reason.NO_INDEX,
                    hint=ENCODE_HINT,
                ) from error
            file.seek(0)
            return file.read()

    def _write(
        self, target: OutputContainer, template: VideoStream, packets: Sequence[int], pts: Sequence[int]
    ) -> None:
        stream = target.add_stream_from_template(template, opaque=True)
        stream.time_base = self._base
        # The muxer uses this duration for the last frame; the others last until the next one.
        shown_at = sorted(pts)
        step = max(1, shown_at[-1] - shown_at[-2]) if len(pts) > 1 else max(1, round(1 / self.played.rate / self._base))
        for packet, shown, decoded in zip(packets, pts, decode_times(pts), strict=True):
            data: Any = self.played.packets[packet]  # PyAV takes any buffer; its stubs say bytes
            one = av.Packet(data)
            one.stream, one.time_base = stream, self._base
            one.pts, one.dts, one.duration = shown, decoded, step
            one.is_keyframe = bool(self._numbered.flags[packet] & PacketFlag.KEY)
            target.mux_one(one)


def _clock(played: Playback, numbered: NumberedPackets) -> tuple[Fraction, dict[int, int]]:
    """Return the seconds per tick, and the ticks of each packet with a frame, ascending in display order.

    Uses the source's times, else a constant rate.
    """
    ticks = clock(played, numbered.order)
    if ticks is not None:
        return played.time_base / _ROOM, {packet: time * _ROOM for packet, time in ticks.items()}
    return 1 / played.rate / _ROOM, {packet: place * _ROOM for place, packet in enumerate(numbered.order)}


def decode_times(pts: Sequence[int]) -> list[int]:
    """Return increasing decode times in ticks, none later than the packet's presentation time.

    `pts`: presentation times of the packets in ticks, in decode order.
    """
    times = sorted(pts)
    for place in range(1, len(times)):
        times[place] = max(times[place], times[place - 1] + 1)
    delay = max(decoded - shown for decoded, shown in zip(times, pts, strict=True))
    return [time - delay for time in times]


def _end_edit(data: bytes, seconds: Fraction) -> bytes:
    """Return the MP4 with its edit list shortened to end before `seconds`; the muxer's includes the last packet."""
    mp4 = bytearray(data)
    at = data.find(b"elst")
    if at < 0 or data[at + 4] != 0:
        raise SourceError("MP4 has no edit list to shorten", reason=Reason.NO_INDEX, hint=ENCODE_HINT)
    # Version 0: count, then duration in movie ticks, media time and rate (ISO/IEC 14496-12, 8.6.6).
    (count,) = struct.unpack_from(">I", mp4, at + 8)
    struct.pack_into(">I", mp4, at + 12 + 12 * (count - 1), int(seconds * _MOVIE_TICKS) - 1)
    return bytes(mp4)
