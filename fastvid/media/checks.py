"""Every check of a stream: whether it is what its profile promises, and whether its index leads to the right frames.

A stream is checked when it is written, indexed and verified. The reference are the frames that a player shows: they are
decoded through libavformat's demuxer, which does not use fastvid's index. The frames that a reader decodes from planned
packets must equal them bit for bit, whatever the reader's decoder decoded before.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, Final

import av
import numpy as np
from av.container import InputContainer
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from fastvid.decode.clips import Read, read_clip, reader_of
from fastvid.decode.pyav import PyAvDecoder, open_context
from fastvid.decode.request import Box, ClipRequest, EncodedClip, Planes
from fastvid.errors import ChecksumError, DecodeError, FastvidError, FormatError, SourceError
from fastvid.format.headers import shortened
from fastvid.format.mp4 import Track, read_track
from fastvid.format.packets import PacketTable, StreamInfo, packet_offsets
from fastvid.format.schema import Codec, Matrix, PacketFlag, Range, StreamFlag, matrix_of, with_padding
from fastvid.media.container import ffmpeg_message, fraction, open_demuxer, video_stream
from fastvid.media.file_tables import KEPT, FileReader, Tables
from fastvid.media.prove import decode_padded, frame_digest
from fastvid.media.reasons import Reason, unusable
from fastvid.runtime.arrays import IntArray, RecordArray

CHECKS: Final = {
    "annotations": "annotations are the committed ones and match the shards",
    "files": "every list of videos in place is the committed one",
    "tar": "every tar has the committed size and SHA-256 and is readable to its end",
    "idx": "DALI's tar index matches the tar",
    "parquet": "facts match the tar",
    "pkt": "packet sidecars match their checksums",
    "packets": "every packet matches its checksum",
    "index": "every index row matches the sample's bytes",
    "timing": "frames of profiles are on a constant grid from zero",
    "shape": "frames of profiles are upright, of the indexed size, with square pixels and sides divisible by 16",
    "colour": "frames of profiles are 8-bit 4:2:0, BT.601 limited (JPEG, flow: full), tagged in container and stream",
    "decode": "every sample decodes to the indexed number of frames",
    "audio": "the audio of every sample decodes",
    "plan": "frames decoded from planned packets, and crops from their tiles, are those a player shows",
    "signals": "signals are the committed ones and have a row for each frame",
    "process": "no checking process died",
}
"""Every check and what it verifies, in the order of a report."""

Finding = tuple[str, str]
"""The name of a check, and what is wrong."""

_FORMATS_420: Final = ("yuv420p", "yuvj420p")
_MULTIPLE: Final = 16  # of pixels: both sides of streams of built-in profiles

# Both values mean BT.601 luma; VP9 has one code for the two.
_BT601: Final = (Matrix.BT470BG, Matrix.SMPTE170M)


@dataclass(frozen=True, slots=True)
class Promised:
    """A stream, and what it promises: size, rate, number of frames and range."""

    track: Track
    # the promised size, rate and number of frames. With StreamFlag.CONFORMS, the stream promises everything that this
    # module checks.
    info: StreamInfo
    full_range: bool  # whether its samples must range from 0 to 255
    multiple: int = _MULTIPLE  # both sides must be multiples of this, in pixels

    @classmethod
    def of(cls, track: Track, info: StreamInfo, name: str = "rgb") -> Promised:
        """Return the promises of a dataset's stream. Full range: JPEG (by JFIF 1.02), and flow (by fastvid's format).

        `name`: the stream's name, such as "rgb" or "flow".
        """
        return cls(track, info, full_range=name == "flow" or info.codec is Codec.MJPEG)

    @property
    def conforms(self) -> bool:
        """Whether the stream promises everything that this module checks."""
        return bool(self.info.flags & StreamFlag.CONFORMS)


def check_stream(
    data: bytes | memoryview, stream: Promised, look: Callable[[int, Any], None] | None = None
) -> Iterator[Finding]:
    """Yield the broken promises of an MP4; `look` is called with the number of each frame and the frame."""
    if stream.conforms:
        yield from check_tables(stream)
    yield from play_stream(data, stream, look)


def check_tables(stream: Promised) -> Iterator[Finding]:
    """Yield the broken promises that show in an MP4's tables, without decoding; for a stream that conforms."""
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
            video = video_stream(container)
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
    if wrong := _wrong_tags(stream, Range(int(frame.color_range)), matrix_of(int(frame.colorspace))):
        yield "colour", wrong
    elif frame.format.name not in _FORMATS_420:
        yield "colour", f"is {frame.format.name}"


def _wrong_tags(stream: Promised, sample_range: Range, matrix: Matrix) -> str:
    wanted = Range.FULL if stream.full_range else Range.LIMITED
    # JPEG is BT.601 by definition (JFIF 1.02) and has no field for the matrix.
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


def check_sample(
    key: str, name: str, data: memoryview, indexed: Indexed | None, decoder: PyAvDecoder
) -> Iterator[Finding]:
    """Yield the problems of a video stream of a sample.

    `key`: the sample's key; it determines which frames are also decoded from planned packets. `decoder`: reused for
    all samples, so that what it decoded before would show.
    """
    try:
        track = read_track(data)
    except FormatError as error:
        yield "index", f"the MP4's tables are broken: {error.message}"
        return
    if indexed is None:
        yield from play_stream(data)
        return
    info, kept = indexed.info, dict[int, str]()
    # The last frame and some others, always the same ones.
    picks = np.random.default_rng(zlib.crc32(key.encode())).integers(0, info.num_frames, _PLANNED - 1)
    chosen = {info.num_frames - 1, *picks.tolist()}

    def keep(number: int, frame: Any) -> None:
        if number in chosen:
            kept[number] = frame_digest(frame)

    yield from check_stream(data, Promised.of(track, info, name), keep)
    if len(kept) == len(chosen):
        yield from check_plans(info, indexed.table, reader_of(data), [[frame] for frame in kept], kept, decoder)


def check_plans(
    info: StreamInfo,
    table: PacketTable,
    read: Read,
    clips: Sequence[Sequence[int]],
    expected: Mapping[int, str],
    decoder: PyAvDecoder,
) -> Iterator[Finding]:
    """Yield how frames that are decoded from planned packets differ from those that a player shows.

    Clips are read in random order and decoded by a decoder that has decoded others; single frames also by a new one.
    `clips`: the numbers of their frames, ascending. `expected`: the digest of each of these frames.
    """
    info = info.decoded
    box = Box(0, 0, info.height & ~1, info.width & ~1)
    draws = np.random.default_rng(len(table))
    for number in draws.permutation(len(clips)).tolist():
        frames = clips[number]
        request = ClipRequest(0, np.array(frames), box, (box.height, box.width))
        named = f"frame {frames[0]}" if len(frames) == 1 else f"one of {len(frames)} frames from {frames[0]} on"
        try:
            clip = read_clip(request, info, table, read)
            found = [_digests(one, clip) for one in ([decoder] if len(frames) > 1 else [decoder, PyAvDecoder()])]
            alike = _crops_alike(draws, clip, decoder)
        except ChecksumError:
            return  # reported by the packet check
        except (FormatError, DecodeError) as error:
            yield "plan", f"{named} does not decode from its planned packets: {error.message}"
            return
        if any(digests != [expected[frame] for frame in frames] for digests in found):
            yield "plan", f"{named} decoded from its planned packets differs from the one a player shows"
            return
        if not alike:
            yield "plan", f"a crop of {named} that is decoded from its tiles differs from that of the whole frame"
            return


def _crops_alike(draws: np.random.Generator, clip: EncodedClip, decoder: PyAvDecoder) -> bool:
    """Return whether a random crop is the same if the JPEG is cut before decoding as if the whole frame is decoded.

    True for other codecs, whose packets are never cut.
    """
    if clip.info.codec is not Codec.MJPEG:
        return True
    sides = np.array([clip.info.height, clip.info.width]) // 2
    extent = draws.integers(1, sides // 2 + 2)
    y, x, height, width = (2 * np.concatenate([draws.integers(0, sides - extent + 1), extent])).tolist()
    box, count = Box(y, x, height, width), len(clip.request.frames)
    cut = replace(clip, request=replace(clip.request, box=box))
    # Pictures that fastvid did not encode are decoded whole.
    whole = replace(cut, info=replace(clip.info, flags=StreamFlag.NONE))
    found = [np.empty(Planes.nbytes(count, box), np.uint8) for _ in range(2)]
    for one, buffer in zip((cut, whole), found, strict=True):
        error = decoder.decode([one], [Planes.packed(buffer, count, box)])[0]
        if error is not None:
            raise error
    return found[0].tobytes() == found[1].tobytes()


def _digests(decoder: PyAvDecoder, clip: EncodedClip) -> list[str]:
    """Return the digest of each frame of a clip without repeated frames."""
    found = dict[int, str]()
    decoder.give(clip, lambda frame, place: found.update({place: frame_digest(frame)}))
    return [found[place] for place in range(len(clip.request.frames))]


def check_packets(read: Callable[[int, int], bytes | memoryview], records: RecordArray) -> Iterator[Finding]:
    """Compare every packet with its checksum. `read`: returns bytes of the stream by offset and size."""
    columns = (packet_offsets(records), records["size"].tolist(), records["crc32"].tolist())
    places = enumerate(zip(*columns, strict=True))
    wrong = [packet for packet, (offset, size, crc32) in places if zlib.crc32(read(offset, size)) != crc32]
    if wrong:
        listed = ", ".join(map(str, wrong[:5])) + (", ..." if len(wrong) > 5 else "")
        yield "packets", f"{len(wrong)} of {len(records)} packets differ from their checksums: {listed}"


CANDIDATES: Final = 8
"""How many key packets are drawn; frames around one of them are compared, see `chosen_clips`."""

GROUP: Final = 32
"""How many packets of the GOP before that key packet have frames that are compared."""

NEAR: Final = 16
"""How many packets from that key packet on may have the compared frame."""

SHORT: Final = 64
"""In videos of at most this many packets, the last frame is compared as well."""


# Codecs that may show pictures in another order than they decode them; and how many packets `check_order` decodes.
_REORDERED: Final = frozenset({Codec.H264, Codec.HEVC})
_ORDERED: Final = 24


class Comparison:
    """Compares frames that a reader decodes from planned packets of a file with those that FFmpeg decodes from it."""

    def __init__(self, file: FileReader, tables: Tables) -> None:
        self.file, self.tables = file, tables
        self.aspect: Fraction | None = None  # width of a pixel divided by its height, as the codec says
        self._numbers = {offset: number for number, offset in enumerate(tables.offsets.tolist())}

    def _context(self) -> VideoCodecContext:
        """Open a decoder with the colour tags of the container, which FFmpeg's demuxers also pass to their decoders."""
        context = open_context(self.tables.codec, self.tables.extradata)
        if (colours := self.tables.declared.colours) is not None:
            context.color_primaries, context.color_trc, context.colorspace, context.color_range = colours
        return context

    def decoded(self, packets: IntArray, records: RecordArray) -> Iterator[tuple[int, VideoFrame]]:
        """Decode packets; yield their numbers and frames, in display order."""
        chosen = records[packets]
        places = list(zip(packet_offsets(chosen), chosen["size"].tolist(), strict=True))
        context = self._context()
        try:
            data = list(map(with_padding, self.file.parts(places)))
            for number, frame in decode_padded(context, list(zip(packets.tolist(), data, strict=True))):
                self.aspect = self.aspect or fraction(context.sample_aspect_ratio)
                yield number, frame
        except (av.FFmpegError, ValueError) as error:
            raise SourceError(f"decoding failed: {ffmpeg_message(error)}", reason=Reason.DAMAGED) from error

    def begun(self, head: bytes) -> VideoFrame | None:
        """Return a picture with the video's size and colour tags, but meaningless pixels; None if nothing decodes.

        `head`: the first bytes of the first packet. Only they are decoded.
        """
        context = self._context()
        context.options = {**context.options, "ec": "0"}  # no error concealment: do not compute the missing rest
        try:
            packet = av.Packet(shortened(self.tables.codec, self.tables.extradata, head))
            frames = [*context.decode(packet), *context.decode(None)]
        except (av.FFmpegError, ValueError):
            return None
        self.aspect = fraction(context.sample_aspect_ratio)
        return frames[0] if frames else None

    def check(self, info: StreamInfo, records: RecordArray, clips: Sequence[Sequence[int]]) -> Iterator[Finding]:
        """Yield how some frames that a reader decodes differ from those that FFmpeg shows in the file.

        `records`: PACKET_DTYPE records [P] of the stream, with offsets from the start of the file. `clips`: see
        `check_plans`.
        """
        rows = records[np.isin(records["frame"], [frame for frames in clips for frame in frames])]
        numbers = {
            frame: self._numbers.get(at) for frame, at in zip(rows["frame"].tolist(), packet_offsets(rows), strict=True)
        }
        if None in numbers.values():
            yield "packets", "the file has no packet where one is indexed"
            return
        expected = self._played([number for number in numbers.values() if number is not None])
        table = PacketTable(records, whole=bool(info.flags & StreamFlag.WHOLE))
        digests = {frame: expected[number] for frame, number in numbers.items()}
        yield from check_plans(info, table, self._fill, clips, digests, PyAvDecoder())

    def check_order(self, records: RecordArray) -> None:
        """Raise a SourceError if the times say that frames are shown in decode order, but decoding reorders them."""
        tables = self.tables
        shown = np.flatnonzero(tables.shown)
        if tables.codec not in _REORDERED or tables.sync.all() or (np.diff(tables.pts[shown]) <= 0).any():
            return
        first = np.arange(min(len(records), int(shown[0]) + _ORDERED))
        try:
            order = [number for number, _ in self.decoded(first, records)]
        except SourceError:
            return  # packets that do not decode have no order; other checks report them
        wrong = next((after for before, after in pairwise(order) if after < before), None)
        if wrong is not None:
            raise SourceError(
                f"its times contradict the order of its pictures: packet {wrong} is shown before others",
                reason=Reason.NO_INDEX,
                hint="use --prove all, which orders the frames by decoding them, or `fastvid shard --profile compact`",
            )

    def _fill(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        data = self.file.parts([(offset, len(view)) for offset, view in ranges])
        for (_, view), one in zip(ranges, data, strict=True):
            view[:] = one

    def _fetch(self, first: int, last: int) -> None:
        """Read packets, and those between them, at once, so that a demuxer finds them in the cache."""
        places = self.tables.offsets[first : last + 1]
        begin, end = int(places.min()), int((places + self.tables.sizes[first : last + 1]).max())
        self.file.part(begin, min(end - begin, KEPT))

    @contextmanager
    def _demuxed(self, since: int) -> Iterator[tuple[InputContainer, VideoStream, int]]:
        """Open the file in FFmpeg's demuxer and seek.

        `since`: where to seek, in ticks after the first frame. Yields the file, its video stream, and the tick of the
        first frame.
        """
        self.file.seek(0)
        with open_demuxer(self.file, self.tables.container) as source:
            stream = video_stream(source)
            # FFmpeg does not tell when a Matroska film of few frames begins.
            begin = self._begin if self.tables.container == "matroska" else stream.start_time or 0
            try:
                if since > 0:
                    source.seek(begin + since, stream=stream)
                yield source, stream, begin
            except av.FFmpegError as error:
                raise SourceError(f"decoding failed: {ffmpeg_message(error)}", reason=Reason.DAMAGED) from error

    @property
    def _times(self) -> IntArray:
        """Presentation time of each packet in ticks since the first frame, int64 [P].

        Relative, because only the demuxer adds the delay of an empty edit.
        """
        return self.tables.pts - self._begin

    @property
    def _begin(self) -> int:
        """The tick of the first frame that is shown, as the tables tell it."""
        return int(self.tables.pts[self.tables.shown].min())

    def ends_alike(self) -> bool:
        """Return whether, from the last key packet to the end, FFmpeg's demuxer returns the times in the tables."""
        tables, times = self.tables, self._times
        keys = np.flatnonzero(tables.sync & tables.shown)
        since = int(times[keys[-1]]) if len(keys) else 0
        self._fetch(int(keys[-1]) if len(keys) else 0, len(times) - 1)
        with self._demuxed(since) as (source, stream, begin):
            found = [p.pts - begin for p in source.demux(stream) if p.pts is not None and not p.is_discard]
        listed: list[int] = np.sort(times[tables.shown & (times >= since)]).tolist()
        return sorted(time for time in found if time >= since) == listed

    def _played(self, numbers: Sequence[int]) -> dict[int | None, str]:
        """Return, by packet number, the digests of the frames that packets show, decoded by FFmpeg in one pass.

        The pass begins at an earlier key packet than the plan of the last frame does, so that a key packet at which
        decoding cannot really begin shows as a difference.
        """
        times, keys = self._times, np.flatnonzero(self.tables.sync)
        first, last = (int(np.searchsorted(keys, ends, side="right")) - 1 for ends in (min(numbers), max(numbers)))
        at = max(min(first, last - 1), 0)
        # Frames that follow this key packet but are shown before it do not decode if decoding begins there.
        if at and any(number > keys[at] and times[number] < times[keys[at]] for number in numbers):
            at -= 1
        self._fetch(int(keys[at]) if len(keys) else 0, max(numbers) + NEAR)
        missing, found = {int(times[number]): number for number in numbers}, dict[int | None, str]()
        with self._demuxed(int(times[keys[at] if len(keys) else 0])) as (source, stream, begin):
            for frame in source.decode(stream):
                number = missing.pop(frame.pts - begin, None) if frame.pts is not None else None
                if number is not None:
                    found[number] = frame_digest(frame)
                if not missing:
                    return found
        raise unusable(f"FFmpeg shows no frame at the time of packet {min(missing.values())}")


def chosen_clips(records: RecordArray) -> list[list[int]]:
    """Return the frames of some clips around a key packet, the same ones for the same video; and the last if short.

    Frames before the key packet prove the plans inside a GOP; frames after it prove that decoding may start there. Of
    `CANDIDATES` random key packets, one after a GOP of about `GROUP` packets is taken. Two clips share the first frames
    of the GOP, so that each leaves out the packets of the other's frames that nothing is said to refer to.
    """
    rng = np.random.default_rng(zlib.crc32(records.tobytes()))
    keys, last = np.flatnonzero(records["flags"] & np.uint8(PacketFlag.KEY)), int(records["frame"].max())
    shown = np.flatnonzero(records["frame"] >= 0)
    start = stop = int(shown[0])
    # Prefer key packets next to shown frames: an edit list may hide whole groups of pictures.
    likely = [key for key in range(1, len(keys)) if keys[key] > shown[0] - NEAR and keys[key - 1] <= shown[-1]]
    if likely:
        drawn = [likely[place] for place in rng.integers(0, len(likely), CANDIDATES).tolist()]
        lengths = {key: int(keys[key] - keys[key - 1]) for key in drawn}
        number = min(drawn, key=lambda key: (lengths[key] < GROUP, abs(lengths[key] - GROUP)))
        start, stop = int(keys[number - 1]), int(keys[number])
    before, after, group = (
        np.sort(part[part >= 0]).tolist()
        for part in (
            records["frame"][start:stop],
            records["frame"][stop : stop + NEAR],
            records["frame"][start : min(start + GROUP, stop) if stop > start else start + GROUP],
        )
    )
    picked = [frames[int(rng.integers(0, len(frames)))] for frames in (before, after) if frames]
    singles = sorted({*after[:1], *picked, *([last] if len(records) <= SHORT else [])})
    drawn = rng.integers(0, 2, len(group)).tolist()
    halves = [[frame for frame, side in zip(group, drawn, strict=True) if side == half] for half in range(2)]
    return [*([frame] for frame in singles), *(half for half in halves if len(half) > 1)]
