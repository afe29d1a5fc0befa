"""Index a video file that another tool wrote: find its packets with FFmpeg's demuxer, and verify them by decoding.

Nothing that the container says is trusted. A packet must be in the file byte for byte; frames are numbered in the order
in which the decoder outputs them; and all frames must equal those a player shows, bit for bit. Parts of a stream may be
read only if every GOP decodes to the same frames on its own: once complete, and twice with a random half of its
droppable packets left out. A stream that fails this is marked to be decoded from its first packet.

`Remuxer` remuxes the packets into a plain MP4 with FFmpeg's muxer, without re-encoding. The muxer converts between
container conventions (start codes to lengths, decoder configuration); the times and the hidden frames are set here.

The file is untrusted: run this in a worker process that may crash (`fastvid.sharding.engines.local`).
"""

from __future__ import annotations

import struct
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, Final

import av
import numpy as np
import numpy.typing as npt
from av.bitstream import BitStreamFilterContext
from av.container import InputContainer, OutputContainer
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from fastvid.decode.pyav import open_context
from fastvid.errors import FormatError, SourceError
from fastvid.format.bitstream import can_plan, packet_flags
from fastvid.format.headers import FieldPairs
from fastvid.format.mp4 import frame_rate
from fastvid.format.packets import PacketTable, StreamInfo, packet_records
from fastvid.format.presentation import FINE, usual_step
from fastvid.format.schema import Codec, Matrix, PacketFlag, Range, StreamFlag, with_padding
from fastvid.media.container import Demuxed, Read, check_fragments, ffmpeg_message, open_demuxer, video_stream
from fastvid.media.describe import TONE_MAP, declared, present, with_times
from fastvid.media.ffmpeg import Limits
from fastvid.media.probe import HEAD_BYTES, sniff
from fastvid.media.reasons import Reason, unusable
from fastvid.runtime.arrays import FloatArray, IntArray
from fastvid.runtime.values import sha256, sha256_of_pieces


def frame_digest(frame: VideoFrame) -> str:
    """Return the SHA-256 of a frame's samples; padding between rows is ignored."""
    # Most processors have instructions for SHA-256, and compute it twice as fast as BLAKE2b.
    if frame.format.is_rgb or not frame.format.is_planar:
        return sha256(frame.to_ndarray().tobytes())
    wide = 2 if frame.format.components[0].bits > 8 else 1
    planes: Any = frame.planes  # they support the buffer protocol, which the stubs omit
    return sha256_of_pieces(
        np.ndarray((plane.height, plane.width * wide), np.uint8, plane, 0, (plane.line_size, 1)).tobytes()
        for plane in planes
    )


# Codecs by FFmpeg's name.
_CODECS: Final = {codec.label: codec for codec in Codec}


class Playback(Demuxed):
    """The packets and frames that a player gets from a file's first video stream."""

    def __init__(self, container: str, source: InputContainer, limits: Limits) -> None:
        super().__init__(container, source, limits)
        self.codec = decoded_codec(self.stream)
        self.packets = list[memoryview]()
        self.positions, self.pts, self.dts = list[int | None](), list[int | None](), list[int | None]()
        self.durations, self.discard = list[int](), list[bool]()
        self.digests = list[str]()  # hashes of the shown frames, in display order
        self.first: VideoFrame | None = None
        self._fields = FieldPairs(self.codec.label, self.extradata)

    def play(self, *, unpack: bool) -> None:
        """Read and decode all packets; `unpack`: whether to separate frames that MPEG-4 puts into one packet."""
        is_packed = unpack and self.codec is Codec.MPEG4
        splitter = BitStreamFilterContext("mpeg4_unpack_bframes", self.stream) if is_packed else None
        try:
            for demuxed in self:
                packets = [demuxed] if splitter is None or not demuxed.size else splitter.filter(demuxed)
                for packet in packets:
                    self._take(packet)
        except MemoryError as error:
            raise SourceError("decoding exceeds the memory limit", reason=Reason.MEMORY) from error
        except av.FFmpegError as error:
            message = f"decoding failed after {len(self.digests)} frames: {ffmpeg_message(error)}"
            raise SourceError(message, reason=Reason.DAMAGED) from error
        if not self.packets:
            raise SourceError("video stream has no packets", reason=Reason.NO_FRAMES)

    def _take(self, packet: Any) -> None:
        if packet.size:
            if packet.is_corrupt:
                raise SourceError(f"packet {len(self.packets)} is truncated", reason=Reason.TRUNCATED)
            data, joined = bytes(packet), self._fields.completes(memoryview(packet)) and self.packets
            if joined:
                data = bytes(self.packets.pop()) + data
                self.durations[-1] += packet.duration or 0
            self.packets.append(with_padding(data))
            if not joined:
                self.positions.append(packet.pos)
                self.pts.append(packet.pts)
                self.dts.append(packet.dts)
                self.durations.append(packet.duration or 0)
                self.discard.append(packet.is_discard)
        for frame in self.stream.decode(packet):
            number = len(self.digests)
            if frame.is_corrupt:
                raise SourceError(f"decoder reports errors in frame {number}", reason=Reason.DAMAGED)
            self.first = self.first or frame
            size = (self.first.width, self.first.height)
            if frame.interlaced_frame and not self.first.interlaced_frame:
                self.first = frame  # one interlaced frame makes the whole stream interlaced
            if (frame.width, frame.height) != size:
                raise unusable(
                    f"frame {number} has size {frame.width}x{frame.height}, the first frame {size[0]}x{size[1]}"
                )
            self.digests.append(frame_digest(frame))


def play(data: bytes, container: str, limits: Limits, *, unpack: bool = False) -> Playback:
    """Demux and decode the first video stream of a file.

    `limits`: limits on the size and number of frames.
    """

    def read(at: int, count: int) -> bytes:
        return data[at : at + count]

    if container == "mov":
        check_fragments(read, len(data))
    with open_demuxer(data, container) as source:
        played = Playback(container, source, limits)
        played.play(unpack=unpack)
        played.check(read, len(data))
        if played.first is None:
            raise SourceError(f"none of the {len(played.packets)} packets shows a frame", reason=Reason.NO_FRAMES)
    return played


def decoded_codec(stream: VideoStream) -> Codec:
    """Return the codec of a stream; raise SourceError if no decoder of fastvid supports it."""
    name = stream.codec_context.codec.canonical_name
    codec = _CODECS.get(name)
    if codec is None:
        raise unusable(f"no fastvid decoder supports {name}")
    return codec


# Bytes to search for a packet from the position that its demuxer returns, which is that of the packet's header. Even
# the longest headers, of Matroska's block groups, are shorter.
_HEADER_WINDOW: Final = 4096
# MPEG-4's placeholder for a frame that an earlier packet contained: a picture header without a picture.
_PLACEHOLDER_BYTES: Final = 8
# Passes over each GOP with half of the droppable packets left out.
_PASSES: Final = 2


@dataclass(frozen=True, slots=True)
class IndexedVideo:
    """An indexed video."""

    info: StreamInfo
    records: npt.NDArray[np.void]  # PACKET_DTYPE records [P], with offsets from the start of the file
    pix_fmt: str  # FFmpeg's pixel format of the frames
    container: str
    notes: tuple[str, ...]
    digests: tuple[str, ...] = ()  # digests of its frames in display order
    times: IntArray | None = None  # when each frame is shown, in ticks, int64 [N]; None if the container has no times
    tick: Fraction = Fraction(1)  # seconds per tick

    @property
    def seconds(self) -> FloatArray:
        """Time of each frame in seconds after the first, float64 [N]; from the rate if the container has no times."""
        if self.times is None:
            return np.asarray(np.arange(self.info.num_frames) / float(self.info.fps))
        seconds: FloatArray = (self.times - self.times[0]) * self.tick.numerator / self.tick.denominator
        return seconds


@dataclass(frozen=True, slots=True)
class NumberedPackets:
    """The flags of each packet of a stream, and the frame that it shows."""

    flags: npt.NDArray[np.uint32]  # PacketFlag of each packet, uint32 [P]; the first packet is KEY
    frames: npt.NDArray[np.int64]  # frame that each packet shows, in display order, -1 for none; int64 [P]
    order: tuple[int, ...]
    whole: str


def index_video(data: bytes, limits: Limits, *, hdr: str = TONE_MAP) -> IndexedVideo:
    """Find and verify the packets of a video file's first video stream.

    `limits`: limits on the size and number of frames. `hdr`: see `fastvid.media.describe.present`.
    """
    container = sniff(data[:HEAD_BYTES])
    played = play(data, container, limits)
    offsets = _locate(data, played)
    first = played.first
    assert first is not None
    info, shown = described(played, data, hdr=hdr)
    numbered = number_packets(played)
    times, rate, notes = _timed(played, numbered, info.fps)
    info = replace(info, fps=rate)
    sizes = [len(packet) for packet in played.packets]
    checksums = [zlib.crc32(packet) for packet in played.packets]
    records = usable_records(offsets, sizes, checksums, numbered.frames, numbered.flags)
    whole = numbered.whole or why_decode_whole(played, numbered)
    if whole:
        info = replace(info, flags=info.flags | StreamFlag.WHOLE)
        notes.append(f"whole: {whole}")
    notes = [*shown, *_differences(played, info, first), *notes]
    info = with_times(info, times, played.time_base)
    return IndexedVideo(
        info, records, first.format.name, container, tuple(notes), tuple(played.digests), times, played.time_base
    )


def usable_records(*columns: Any) -> npt.NDArray[np.void]:
    """Return PACKET_DTYPE records [P] of columns, see `packet_records`; SourceError if a reader cannot use them."""
    try:
        records = packet_records(*columns)
        PacketTable(records)
    except FormatError as error:
        raise SourceError(f"its packets cannot be indexed: {error.message}", reason=Reason.NO_INDEX) from error
    return records


def described(played: Playback, data: bytes, *, hdr: str = TONE_MAP) -> tuple[StreamInfo, tuple[str, ...]]:
    """Describe the stream of a file, see `fastvid.media.describe.present`."""
    assert played.first is not None
    info = StreamInfo(played.codec, 2, 2, len(played.digests), played.rate, played.extradata)
    said = declared(played.container, lambda at, count: data[at : at + count], len(data))
    return present(info, played.first, said, played.aspect, hdr=hdr)


def shown_times(pts: Sequence[int | None], frames: IntArray) -> IntArray | None:
    """Return when each frame is shown, in ticks, int64 [N]; None if times are missing or disordered.

    `frames`: the frame that each packet shows, -1 for none, int64 [P].
    """
    shown = np.flatnonzero(frames >= 0)
    times = [pts[number] for number in shown[np.argsort(frames[shown])].tolist()]
    if None in times:
        return None
    known = np.asarray(times, np.int64)
    return None if (np.diff(known) <= 0).any() else known


def number_packets(played: Playback) -> NumberedPackets:
    """Classify and number each packet, from its header and by decoding all packets without the container."""
    flags, whole = np.zeros(len(played.packets), np.uint32), ""
    if can_plan(played.codec):
        try:
            flags = packet_flags(played.codec, played.extradata, played.packets)
        except FormatError as error:
            whole = error.message
    else:
        whole = f"packet headers of {played.codec.label} are not parsed"
    try:
        given = dict(_decode(played, range(len(played.packets))))
    except (SourceError, av.FFmpegError, ValueError) as error:
        raise unusable(f"its packets do not decode without their container: {error}") from error
    silent = [number for number in range(len(played.packets)) if number not in given]
    allowed = set(_silent(played, flags))
    lost = [number for number in silent if number not in allowed]
    if lost:
        raise SourceError(
            f"{len(lost)} packets decode to no frame, the first of them packet {lost[0]}", reason=Reason.DAMAGED
        )
    shown = [number for number in given if not played.discard[number]]
    if [given[number] for number in shown] != played.digests:
        raise unusable(
            f"decoding its packets returns {len(shown)} frames that differ from the {len(played.digests)} of the file"
        )
    frames = np.full(len(played.packets), -1, np.int64)
    frames[shown] = np.arange(len(shown))
    hidden = np.where(frames < 0, np.uint32(PacketFlag.HIDDEN), np.uint32(0))
    flags = (flags & ~np.uint32(PacketFlag.HIDDEN)) | hidden
    if not whole and not flags[0] & PacketFlag.KEY:
        whole = "the first packet is no key packet"
    flags[0] |= np.uint32(PacketFlag.KEY)
    return NumberedPackets(flags, frames, tuple(given), whole)


def _locate(data: bytes, played: Playback) -> list[int]:
    """Return the offset of each packet in the file."""
    offsets: list[int] = []
    for number, (packet, position) in enumerate(zip(played.packets, played.positions, strict=True)):
        end = offsets[-1] + len(played.packets[number - 1]) if number else 0
        offsets.append(found_at(lambda at, count: data[at : at + count], packet, number, position, end))
    return offsets


def found_at(read: Read, packet: bytes | memoryview, number: int, position: int | None, end: int) -> int:
    """Return the offset of a packet in the file.

    `packet`: its bytes. `number`: its number, for messages. `position`: where the demuxer found its header; None if the
    demuxer does not say. Then it is searched from `end`, where the packet before it ends.
    """
    start = end if position is None or position < 0 else position
    at = read(start, _HEADER_WINDOW + len(packet)).find(packet)
    if at < 0:
        raise unusable(f"packet {number} is not contiguous at byte {start} of the file")
    return start + at


def _silent(played: Playback, flags: npt.NDArray[np.uint32]) -> Iterator[int]:
    """Yield the numbers of the packets that need not decode to a frame: without one they are not damaged."""
    leading = played.codec is Codec.HEVC
    for number, packet in enumerate(played.packets):
        placeholder = played.codec is Codec.MPEG4 and len(packet) <= _PLACEHOLDER_BYTES
        if flags[number] & PacketFlag.HIDDEN or played.discard[number] or placeholder:
            yield number
        elif leading and number:
            # Leading pictures of the first key picture: their references are missing, because the video was cut.
            leading = (packet[4] >> 1 & 63) in (8, 9) if len(packet) > 4 else False
            if leading:
                yield number


def why_decode_whole(played: Playback, numbered: NumberedPackets) -> str:
    """Return why a part of the stream cannot be decoded on its own; empty if every part can."""
    flags, frames = numbered.flags, numbered.frames
    shown = {number: played.digests[frame] for number, frame in enumerate(frames.tolist()) if frame >= 0}
    keys = [*np.flatnonzero(flags & np.uint32(PacketFlag.KEY)).tolist(), len(flags)]
    droppable = (flags & np.uint32(PacketFlag.DROPPABLE)) != 0
    rng = np.random.default_rng(zlib.crc32(flags.tobytes() + frames.tobytes()))
    for start, stop in pairwise(keys):
        group = np.arange(start, stop)
        # In each pass leave out random droppable packets, and keep others, which would show that they depend on them.
        kept = [group] if len(keys) > 2 else []
        if droppable[start:stop].any():
            kept += [
                group[~droppable[start:stop] | half] for half in rng.integers(0, 2, (_PASSES, len(group))).astype(bool)
            ]
        for packets in kept:
            try:
                given = dict(_decode(played, packets.tolist()))
            except (SourceError, av.FFmpegError, ValueError) as error:
                return f"packets {start} to {stop - 1} do not decode on their own: {error}"
            wrong = [number for number in packets.tolist() if number in shown and given.get(number) != shown[number]]
            if wrong:
                return f"packet {wrong[0]} differs if packets {start} to {stop - 1} are decoded on their own"
    return ""


def _decode(played: Playback, packets: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Decode packets as `fastvid.decode.pyav` does; yield packet numbers and frame digests, in display order."""
    given: list[tuple[int, Any]] = [(number, played.packets[number]) for number in packets]
    for number, frame in decode_padded(open_context(played.codec, played.extradata), given):
        yield number, frame_digest(frame)


def decode_padded(context: VideoCodecContext, packets: Sequence[tuple[int, Any]]) -> Iterator[tuple[int, VideoFrame]]:
    """Decode numbered packets, views of padded memory; yield the numbers and frames, in display order."""
    for number, data in [*packets, (None, None)]:
        packet = None
        if number is not None:
            packet = av.Packet(data)
            packet.pts = number
        for frame in context.decode(packet):
            if frame.pts is None or frame.is_corrupt:
                raise SourceError("a packet decodes with errors", reason=Reason.DAMAGED)
            yield frame.pts, frame


def clock(played: Playback, order: Sequence[int]) -> dict[int, int] | None:
    """Return the ticks at which packets show their frames; None if the container does not tell.

    These are presentation times if they increase, else decode times: AVI stores only decode times, and the n-th frame
    is shown at the n-th of them. If an encoder wrote placeholders, packets without a frame, while it was some frames
    behind, they take the first ticks, and the frames the last ones. `order`: the packets that decode to a frame, in
    display order.
    """
    decoded = sorted(time for packet in order if (time := played.dts[packet]) is not None)
    for times in (_late_ticks(played, len(order)), [played.pts[packet] for packet in order], decoded):
        known = [time for time in times if time is not None]
        if len(known) == len(order) and all(a < b for a, b in pairwise(known)):
            return dict(zip(order, known, strict=True))
    return None


def _late_ticks(played: Playback, count: int) -> Sequence[int]:
    """Return the last `count` ticks, if placeholders take the first ones; empty if the ticks are not evenly spaced."""
    pairs = zip(played.dts, played.discard, strict=True)
    ticks = sorted(time for time, is_hidden in pairs if time is not None and not is_hidden)
    late = ticks[-count:] if played.codec is Codec.MPEG4 and len(ticks) > count else []
    return late if len(set(np.diff(late).tolist())) == 1 else ()


def _timed(
    played: Playback, numbered: NumberedPackets, nominal: Fraction
) -> tuple[IntArray | None, Fraction, list[str]]:
    """Return the times of the shown frames in ticks, int64 [N], their rate, and notes about those times.

    The times are None if they are not known.
    """
    frames = numbered.frames
    ticks = clock(played, [packet for packet in numbered.order if frames[packet] >= 0])
    times = None if ticks is None else np.asarray(list(ticks.values()))
    shown = np.flatnonzero(frames >= 0)
    pts = [played.pts[number] for number in shown[np.argsort(frames[shown])].tolist()]
    notes = ["times-missing"] if None in pts else []
    if not notes and not all(a < b for a, b in pairwise(pts)):
        notes = ["times-disordered"]
    tick = played.time_base
    if times is None or tick.numerator != 1:
        return times, nominal, notes
    steps = np.diff(times)
    last = usual_step(steps, played.durations[int(shown[0])])
    rate = frame_rate(times, tick.denominator, last=last) if last else nominal
    # Rounding to the container's clock changes a step by up to one tick.
    if not notes and len(steps) and int(steps.max() - steps.min()) > max(1, last // 100):
        notes = ["variable-rate"]
    # FFmpeg's rate of an MP4 is a mean too, with the duration of the last frame as the muxer happened to write it.
    return times, rate if played.container == "mov" else nearest_rate(rate, nominal, len(times), tick), notes


def nearest_rate(measured: Fraction, nominal: Fraction, count: int, tick: Fraction) -> Fraction:
    """Return the nominal rate if it explains the measured one: containers round times to their clock.

    `count`: frames. `tick`: seconds of the clock; the time of the first frame, that of the last one and its duration
    are off by up to half of it each.
    """
    is_rounded = tick <= FINE and abs(count / measured - count / nominal) <= tick * 3 / 2
    return nominal if is_rounded or abs(measured - nominal) * 1000 <= measured else measured


def _differences(played: Playback, info: StreamInfo, frame: VideoFrame) -> Iterator[str]:
    """Yield notes for the ledger on how a stream differs from what fastvid's profiles write."""
    if frame.width % 16 or frame.height % 16:
        yield "size"
    if frame.format.name not in ("yuv420p", "yuvj420p"):
        yield f"pixels-{frame.format.name}"
    if info.range is not Range.LIMITED or info.matrix not in (Matrix.SMPTE170M, Matrix.BT470BG):
        yield f"colour-{info.range.name.lower()}-{info.matrix.name.lower()}"
    if any(played.discard):
        yield "edit-list"


# Codecs in which every packet shows a frame. A packet that decodes to none is a placeholder or lacks its references.
_NEVER_SILENT: Final = frozenset({Codec.H264, Codec.HEVC, Codec.MPEG4})
# Ticks between two displayed packets, to leave times for hidden packets.
_ROOM: Final = 8
# Movie ticks per second, fine enough for an edit list to end between two frames.
_MOVIE_TICKS: Final = 90_000


class Remuxer:
    """Writes MP4s with the packets of a source.

    `data`: bytes of the source. Attributes: `played`, its packets and frames; `shown`, how a player shows them;
    `rate`, its frames per second.
    """

    def __init__(self, data: bytes, container: str, limits: Limits, hdr: str) -> None:
        self.played = played = play(data, container, limits, unpack=True)
        self.shown, _ = described(played, data, hdr=hdr)
        self._data, self._numbered = data, number_packets(played)
        _, self.rate, _ = _timed(played, self._numbered, self.shown.fps)
        frames, nothing = self._numbered.frames, np.zeros(len(played.packets), np.int64)
        records = packet_records(nothing, nothing, nothing, frames, self._numbered.flags)
        whole = bool(self._numbered.whole or why_decode_whole(played, self._numbered))
        self._table = PacketTable(records, whole=whole)
        self._base, self._ticks = _own_clock(played, self._numbered)
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
            raise unusable("edit list would need several segments")
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
                raise unusable("MP4 cannot contain vp8")
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
                raise unusable(f"packets do not fit into an MP4: {ffmpeg_message(error)}") from error
            file.seek(0)
            return file.read()

    def _write(
        self, target: OutputContainer, template: VideoStream, packets: Sequence[int], pts: Sequence[int]
    ) -> None:
        stream = target.add_stream_from_template(template, opaque=True)
        stream.time_base = self._base
        if self.played.aspect:  # of VP9 and AV1 only the container says it
            stream.codec_context.sample_aspect_ratio = self.played.aspect
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


def _own_clock(played: Playback, numbered: NumberedPackets) -> tuple[Fraction, dict[int, int]]:
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
        raise unusable("MP4 has no edit list to shorten")
    # Version 0: count, then duration in movie ticks, media time and rate (ISO/IEC 14496-12, 8.6.6).
    (count,) = struct.unpack_from(">I", mp4, at + 8)
    struct.pack_into(">I", mp4, at + 12 + 12 * (count - 1), int(seconds * _MOVIE_TICKS) - 1)
    return bytes(mp4)
