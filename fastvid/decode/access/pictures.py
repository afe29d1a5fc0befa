"""Make small pictures of frames: reduce, arrange and encode them."""

from __future__ import annotations

import base64
import math
from fractions import Fraction
from typing import Final, cast

import numpy as np
from av.codec.context import CodecContext
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation

from fastvid.errors import DecodeError
from fastvid.runtime.arrays import UInt8Array

_ENCODERS: Final = (
    # At equal quality WebP needs a third of JPEG's bytes; the few FFmpeg builds without libwebp use JPEG.
    ("libwebp", "webp", "yuv420p", {"quality": "56", "compression_level": "4"}),
    ("mjpeg", "jpeg", "yuvj420p", {"qmin": "6", "qmax": "6"}),
)
_TILE: Final = (102, 200)  # largest height and width of a picture in a notebook: eight of 4:3 fill 1,180 pixels
_SHEET_SIDE: Final = 2048  # longest side of a contact sheet in pixels: written in a second, and readable on a screen
_SHEET_ASPECT: Final = 16 / 9
_GAP: Final = 4  # white pixels between the frames of a sheet


def encode_picture(rgb: UInt8Array) -> str:
    """Encode a picture, uint8 [H, W, 3] with even sides, as a ``data:`` URI."""
    for encoder, kind, pix_fmt, options in _ENCODERS:
        try:
            context = cast(VideoCodecContext, CodecContext.create(encoder, "w"))
        except ValueError:  # no such encoder in this build
            continue
        context.height, context.width = rgb.shape[:2]
        context.pix_fmt, context.time_base, context.options = pix_fmt, Fraction(1, 25), dict(options)
        frame = VideoFrame.from_ndarray(rgb, format="rgb24").reformat(format=pix_fmt, threads=1)
        data = b"".join(bytes(packet) for packet in (*context.encode(frame), *context.encode(None)))
        return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
    raise DecodeError("this build of FFmpeg encodes neither WebP nor JPEG", hint="install PyAV from PyPI")


def tile_size(height: int, width: int) -> tuple[int, int]:
    """Return the even height and width of a frame in a notebook, at its own aspect ratio where that is possible."""
    return _fit(height, width, *_TILE)


def shrink(frames: UInt8Array, height: int, width: int) -> UInt8Array:
    """Return frames, uint8 [T, H, W, 3], at another size; at their own they are returned as they are."""
    if frames.shape[1:3] == (height, width):
        return frames
    return np.stack(
        [
            VideoFrame.from_ndarray(np.ascontiguousarray(one), format="rgb24")
            .reformat(width, height, "rgb24", interpolation=Interpolation.AREA, threads=1)
            .to_ndarray()
            for one in frames
        ]
    )


def contact_sheet(frames: UInt8Array) -> UInt8Array:
    """Arrange frames, uint8 [T, H, W, 3], in rows from left to right: one picture, uint8 [H', W', 3].

    Their pixels are unchanged unless a side of the picture would be longer than 2,048; then all are made smaller.
    """
    count, height, width, _ = frames.shape
    columns = min(count, max(1, round(math.sqrt(count * _SHEET_ASPECT * height / width))))
    rows = -(-count // columns)
    room = ((_SHEET_SIDE + _GAP) // rows - _GAP, (_SHEET_SIDE + _GAP) // columns - _GAP)
    if height > room[0] or width > room[1]:
        frames = shrink(frames, *_fit(height, width, *(max(side, 2) for side in room)))
    spaced = np.pad(frames, ((0, rows * columns - count), (0, _GAP), (0, _GAP), (0, 0)), constant_values=255)
    grid = spaced.reshape(rows, columns, *spaced.shape[1:]).swapaxes(1, 2)
    picture = grid.reshape(rows * spaced.shape[1], columns * spaced.shape[2], 3)[:-_GAP, :-_GAP]
    return np.ascontiguousarray(picture)


def _fit(height: int, width: int, most_height: int, most_width: int) -> tuple[int, int]:
    scale = min(1.0, most_height / height, most_width / width)
    return max(2, int(height * scale) & ~1), max(2, int(width * scale) & ~1)
