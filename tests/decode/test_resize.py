"""Frames that are resized before they are converted stay within the stated distance of the colour reference."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from av.video.frame import VideoFrame

from fastvid.decode.colours import ClipPlanes
from fastvid.decode.pixels import clip_to_rgb
from fastvid.decode.pyav import RgbConverter
from fastvid.decode.request import Box, ClipRequest, Rgb
from fastvid.format.packets import StreamInfo
from fastvid.format.schema import Codec, Matrix, Range


def planes(height, width):
    """Waves of brightness and colour, with a sharp rectangle, as 4:2:0 planes."""
    y, x = np.mgrid[0:height, 0:width]
    luma = 120 + 70 * np.sin(x / 17) * np.cos(y / 23) + 20 * np.sin((x + y) / 3)
    luma[height // 3 : height // 2, width // 4 : width // 2] = 200
    half = np.mgrid[0 : height // 2, 0 : width // 2]
    chroma = [128 + 50 * np.sin(half[axis] / 19 + axis) for axis in (0, 1)]
    return [plane.round().clip(16, 235).astype(np.uint8) for plane in (luma, *chroma)]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("size", [(37, 56), (45, 80), (31, 48), (33, 33), (64, 223), (36, 56), (224, 224)])
def test_no_pixel_depends_on_what_was_converted_before(size, fast):
    info, request = StreamInfo(Codec.H264, 480, 360, 1, Fraction(25)), np.zeros(1, np.int64)

    def converted(converter, pictures, size):
        output = Rgb(np.zeros((3, 1, *size), np.uint8), fast=fast)
        converter.begin(info, ClipRequest(0, request, Box(20, 40, 200, 300), size), output)
        converter.write(VideoFrame.from_dlpack(pictures, format="yuv420p"), 0)
        return output.data

    used, white = RgbConverter(), [np.full_like(plane, 235) for plane in planes(360, 480)]
    for large in ((224, 256), (225, 255)):
        converted(used, white, large)
    assert np.array_equal(converted(used, planes(360, 480), size), converted(RgbConverter(), planes(360, 480), size))


@pytest.mark.parametrize("sample_range", [Range.LIMITED, Range.FULL])
@pytest.mark.parametrize("matrix", [Matrix.SMPTE170M, Matrix.BT709])
def test_fast_resizing_is_close_to_the_reference_in_every_shape(sample_range, matrix):
    pictures, draws, converter = planes(360, 480), np.random.default_rng(0), RgbConverter()
    info = StreamInfo(Codec.H264, 480, 360, 1, Fraction(25), range=sample_range, matrix=matrix)
    distances = []
    for number in range(60):
        height, width = (int(side) // 2 * 2 for side in draws.integers((64, 64), (360, 480)))
        box = Box(*(int(draws.integers(0, most + 1)) // 2 * 2 for most in (360 - height, 480 - width)), height, width)
        size = (
            (224, 224) if number % 2 else (int(height * draws.uniform(0.3, 1.5)), int(width * draws.uniform(0.3, 1.5)))
        )
        request = ClipRequest(0, np.zeros(1, np.int64), box, size, flip=number % 3 == 0)
        output = Rgb(np.zeros((3, 1, *size), np.uint8), fast=True)
        converter.begin(info, request, output)
        converter.write(VideoFrame.from_dlpack(pictures, format="yuv420p"), 0)
        rows, columns = slice(box.y, box.y + height), slice(box.x, box.x + width)
        half = (slice(box.y // 2, (box.y + height) // 2), slice(box.x // 2, (box.x + width) // 2))
        cut = [plane[where][None] for plane, where in zip(pictures, ((rows, columns), half, half), strict=True)]
        clip = ClipPlanes(*map(torch.from_numpy, map(np.ascontiguousarray, cut)), request.flip, matrix, sample_range)
        distances.append(output.data.astype(float) - clip_to_rgb(clip, size).numpy())
    each = [np.abs(one).mean() for one in distances]
    assert max(each) < 2.5
    assert np.mean(each) < 1.0
    assert abs(np.mean([one.mean() for one in distances])) < 0.3
