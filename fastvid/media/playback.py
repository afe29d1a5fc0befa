"""Demux and decode a file in memory once with FFmpeg, as a player would: packets, times, frames.

Files are untrusted: call this in a process that may die (`fastvid.sharding.engines.local_engine`).
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
from fastvid.format.codecs.fields import FieldPairs
from fastvid.format.schema import INPUT_PADDING, Codec
from fastvid.media.boxes import check_fragments
from fastvid.media.demuxer import ffmpeg_message, fraction, open_demuxer, video_stream
from fastvid.media.frame_digest import frame_digest
from fastvid.media.limits import Limits
from fastvid.media.reasons import Reason

ENCODE_HINT: Final = "re-encode it with a profile: `fastvid shard --profile compact`"
"""The hint for a video whose packets cannot be used unchanged."""

# Codecs by FFmpeg's name.
_CODECS: Final = {codec.label: codec for codec in Codec}


@dataclass(slots=True)
class Playback:
    """The packets and frames that a player gets from a file's first video stream."""

    codec: Codec
    extradata: bytes = b""
    rate: Fraction = Fraction(25)  # frames per second according to the container
    time_base: Fraction = Fraction(1, 1000)  # seconds per tick
    aspect: Fraction = Fraction(1)  # width of a pixel divided by its height
    packets: list[memoryview] = field(default_factory=list)
    positions: list[int | None] = field(default_factory=list)
    pts: list[int | None] = field(default_factory=list)
    dts: list[int | None] = field(default_factory=list)
    durations: list[int] = field(default_factory=list)
    discard: list[bool] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # hashes of the shown frames, in display order
    first: VideoFrame | None = None
    second_fields: int = 0


def play(data: bytes, container: str, limits: Limits, *, unpack: bool = False) -> Playback:
    """Demux and decode the first video stream of a file.

    `limits`: limits on the size and number of frames.
    """
    if container == "mov":
        check_fragments(lambda at, count: data[at : at + count], len(data))
    with open_demuxer(data, container) as source:
        stream = video_stream(source)
        name = stream.codec_context.codec.canonical_name
        codec = _CODECS.get(name)
        if codec is None:
            raise SourceError(f"no fastvid decoder supports {name}", reason=Reason.NO_INDEX, hint=ENCODE_HINT)
        width, height = stream.codec_context.width, stream.codec_context.height
        if width * height > limits.max_pixels:
            raise SourceError(
                f"frames have {width}x{height} pixels, at most {limits.max_pixels} are allowed",
                reason=Reason.TOO_LARGE,
            )
        stream.codec_context.thread_count = 1
        played = Playback(codec, bytes(stream.codec_context.extradata or b""))
        played.time_base = fraction(stream.time_base) or Fraction(1, 1000)
        rate = fraction(stream.average_rate) or fraction(stream.guessed_rate) or Fraction(25)
        played.rate = rate.limit_denominator(100_000)
        played.aspect = fraction(stream.sample_aspect_ratio) or Fraction(1)
        try:
            _read(source, stream, played, limits, unpack=unpack and codec is Codec.MPEG4)
        except MemoryError as error:
            raise SourceError("decoding exceeds the memory limit", reason=Reason.MEMORY) from error
        except av.FFmpegError as error:
            raise SourceError(
                f"decoding failed after {len(played.digests)} frames: {ffmpeg_message(error)}", reason=Reason.DAMAGED
            ) from error
        if not played.packets:
            raise SourceError("video stream has no packets", reason=Reason.NO_FRAMES)
        demuxed = len(played.packets) + played.second_fields
        if container == "mov" and not unpack and demuxed < stream.frames:
            raise SourceError(
                f"file contains {demuxed} of the {stream.frames} packets that its header counts",
                reason=Reason.TRUNCATED,
            )
        if played.first is None:
            raise SourceError(f"none of the {len(played.packets)} packets shows a frame", reason=Reason.NO_FRAMES)
    return played


def _read(source: InputContainer, stream: VideoStream, played: Playback, limits: Limits, *, unpack: bool) -> None:
    fields = FieldPairs(played.codec.label, played.extradata)
    splitter = BitStreamFilterContext("mpeg4_unpack_bframes", stream) if unpack else None
    for demuxed in source.demux(stream):
        packets = [demuxed] if splitter is None or not demuxed.size else splitter.filter(demuxed)
        for packet in packets:
            _take(packet, stream, played, limits, fields)


def _take(packet: Any, stream: VideoStream, played: Playback, limits: Limits, fields: FieldPairs) -> None:
    if packet.size:
        if packet.is_corrupt:
            raise SourceError(f"packet {len(played.packets)} is truncated", reason=Reason.TRUNCATED)
        data, joined = bytes(packet), fields.completes(memoryview(packet)) and played.packets
        if joined:
            data = bytes(played.packets.pop()) + data
            played.durations[-1] += packet.duration or 0
            played.second_fields += 1
        # Pad the packet: decoders read past its end, and PyAV neither copies nor pads a packet made from a buffer.
        played.packets.append(memoryview(data + bytes(INPUT_PADDING))[: len(data)])
        if not joined:
            played.positions.append(packet.pos)
            played.pts.append(packet.pts)
            played.dts.append(packet.dts)
            played.durations.append(packet.duration or 0)
            played.discard.append(packet.is_discard)
        if len(played.packets) > limits.max_frames:
            raise SourceError(f"file has more than {limits.max_frames} frames", reason=Reason.TOO_LONG)
    for frame in stream.decode(packet):
        number = len(played.digests)
        if frame.is_corrupt:
            raise SourceError(f"decoder reports errors in frame {number}", reason=Reason.DAMAGED)
        played.first = played.first or frame
        size = (played.first.width, played.first.height)
        if (frame.width, frame.height) != size:
            raise SourceError(
                f"frame {number} has size {frame.width}x{frame.height}, the first frame {size[0]}x{size[1]}",
                reason=Reason.NO_INDEX,
                hint=ENCODE_HINT,
            )
        played.digests.append(frame_digest(frame))
