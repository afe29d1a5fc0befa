"""How a player shows a stream's decoded pictures, and when: describes any video that fastvid did not encode.

The container says how pictures are cropped, rotated and stretched; the first frame says the rest. For MP4 and Matroska
fastvid reads this itself, because FFmpeg's demuxers, in the supported versions, do not report crops.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from av.video.frame import VideoFrame

from fastvid.errors import FormatError, SourceError
from fastvid.format.mp4 import Declared, declared_by_mp4, find_moov
from fastvid.format.packets import StreamInfo
from fastvid.format.presentation import Coded, Times
from fastvid.format.schema import Matrix, Range
from fastvid.media.container import Read, element, side_data
from fastvid.media.reasons import ENCODE_HINT, Reason, unusable
from fastvid.runtime.arrays import IntArray

TONE_MAP, KEEP = HDR = ("tonemap", "keep")
"""What becomes of high dynamic range (HDR): tone-mapped, which only encoding can do, or kept as it is."""

HDR_TRANSFERS: Final = {16: "smpte2084", 18: "arib-std-b67"}
"""Transfer characteristics of ITU-T H.273 that require tone mapping: PQ and HLG."""

_SD_WIDTH, _SD_HEIGHT = 1024, 576  # pixels
_BT2020_CL: Final = 10  # constant luminance; players show it as BT.2020 with non-constant luminance
# A larger ratio is damage, not anamorphic video: DV and DVD stay below 1.5, scope below 2.
_MOST_ASPECT: Final = 8
_NEAR_TURN: Final = 1  # degrees
# EBML identifiers (RFC 8794, RFC 9559): Segment, Tracks, TrackEntry, Video, and the crop margins in Video.
_SEGMENT, _TRACKS, _ENTRY, _VIDEO = 0x18538067, 0x1654AE6B, 0xAE, 0xE0
_CROPS: Final = {0x54BB: 0, 0x54CC: 1, 0x54AA: 2, 0x54DD: 3}  # top, left, bottom, right
_HEAD: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Orientation:
    """How a display matrix rotates and mirrors pictures."""

    turn: int  # quarter turns clockwise
    mirror: bool  # whether left and right are exchanged before the rotation
    is_exact: bool  # whether the rotation is a multiple of 90 degrees

    @property
    def is_upright(self) -> bool:
        """Whether the matrix neither rotates nor mirrors."""
        return self.is_exact and not self.turn and not self.mirror

    @classmethod
    def of(cls, matrix: bytes | None) -> Orientation:
        """Read a matrix as FFmpeg returns it: nine 32-bit numbers, little-endian."""
        if matrix is None or len(matrix) < 36:
            return cls(0, False, True)
        a, b, _, c, d = struct.unpack("<5i", matrix[:20])  # 16.16 fixed point; x' = ax + cy, y' = bx + dy
        scale_x, scale_y = math.hypot(a, c), math.hypot(b, d)
        if not scale_x or not scale_y:
            return cls(0, False, True)
        mirror = a * d - b * c < 0
        sign = -1 if mirror else 1
        degrees = math.degrees(math.atan2(sign * b / scale_y, sign * a / scale_x))
        turn = round(degrees / 90)
        return cls(turn % 4, mirror, abs(degrees - 90 * turn) <= _NEAR_TURN)


def declared(container: str, read: Read, size: int) -> Declared:
    """Return how an MP4 or Matroska file says that its pictures are shown; an empty Declared for other containers.

    `size`: size of the file in bytes.
    """
    try:
        if container == "mov":
            return declared_by_mp4(find_moov(read, size))
        if container == "matroska":
            return Declared(margins=_matroska_margins(read(0, _HEAD)))
    except (FormatError, struct.error, IndexError):
        pass  # the code that reads the packet tables reports what is broken
    return Declared()


def present(
    info: StreamInfo, frame: VideoFrame, said: Declared, aspect: Fraction | None, *, hdr: str = TONE_MAP
) -> tuple[StreamInfo, tuple[str, ...]]:
    """Complete a stream's description by its first frame and its container; also return notes for the ledger.

    `aspect`: width of a pixel divided by its height according to FFmpeg, None if unknown. `hdr`: "tonemap" raises
    SourceError for high dynamic range, because only encoding tone-maps it; "keep" delivers its values unchanged.
    """
    _refuse(frame, hdr)
    turned = Orientation.of(said.matrix or side_data(frame, "DISPLAYMATRIX"))
    if not turned.is_exact:
        raise unusable("its pictures are rotated by an angle that is no multiple of 90 degrees")
    crop = said.crop(frame.height, frame.width)
    aspect = plausible(said.aspect(frame.height, frame.width) or aspect)
    height, width = crop[2:]
    if aspect != 1:
        width = max(2, 2 * round(width * aspect / 2))
    if turned.turn % 2:
        height, width = width, height
    coded = Coded(frame.width, frame.height, crop, turned.turn, turned.mirror)
    plain = Coded(frame.width, frame.height, (0, 0, frame.height, frame.width))
    range_, matrix = colours_of(frame)
    info = replace(
        info,
        width=width,
        height=height,
        range=range_,
        matrix=matrix,
        coded=None if coded == plain and aspect == 1 else coded,
    )
    return info, tuple(_notes(frame, coded, aspect))


def plausible(aspect: Fraction | None) -> Fraction:
    """Return the width of a pixel divided by its height; 1 if it is unknown or too extreme to be real."""
    return aspect if aspect is not None and Fraction(1, _MOST_ASPECT) <= aspect <= _MOST_ASPECT else Fraction(1)


def _refuse(frame: VideoFrame, hdr: str) -> None:
    if frame.interlaced_frame:
        raise unusable("its pictures are interlaced, and packets cannot be deinterlaced")
    transfer = HDR_TRANSFERS.get(int(frame.color_trc))
    if transfer and hdr != KEEP:
        raise SourceError(
            f"its pictures have high dynamic range ({transfer}), which only encoding tone-maps",
            reason=Reason.HDR,
            hint=f"{ENCODE_HINT}; or deliver its values as they are: --hdr keep",
        )


def _notes(frame: VideoFrame, coded: Coded, aspect: Fraction) -> Iterator[str]:
    if coded.turn:
        yield f"rotated-{90 * coded.turn}"
    if coded.mirror:
        yield "mirrored"
    if coded.crop != (0, 0, coded.height, coded.width):
        yield "cropped"
    if aspect != 1:
        yield "pixel-aspect"
    if (coded.crop[2] | coded.crop[3]) & 1:
        yield "odd-size"
    if int(frame.color_trc) in HDR_TRANSFERS:
        yield "hdr-kept"


def colours_of(frame: VideoFrame) -> tuple[Range, Matrix]:
    """Return the range and the luma coefficients of a frame."""
    if min(frame.width, frame.height) < 2:
        raise SourceError(
            f"{frame.width}x{frame.height} pixels are too few: cropping to even sizes leaves nothing",
            reason=Reason.BAD_SHAPE,
        )
    if frame.format.is_rgb:
        raise unusable(f"its pictures are {frame.format.name}")
    full = Range.FULL if frame.format.name.startswith("yuvj") else Range.UNKNOWN
    return Range(int(frame.color_range)) or full, shown_matrix(int(frame.colorspace), frame.width, frame.height)


def shown_matrix(number: int, width: int, height: int) -> Matrix:
    """Return the luma coefficients with which players show decoded pictures; UNKNOWN for the players' default.

    `number`: MatrixCoefficients of ITU-T H.273. `width`, `height`: in pixels. Untagged pictures that are larger than
    standard definition are BT.709, as players assume. A tag of RGB on YUV pictures is ignored.
    """
    if number == _BT2020_CL:
        return Matrix.BT2020_NCL
    if number in list(Matrix) and number not in (Matrix.RGB, Matrix.UNKNOWN):
        return Matrix(number)
    return Matrix.BT709 if width > _SD_WIDTH or height > _SD_HEIGHT else Matrix.UNKNOWN


def with_times(info: StreamInfo, pts: IntArray | None, tick: Fraction) -> StreamInfo:
    """Return a stream's description with the times of its frames; without them if a constant rate explains them.

    `pts`: times of the shown frames in ticks, ascending, int64 [N]; None if they are not known. `tick`: seconds.
    """
    return replace(info, times=None if pts is None else Times.of(pts, tick, info.fps))


def _matroska_margins(head: bytes) -> tuple[int, int, int, int]:
    """Return the rows and columns that a Matroska file cuts off its first video track: top, left, bottom, right."""
    margins, tracks = [0, 0, 0, 0], 0
    for kind, body in _elements(memoryview(head), (_SEGMENT, _TRACKS, _ENTRY, _VIDEO)):
        tracks += kind == _VIDEO
        if kind in _CROPS and tracks == 1:
            margins[_CROPS[kind]] = int.from_bytes(body, "big")
    top, left, bottom, right = margins
    return top, left, bottom, right


def _elements(view: memoryview, path: Sequence[int]) -> Iterator[tuple[int, memoryview]]:
    """Yield id and body of EBML elements, also of those inside elements whose ids, from the outermost, are `path`.

    The body of an element that exceeds `view` is truncated.
    """
    at = 0
    while (found := element(view[at : at + 12])) is not None:
        kind, header, size = found
        stop = len(view) if size is None else at + header + size
        yield kind, view[at + header : stop]
        if path and kind == path[0]:
            yield from _elements(view[at + header : stop], path[1:])
        at = stop
