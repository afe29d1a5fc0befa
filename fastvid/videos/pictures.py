"""Show frames to a person: choose frames, make small pictures and contact sheets, and display them in a notebook."""

from __future__ import annotations

import base64
import math
import os
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import numpy as np
import numpy.typing as npt
from av.codec.context import CodecContext
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation

from fastvid.errors import DecodeError, UsageError
from fastvid.format.packets import StreamInfo
from fastvid.report.page import page, png
from fastvid.runtime.arrays import IntArray, UInt8Array

_ENCODERS: Final = (
    # At equal quality WebP needs a third of JPEG's bytes; the few FFmpeg builds without libwebp use JPEG.
    ("libwebp", "webp", "yuv420p", {"quality": "56", "compression_level": "4"}),
    ("mjpeg", "jpeg", "yuvj420p", {"qmin": "6", "qmax": "6"}),
)
_TILE: Final = (102, 200)  # largest height and width of a notebook's picture: eight of aspect 4:3 fill 1,180 pixels
_SHEET_SIDE: Final = 2048  # longest side of a contact sheet in pixels: written in a second, and readable on a screen
_SHEET_ASPECT: Final = 16 / 9
_GAP: Final = 4  # white pixels between the frames of a contact sheet


def encode_picture(rgb: UInt8Array) -> str:
    """Encode a picture, uint8 [H, W, 3] with even sides, as a ``data:`` URI."""
    for encoder, kind, pix_fmt, options in _ENCODERS:
        try:
            data = encode_frame(rgb, encoder, pix_fmt, options)
        except ValueError:  # no such encoder in this build
            continue
        return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
    raise DecodeError("this build of FFmpeg encodes neither WebP nor JPEG", hint="install PyAV from PyPI")


def encode_frame(rgb: UInt8Array, encoder: str, pix_fmt: str, options: Mapping[str, str]) -> bytes:
    """Encode a picture, uint8 [H, W, 3], with an encoder of FFmpeg; raise ValueError if this build lacks it."""
    context = cast(VideoCodecContext, CodecContext.create(encoder, "w"))
    context.height, context.width = rgb.shape[:2]
    context.pix_fmt, context.time_base, context.options = pix_fmt, Fraction(1, 25), dict(options)
    frame = VideoFrame.from_ndarray(np.ascontiguousarray(rgb), format="rgb24").reformat(format=pix_fmt, threads=1)
    return b"".join(bytes(packet) for packet in (*context.encode(frame), *context.encode(None)))


def tile_size(height: int, width: int) -> tuple[int, int]:
    """Return the even height and width at which a notebook shows a frame, at its own aspect ratio if possible."""
    return _fit(height, width, *_TILE)


def shrink(frames: UInt8Array, height: int, width: int) -> UInt8Array:
    """Resize frames, uint8 [T, H, W, 3]; frames that have this size already are returned as they are."""
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
    """Arrange frames, uint8 [T, H, W, 3], in rows from left to right; return one picture, uint8 [H', W', 3].

    Frames keep their pixels unless a side of the picture would be longer than 2,048; then all are made smaller.
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


class Shown(ABC):
    """Base of what notebooks display, and what can be shown and saved elsewhere."""

    __slots__ = ()

    _NAME: ClassVar[str]

    @abstractmethod
    def _repr_html_(self) -> str:
        """Return HTML for a notebook: self-contained, escaped, without scripts, usually below 100 kB."""

    @abstractmethod
    def _picture(self) -> UInt8Array:
        """Return a contact sheet, uint8 [H, W, 3]."""

    def _file(self, suffix: str) -> bytes | None:
        """Return the contents of a file to save; None for a suffix that is not supported."""
        if suffix == ".png":
            return png(self._picture())
        return page(self._repr_html_()).encode() if suffix == ".html" else None

    def _suffixes(self) -> tuple[str, ...]:
        """Return the suffixes of the files that can be saved."""
        return (".png", ".html")

    def show(self) -> None:
        """Display in a notebook; elsewhere write a PNG contact sheet to a temporary file and print its path."""
        shell = _notebook()
        if shell is not None:
            shell.display.display(shell.display.HTML(self._shown_html()))
        else:
            path = self.save(Path(tempfile.mkdtemp(prefix="fastvid-")) / f"{self._NAME}.png")
            sys.stdout.write(f"{path}\n")

    def _shown_html(self) -> str:
        return self._repr_html_()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a file of the kind that the suffix names, and return its path; an existing file is replaced.

        ``.png`` is a contact sheet: frames from left to right, with unchanged pixels unless a side would be longer than
        2,048 pixels. ``.html`` is what a notebook displays, as a page that loads nothing else.
        """
        target = Path(path)
        try:
            data = self.file(target.suffix.lower())
        except UsageError as error:
            raise error.at(file=target) from error
        try:
            target.write_bytes(data)
        except OSError as error:
            raise UsageError(
                f"cannot write the file: {error.strerror}", file=target, hint="choose a path that you can write"
            ) from error
        return target

    def file(self, suffix: str) -> bytes:
        """Return the bytes that `save` writes for a suffix, such as ``.png``."""
        data = self._file(suffix)
        if data is None:
            raise UsageError(
                f"cannot save {self._NAME} as {suffix or 'a file without a suffix'}",
                hint=f"use {' or '.join(self._suffixes())}",
            )
        return data


def _notebook() -> Any:
    """Return the module IPython if a notebook's kernel runs this code; None elsewhere, also in IPython's terminal."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return module if hasattr(shell, "kernel") else None


def wanted_frames(
    info: StreamInfo,
    frames: slice | Sequence[int] | npt.ArrayLike | None,
    seconds: Sequence[float] | npt.ArrayLike | None,
) -> IntArray:
    """Return frame indices, int64 [T], from numbers or times. Bounds of numbers are checked by the packet plan."""
    if (frames is None) == (seconds is None):
        raise UsageError(
            "expected either frames or seconds", hint="call `video.frames([0, 8])` or `video.frames(seconds=[1.2])`"
        )
    hint = f"give frames from 0 to {info.num_frames - 1} as integers or a slice, or times as `seconds=`"
    if seconds is not None:
        wanted = frames_at(info, seconds)
    elif isinstance(frames, slice):
        wanted = np.arange(info.num_frames, dtype=np.int64)[frames]
    else:
        wanted = np.atleast_1d(np.asarray(frames))
        if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
            raise UsageError(f"frames are {frames!r}, expected integers", hint=hint)
    if not wanted.size:
        raise UsageError("no frame requested, at least one is required", hint=hint)
    return wanted.astype(np.int64)


def frames_at(info: StreamInfo, seconds: Sequence[float] | npt.ArrayLike) -> IntArray:
    """Return the frames shown at some times, int64 [T]; UsageError for times outside the video.

    A frame is shown from its own time until that of the next frame. Because times are often rounded, a time up to a
    millisecond before a frame, and at most half of the frame's duration, also means that frame.
    """
    try:
        times = np.atleast_1d(np.asarray(seconds, dtype=np.float64))
    except (TypeError, ValueError):
        times = np.empty((0, 0))
    end = float(info.num_frames / info.fps)
    hint = f"give seconds from 0 to less than {end:.6g}"
    if times.ndim != 1:
        raise UsageError(f"seconds are {seconds!r}, expected a list of numbers", hint=hint)
    outside = ~((times >= 0) & (times < end))  # also NaN
    if outside.any():
        raise UsageError(f"second {times[outside][0]:.6g} is outside the video", hint=hint)
    return info.frames_at(times)


def spread(count: int, most: int) -> IntArray:
    """Return at most `most` numbers below `count`, evenly spaced, ascending, int64: the middles of equal parts."""
    most = min(count, most)
    middles: IntArray = (2 * np.arange(most, dtype=np.int64) + 1) * count // (2 * max(most, 1))
    return middles
