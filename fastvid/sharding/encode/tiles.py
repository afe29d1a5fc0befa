"""Write pictures as JPEG with restart markers, so that `fastvid.decode.tiles` can decode only the part in a crop.

FFmpeg's encoder writes restart markers only at the ends of rows. So ffmpeg writes lossless pictures, and Pillow's
libjpeg-turbo encodes them. Its integer transform and the standard's Huffman tables give the same bytes on every CPU.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any, Final

import numpy as np
from av.video.frame import VideoFrame

from fastvid.decode.containers import minimal_mp4
from fastvid.errors import SourceError, naming_extras
from fastvid.format.packets import StreamInfo
from fastvid.format.schema import Codec, Range
from fastvid.media.container import open_demuxer, video_stream
from fastvid.media.reasons import Reason
from fastvid.runtime.arrays import UInt8Array

_BLOCK: Final = 16  # pixels: side of the smallest unit that is decoded, with both chroma planes
# Numbers of blocks from one marker to the next, best first: 48 to 64 pixels are the best compromise of speed and size.
_INTERVALS: Final = (4, 3, 5, 2, 7)
# Ratio of chroma to luma steps of quantisation, relative to the standard's tables; so all three planes have the same
# SSIM as in H.264.
_CHROMA: Final = Fraction(20, 29)

# ITU-T T.81, tables K.1 and K.2: steps of quantisation.
_LUMA_STEPS: Final = (
    16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29, 51,
    87, 80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92, 49, 64, 78, 87, 103, 121, 120, 101,
    72, 92, 95, 98, 112, 100, 103, 99,
)  # fmt: skip
_CHROMA_STEPS: Final = (
    17, 18, 24, 47, 99, 99, 99, 99, 18, 21, 26, 66, 99, 99, 99, 99, 24, 26, 56, 99, 99, 99, 99, 99, 47, 66, 99, 99, 99,
    99, 99, 99, *[99] * 32,
)  # fmt: skip


def encoder_version() -> str:
    """Return the versions that may change what `write_tiles` writes."""
    with naming_extras():
        import PIL
        from PIL import features
    return f"Pillow {PIL.__version__}, libjpeg-turbo {features.version('libjpeg_turbo')}"


def interval(width: int) -> int:
    """Return the number of blocks from one restart marker to the next, for a width in pixels.

    A whole row of blocks if none of the usual numbers divides it.
    """
    row = -(-width // _BLOCK)
    return next((blocks for blocks in _INTERVALS if row % blocks == 0), row)


def write_tiles(descriptor: int, rate: Fraction, percent: int) -> bytes:
    """Return an MP4 of JPEG pictures, made from a lossless MP4.

    `descriptor`: the open file of the lossless MP4. `rate`: its frames per second. `percent`: steps of quantisation of
    luma, in percent of the standard's.
    """
    with open_demuxer(f"file:/dev/fd/{descriptor}", "mov") as source:
        stream = video_stream(source)
        width, height = stream.width, stream.height
        pictures = list(_encoded(source.decode(stream), rate, percent))
    if not pictures:
        raise SourceError("no frame was encoded", reason=Reason.NO_FRAMES)
    count = len(pictures)
    sizes = list(map(len, pictures))
    starts = np.array([0, *accumulate(sizes[:-1])])
    info = StreamInfo(Codec.MJPEG, width, height, count, rate, range=Range.FULL)
    keys = np.ones(count, np.bool_)
    return minimal_mp4(info, b"".join(pictures), starts, np.array(sizes), np.arange(count), keys)


def _encoded(frames: Iterator[VideoFrame], rate: Fraction, percent: int) -> Iterator[bytes]:
    from PIL import Image

    tables = [_scaled(_LUMA_STEPS, percent), _scaled(_CHROMA_STEPS, int(percent * _CHROMA))]
    for number, frame in enumerate(frames):
        if frame.pts is None or frame.time_base is None or frame.pts * frame.time_base * rate != number:
            raise SourceError(f"frame {number} is not on the grid of {rate} a second", reason=Reason.VERIFY_FAILED)
        y, u, v = (plane_of(frame, number) for number in range(3))
        # Repeat each chroma level four times: libjpeg takes the mean of the four, which is the level itself.
        picture = np.dstack([y, *(np.repeat(np.repeat(plane, 2, 0), 2, 1) for plane in (u, v))])
        target = io.BytesIO()
        Image.fromarray(picture, "YCbCr").save(
            target,
            "JPEG",
            qtables=tables,
            subsampling="4:2:0",
            restart_marker_blocks=interval(frame.width),
        )
        yield target.getvalue()


def _scaled(steps: Sequence[int], percent: int) -> list[int]:
    """Return a table of quantisation steps, scaled as libjpeg does."""
    return [min(max((step * percent + 50) // 100, 1), 255) for step in steps]


def plane_of(frame: VideoFrame, number: int) -> UInt8Array:
    """Return a plane of a frame, uint8 [H, W], as a view."""
    plane: Any = frame.planes[number]  # supports the buffer protocol, but PyAV's stubs do not say so
    return np.ndarray((plane.height, plane.width), np.uint8, plane, 0, (plane.line_size, 1))
