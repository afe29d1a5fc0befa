"""YUV 4:2:0 planes to RGB on the host, by libswscale: all frames of a clip in one call, cropped before.

Frames of a clip are stacked into one tall picture, because 4:2:0 planes of even height stay 4:2:0 when stacked; frames
that are resized go one by one, since a vertical filter would mix neighbours.

Accuracy against the rounded float reference of `fastvid.decode.pixels`:

- not resized: nearest chroma, at most 3 levels off, 1.2 on average (the converter truncates, so it is darker);
- resized: antialiased like the reference, but chroma is filtered instead of repeated: 0.2 to 0.7 levels off on average
  over a real clip, a few dozen at its sharpest edges between colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter

from fastvid.decode.request import ClipRequest, Planes, UInt8Array
from fastvid.errors import DecodeError
from fastvid.format.packets import StreamInfo
from fastvid.format.schema import Matrix, Range

# Unknown is taken for BT.601: what FFmpeg and DALI do, and what `pixels` does.
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

# libswscale's 4:2:0 to planar RGB code leaves the last columns unwritten when the width modulo 16 is 1 to 8 (seen with
# libswscale 9.5), so rows are padded to a multiple of 16. It may read a vector past the last row.
_ROW: Final = 16
_SLACK: Final = 64

# Where R, G and B lie in FFmpeg's gbrp.
_RGB_PLANES: Final = (2, 0, 1)


class RgbConverter:
    """Turns planes into RGB. Keeps libswscale's tables and its buffers between clips; for one thread."""

    def __init__(self) -> None:
        self._reformatter = VideoReformatter()
        self._buffer: UInt8Array = np.empty(0, dtype=np.uint8)
        self._stacked: Planes | None = None

    def planes(self, num_frames: int, height: int, width: int) -> Planes:
        """Planes to fill with `num_frames` cropped frames before `write`; valid until the next call."""
        padded = -(-width // _ROW) * _ROW
        luma = num_frames * height * padded
        if len(self._buffer) < luma * 3 // 2 + _SLACK:
            self._buffer = np.zeros(luma * 3 // 2 + _SLACK, dtype=np.uint8)
        half = (num_frames, height // 2, padded // 2)
        stacked = Planes(
            self._buffer[:luma].reshape(num_frames, height, padded),
            self._buffer[luma : luma * 5 // 4].reshape(half),
            self._buffer[luma * 5 // 4 : luma * 3 // 2].reshape(half),
        )
        self._stacked = stacked
        return Planes(stacked.y[:, :, :width], stacked.u[:, :, : width // 2], stacked.v[:, :, : width // 2])

    def write(self, info: StreamInfo, request: ClipRequest, index: Sequence[int], out: UInt8Array) -> None:
        """Converts the planes that `planes` gave out.

        Args:
            info: The stream; says range and matrix.
            request: Says size and flip.
            index: Which of the planes' frames stands at each position of the output, [T].
            out: uint8 [3, T, H, W] to write.

        Raises:
            DecodeError: The matrix is not one of YUV.
        """
        assert self._stacked is not None
        y, u, v = self._stacked.y, self._stacked.u, self._stacked.v
        num_frames, height, padded = y.shape
        box, (out_height, out_width) = request.box, request.size
        if (box.height, box.width) == request.size:
            picture = self._convert(
                (y.reshape(-1, padded), u.reshape(-1, padded // 2), v.reshape(-1, padded // 2)), info, None
            )
            for plane, target in zip(_planes(picture, (num_frames, height, box.width)), out, strict=True):
                _copy(plane if len(index) == num_frames else plane[index], target, request.flip)
            return
        places: list[list[int]] = [[] for _ in range(num_frames)]
        for place, frame in enumerate(index):
            places[frame].append(place)
        for frame, where in enumerate(places):
            cut = (y[frame, :, : box.width], u[frame, :, : box.width // 2], v[frame, :, : box.width // 2])
            picture = self._convert(cut, info, request.size)
            for plane, target in zip(_planes(picture, (1, out_height, out_width)), out, strict=True):
                _copy(plane[0], target[where[0]], request.flip)
        for where in places:
            for copy in where[1:]:
                out[:, copy] = out[:, where[0]]

    def to_420(self, frame: VideoFrame, info: StreamInfo) -> VideoFrame:
        """A frame in another YUV format (4:2:2, 4:4:4, 10 bits, grey) as 8-bit 4:2:0 of the same range and matrix.

        Raises:
            DecodeError: The frame is no YUV picture.
        """
        if frame.format.is_rgb:
            raise DecodeError(f"pixel format {frame.format.name} is not YUV")
        colorspace, color_range = _colour(info)
        return self._reformatter.reformat(
            frame,
            format="yuv420p",
            src_colorspace=colorspace,
            dst_colorspace=colorspace,
            src_color_range=color_range,
            dst_color_range=color_range,
            threads=1,
        )

    def _convert(
        self, planes: tuple[UInt8Array, UInt8Array, UInt8Array], info: StreamInfo, size: tuple[int, int] | None
    ) -> VideoFrame:
        colorspace, color_range = _colour(info)
        height, width = size or (None, None)
        # threads=None would start a thread per core: 1.1 instead of 0.2 ms for 8 frames of 224x224.
        return self._reformatter.reformat(
            VideoFrame.from_dlpack(planes, format="yuv420p"),
            width,
            height,
            "gbrp",
            src_colorspace=colorspace,
            dst_colorspace=colorspace,
            interpolation=Interpolation.BILINEAR,
            src_color_range=color_range,
            threads=1,
        )


def _colour(info: StreamInfo) -> tuple[int, int]:
    try:
        return COLORSPACE[info.matrix], COLOR_RANGE[info.range]
    except KeyError:
        raise DecodeError(f"matrix {info.matrix.name} is not one of YUV") from None


def _planes(picture: VideoFrame, shape: tuple[int, int, int]) -> list[UInt8Array]:
    """R, G and B of a stacked gbrp picture, each [T, H, W], without a copy."""
    planes = picture.planes
    views = []
    for number in _RGB_PLANES:
        plane: Any = planes[number]  # a buffer to numpy, which the stubs do not know
        pitch = plane.line_size
        views.append(np.ndarray(shape, np.uint8, plane, 0, (shape[1] * pitch, pitch, 1)))
    return views


def _copy(source: UInt8Array, target: UInt8Array, flip: bool) -> None:
    """Copies rows, mirrored or not; the last axis of both is dense."""
    if not flip:
        target[...] = source
    elif source.shape[-1] % 8 == 0:
        # Reversing eight bytes at once, by byte order, is seven times as fast as a negative stride over bytes.
        target.view(">u8")[...] = source.view("<u8")[..., ::-1]
    else:
        target[...] = source[..., ::-1]
