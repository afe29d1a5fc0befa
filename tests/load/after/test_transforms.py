"""Transforms of after=: operations on colours and places, what the built-in ones draw, and callables."""

import colorsys
import functools
import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn

from fastvid.errors import UsageError
from fastvid.load.after import transform
from fastvid.load.after.augment import ColorJitter, Erasing, GaussianBlur, Grayscale, RandAugment
from fastvid.load.after.chain import CallableTransform, TransformChain
from fastvid.load.after.transform import OPERATIONS, TransformDraws, run_programs, warp
from fastvid.load.order.draws import Draws

MANY = 4000


def drawn(transform, count=MANY, **place):
    return [transform.draw(TransformDraws(Draws(7, 0, position), **place)) for position in range(count)]


def uniform(values, low, high):
    """Check that values fill a range evenly: the largest gap to a uniform distribution is that of chance."""
    places = (np.sort(values) - low) / (high - low)
    gap = np.abs(places - (np.arange(len(places)) + 0.5) / len(places)).max()
    assert places.min() >= 0
    assert places.max() <= 1
    assert gap < 2.2 / math.sqrt(len(places))  # Kolmogorov-Smirnov: exceeded by chance once in 8,000


def share(count, p, of=MANY):
    """Check a number of successes: within four standard deviations."""
    assert abs(count - p * of) <= 4 * math.sqrt(p * (1 - p) * of) + 1e-9


def test_color_jitter_draws_uniform_factors_in_any_order():
    jitter = ColorJitter(brightness=0.4, contrast=(0.5, 2.0), saturation=1.5, hue=0.1, p=0.8)
    programs = [program for program in drawn(jitter) if program]
    share(len(programs), 0.8)
    values = {name: [dict(program)[name] for program in programs] for name in dict(programs[0])}
    uniform(values["brightness"], 0.6, 1.4)
    uniform(values["contrast"], 0.5, 2.0)
    uniform(values["saturation"], 0.0, 2.5)
    uniform(values["hue"], -0.1, 0.1)
    orders = Counter(tuple(name for name, _ in program) for program in programs)
    assert len(orders) == 24
    for count in orders.values():
        share(count, 1 / 24, len(programs))
    correlation = np.corrcoef(np.array([values[name] for name in sorted(values)])) - np.eye(4)
    assert np.abs(correlation).max() < 5 / math.sqrt(len(programs))


def test_settings_that_change_nothing_are_not_drawn():
    assert {name for program in drawn(ColorJitter(brightness=0.2), 50) for name, _ in program} == {"brightness"}
    assert not any(drawn(ColorJitter(), 50))
    assert not any(drawn(ColorJitter(0.5, p=0), 50))


def test_rand_augment_draws_each_of_14_operations_with_either_sign():
    augment = RandAugment(num_ops=3, magnitude=10)
    programs = drawn(augment)
    steps = [step for program in programs for step in program]
    names = Counter(value[0] if name == "warp" else name for name, value in steps)
    names["identity"] = 3 * MANY - len(steps)
    assert len(names) == 14
    for count in names.values():
        share(count, 1 / 14, 3 * MANY)
    # A third of the largest values of torchvision's table: 10 of 0 to 30.
    assert {abs(round(v[1], 6)) for n, v in steps if n == "warp" and v[0] == "shear_x"} == {0.1}
    assert {round(v[1], 6) for n, v in steps if n == "warp" and v[0] == "rotate"} == {10.0, -10.0}
    assert {round(v[1], 6) for n, v in steps if n == "warp" and v[0] == "translate_y"} == {0.151057, -0.151057}
    assert {round(v, 6) for n, v in steps if n == "contrast"} == {0.7, 1.3}
    assert {v for n, v in steps if n == "posterize"} == {7.0}  # 8 - round(10 / 7.5)
    assert {round(v, 6) for n, v in steps if n == "solarize"} == {0.666667}
    signs = [v[1] > 0 for n, v in steps if n == "warp"]
    share(sum(signs), 0.5, len(signs))
    assert not any(name == "warp" for program in drawn(RandAugment(geometric=False)) for name, _ in program)


def test_erasing_draws_areas_ratios_and_places():
    # Every rectangle of these areas and ratios fits, so none is drawn again.
    erasing, height, width = Erasing(p=0.25, scale=(0.02, 0.25)), 1000, 1000
    numbers = [one for one in drawn(erasing) if one]
    share(len(numbers), 0.25)
    holes = [erasing.hole(height, width, one) for one in numbers]
    assert all(hole is not None for hole in holes)
    uniform([h * w / (height * width) for _, _, h, w in holes], 0.0198, 0.2502)
    uniform([y / (height - h) for y, _, h, _ in holes], 0, 1)
    uniform([x / (width - w) for _, x, _, w in holes], 0, 1)
    uniform([math.log(h / w) for _, _, h, w in holes], math.log(0.297), math.log(3.33))


@settings(max_examples=100, deadline=None)
@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    low=st.floats(0.01, 1),
    ratio=st.tuples(st.floats(0.1, 1), st.floats(1, 10)),
    position=st.integers(0, 2**40),
)
def test_erasing_erases_one_rectangle_inside_every_picture(height, width, low, ratio, position):
    erasing = Erasing(1.0, (low, 1.0), ratio, value=(0.25, 0.5, 0.75))
    numbers = erasing.draw(TransformDraws(Draws(1, 2, position)))
    clips = erasing.apply(torch.ones(2, 3, 3, height, width), [numbers, []])
    assert torch.equal(clips[1], torch.ones(3, 3, height, width))
    changed = clips[0] != 1
    assert torch.equal(changed, changed[:1, :1].expand_as(changed))  # the same in all frames and channels
    hole = erasing.hole(height, width, numbers)
    if hole is None:
        assert not changed.any()
        return
    y, x, h, w = hole
    assert 0 < h < height
    assert 0 < w < width
    region = clips[0][..., y : y + h, x : x + w]
    assert region.shape[2:] == (h, w)
    assert int(changed[0, 0].sum()) == h * w
    assert torch.equal(region.amax((1, 2, 3)), torch.tensor([0.25, 0.5, 0.75]))


def test_blur_and_grayscale_happen_as_often_as_asked():
    blurs = [weights for weights in drawn(GaussianBlur(5, (0.5, 1.5), p=0.3)) if weights]
    share(len(blurs), 0.3)
    # The first weight ratio of a Gaussian gives its width back.
    uniform([1 / math.sqrt(2 * math.log(weights[0] / weights[1])) for weights in blurs], 0.5, 1.5)
    assert all(len(weights) == 3 and weights[0] + 2 * sum(weights[1:]) == pytest.approx(1) for weights in blurs)
    share(sum(bool(program) for program in drawn(Grayscale(0.2))), 0.2)
    clips = Grayscale(1).apply(torch.rand(1, 3, 2, 4, 4), drawn(Grayscale(1), 1))
    assert torch.equal(clips[:, :1].expand_as(clips), clips)


TRANSFORMS = [
    ColorJitter(0.5, 0.5, 0.5, 0.3),
    RandAugment(4, 20),
    Erasing(1.0, value=0.5),
    GaussianBlur(5, (0.1, 3.0)),
    Grayscale(0.5),
]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda one: type(one).__name__)
def test_frames_of_a_clip_get_the_same_change_and_clips_different_ones(transform):
    picture = torch.rand(3, 1, 24, 32, generator=torch.Generator().manual_seed(5))
    clips = picture.expand(20, 3, 4, 24, 32).clone()
    made = transform.apply(clips, drawn(transform, 20))
    assert torch.equal(made, made[:, :, :1].expand_as(made))
    assert made.min() >= 0
    assert made.max() <= 1
    kinds = len({clip.numpy().tobytes() for clip in made})
    assert kinds == 2 if isinstance(transform, Grayscale) else kinds > 12


def test_numbers_depend_on_everything_that_names_a_clip():
    base = {"seed": 1, "epoch": 2, "position": 3, "view": 0, "index": 0}

    def numbers(seed, epoch, position, view, index):
        draws = TransformDraws(Draws(seed, epoch, position), view, index)
        assert draws.uniform(5) == draws.uniform(2) + draws.uniform(3, first=2)
        return (draws.seed, *draws.uniform(4))

    seen = [numbers(**base), *(numbers(**base | {name: value + 1}) for name, value in base.items())]
    seen.append(numbers(**base | {"index": 1, "view": 1}))
    assert len({number for one in seen for number in one}) == 5 * len(seen)
    # Saved states are valid only while these stay as they are.
    assert numbers(**base)[0] == 10972957942658262303
    assert numbers(1, 2, 3, 1, 2)[1] == 0.09590495918531095


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ColorJitter(brightness=-0.1), "brightness is -0.1"),
        (lambda: ColorJitter(contrast=(2, 1)), "contrast is"),
        (lambda: ColorJitter(saturation=(1, 2, 3)), "saturation is"),
        (lambda: ColorJitter(brightness=math.inf), "brightness is inf"),
        (lambda: ColorJitter(hue=0.6), "hue is 0.6"),
        (lambda: ColorJitter(hue=(-0.6, 0)), "hue is"),
        (lambda: ColorJitter(None), "brightness is None"),
        (lambda: ColorJitter(contrast=[1, "a"]), "contrast is"),
        (lambda: ColorJitter(p=float), "p is <class 'float'>"),
        (lambda: ColorJitter(p=1.1), "p is 1.1"),
        (lambda: Grayscale(-1), "p is -1"),
        (lambda: Erasing(p=2), "p is 2"),
        (lambda: Erasing(scale=(0, 0.3)), "scale is"),
        (lambda: Erasing(scale=(0.1, 1.3)), "scale is"),
        (lambda: Erasing(ratio=(2, 1)), "ratio is"),
        (lambda: Erasing(value=255), "value is 255"),
        (lambda: Erasing(value=(0, 1)), "value is"),
        (lambda: RandAugment(num_ops=0), "num_ops is 0"),
        (lambda: RandAugment(magnitude=31), "magnitude is 31"),
        (lambda: RandAugment(magnitude=2.5), "magnitude is 2.5"),
        (lambda: RandAugment(num_magnitude_bins=1), "num_magnitude_bins is 1"),
        (lambda: GaussianBlur(4), "kernel_size is 4"),
        (lambda: GaussianBlur(3, (0, 1)), "sigma is"),
        (lambda: GaussianBlur(9).apply(torch.zeros(1, 3, 2, 4, 9), [(1.0,) * 5]), "not fit clips of 9x4 pixels"),
        (lambda: TransformChain.of(ColorJitter(), ("rgb",)), "after is ColorJitter"),
        (lambda: TransformChain.of([3], ("rgb",)), "after contains 3"),
        (lambda: TransformChain.of([Grayscale()], ("flow",)), "after= transforms RGB"),
        (lambda: TransformChain.of([Grayscale(), RandAugment()], ("rgb", "flow")), "moves pixels"),
    ],
)
def test_wrong_settings_are_refused_by_name(make, message):
    with pytest.raises(UsageError, match=message) as caught:
        make()
    assert caught.value.hint or "expected at least" in str(caught.value) or "expected an integer" in str(caught.value)


def test_equal_settings_have_equal_reprs():
    assert repr(ColorJitter(np.float32(0.5), hue=0.1)) == repr(ColorJitter((0.5, 1.5), hue=(-0.1, 0.1)))
    assert repr(Erasing(value=1)) == repr(Erasing(value=(1.0, 1, 1), scale=[0.02, 0.33]))
    assert TransformChain.of([], ("rgb",)) is None
    assert TransformChain.of([RandAugment(geometric=False)], ("rgb", "flow"))


class Jitter(nn.Module):
    """A transform in the style of torchvision v2: one random factor for all leading dimensions."""

    def __init__(self, low=0.5):
        super().__init__()
        self.low = low
        self.calls = []

    def extra_repr(self):
        return f"low={self.low}"

    def forward(self, clip):
        self.calls.append((tuple(clip.shape), clip.dtype, clip.is_contiguous(), self.training))
        return clip * (self.low + (1 - self.low) * torch.rand(()))


def add_noise(clip):
    return clip + 0.1 * torch.randn_like(clip) + 0.01 * random.random() + 0.01 * float(np.random.rand())


def chain(*after):
    return TransformChain.of(after, ("rgb",))


def clips(count=5, height=8):
    return torch.rand(count, 3, 4, height, 6, generator=torch.Generator().manual_seed(2))


def places(first, count=5):
    return [(Draws(3, 1, position), 0) for position in range(first, first + count)]


def test_a_callable_gets_one_clip_of_frames_at_a_time():
    jitter = Jitter().eval()
    source = clips()
    made = chain(jitter).apply(source.clone(), places(0))
    assert jitter.calls == [((4, 3, 8, 6), torch.float32, True, False)] * 5
    factors = [float(one) for one in (made / source)[:, 0, 0, 0, 0]]
    assert len(set(factors)) == 5
    for clip, before, factor in zip(made, source, factors, strict=True):
        torch.testing.assert_close(clip, before * factor)


@pytest.mark.parametrize("function", [Jitter(), add_noise], ids=["torch", "torch, numpy and random"])
def test_results_depend_on_the_place_of_the_clip_alone(function):
    together = chain(function).apply(clips(), places(0))
    torch.manual_seed(8)
    random.seed(8)
    np.random.seed(8)
    for row in reversed(range(5)):
        alone = chain(function).apply(clips()[row : row + 1], places(row, 1))
        assert torch.equal(alone[0], together[row])
    # Another place in the list is another stream of numbers.
    assert not torch.equal(chain(Grayscale(0), function).apply(clips(), places(0)), together)


def test_global_generators_stay_as_they_are_even_after_an_error():
    def broken(clip):
        add_noise(clip)
        raise ValueError("no")

    def numbers():
        return torch.rand(3).tolist(), random.random(), np.random.rand(2).tolist()

    def seed():
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    seed()
    expected = numbers()
    seed()
    chain(add_noise).apply(clips(), places(0))
    with pytest.raises(ValueError, match="no") as caught:
        chain(broken).apply(clips(), places(0))
    assert numbers() == expected
    assert any("broken" in note and "[4, 3, 8, 6]" in note for note in caught.value.__notes__)


def test_a_callable_may_resize_all_clips_alike_and_reuse_its_memory():
    memory = torch.empty(4, 3, 4, 3, dtype=torch.float64)

    def halve(clip):
        return memory.copy_(clip[..., ::2, ::2])

    made = chain(halve).apply(clips(), places(0))
    assert made.dtype is torch.float32
    assert torch.equal(made, clips()[..., ::2, ::2])


def test_results_carry_no_gradients():
    layer = nn.Conv2d(3, 3, 3, padding=1)
    assert not chain(layer).apply(clips(), places(0)).requires_grad


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda clip: None, "returned NoneType, expected a tensor"),
        (lambda clip: (clip, 0), "returned tuple"),
        (lambda clip: (clip * 255).to(torch.uint8), r"returned torch.uint8 \[4, 3, 8, 6\]"),
        (lambda clip: clip[:2], r"returned torch.float32 \[2, 3, 8, 6\]"),
        (lambda clip: clip[:, :1], r"\[4, 1, 8, 6\]"),
        (lambda clip: clip[None], r"\[1, 4, 3, 8, 6\]"),
        (lambda clip: clip[..., :0], r"\[4, 3, 8, 0\]"),
        (lambda clip: clip[..., : 2 + int(3 * torch.rand(()))], "returned clips of .x8 pixels and .x8 pixels"),
    ],
)
def test_a_wrong_result_is_an_error_that_names_the_transform(function, message):
    with pytest.raises(UsageError, match=message) as caught:
        chain(function).apply(clips(), places(0))
    assert f"the transform {__name__}.<lambda>" in str(caught.value)
    assert caught.value.hint


def test_the_fingerprint_of_a_callable_has_its_name_and_settings_but_no_address():
    assert repr(CallableTransform(add_noise)) == f"{__name__}.add_noise: <function add_noise>"
    assert repr(CallableTransform(Jitter(0.25))) == f"{__name__}.Jitter: Jitter(low=0.25)"
    both = CallableTransform(nn.Sequential(Jitter(0.25), Jitter(0.5)))
    assert "\n" not in repr(both)
    partial = CallableTransform(functools.partial(add_noise, scale=2))
    assert repr(partial) == "functools.partial: functools.partial(<function add_noise>, scale=2)"
    method = f"{__name__}.Jitter.forward: <bound method Jitter.forward of Jitter(low=0.5)>"
    assert repr(CallableTransform(Jitter().forward)) == method


def test_the_fingerprint_stays_when_calls_change_the_repr():
    class Counting:
        calls = 0

        def __call__(self, clip):
            self.calls += 1
            return clip

        def __repr__(self):
            return f"Counting({self.calls})"

    one = chain(Counting())
    before = repr(one)
    one.apply(clips(), places(0))
    assert repr(one) == before
    assert "Counting(0)" in before


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
    all_bits = np.minimum(np.floor(np.float32(exact[1]) * 256), 255) / 256
    equal(transform.posterize(clips.clone(), [bits, 8]), [kept[0], all_bits])
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
