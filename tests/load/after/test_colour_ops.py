"""Operations of the transforms against the same formulas written independently, in double precision."""

import colorsys
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fastvid.errors import UsageError
from fastvid.load.after import transform
from fastvid.load.after.augment import GaussianBlur
from fastvid.load.after.transform import OPERATIONS, run_programs, warp

LUMA = np.array([0.2989, 0.587, 0.114])

# Clips [3, T, H, W] of levels, as decoded.
LEVELS = arrays.arrays(
    np.uint8,
    st.tuples(st.just(3), st.integers(1, 3), st.integers(1, 6), st.integers(1, 6)),
    elements=st.integers(0, 255),
)


def pair(levels):
    """Return a batch of a clip and its negative, float32, and the same in double precision."""
    both = np.stack([levels, 255 - levels])
    return torch.from_numpy(both).float() / 255, both / 255


def grey(clip):
    return np.tensordot(LUMA, clip, 1)[None]


def blended(clip, other, factor):
    return np.clip(factor * clip + (1 - factor) * other, 0, 1)


def equal(made, expected, within=2e-6):
    np.testing.assert_allclose(made.numpy(), np.stack(expected), rtol=0, atol=within)


@settings(max_examples=60, deadline=None)
@given(levels=LEVELS, factors=st.tuples(*[st.floats(0, 3)] * 2))
def test_brightness_contrast_and_saturation_are_blends(levels, factors):
    clips, exact = pair(levels)
    both = list(zip(exact, factors, strict=True))
    equal(transform.brightness(clips.clone(), factors), [blended(one, 0, f) for one, f in both])
    equal(transform.saturation(clips.clone(), factors), [blended(one, grey(one), f) for one, f in both])
    # Of each frame, as torchvision computes it for a video.
    means = [grey(one).mean((2, 3), keepdims=True) for one in exact]
    equal(transform.contrast(clips, factors), [blended(one, m, f) for (one, f), m in zip(both, means, strict=True)])


@settings(max_examples=60, deadline=None)
@given(levels=LEVELS, turns=st.tuples(*[st.floats(-0.5, 0.5)] * 2))
def test_hue_rotates_the_colour_circle_of_hsv(levels, turns):
    def shifted(pixel, turn):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
        return colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)

    clips, exact = pair(levels)
    expected = [
        np.apply_along_axis(shifted, 0, one, turn).reshape(one.shape) for one, turn in zip(exact, turns, strict=True)
    ]
    equal(transform.hue(clips, turns), expected, within=5e-6)


@settings(max_examples=60, deadline=None)
@given(levels=LEVELS, factors=st.tuples(*[st.floats(0, 2)] * 2))
def test_sharpness_blends_with_a_blur_of_the_inner_pixels(levels, factors):
    clips, exact = pair(levels)
    expected = []
    for one, factor in zip(exact, factors, strict=True):
        blurred = one.copy()
        for y in range(1, one.shape[2] - 1):
            for x in range(1, one.shape[3] - 1):
                blurred[..., y, x] = (one[..., y - 1 : y + 2, x - 1 : x + 2].sum((2, 3)) + 4 * one[..., y, x]) / 13
        expected.append(blended(one, blurred, factor) if min(one.shape[2:]) > 2 else one)
    equal(transform.sharpness(clips, factors), expected)


@settings(max_examples=60, deadline=None)
@given(levels=LEVELS, bits=st.integers(1, 8), threshold=st.integers(0, 256))
def test_posterize_keeps_bits_and_solarize_inverts_bright_values(levels, bits, threshold):
    clips, exact = pair(levels)
    steps = 2**bits
    kept = np.minimum(np.floor(np.float32(exact) * steps), steps - 1) / steps
    equal(
        transform.posterize(clips.clone(), [bits, 8]),
        [kept[0], np.minimum(np.floor(np.float32(exact[1]) * 256), 255) / 256],
    )
    # Between two levels, so that rounding decides nothing.
    limit = (threshold - 0.5) / 255
    equal(transform.solarize(clips, [limit] * 2), np.where(exact >= limit, 1 - exact, exact))


@settings(max_examples=60, deadline=None)
@given(levels=LEVELS)
def test_autocontrast_and_equalize_are_those_of_each_channel_of_each_frame(levels):
    def stretched(plane):
        low, high = int(plane.min()), int(plane.max())
        return plane / 255 if low == high else (plane.astype(float) - low) / (high - low)

    def flattened(plane):  # PIL.ImageOps.equalize, line by line
        histogram = np.bincount(plane.ravel(), minlength=256).tolist()
        present = [count for count in histogram if count]
        step = (sum(present) - present[-1]) // 255
        if len(present) <= 1 or not step:
            return plane / 255
        table, total = [], step // 2
        for count in histogram:
            table.append(min(255, total // step))
            total += count
        return np.array(table)[plane] / 255

    # 8 x 8 copies, because equalize leaves pictures of fewer than 256 pixels.
    levels = np.tile(levels, (1, 1, 8, 8))
    clips, _ = pair(levels)
    both = np.stack([levels, 255 - levels])
    planes = both.reshape(-1, *both.shape[-2:])
    equal(transform.autocontrast(clips.clone(), [0, 0]), np.stack(list(map(stretched, planes))).reshape(both.shape))
    equal(transform.equalize(clips, [0, 0]), np.stack(list(map(flattened, planes))).reshape(both.shape))


def inverse(motion, size, height, width):
    """The source of an output pixel, both relative to the top left corner, from the geometry of each motion."""
    angle = math.radians(size)

    def rotate(y, x):
        right, down = x - width / 2, y - height / 2
        return (
            height / 2 + math.sin(angle) * right + math.cos(angle) * down,
            width / 2 + math.cos(angle) * right - math.sin(angle) * down,
        )

    return {
        "rotate": rotate,
        "shear_x": lambda y, x: (y, x + size * y),
        "shear_y": lambda y, x: (y + size * x, x),
        "translate_x": lambda y, x: (y, x - int(size * width)),
        "translate_y": lambda y, x: (y - int(size * height), x),
    }[motion]


@pytest.mark.parametrize("size", [0.0, 0.3, -0.25, 20.0, -7.0])
@pytest.mark.parametrize("motion", ["rotate", "shear_x", "shear_y", "translate_x", "translate_y"])
def test_warp_samples_the_source_of_each_pixel(motion, size):
    size = size if motion == "rotate" else size / 30 if abs(size) > 1 else size
    height, width = 9, 12
    clips = torch.rand(2, 3, 2, height, width, generator=torch.Generator().manual_seed(3))
    source, expected = inverse(motion, size, height, width), np.zeros((3, 2, height, width))
    padded = np.pad(clips[0].double().numpy(), ((0, 0), (0, 0), (1, 1), (1, 1)))
    for row in range(height):
        for column in range(width):
            y, x = source(row + 0.5, column + 0.5)
            y, x = y - 0.5 + 1, x - 0.5 + 1  # index into the padded picture
            top, left = math.floor(y), math.floor(x)
            for r, c in ((top, left), (top, left + 1), (top + 1, left), (top + 1, left + 1)):
                if 0 <= r < height + 2 and 0 <= c < width + 2:
                    expected[..., row, column] += padded[..., r, c] * (1 - abs(y - r)) * (1 - abs(x - c))
    made = warp(clips, [(motion, size), ("rotate", 0.0)])
    np.testing.assert_allclose(made[0].numpy(), expected, atol=2e-5)
    np.testing.assert_allclose(made[1].numpy(), clips[1].numpy(), atol=2e-6)


def test_a_quarter_turn_is_counter_clockwise():
    clips = torch.rand(1, 3, 2, 8, 8)
    torch.testing.assert_close(warp(clips, [("rotate", 90.0)]), clips.rot90(1, (-2, -1)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kernel_size", [1, 3, 9])
def test_blur_is_a_gaussian_with_mirrored_borders(kernel_size):
    blur, sigma = GaussianBlur(kernel_size, (0.8, 0.8)), 0.8
    clips = torch.rand(3, 3, 2, 11, 13, generator=torch.Generator().manual_seed(1))
    reach = kernel_size // 2
    bell = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    kernel = bell / bell.sum()
    padded = np.pad(clips.double().numpy(), ((0, 0),) * 3 + ((reach, reach),) * 2, mode="reflect")
    for axis in (-2, -1):
        padded = np.apply_along_axis(np.convolve, axis, padded, kernel, mode="valid")
    weights = tuple(kernel[reach:].tolist())
    made = blur.apply(clips.clone(), [weights, (), weights])
    np.testing.assert_allclose(made[::2].numpy(), padded[::2], atol=1e-6)
    assert torch.equal(made[1], clips[1])


def test_blur_of_clips_that_are_too_small_is_refused():
    with pytest.raises(UsageError, match="does not fit clips of 9x4 pixels") as caught:
        GaussianBlur(9).apply(torch.zeros(1, 3, 2, 4, 9), [(1.0,) * 5])
    assert caught.value.hint


NUMBERS = {name: st.floats(0.1, 0.9) for name in OPERATIONS} | {
    "posterize": st.integers(4, 8),
    "warp": st.tuples(st.sampled_from(["rotate", "shear_x", "translate_y"]), st.floats(-0.3, 0.3)),
}
STEP = st.sampled_from(sorted(OPERATIONS)).flatmap(lambda name: st.tuples(st.just(name), NUMBERS[name]))


@settings(max_examples=60, deadline=None)
@given(programs=st.lists(st.lists(STEP, max_size=3), min_size=2, max_size=7), seed=st.integers(0, 2**32))
def test_a_clip_gets_the_same_bits_whichever_clips_it_shares_a_batch_with(programs, seed):
    shape = (len(programs), 3, 2, 17, 23)
    clips = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    together = run_programs(clips.clone(), programs)
    for row, program in enumerate(programs):
        assert torch.equal(run_programs(clips[row : row + 1].clone(), [program])[0], together[row])


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_bits_do_not_depend_on_threads_and_batch(name, threads):
    # A single picture, large enough that torch divides a sum over its pixels among threads.
    clips = torch.rand(5, 3, 1, 224, 225, generator=torch.Generator().manual_seed(0))
    program = [(name, {"warp": ("rotate", 9.0), "posterize": 6}.get(name, 0.7))]
    alone = [run_programs(clip[None].clone(), [program]) for clip in clips]
    torch.set_num_threads(2)
    assert torch.equal(run_programs(clips.clone(), [program] * 5), torch.cat(alone))
