"""Convert YUV 4:2:0 frames to RGB on the host with PyAV's copy of libswscale, through its C interface.

Frames are cropped before the conversion, which writes directly to the output; PyAV's own reformatter allocates its
output, which costs another copy. The C functions used here have not changed since libswscale 2 (2011).

Accuracy compared with the rounded float reference in `fastvid.decode.pixels`:

- not resized: each chroma sample is repeated, at most 3 levels off, 1.2 on average (libswscale truncates, so it is
  darker);
- resized: antialiased like the reference, but chroma is filtered instead of repeated: 0.2 to 0.7 levels off on average
  over a real clip, a few dozen at the sharpest edges between colours;
- resized fast: the YUV planes are resized first and then converted as if not resized, one level brighter: 0.9 levels
  off on average, in two thirds of the time.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from functools import cache
from typing import Any, Final

import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange, Colorspace, VideoReformatter

from fastvid.decode.engines import library
from fastvid.decode.request import ClipRequest, Rgb
from fastvid.errors import DecodeError
from fastvid.format.packets import StreamInfo
from fastvid.format.schema import Matrix, Range
from fastvid.runtime.arrays import UInt8Array

_BILINEAR: Final = 2  # SWS_BILINEAR
_ONE: Final = 1 << 16  # contrast and saturation are 16.16 fixed point
# Brightness, in 16.16 fixed point, that compensates for truncation where nothing is resized: 1.15 of 255 levels.
_ROUNDED: Final = 1 << 8

Pointers = ctypes.c_void_p * 4
Strides = ctypes.c_int * 4


@cache
def _functions() -> Any:
    """Load libswscale and declare the signatures of its functions."""
    scale = library("swscale")
    scale.sws_getContext.restype = scale.sws_getCoefficients.restype = ctypes.c_void_p
    scale.sws_getContext.argtypes = [ctypes.c_int] * 7 + [ctypes.c_void_p] * 3
    details = [*[ctypes.c_void_p] * 2, ctypes.c_int, ctypes.c_void_p, *[ctypes.c_int] * 4]
    scale.sws_setColorspaceDetails.argtypes = details
    scale.sws_freeContext.argtypes = [ctypes.c_void_p]
    scale.sws_scale.argtypes = [ctypes.c_void_p, Pointers, Strides, ctypes.c_int, ctypes.c_int, Pointers, Strides]
    return scale


@cache
def _formats() -> tuple[int, int]:
    """Return FFmpeg's numbers of 4:2:0 and of planar RGB."""
    find = library("avutil").av_get_pix_fmt
    return find(b"yuv420p"), find(b"gbrp")


def _context(
    source: tuple[int, int], target: tuple[int, int], colorspace: int, full: bool, planes: bool, brightness: int
) -> int:
    """Create a libswscale context that converts 4:2:0 pictures to planar RGB; sizes are (height, width).

    `full`: whether the input has full-range samples. `planes`: whether the output is 4:2:0 instead, resized.
    """
    scale = _functions()
    yuv, rgb = _formats()
    context: int | None = scale.sws_getContext(
        source[1], source[0], yuv, target[1], target[0], yuv if planes else rgb, _BILINEAR, None, None, None
    )
    if not context:
        raise DecodeError(f"libswscale cannot convert {source} to {target}")
    table = scale.sws_getCoefficients(colorspace)
    scale.sws_setColorspaceDetails(context, table, int(full), table, int(full or not planes), brightness, _ONE, _ONE)
    return context


# Unknown is treated as BT.601, as in FFmpeg, DALI and `pixels`.
COLORSPACE: Final = {
    Matrix.BT709: Colorspace.ITU709,
    Matrix.UNKNOWN: Colorspace.ITU601,
    Matrix.FCC: Colorspace.FCC,
    Matrix.BT470BG: Colorspace.ITU601,
    Matrix.SMPTE170M: Colorspace.ITU601,
    Matrix.SMPTE240M: Colorspace.SMPTE240M,
    Matrix.BT2020_NCL: Colorspace.BT2020,
}
COLOR_RANGE: Final = {Range.UNKNOWN: ColorRange.MPEG, Range.LIMITED: ColorRange.MPEG, Range.FULL: ColorRange.JPEG}

# libswscale's conversion from 4:2:0 to planar RGB does not write the last columns if the width modulo 16 is 1 to 8
# (observed with libswscale 9.5), and its SIMD vectors have up to 32 bytes. So rows are padded to a multiple of this.
_ROW: Final = 32
# SIMD code may read or write this many bytes past the last row.
_SLACK: Final = 64
# A context is made for each size. Random crops have thousands of sizes, so only a few contexts are kept.
_MAX_CONTEXTS: Final = 8
# Plane indices of R, G and B in FFmpeg's gbrp.
_PLANE_OF_RGB: Final = (2, 0, 1)


class RgbConverter:
    """Converts the frames of one clip at a time; reuses libswscale contexts and buffers. Not thread-safe."""

    def __init__(self) -> None:
        self._reformatter = VideoReformatter()
        self._contexts: OrderedDict[tuple[object, ...], int] = OrderedDict()
        self._source, self._source_strides = Pointers(), Strides()
        self._target, self._target_strides = Pointers(), Strides()
        self._stage: UInt8Array = np.empty(0, dtype=np.uint8)
        self._picture: UInt8Array = np.empty(0, dtype=np.uint8)
        self._middle, self._middle_strides = Pointers(), Strides()
        self._resized: UInt8Array = np.empty(0, dtype=np.uint8)

    def __del__(self) -> None:
        for context in self._contexts.values():
            self._swscale.sws_freeContext(context)

    def begin(self, info: StreamInfo, request: ClipRequest, output: Rgb) -> None:
        """Prepare to convert the frames of a clip to `output`; then call `write` for each."""
        out = output.data
        box, (height, width), flip = request.box, request.size, request.flip
        resized = (box.height, box.width) != request.size
        padded = -(-width // _ROW) * _ROW
        # A resize filter must not read pixels outside the crop; without resizing, padded rows may contain such pixels.
        self._box, self._width = box, box.width if resized else padded
        source, target, brightness = (box.height, self._width), (height, width if resized else padded), 0
        self._resizing = None
        if resized and output.fast:
            self._resizing = self._take_context(info, source, target, planes=True)
            source = target = (height, padded)
            brightness = 0 if height % 2 else _ROUNDED  # for odd heights, libswscale rounds
            self._place_middle(height, padded)
        self._rows = source[0]
        self._scaling = self._take_context(info, source, target, brightness=brightness)
        # Convert directly into the output if rows need neither padding nor mirroring.
        self._direct = padded == width and not flip and out.strides[3] == 1
        if self._direct:
            self._base, self._plane, self._step, pitch = out.ctypes.data, out.strides[0], out.strides[1], out.strides[2]
        else:
            if self._picture.shape[1:] != (height, padded):
                buffer = np.empty(3 * height * padded + _SLACK, dtype=np.uint8)
                self._picture = buffer[: 3 * height * padded].reshape(3, height, padded)
            self._base, self._plane, self._step, pitch = self._picture.ctypes.data, height * padded, 0, padded
            self._cut, self._shown = self._picture[..., :width], out
            if flip and width % 8 == 0 and out.strides[3] == 1:
                # Swapping eight bytes at once by byte order is seven times as fast as a negative stride over bytes.
                self._cut, self._shown = self._cut.view("<u8"), out.view(">u8")
            if flip:
                self._cut = self._cut[..., ::-1]
        for number in range(3):
            self._target_strides[number] = pitch

    def _take_context(
        self,
        info: StreamInfo,
        source: tuple[int, int],
        target: tuple[int, int],
        *,
        planes: bool = False,
        brightness: int = 0,
    ) -> int:
        colorspace, color_range = _colour(info.matrix, info.range)
        key = (source, target, colorspace, color_range, planes, brightness)
        context = self._contexts.pop(key, None)
        if context is None:
            self._swscale = _functions()
            context = _context(source, target, colorspace, color_range == ColorRange.JPEG, planes, brightness)
        self._contexts[key] = context
        if len(self._contexts) > _MAX_CONTEXTS:
            self._swscale.sws_freeContext(self._contexts.popitem(last=False)[1])
        return context

    def _place_middle(self, height: int, padded: int) -> None:
        """Set up memory for a picture that is resized and not converted yet."""
        luma, chroma = height * padded, -(-height // 2) * padded // 2
        if len(self._resized) < luma + 2 * chroma + _SLACK:
            self._resized = np.zeros(luma + 2 * chroma + _SLACK, dtype=np.uint8)
        start = self._resized.ctypes.data
        self._middle[0], self._middle[1], self._middle[2] = start, start + luma, start + luma + chroma
        self._middle_strides[0], self._middle_strides[1], self._middle_strides[2] = padded, padded // 2, padded // 2

    def write(self, frame: VideoFrame, place: int) -> None:
        """Convert an 8-bit 4:2:0 frame of the stream's size into ``out[:, place]``, index `place` of the output."""
        box, source, strides, target = self._box, self._source, self._source_strides, self._target
        planes: Any = frame.planes
        y, u, v = planes
        luma, chroma = y.line_size, u.line_size
        if box.x + self._width <= luma and box.x // 2 + self._width // 2 <= chroma:
            source[0] = y.buffer_ptr + box.y * luma + box.x
            source[1] = u.buffer_ptr + box.y // 2 * chroma + box.x // 2
            source[2] = v.buffer_ptr + box.y // 2 * chroma + box.x // 2
            strides[0], strides[1], strides[2] = luma, chroma, chroma
        else:
            self._copy_out(planes)
        start = self._base + place * self._step
        for number, plane in enumerate(_PLANE_OF_RGB):
            target[plane] = start + number * self._plane
        if self._resizing is not None:
            middle = self._middle, self._middle_strides
            self._swscale.sws_scale(self._resizing, source, strides, 0, box.height, *middle)
            source, strides = middle
        self._swscale.sws_scale(self._scaling, source, strides, 0, self._rows, target, self._target_strides)
        if not self._direct:
            self._shown[:, place] = self._cut

    def to_420(self, frame: VideoFrame, info: StreamInfo) -> VideoFrame:
        """Convert a frame of another YUV format to 8-bit 4:2:0 of the same range and matrix.

        The frame may be 4:2:2, 4:4:4, more than 8 bits or grey.
        """
        if frame.format.is_rgb:
            raise DecodeError(f"pixel format {frame.format.name} is not YUV")
        colorspace, color_range = _colour(info.matrix, info.range)
        return self._reformatter.reformat(
            frame,
            format="yuv420p",
            src_colorspace=colorspace,
            dst_colorspace=colorspace,
            src_color_range=color_range,
            dst_color_range=color_range,
            # By default it would start one thread per core, which takes five times as long as the conversion.
            threads=1,
        )

    def _copy_out(self, planes: Any) -> None:
        """Copy the crop into wider rows, because the frame has too few bytes after the crop for the padded width."""
        box, width = self._box, self._width
        size = box.height * width
        if len(self._stage) < size * 3 // 2 + _SLACK:
            self._stage = np.zeros(size * 3 // 2 + _SLACK, dtype=np.uint8)
        at = 0
        for number, (plane, step) in enumerate(zip(planes, (1, 2, 2), strict=True)):
            height, row, pitch = box.height // step, width // step, plane.line_size
            cut = (height, box.width // step)
            rows = self._stage[at : at + height * row].reshape(height, row)
            start = box.y // step * pitch + box.x // step
            rows[:, : cut[1]] = np.ndarray(cut, np.uint8, plane, start, (pitch, 1))
            self._source[number] = self._stage.ctypes.data + at
            self._source_strides[number] = row
            at += height * row


@cache
def _colour(matrix: Matrix, sample_range: Range) -> tuple[int, int]:
    if matrix not in COLORSPACE:
        raise DecodeError(f"matrix {matrix.name} is not a YUV matrix")
    return COLORSPACE[matrix], COLOR_RANGE[sample_range]
