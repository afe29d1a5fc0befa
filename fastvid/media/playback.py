"""One pass of FFmpeg's demuxer and decoder over a file in memory, as a player does it: packets, times, frames.

The file is hostile: call this in a process that may die (`fastvid.sharding.engines.local_engine`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

import av
from av.bitstream import BitStreamFilterContext
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from fastvid.errors import SourceError
from fastvid.format.schema import INPUT_PADDING, Codec
from fastvid.media.demuxer import fraction, open_demuxer, said, video_stream
from fastvid.media.frame_digest import frame_digest
from fastvid.media.limits import Limits
from fastvid.media.reasons import Reason

ENCODE_HINT: Final = "a profile that encodes takes it: `fastvid shard --profile compact`"
"""What to do with a video whose packets cannot be used as they are."""

# FFmpeg's names that differ from ours.
_CODECS: Final = {codec.label: codec for codec in Codec}


@dataclass(slots=True)
class Played:
    """What a player gets out of a file.

    Attributes:
        codec: Of the first video stream.
        extradata: The decoder's configuration as the demuxer gives it.
        rate: Frames a second as the container claims.
        time_base: Seconds per tick.
        aspect: Width of a pixel over its height.
        packets: In decode order, each followed by the padding that decoders need.
        positions: Where the container says that each lies in the file; None where it does not say.
        pts: Presentation times in ticks.
        dts: Decode times in ticks.
        durations: In ticks, 0 where unknown.
        discard: Whether an edit list hides the packet's frame.
        digests: Of the frames that are shown, in display order.
        first: The first of them.
    """

    codec: Codec
    extradata: bytes = b""
    rate: Fraction = Fraction(25)
    time_base: Fraction = Fraction(1, 1000)
    aspect: Fraction = Fraction(1)
    packets: list[memoryview] = field(default_factory=list)
    positions: list[int | None] = field(default_factory=list)
    pts: list[int | None] = field(default_factory=list)
    dts: list[int | None] = field(default_factory=list)
    durations: list[int] = field(default_factory=list)
    discard: list[bool] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    first: VideoFrame | None = None


def play(data: bytes, container: str, limits: Limits, *, unpack: bool = False) -> Played:
    """Reads and decodes the first video stream of a file.

    Args:
        data: The whole file.
        container: FFmpeg's demuxer, from `sniff`.
        limits: For the size of frames and their number.
        unpack: Take packets of MPEG-4 apart that hold two pictures, as AVI files do.

    Raises:
        SourceError: It is no video that fastvid decodes, or it is damaged or beyond a limit.
    """
    with open_demuxer(data, container) as source:
        stream = video_stream(source)
        name = stream.codec_context.codec.canonical_name
        codec = _CODECS.get(name)
        if codec is None:
            raise SourceError(f"no decoder of fastvid takes {name}", reason=Reason.NO_INDEX, hint=ENCODE_HINT)
        width, height = stream.codec_context.width, stream.codec_context.height
        if width * height > limits.max_pixels:
            raise SourceError(
                f"frames of {width}x{height} pixels, {limits.max_pixels} at most", reason=Reason.TOO_LARGE
            )
        stream.codec_context.thread_count = 1
        played = Played(codec, bytes(stream.codec_context.extradata or b""))
        played.time_base = fraction(stream.time_base) or Fraction(1, 1000)
        rate = fraction(stream.average_rate) or fraction(stream.guessed_rate) or Fraction(25)
        played.rate = rate.limit_denominator(100_000)
        played.aspect = fraction(stream.sample_aspect_ratio) or Fraction(1)
        try:
            _read(source, stream, played, limits, unpack=unpack and codec is Codec.MPEG4)
        except MemoryError as error:
            raise SourceError("decoding needs too much memory", reason=Reason.MEMORY) from error
        except av.FFmpegError as error:
            raise SourceError(
                f"decoding stops after {len(played.digests)} frames: {said(error)}", reason=Reason.DAMAGED
            ) from error
        if not played.packets:
            raise SourceError("the video stream has no packets", reason=Reason.NO_FRAMES)
        if container == "mov" and not unpack and len(played.packets) < stream.frames:
            raise SourceError(
                f"{len(played.packets)} of the {stream.frames} packets that the header counts are there",
                reason=Reason.TRUNCATED,
            )
        if played.first is None:
            raise SourceError(f"none of {len(played.packets)} packets shows a frame", reason=Reason.NO_FRAMES)
    return played


def _read(source: InputContainer, stream: VideoStream, played: Played, limits: Limits, *, unpack: bool) -> None:
    splitter = BitStreamFilterContext("mpeg4_unpack_bframes", stream) if unpack else None
    for demuxed in source.demux(stream):
        packets = [demuxed] if splitter is None or not demuxed.size else splitter.filter(demuxed)
        for packet in packets:
            _take(packet, stream, played, limits)


def _take(packet: Any, stream: VideoStream, played: Played, limits: Limits) -> None:
    if packet.size:
        if packet.is_corrupt:
            raise SourceError(f"packet {len(played.packets)} is cut", reason=Reason.TRUNCATED)
        # The binding neither copies nor pads what it is given back, and decoders read past the end.
        played.packets.append(memoryview(bytes(packet) + bytes(INPUT_PADDING))[: packet.size])
        played.positions.append(packet.pos)
        played.pts.append(packet.pts)
        played.dts.append(packet.dts)
        played.durations.append(packet.duration or 0)
        played.discard.append(packet.is_discard)
        if len(played.packets) > limits.max_frames:
            raise SourceError(f"more than {limits.max_frames} frames", reason=Reason.TOO_LONG)
    for frame in stream.decode(packet):
        number = len(played.digests)
        if frame.is_corrupt:
            raise SourceError(f"frame {number} decodes with errors", reason=Reason.DAMAGED)
        played.first = played.first or frame
        size = (played.first.width, played.first.height)
        if (frame.width, frame.height) != size:
            raise SourceError(
                f"frame {number} has {frame.width}x{frame.height} pixels, the first {size[0]}x{size[1]}",
                reason=Reason.NO_INDEX,
                hint=ENCODE_HINT,
            )
        played.digests.append(frame_digest(frame))
