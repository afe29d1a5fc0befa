"""Probe a source: container, stream, size, colour, orientation and timing.

All packets are read, and one frame is decoded.

Files are untrusted, and native code parses them. Call this in a process that may die and that has limits
(`fastvid.sharding.engines.local_engine`), never in one with state worth keeping.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from statistics import median_low
from typing import Any, Final

import av
import numpy as np
from av.container import InputContainer
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from fastvid.errors import SourceError
from fastvid.format.codecs.fields import FieldPairs
from fastvid.media.boxes import check_fragments
from fastvid.media.demuxer import ffmpeg_message, fraction, open_demuxer, side_data, video_stream
from fastvid.media.limits import Limits
from fastvid.media.random_access import RandomAccess
from fastvid.media.reasons import Reason
from fastvid.media.source_file import OpenSource
from fastvid.media.timing import FrameTiming, choose_timing
from fastvid.runtime.arrays import IntArray

# Transfer characteristics of ITU-T H.273 that require tone mapping: PQ and HLG.
HDR_TRANSFERS: Final = {16: "smpte2084", 18: "arib-std-b67"}
_FULL_RANGE: Final = 2  # AVCOL_RANGE_JPEG
# Containers whose header contains a duration that the muxer writes last, when it is known.
_DURATION_COUNTS: Final = frozenset({"matroska", "flv", "asf"})
# Containers whose header counts ticks of the video's clock, of which a packet may take several.
_STEPS_COUNT: Final = frozenset({"avi", "ivf"})
# Ticks that may be missing: muxers count the last packet differently.
_SLACK_STEPS: Final = 2
# Containers without timestamps, for which FFmpeg invents some.
_RAW: Final = frozenset({"h264", "hevc", "m4v", "mpegvideo"})
# Seconds and fraction of the header's duration that may be missing: muxers round, and audio may end earlier.
_SLACK_SECONDS: Final = 1.0
_SLACK_PART: Final = 0.1
# Maximum size of a placeholder for a frame of an earlier packet; the smallest real MPEG-4 picture is larger.
_PLACEHOLDER_BYTES: Final = 2
# A larger sample aspect ratio is damage, not anamorphic video: DV and DVD stay below 1.5, scope below 2.
_MAX_ASPECT: Final = 8


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """The properties of a source."""

    container: str
    codec: str
    width: int  # coded width in pixels, before rotation
    height: int  # coded height in pixels, before rotation
    pix_fmt: str  # FFmpeg's pixel format
    sample_aspect: Fraction  # width of a pixel divided by its height; 1 if unknown or implausible
    rotation: int
    matrix: int
    full_range: bool  # whether luma ranges from 0 to 255
    transfer: int
    primaries: int
    interlaced: bool  # whether frames may consist of two fields
    timing: FrameTiming
    # presentation times of its shown frames in ticks, ascending, int64 [N]; those that are missing are left out.
    times: IntArray = field(compare=False, repr=False)
    time_base: Fraction  # seconds per tick
    # times of the packets at which decoding can begin, in ticks, ascending, int64 [K]; empty if it must begin at
    # the first packet. See `fastvid.media.random_access`.
    keys: IntArray = field(compare=False, repr=False)
    others: frozenset[str]

    @property
    def turned(self) -> bool:
        """Whether display swaps width and height."""
        return self.rotation % 180 == 90

    @property
    def hdr(self) -> bool:
        """Whether the picture must be tone-mapped."""
        return self.transfer in HDR_TRANSFERS


def probe(source: OpenSource, limits: Limits, *, whole: bool = True) -> SourceInfo:
    """Read all packets of a source and decode its first frame.

    `limits`: limits on its frames.
    """
    if source.container == "mov":
        check_fragments(lambda at, count: os.pread(source.descriptor, count, at), source.size)
    with open_demuxer(source.url, source.container) as container:
        stream = video_stream(container)
        scan = _Scan(source.container, container, stream, limits)
        scan.run(whole=whole)
        info = _describe(source, container, stream, scan)
        if whole:
            _check_whole(source.container, container, stream, scan)
        return info


class _Scan:
    """One pass over the packets that collects counts, times and the first frame."""

    def __init__(self, forced: str, container: InputContainer, stream: VideoStream, limits: Limits) -> None:
        self.container, self.stream, self.limits = container, stream, limits
        self.packets = 0
        self.shown = 0
        self.pts: list[int | None] = []
        self.corrupt = 0
        self._codec = stream.codec_context.name
        name, extradata = stream.codec_context.codec.canonical_name, bytes(stream.codec_context.extradata or b"")
        self.fields = FieldPairs(name, extradata)
        self.access = RandomAccess(forced, name, extradata)
        self._avi = forced == "avi"
        self._ends: dict[int, int] = {}
        self.frame: VideoFrame | None = None
        self.error = ""

    @property
    def last_end(self) -> Fraction:
        """Latest end of a packet of any stream, in seconds."""
        bases = {stream.index: fraction(stream.time_base) or 0 for stream in self.container.streams}
        return max((Fraction(end * bases[index]) for index, end in self._ends.items()), default=Fraction(-1))

    def run(self, *, whole: bool) -> None:
        stream = self.stream
        stream.codec_context.thread_count = 1
        width, height = stream.codec_context.width, stream.codec_context.height
        if width * height > self.limits.max_pixels:
            raise SourceError(
                f"frames have {width}x{height} pixels, at most {self.limits.max_pixels} are allowed",
                reason=Reason.TOO_LARGE,
            )
        try:
            for packet in self.container.demux():
                if packet.size:
                    self._take(packet)
        except MemoryError as error:
            raise SourceError("reading the file exceeds the memory limit", reason=Reason.MEMORY) from error
        except av.FFmpegError as error:
            if whole:
                raise SourceError(
                    f"reading failed after {self.packets} packets: {ffmpeg_message(error)}", reason=Reason.DAMAGED
                ) from error
        if self.frame is None:
            self._decode(None)

    def _take(self, packet: Packet[Any]) -> None:
        if packet.pts is not None:
            end = packet.pts + (packet.duration or 0)
            if end > self._ends.get(packet.stream_index, end - 1):
                self._ends[packet.stream_index] = end
        if packet.stream_index != self.stream.index:
            return
        self.packets += 1
        self.corrupt += packet.is_corrupt
        if self.packets > self.limits.max_frames:
            raise SourceError(f"file has more than {self.limits.max_frames} frames", reason=Reason.TOO_LONG)
        if self.frame is None:
            self._decode(packet)
        self.access.add(packet)
        # A frame of two fields may have two packets.
        second = self.fields.completes(memoryview(packet))
        if packet.is_discard or second or _is_hidden(self._codec, packet):
            return
        # A placeholder takes a tick of the clock but contains no frame. AVI stores decode times only; for reordered
        # pictures libavformat invents presentation times, the last of them wrong.
        self.pts.append(packet.dts if self._avi else packet.pts)
        self.shown += packet.size > _PLACEHOLDER_BYTES

    def _decode(self, packet: Packet[VideoStream] | None) -> None:
        try:
            frames = self.stream.codec_context.decode(packet)
        except MemoryError as error:
            raise SourceError("decoding a frame exceeds the memory limit", reason=Reason.MEMORY) from error
        except av.FFmpegError as error:
            self.error = ffmpeg_message(error)
            return
        if frames:
            self.frame = frames[0]


def _describe(source: OpenSource, container: InputContainer, stream: VideoStream, scan: _Scan) -> SourceInfo:
    if not scan.packets:
        raise SourceError("video stream has no packets", reason=Reason.NO_FRAMES)
    if scan.frame is None:
        cause = f": {scan.error}" if scan.error else ""
        raise SourceError(f"no frame decodes from {scan.packets} packets{cause}", reason=Reason.NO_FRAMES)
    if not scan.shown:
        raise SourceError("edit list shows no frame", reason=Reason.NO_FRAMES)
    context, frame = stream.codec_context, scan.frame
    time_base = fraction(stream.time_base) or Fraction(1, 1000)
    timing = choose_timing(
        [] if source.container in _RAW else scan.pts,
        time_base,
        [fraction(rate) for rate in (stream.guessed_rate, stream.base_rate, stream.average_rate)],
        scan.shown,
    )
    pix_fmt = frame.format.name
    aspect = fraction(stream.sample_aspect_ratio) or Fraction(1)
    times = np.sort(np.asarray([time for time in scan.pts if time is not None], np.int64))
    interlaced = bool(frame.interlaced_frame) or scan.fields.possible
    # Deinterlacing looks at neighbouring frames, and without times no frame can be found by its time.
    from_any = not interlaced and timing.kind != "counted" and not (scan.access.old_x264 and "444" in pix_fmt)
    return SourceInfo(
        container=source.container,
        codec=context.name,
        width=frame.width,
        height=frame.height,
        pix_fmt=pix_fmt,
        sample_aspect=aspect if Fraction(1, _MAX_ASPECT) <= aspect <= _MAX_ASPECT else Fraction(1),
        rotation=_rotation(frame),
        matrix=int(frame.colorspace),
        full_range=int(frame.color_range) == _FULL_RANGE or pix_fmt.startswith("yuvj"),
        transfer=int(frame.color_trc),
        primaries=int(frame.color_primaries),
        interlaced=interlaced,
        timing=timing,
        times=times,
        time_base=time_base,
        keys=scan.access.keys(times, scan.shown) if from_any else np.zeros(0, np.int64),
        others=frozenset(_other_decoders(container, stream)),
    )


def _check_whole(name: str, container: InputContainer, stream: VideoStream, scan: _Scan) -> None:
    """Compare the data with the header's counts, in containers whose header is written last."""
    if scan.corrupt:
        raise SourceError(f"{scan.corrupt} of {scan.packets} packets are truncated or damaged", reason=Reason.TRUNCATED)
    if name == "mov" and scan.packets < stream.frames:
        raise SourceError(
            f"file contains {scan.packets} of the {stream.frames} packets that its header counts",
            reason=Reason.TRUNCATED,
        )
    if name in _STEPS_COUNT and scan.pts and scan.pts[-1] is not None:
        times = sorted(t for t in scan.pts if t is not None)
        # Assume the usual duration for the last frame. An AVI remuxed from an MP4 may take 24 ticks per frame.
        usual = median_low([after - before for before, after in pairwise(times)] or [1])
        steps = times[-1] + max(1, usual)
        if steps < stream.frames - _SLACK_STEPS:
            raise SourceError(
                f"file contains {steps} of the {stream.frames} clock ticks that its header counts",
                reason=Reason.TRUNCATED,
            )
    if name in _DURATION_COUNTS and container.duration:
        promised = Fraction(container.duration, av.time_base)
        missing = promised - scan.last_end
        if missing > max(_SLACK_SECONDS, _SLACK_PART * promised):
            raise SourceError(
                f"file ends at {float(scan.last_end):.2f} s, its header says {float(promised):.2f} s",
                reason=Reason.TRUNCATED,
            )


def _is_hidden(codec: str, packet: Packet[Any]) -> bool:
    """Return whether a VP8 or VP9 packet is decoded but never shown."""
    view = memoryview(packet)
    if "vp8" in codec:
        return not view[0] & 0x10  # show_frame, RFC 6386 section 9.1
    if "vp9" not in codec or view[-1] & 0xE0 == 0xC0:  # a superframe contains a shown frame
        return False
    # frame_marker 2, profile 2, show_existing_frame 1, frame_type 1, show_frame 1: VP9 bitstream 6.2; profile 3 has
    # one bit more.
    bits = view[0] << 1 if view[0] & 0x30 == 0x30 else view[0]
    return not bits & 0x08 and not bits & 0x02


def _rotation(frame: VideoFrame) -> int:
    """Return the degrees by which the ffmpeg program rotates the picture, 0 <= r < 360, rounded alike."""
    matrix = side_data(frame, "DISPLAYMATRIX")
    if matrix is None or len(matrix) < 36:
        return 0
    a, b, _, c, d = struct.unpack("<5i", matrix[:20])  # 16.16 fixed point; x' = ax + cy, y' = bx + dy
    scale_x, scale_y = math.hypot(a, c), math.hypot(b, d)
    if not scale_x or not scale_y:
        return 0
    return round(math.degrees(math.atan2(b / scale_y, a / scale_x))) % 360


def _other_decoders(container: InputContainer, stream: VideoStream) -> set[str]:
    """Return the names of decoders in log lines that cannot be the picture's."""
    own, others = set[str](), set[str]()
    for one in container.streams:
        context: Any = getattr(one, "codec_context", None)
        if context is not None:
            names = own if one.index == stream.index else others
            names |= {str(context.name), str(context.codec.canonical_name)}
    return others - own
