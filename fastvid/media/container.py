"""Open video files with FFmpeg's demuxers, and compare what a container declares with what the file contains.

Files are untrusted: call this in a process that may die (`fastvid.sharding.engines.local`). All supported versions of
PyAV open them. Compared are boxes, sizes, counts and durations.

A truncated file is rejected, even if a demuxer reads it to its end without an error. A trimmed file is accepted, even
though a demuxer returns fewer packets than its header counts, because it omits those outside the edit list.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from itertools import pairwise
from statistics import median_low
from typing import Any, Final, cast

import av
from av.container import InputContainer
from av.sidedata.sidedata import Type
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from fastvid.errors import FormatError, SourceError
from fastvid.format.mp4 import box_places, find_moov, packet_places
from fastvid.media.ffmpeg import Limits
from fastvid.media.reasons import Reason
from fastvid.media.timing import FALLBACK, MOST_CLAIMED

Read = Callable[[int, int], bytes]
"""Returns bytes of a file by offset and size; fewer at its end."""

RAW: Final = frozenset({"h264", "hevc", "m4v", "mpegvideo"})
"""Containers without timestamps: raw streams, for which FFmpeg invents times."""


_CHUNK: Final = 1 << 20
# Element ids of Matroska (RFC 9559, 5.1).
_SEGMENT, _CLUSTER = 0x18538067, 0x1F43B675
_NAMES: Final = {_SEGMENT: "segment", _CLUSTER: "cluster"}
_WALKED: Final = 1 << 26  # in Matroska files of at most this many bytes, elements inside clusters are checked too
# Containers whose header contains the duration, which the muxer writes when the file is complete.
_DURATION_COUNTS: Final = frozenset({"matroska", "flv", "asf"})
# Containers whose header counts ticks of the video's clock; a packet may last several ticks.
_STEPS_COUNT: Final = frozenset({"avi", "ivf"})
# Ticks that may be missing: muxers count the last packet differently.
_SLACK_STEPS: Final = 2
# Seconds and fraction of the header's duration that may be missing: muxers round, and audio may end earlier.
_SLACK_SECONDS: Final = 1.0
_SLACK_PART: Final = 0.1


def open_demuxer(file: str | bytes | memoryview | io.RawIOBase, container: str) -> InputContainer:
    """Open a file with a forced demuxer and no access to other files. Metadata that is not UTF-8 is accepted."""
    try:
        opened = av.open(
            file if isinstance(file, str | io.RawIOBase) else io.BytesIO(file),
            format=container,
            # The options also apply to nested demuxers; they allow no protocol except file.
            options={"protocol_whitelist": "file", "format_whitelist": container},
            **_any_text(),
        )
    except MemoryError as error:
        raise SourceError("opening the file exceeds the memory limit", reason=Reason.MEMORY) from error
    except (av.FFmpegError, ValueError) as error:
        raise SourceError(f"{container}: {ffmpeg_message(error)}", reason=Reason.BROKEN_CONTAINER) from error
    return cast(InputContainer, opened)


def video_stream(source: InputContainer) -> VideoStream:
    """Return the first video stream that is not a cover image (ffmpeg's specifier V), set to decode in one thread."""
    pictures = [s for s in source.streams.video if not s.disposition & av.stream.Disposition.attached_pic]
    if not pictures:
        kinds = " and ".join(sorted({s.type for s in source.streams})) or "nothing"
        raise SourceError(f"file contains {kinds}, no video", reason=Reason.NO_VIDEO_STREAM)
    # PyAV has no context for a codec that it cannot decode, although its type annotations do not allow None.
    context: Any = pictures[0].codec_context
    if context is None:
        raise SourceError("no decoder for the video stream", reason=Reason.NO_DECODER)
    if not context.is_open:
        context.thread_count = 1
    return pictures[0]


def fraction(value: Any) -> Fraction | None:
    """Convert a rate, time base or aspect ratio of PyAV; None if unset, in PyAV 19 also 0/1 and 1/0."""
    return Fraction(value.numerator, value.denominator) if value and value.denominator else None


def side_data(frame: VideoFrame, name: str) -> bytes | None:
    """Return a frame's side data of one type, such as "DISPLAYMATRIX", or None if it has none."""
    _name_every_type()
    data: Any = frame.side_data.get(name)
    return None if data is None else bytes(data)


def ffmpeg_message(error: BaseException) -> str:
    """Return FFmpeg's message, at most 200 characters, without the name of a file descriptor, which means nothing."""
    text = getattr(error, "strerror", None) or str(error)
    return str(text).split(": 'file:")[0][:200]


@cache
def _any_text() -> dict[str, Any]:
    """Return the arguments with which `av.open` accepts metadata that is not UTF-8."""
    arguments: dict[str, Any] = {"metadata_errors": "replace"}
    try:
        with contextlib.suppress(av.FFmpegError, ValueError):  # the test file is empty
            av.open(io.BytesIO(), format="mov", **arguments)
    except TypeError:  # PyAV 19 accepts any bytes and has removed the argument
        return {}
    return arguments


@cache
def _name_every_type() -> None:
    """Let PyAV before version 19 accept unknown types of side data.

    Otherwise one unknown type makes all side data of a frame unreadable. Decoders attach such types to spatial videos
    (VIEW_ID) and to JPEG with EXIF; new versions of FFmpeg add more.
    """
    types: Any = Type
    try:
        types(-1)
    except ValueError:
        # As PyAV 19 does: https://github.com/PyAV-Org/PyAV/pull/2392
        types._missing_ = classmethod(_nameless)


def _nameless(cls: Any, value: object) -> Any:
    """Create an enum member for an unknown value."""
    member = object.__new__(cls)
    member._name_, member._value_ = f"UNKNOWN_{value}", value
    return cls._value2member_map_.setdefault(value, member)


class Demuxed:
    """Iterates over the packets of a file's video; then `check` compares them with what the header declares.

    `whole`: whether a demuxer error raises SourceError; otherwise the iteration ends there.
    """

    def __init__(self, container: str, source: InputContainer, limits: Limits, *, whole: bool = True) -> None:
        self.stream = stream = video_stream(source)
        context = stream.codec_context
        check_pixels(context.width, context.height, limits)
        self.container, self.count, self.corrupt = container, 0, 0
        self.extradata = bytes(context.extradata or b"")
        self.time_base = fraction(stream.time_base) or Fraction(1, 1000)  # seconds per tick
        self.aspect = fraction(stream.sample_aspect_ratio)  # width of a pixel divided by its height
        # Raw streams have no times: their average rate is only FFmpeg's default, so prefer the guessed one.
        rates = (stream.guessed_rate, stream.average_rate)[:: 1 if container in RAW else -1]
        claimed = (rate for rate in map(fraction, rates) if rate and rate <= MOST_CLAIMED)
        self.rate = next(claimed, FALLBACK).limit_denominator(100_000)  # nominal frames per second
        self._source, self._limits, self._whole = source, limits, whole
        self._ends: dict[int, int] = {}
        self._times: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        """Yield the packets of the video, and at the end an empty packet, which drains a decoder."""
        try:
            yield from self._read()
        except MemoryError as error:
            raise SourceError("reading the file exceeds the memory limit", reason=Reason.MEMORY) from error
        except av.FFmpegError as error:
            if self._whole:
                message = f"reading failed after {self.count} packets: {ffmpeg_message(error)}"
                raise SourceError(message, reason=Reason.DAMAGED) from error

    def _read(self) -> Iterator[Any]:
        drain = None
        for packet in self._source.demux():
            if not packet.size:
                drain = packet
                continue
            if packet.pts is not None:
                end = packet.pts + (packet.duration or 0)
                self._ends[packet.stream_index] = max(end, self._ends.get(packet.stream_index, end))
            if packet.stream_index != self.stream.index:
                continue
            self.count += 1
            self.corrupt += packet.is_corrupt
            if self.count > self._limits.max_frames:
                raise SourceError(f"file has more than {self._limits.max_frames} frames", reason=Reason.TOO_LONG)
            # AVI stores decode times only; for reordered pictures libavformat invents presentation times.
            time = packet.dts if self.container == "avi" else packet.pts
            self._times += [] if time is None else [time]
            yield packet
        # The demuxer returns an empty packet for every stream, without saying for which: yield one of them.
        if drain is not None:
            yield drain

    def check(self, read: Read, size: int) -> None:
        """Raise a SourceError if packets or bytes are missing.

        `read`: reads the file's bytes. `size`: size of the file in bytes. Counts and durations are compared only in
        containers whose muxer writes them at the end.
        """
        if self.corrupt:
            raise _truncated(f"{self.corrupt} of {self.count} packets are truncated or damaged")
        if self.container == "matroska":
            _check_elements(read, size)
        counted = self.stream.frames
        if self.container == "mov" and self.count < counted and not _is_there(read, size):
            raise _truncated(f"file contains {self.count} of the {counted} packets that its header counts")
        if self.container in _STEPS_COUNT and self._times:
            times = sorted(self._times)
            # Assume the usual duration for the last frame. An AVI remuxed from an MP4 may take 24 ticks per frame.
            steps = times[-1] + max(1, median_low([after - before for before, after in pairwise(times)] or [1]))
            if steps < counted - _SLACK_STEPS:
                raise _truncated(f"file contains {steps} of the {counted} clock ticks that its header counts")
        if self.container in _DURATION_COUNTS and self._source.duration:
            promised, ends = Fraction(self._source.duration, av.time_base), self._last_end()
            if promised - ends > max(_SLACK_SECONDS, _SLACK_PART * promised):
                raise _truncated(f"file ends at {float(ends):.2f} s, its header says {float(promised):.2f} s")

    def _last_end(self) -> Fraction:
        """Return the latest end of a packet of any stream, in seconds."""
        bases = {stream.index: fraction(stream.time_base) or 0 for stream in self._source.streams}
        return max((Fraction(end * bases[index]) for index, end in self._ends.items()), default=Fraction(-1))


def check_pixels(width: int, height: int, limits: Limits) -> None:
    """Raise SourceError for frames that are larger than allowed."""
    if width * height > limits.max_pixels:
        raise SourceError(
            f"frames have {width}x{height} pixels, at most {limits.max_pixels} are allowed", reason=Reason.TOO_LARGE
        )


def _is_there(read: Read, size: int) -> bool:
    """Return whether the file has all packets that the tables of an MP4 list."""
    try:
        packet_places(find_moov(read, size), size)
    except FormatError:
        return False
    return True


def check_fragments(read: Read, size: int) -> None:
    """Raise a SourceError if fragments of an MP4 follow a broken box. Other bytes after the last box are padding.

    `size`: size of the file in bytes.
    """
    position, fragmented = 0, False
    try:
        for name, _, _, length in box_places(read, size):
            if position + length > size or not any(name):
                break
            fragmented |= name == b"moof"
            position += length
    except FormatError:
        pass
    for start in range(position + 8, size if fragmented else 0, _CHUNK):
        if b"moof" in read(start, _CHUNK + 3):
            raise _truncated(
                f"{size - position} bytes after a broken box at byte {position} contain fragments that cannot be read"
            )


def _check_elements(read: Read, size: int) -> None:
    """Raise a SourceError if an element of a Matroska file exceeds the file, or there are zeros instead of an element.

    Demuxers stop at the former and skip the latter, both without an error. In files of more than `_WALKED` bytes only
    the start of each cluster is read, because the page cache may not keep such a file for a second reading.
    """
    inside = {_SEGMENT, _CLUSTER} if size <= _WALKED else {_SEGMENT}
    at, end, is_sized = 0, size, False
    while at < end:
        head = read(at, 12)
        if is_sized and not any(head):  # zeros after a segment of unknown size are padding
            raise _truncated(f"bytes are missing: there are zeros at byte {at}")
        found = element(head)
        if found is None:
            return
        name, header, length = found
        if name in _NAMES and length is not None and at + header + length > size:
            there = size - at - header
            raise _truncated(f"the {_NAMES[name]} at byte {at} has {length} bytes, of which {there} are in the file")
        if name == _SEGMENT and length is not None:
            end, is_sized = at + header + length, True
        at += header + (0 if length is None or name in inside else length)


def element(head: bytes | memoryview) -> tuple[int, int, int | None] | None:
    """Parse the header of a Matroska element; None if `head` does not begin with one.

    Returns its id, the size of its header in bytes, and the size of its body in bytes, None if that is unknown.
    """
    if not head or not head[0]:
        return None
    wide = 9 - head[0].bit_length()
    if wide >= len(head) or not head[wide]:
        return None
    long = 9 - head[wide].bit_length()
    endless = (1 << 7 * long) - 1  # all bits set: the size is unknown
    length = int.from_bytes(head[wide : wide + long], "big") & endless
    return int.from_bytes(head[:wide], "big"), wide + long, None if length == endless else length


def _truncated(message: str) -> SourceError:
    return SourceError(message, reason=Reason.TRUNCATED)
