"""What must hold of one sample: its MP4 plays to the promised frames, as promised, and its index finds those frames.

Every frame is decoded through libavformat's demuxer, which knows nothing of fastvid's index; some are then decoded
again from planned packets, and must be the same to the bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import av
import numpy as np
import numpy.typing as npt

from fastvid.decode.clips import read_clip, reader_of
from fastvid.decode.pyav import PyAvDecoder
from fastvid.decode.request import Box, ClipRequest, Planes
from fastvid.decode.swscale import RgbConverter
from fastvid.errors import ChecksumError, FastvidError, FormatError
from fastvid.format.demux import Track, read_track
from fastvid.format.packets import PacketTable, StreamInfo
from fastvid.format.schema import Codec, Matrix, Range, StreamFlag
from fastvid.media.demuxer import fraction, open_demuxer

Finding = tuple[str, str]
"""The name of a check and what it found."""

# Frames of each sample that are decoded again from planned packets.
_PLANNED: Final = 3
_MULTIPLE: Final = 16  # of StreamFlag.CONFORMS
# Both numbers stand for BT.601 luma; VP9 has one code for the two.
_BT601: Final = (Matrix.BT470BG, Matrix.SMPTE170M)
_FORMATS_420: Final = ("yuv420p", "yuvj420p")
_AV_RANGE: Final = {0: Range.UNKNOWN, 1: Range.LIMITED, 2: Range.FULL}  # AVColorRange


@dataclass(frozen=True, slots=True)
class Indexed:
    """A stream as its shard's packet sidecar describes it."""

    info: StreamInfo
    table: PacketTable


class SampleChecker:
    """Checks samples one after the other; keeps decoders open between them."""

    def __init__(self) -> None:
        self._decoder = PyAvDecoder()
        self._converter = RgbConverter()

    def check(self, key: str, name: str, data: memoryview, indexed: Indexed | None) -> list[Finding]:
        """What is wrong with a video stream of a sample.

        Args:
            key: The sample's key; chooses which frames are decoded twice.
            name: The stream.
            data: Its MP4.
            indexed: What the sidecar says; None where the sidecar cannot be read, and nothing is compared with it.
        """
        try:
            track = read_track(data)
        except FormatError as error:
            return [("index", f"the MP4's tables are broken: {error.message}")]
        findings: list[Finding] = []
        if indexed is not None:
            conforms = bool(indexed.info.flags & StreamFlag.CONFORMS)
            if conforms:
                findings += broken_promises(track, indexed.info, name)
            wanted = _choose(key, indexed.info.num_frames)
        else:
            conforms, wanted = False, np.empty(0, np.int64)
        kept: dict[int, Planes] = {}
        findings += self._play(data, name, indexed.info if indexed else None, conforms, set(wanted.tolist()), kept)
        if indexed is not None and len(kept) == len(wanted):
            findings += self._plan(name, data, indexed, wanted, kept)
        return findings

    def _play(
        self,
        data: memoryview,
        name: str,
        info: StreamInfo | None,
        conforms: bool,
        wanted: set[int],
        kept: dict[int, Planes],
    ) -> Iterator[Finding]:
        """Decodes the whole stream; keeps the wanted frames."""
        count, colour, shape, tags = 0, None, None, None
        try:
            with open_demuxer(data, "mov") as container:
                stream = container.streams.video[0]
                stream.codec_context.thread_count = 1
                aspect = fraction(stream.sample_aspect_ratio)
                if conforms and aspect not in (None, 1):
                    shape = f"pixels are {aspect} times as wide as high"
                for frame in container.decode(stream):
                    if frame.is_corrupt:
                        yield "decode", f"frame {count} decodes with errors"
                        return
                    size = (frame.width, frame.height)
                    if info is not None and size != (info.width, info.height) and shape is None:
                        shape = f"frame {count} has {size[0]}x{size[1]} pixels, the index {info.width}x{info.height}"
                    if conforms and name == "rgb" and colour is None:
                        tags = _frame_tags(frame)
                        colour = _wrong_tags(f"frame {count}", *tags)
                    if count in wanted and info is not None and not frame.format.is_rgb:
                        kept[count] = _copy(
                            frame if frame.format.name in _FORMATS_420 else self._converter.to_420(frame, info)
                        )
                    count += 1
        except (av.FFmpegError, FastvidError) as error:
            yield "decode", f"decoding fails after {count} frames: {error}"
            return
        if info is not None and count != info.num_frames:
            yield "decode", f"{count} frames decode, {info.num_frames} are promised"
        if shape is not None:
            yield "shape", shape
        if colour is not None:
            yield "colour", colour

    def _plan(
        self,
        name: str,
        data: memoryview,
        indexed: Indexed,
        wanted: npt.NDArray[np.int64],
        kept: Mapping[int, Planes],
    ) -> Iterator[Finding]:
        """Decodes the wanted frames from planned packets and compares them."""
        info = indexed.info
        sides = (info.height & ~1, info.width & ~1)
        box = Box(0, 0, *sides)
        try:
            clip = read_clip(ClipRequest(0, wanted, box, sides, stream=name), info, indexed.table, reader_of(data))
            output = Planes.packed(np.empty(Planes.nbytes(len(wanted), box), np.uint8), len(wanted), box)
            (error,) = self._decoder.decode([clip], [output])
        except ChecksumError:
            return  # the packet check says so
        except FastvidError as caught:
            error = caught
        if error is not None:
            yield "plan", f"frames {wanted.tolist()} do not decode from their packets: {error.message}"
            return
        for place, frame in enumerate(wanted.tolist()):
            pairs = zip((output.y, output.u, output.v), (kept[frame].y, kept[frame].u, kept[frame].v), strict=True)
            if any((planned[place] != whole[0]).any() for planned, whole in pairs):
                yield "plan", f"frame {frame} from its planned packets differs from the frame that a player shows"
                return


def check_packets(data: memoryview, table: PacketTable) -> Iterator[Finding]:
    """Compares every packet with its checksum."""
    wrong = []
    records = table.records
    columns = (records["offset"].tolist(), records["size"].tolist(), records["crc32"].tolist())
    for packet, (offset, size, crc32) in enumerate(zip(*columns, strict=True)):
        if offset + size > len(data) or zlib.crc32(data[offset : offset + size]) != crc32:
            wrong.append(packet)
    if wrong:
        listed = ", ".join(map(str, wrong[:5])) + (", ..." if len(wrong) > 5 else "")
        yield "packets", f"{len(wrong)} of {len(table)} packets differ from their checksums: {listed}"


def broken_promises(track: Track, info: StreamInfo, name: str = "rgb") -> Iterator[Finding]:
    """What an MP4's tables say against StreamFlag.CONFORMS."""
    yield from _timing(track, info)
    yield from _shape(info)
    yield from _colour(track, name)


def _timing(track: Track, info: StreamInfo) -> Iterator[Finding]:
    pts = np.sort(track.pts[track.shown])
    if len(pts) and pts[0]:
        yield "timing", f"the first frame is shown {int(pts[0])} ticks after the start"
    steps = np.diff(pts)
    if len(steps) and (steps != steps[0]).any():
        frame = int(np.argmax(steps != steps[0])) + 1
        yield "timing", f"the frame rate is not constant: frame {frame} stays for {steps[frame - 1]} ticks"
    elif len(steps) and int(steps[0]) * info.fps != track.timescale:
        yield "timing", f"{track.timescale}/{int(steps[0])} frames a second, promised are {info.fps}"


def _shape(info: StreamInfo) -> Iterator[Finding]:
    if info.width % _MULTIPLE or info.height % _MULTIPLE:
        yield "shape", f"{info.width}x{info.height} pixels are no multiples of {_MULTIPLE}"


def _colour(track: Track, name: str) -> Iterator[Finding]:
    if name == "rgb":
        wrong = _wrong_tags("the container", track.codec, track.range, track.matrix, None)
        if wrong is not None:
            yield "colour", wrong


def _frame_tags(frame: Any) -> tuple[Codec | None, Range, Matrix, str]:
    pix_fmt = str(frame.format.name)
    codec = Codec.MJPEG if pix_fmt.startswith("yuvj") else None
    matrix = int(frame.colorspace)
    known = Matrix(matrix) if matrix in Matrix.__members__.values() else Matrix.UNKNOWN
    return codec, _AV_RANGE.get(int(frame.color_range), Range.UNKNOWN), known, pix_fmt


def _wrong_tags(what: str, codec: Codec | None, sample_range: Range, matrix: Matrix, pix_fmt: str | None) -> str | None:
    """What is wrong with colour tags under StreamFlag.CONFORMS: 8-bit 4:2:0, BT.601, limited range."""
    if codec is Codec.MJPEG:
        # JPEG is full-range BT.601 by definition (JFIF 1.02) and has no field to say so.
        right = sample_range is Range.FULL and matrix in (*_BT601, Matrix.UNKNOWN)
    else:
        right = sample_range is Range.LIMITED and matrix in _BT601
    if not right:
        return f"{what} is tagged {sample_range.name.lower()} range, {matrix.name.lower()} matrix"
    if pix_fmt is not None and pix_fmt not in _FORMATS_420:
        return f"{what} is {pix_fmt}"
    return None


def _choose(key: str, num_frames: int) -> npt.NDArray[np.int64]:
    """The last frame and some others, the same ones each time, int64 [F], sorted."""
    picks = np.random.default_rng(zlib.crc32(key.encode())).integers(0, num_frames, _PLANNED - 1)
    return np.unique(np.append(picks, num_frames - 1)).astype(np.int64)


def _copy(frame: Any) -> Planes:
    """A frame's planes, without the last row and column of odd sizes."""
    height, width = frame.height & ~1, frame.width & ~1
    planes = []
    for plane, (h, w) in zip(frame.planes, ((height, width), *((height // 2, width // 2),) * 2), strict=True):
        planes.append(np.ndarray((1, h, w), np.uint8, plane, 0, (0, plane.line_size, 1)).copy())
    return Planes(*planes)
