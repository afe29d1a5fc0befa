"""Remux the packets of a source into a plain MP4 with FFmpeg's muxer, without re-encoding.

The muxer converts between container conventions (start codes to lengths, decoder configuration); this module sets the
times and the hidden frames.

Streams of a profile keep promises. A stream is checked when it is written (`fastvid.sharding.encode.transcode`) and
when its dataset is verified (`fastvid.media.remux`). A copied stream conforms if its tables keep the promises.

Checks one sample: its MP4 must play as promised, and its index must lead to the same frames.

Every frame is decoded through libavformat's demuxer, which does not use fastvid's index; some are then decoded again
from planned packets and must be equal bit for bit.
"""

from __future__ import annotations

import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, Final

import av
import numpy as np
import numpy.typing as npt
from av.container import OutputContainer
from av.video.stream import VideoStream

from fastvid.decode.clips import read_clip, reader_of
from fastvid.decode.pyav import PyAvDecoder
from fastvid.decode.request import Box, ClipRequest, Planes
from fastvid.decode.swscale import RgbConverter
from fastvid.errors import ChecksumError, FastvidError, FormatError, SourceError
from fastvid.format.mp4 import Track, read_track
from fastvid.format.packets import PacketTable, StreamInfo, packet_offsets, packet_records
from fastvid.format.schema import Codec, Matrix, PacketFlag, Range, StreamFlag
from fastvid.media.demuxer import ffmpeg_message, fraction, open_demuxer, video_stream
from fastvid.media.describe import ENCODE_HINT
from fastvid.media.prove import NumberedPackets, Playback
from fastvid.media.timing import Reason

# Codecs whose packets all show a frame; one without a frame is a placeholder or lacks its references.
_NEVER_SILENT: Final = frozenset({Codec.H264, Codec.HEVC, Codec.MPEG4})
# Ticks between two displayed packets, to leave times for hidden packets.
_ROOM: Final = 8
# Movie ticks per second, fine enough for an edit list to end between two frames.
_MOVIE_TICKS: Final = 90_000


class Remuxer:
    """Writes MP4s of a source's packets.

    `played`: its packets and frames.
    """

    def __init__(
        self, data: bytes, container: str, played: Playback, numbered: NumberedPackets, *, whole: bool
    ) -> None:
        self._data, self._container, self._played, self._numbered = data, container, played, numbered
        count = len(played.packets)
        nothing = np.zeros(count, np.int64)
        records = packet_records(nothing, nothing, nothing, numbered.frames, numbered.flags)
        self._table = PacketTable(records, whole=whole)
        self._base, self._ticks = _clock(played, numbered)
        self._packet_of = np.empty(self._table.num_frames, np.int64)
        shown = np.flatnonzero(numbered.frames >= 0)
        self._packet_of[numbered.frames[shown]] = shown

    @property
    def seconds(self) -> npt.NDArray[np.float64]:
        """Presentation time of each shown frame in seconds after the first, float64 [N], increasing."""
        ticks = np.asarray([self._ticks[packet] for packet in self._packet_of.tolist()], np.float64)
        seconds: npt.NDArray[np.float64] = (ticks - ticks[0]) * float(self._base)
        return seconds

    def part(self, first: int, last: int) -> bytes:
        """Return an MP4 that shows frames `first` to `last` - 1 and contains the packets that they need."""
        packets = self._table.plan(range(first, last)).packets.tolist()
        if self._played.codec in _NEVER_SILENT:
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
        """Return the ticks of packets in decode order; one without a frame directly precedes the next."""
        times: list[int] = []
        following = max((self._ticks[packet] for packet in packets if packet in self._ticks), default=0) + _ROOM
        for packet in reversed(packets):
            following = self._ticks.get(packet, following - 1)
            times.append(following)
        return times[::-1]

    def _mux(self, packets: Sequence[int], pts: Sequence[int]) -> bytes:
        # A file, not memory: the muxer rereads its own output to move the tables to the front.
        with tempfile.TemporaryFile(prefix="fastvid-") as file, open_demuxer(self._data, self._container) as source:
            if self._played.codec is Codec.VP8:
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
        step = (
            max(1, shown_at[-1] - shown_at[-2]) if len(pts) > 1 else max(1, round(1 / self._played.rate / self._base))
        )
        for packet, shown, decoded in zip(packets, pts, decode_times(pts), strict=True):
            data: Any = self._played.packets[packet]  # PyAV takes any buffer; its stubs say bytes
            one = av.Packet(data)
            one.stream, one.time_base = stream, self._base
            one.pts, one.dts, one.duration = shown, decoded, step
            one.is_keyframe = bool(self._numbered.flags[packet] & PacketFlag.KEY)
            target.mux_one(one)


def _clock(played: Playback, numbered: NumberedPackets) -> tuple[Fraction, dict[int, int]]:
    """Return the seconds per tick, and the ticks of each packet with a frame, ascending in display order.

    Uses the source's presentation times if complete and increasing, else its decode times, else a constant rate.
    """
    order = numbered.order
    # AVI stores decode times only: the n-th frame is shown at the n-th decode time.
    decoded = sorted(time for packet in order if (time := played.dts[packet]) is not None)
    for times in ([played.pts[packet] for packet in order], decoded):
        known = [time for time in times if time is not None]
        if len(known) == len(order) and all(a < b for a, b in pairwise(known)):
            return played.time_base / _ROOM, {p: time * _ROOM for p, time in zip(order, known, strict=True)}
    return 1 / played.rate / _ROOM, {packet: place * _ROOM for place, packet in enumerate(order)}


def decode_times(pts: Sequence[int]) -> list[int]:
    """Return increasing decode times for presentation times in decode order, in ticks, none later than its packet's."""
    times = sorted(pts)
    for place in range(1, len(times)):
        times[place] = max(times[place], times[place - 1] + 1)
    delay = max(decoded - shown for decoded, shown in zip(times, pts, strict=True))
    return [time - delay for time in times]


def _end_edit(data: bytes, seconds: Fraction) -> bytes:
    """Return the MP4 with its edit, which includes the last packet, shortened to end before `seconds`."""
    mp4 = bytearray(data)
    at = data.find(b"elst")
    if at < 0 or data[at + 4] != 0:
        raise SourceError("MP4 has no edit list to shorten", reason=Reason.NO_INDEX, hint=ENCODE_HINT)
    # Version 0: count, then duration in movie ticks, media time and rate (ISO/IEC 14496-12, 8.6.6).
    (count,) = struct.unpack_from(">I", mp4, at + 8)
    struct.pack_into(">I", mp4, at + 12 + 12 * (count - 1), int(seconds * _MOVIE_TICKS) - 1)
    return bytes(mp4)


Finding = tuple[str, str]
"""The name of a promise or check, and how it is broken."""

FORMATS_420: Final = ("yuv420p", "yuvj420p")
MULTIPLE: Final = 16
"""Both sides of streams of built-in profiles are multiples of this, in pixels."""

# Both values mean BT.601 luma; VP9 has one code for the two.
_BT601: Final = (Matrix.BT470BG, Matrix.SMPTE170M)
_AV_RANGE: Final = {0: Range.UNKNOWN, 1: Range.LIMITED, 2: Range.FULL}  # AVColorRange


@dataclass(frozen=True, slots=True)
class Promised:
    """A stream and its promises."""

    track: Track
    # the promised size, rate and number of frames; with StreamFlag.CONFORMS it promises everything in this file.
    info: StreamInfo
    full_range: bool  # whether its samples must range from 0 to 255
    multiple: int = MULTIPLE  # both sides must be multiples of this, in pixels

    @classmethod
    def of(cls, track: Track, info: StreamInfo, name: str = "rgb") -> Promised:
        """Return a dataset's stream by name: JPEG is full range by definition (JFIF 1.02), flow by ours."""
        return cls(track, info, full_range=name == "flow" or info.codec is Codec.MJPEG)

    @property
    def conforms(self) -> bool:
        """Whether it promises everything in this file."""
        return bool(self.info.flags & StreamFlag.CONFORMS)


def broken_tables(stream: Promised) -> Iterator[Finding]:
    """Yield the broken promises that an MP4's tables show, for a stream that conforms."""
    track, info = stream.track, stream.info
    pts = np.sort(track.pts[track.shown])
    if len(pts) and pts[0]:
        yield "timing", f"the first frame is shown {int(pts[0])} ticks after the start"
    steps = np.diff(pts)
    if len(steps) and (steps != steps[0]).any():
        frame = int(np.argmax(steps != steps[0])) + 1
        yield "timing", f"the frame rate is not constant: frame {frame} lasts {steps[frame - 1]} ticks"
    elif len(steps) and int(steps[0]) * info.fps != track.timescale:
        yield "timing", f"{track.timescale}/{int(steps[0])} frames a second, but {info.fps} are promised"
    if info.width % stream.multiple or info.height % stream.multiple:
        yield "shape", f"{info.width}x{info.height} pixels are not multiples of {stream.multiple}"
    if wrong := _wrong_tags(stream, track.range, track.matrix):
        yield "colour", f"the container {wrong}"


def play_stream(
    data: bytes | memoryview, stream: Promised | None = None, look: Callable[[int, Any], None] | None = None
) -> Iterator[Finding]:
    """Decode a stream as a player does, and yield its broken promises, each with the first frame that breaks it."""
    found: dict[str, str] = {}
    count = 0
    try:
        with open_demuxer(data, "mov") as container:
            video = container.streams.video[0]
            video.codec_context.thread_count = 1
            aspect = fraction(video.sample_aspect_ratio)
            if stream is not None and stream.conforms and aspect not in (None, 1):
                found["shape"] = f"pixels are {aspect} times as wide as high"
            for frame in container.decode(video):
                if frame.is_corrupt:
                    yield "decode", f"frame {count} decodes with errors"
                    return
                for name, message in _broken_frame(stream, frame) if stream is not None else ():
                    found.setdefault(name, f"frame {count} {message}")
                if look is not None:
                    look(count, frame)
                count += 1
    except (av.FFmpegError, FastvidError) as error:
        yield "decode", f"decoding failed after {count} frames: {error}"
        return
    if stream is not None and count != stream.info.num_frames:
        yield "decode", f"{count} frames decode, but {stream.info.num_frames} are promised"
    yield from found.items()


def _broken_frame(stream: Promised, frame: Any) -> Iterator[Finding]:
    """Yield the promises that a decoded frame breaks; a stream that does not conform promises only its size."""
    info = stream.info.decoded
    if (frame.width, frame.height) != (info.width, info.height):
        yield "shape", f"has {frame.width}x{frame.height} pixels, but {info.width}x{info.height} in the index"
    if not stream.conforms:
        return
    if frame.rotation:
        yield "shape", f"has a display rotation of {frame.rotation} degrees"
    number = int(frame.colorspace)
    matrix = Matrix(number) if number in Matrix.__members__.values() else Matrix.UNKNOWN
    if wrong := _wrong_tags(stream, _AV_RANGE.get(int(frame.color_range), Range.UNKNOWN), matrix):
        yield "colour", wrong
    elif frame.format.name not in FORMATS_420:
        yield "colour", f"is {frame.format.name}"


def _wrong_tags(stream: Promised, sample_range: Range, matrix: Matrix) -> str:
    wanted = Range.FULL if stream.full_range else Range.LIMITED
    # JPEG is BT.601 by definition (JFIF 1.02) and has no field for it.
    matrices = (*_BT601, Matrix.UNKNOWN) if stream.info.codec is Codec.MJPEG else _BT601
    if sample_range is wanted and matrix in matrices:
        return ""
    return f"is tagged {sample_range.name.lower()} range, {matrix.name.lower()} matrix"


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
        info = indexed.info.decoded
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
        info = indexed.info.decoded
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
