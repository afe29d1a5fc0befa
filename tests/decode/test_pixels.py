"""pixels.py compared with NumPy arithmetic written from the standards, and with PyTorch's own resize."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from fastvid.decode import pixels, pixels_fused
from fastvid.decode.colours import ClipPlanes, Pixels
from fastvid.decode.pixels import clip_to_rgb, finish_planes, finish_rgb, resize, yuv_to_rgb
from fastvid.errors import UsageError
from fastvid.format.schema import Matrix, Range
from tests import fake_cuda

# Kr and Kb as printed in ITU-R BT.601, BT.709, BT.2020 and ITU-T H.273 table 4.
COEFFICIENTS = {
    Matrix.BT709: (0.2126, 0.0722),
    Matrix.UNKNOWN: (0.299, 0.114),
    Matrix.FCC: (0.30, 0.11),
    Matrix.BT470BG: (0.299, 0.114),
    Matrix.SMPTE170M: (0.299, 0.114),
    Matrix.SMPTE240M: (0.212, 0.087),
    Matrix.BT2020_NCL: (0.2627, 0.0593),
}


def planes(frames=3, height=8, width=12, seed=0):
    rng = np.random.default_rng(seed)
    half = (frames, height // 2, width // 2)
    return (
        torch.from_numpy(rng.integers(0, 256, (frames, height, width), dtype=np.uint8)),
        torch.from_numpy(rng.integers(0, 256, half, dtype=np.uint8)),
        torch.from_numpy(rng.integers(0, 256, half, dtype=np.uint8)),
    )


def clip(seed=0, **options):
    flip = options.pop("flip", False)
    return ClipPlanes(*planes(seed=seed, **options), flip=flip)


def forwards(rgb: np.ndarray, kr: float, kb: float, full: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Convert R'G'B' in 0..1 to Y'CbCr levels, H.273 equations (1) to (12)."""
    r, g, b = rgb
    luma = kr * r + (1 - kr - kb) * g + kb * b
    blue, red = (b - luma) / (2 * (1 - kb)), (r - luma) / (2 * (1 - kr))
    if full:
        return 255 * luma, 255 * blue + 128, 255 * red + 128
    return 219 * luma + 16, 224 * blue + 128, 224 * red + 128


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("matrix", COEFFICIENTS)
def test_conversion_inverts_the_equations_of_the_standard(matrix, full):
    # Colours on a grid, encoded by the standard's forward equations; rounding to levels loses at most 2 levels of RGB.
    steps = np.linspace(0, 1, 6)
    rgb = np.stack(np.meshgrid(steps, steps, steps)).reshape(3, -1)
    levels = [np.round(level).clip(0, 255).astype(np.uint8) for level in forwards(rgb, *COEFFICIENTS[matrix], full)]
    y, u, v = (torch.from_numpy(level) for level in levels)
    y = y.view(1, 1, -1).repeat(1, 2, 1).repeat_interleave(2, -1)
    got = yuv_to_rgb(
        y, u.view(1, 1, -1), v.view(1, 1, -1), matrix=matrix, sample_range=Range.FULL if full else Range.LIMITED
    )
    assert got.shape == (3, 1, 2, 432)
    assert (got[:, 0, :, ::2] == got[:, 0, :, 1::2]).all()
    assert np.abs(got[:, 0, 0, ::2].numpy() - 255 * rgb).max() < 2.1


def test_black_white_and_grey_convert_exactly():
    grey = torch.full((1, 1, 1), 128, dtype=torch.uint8)
    for level, expected in ((16, 0), (235, 255), (126, 128), (0, 0), (255, 255)):
        y = torch.full((1, 2, 2), level, dtype=torch.uint8)
        assert (yuv_to_rgb(y, grey, grey).round() == expected).all()


def test_unknown_range_and_matrix_mean_limited_601():
    y, u, v = planes()
    expected = yuv_to_rgb(y, u, v, matrix=Matrix.SMPTE170M, sample_range=Range.LIMITED)
    assert torch.equal(yuv_to_rgb(y, u, v, matrix=Matrix.UNKNOWN, sample_range=Range.UNKNOWN), expected)


def test_float32_matches_the_double_precision_reference():
    source = planes(frames=16, height=128, width=128)
    for matrix in COEFFICIENTS:
        single = yuv_to_rgb(*source, matrix=matrix).round()
        double = yuv_to_rgb(*source, matrix=matrix, dtype=torch.float64).round()
        difference = (single - double).abs()
        # Only values within float32's error of a half may round to the other side.
        assert difference.max() <= 1
        assert difference.mean() < 1e-4


def test_resize_matches_antialiased_bilinear_of_torch():
    rgb = torch.rand(3, 2, 20, 30) * 255
    expected = functional.interpolate(rgb, (9, 14), mode="bilinear", antialias=True)
    assert torch.equal(resize(rgb, (9, 14)), expected)
    assert resize(rgb, (20, 30)) is rgb


@pytest.mark.parametrize("layout", ["BCTHW", "BTCHW"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [(8, 12), (5, 7), (16, 16)])
def test_planes_and_rgb_finish_to_the_same_batch(layout, dtype, size):
    pixels = Pixels(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), dtype=dtype, layout=layout)
    clips = [clip(seed=1), clip(seed=2, flip=True), clip(seed=3), clip(seed=4, height=10, width=8)]
    rgb = torch.stack([clip_to_rgb(c, size) for c in clips])
    from_planes = finish_planes(clips, size, pixels)
    from_rgb = finish_rgb(rgb, pixels)
    assert from_planes.shape == (4, 3, 3, *size)
    assert from_planes.dtype == from_rgb.dtype == dtype
    assert from_planes.is_contiguous()
    # One level of RGB may round differently; in units of the output that is 1 / (255 * 0.2).
    difference = (from_planes.double() - from_rgb.double()).abs()
    coarse = torch.finfo(dtype).eps * 4
    assert difference.max() <= 1 / 51 + coarse
    assert (difference > coarse).float().mean() < 0.01


def test_normalisation_follows_the_formula():
    rgb = torch.arange(256, dtype=torch.uint8).repeat(3).view(1, 3, 1, 16, 16)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    got = finish_rgb(rgb, Pixels(mean, std))
    axes = (1, 3, 1, 1, 1)
    expected = (rgb.double() / 255 - torch.tensor(mean).double().view(axes)) / torch.tensor(std).double().view(axes)
    assert (got.double() - expected).abs().max() < 1e-6


def test_flip_mirrors_left_and_right():
    plain, flipped = clip(seed=5), clip(seed=5, flip=True)
    for size in ((8, 12), (6, 9)):
        assert torch.equal(clip_to_rgb(flipped, size), clip_to_rgb(plain, size).flip(-1))
        pixels = Pixels()
        both = finish_planes([plain, flipped], size, pixels)
        assert torch.equal(both[1], both[0].flip(-1))


def test_batch_equals_its_clips():
    clips = [
        clip(seed=1),
        clip(seed=2, height=6, width=6),
        ClipPlanes(*planes(seed=3), matrix=Matrix.BT709),
        ClipPlanes(*planes(seed=4), range=Range.FULL),
        clip(seed=6),
    ]
    batch = finish_planes(clips, (8, 8), Pixels())
    for number, one in enumerate(clips):
        assert torch.equal(batch[number], finish_planes([one], (8, 8), Pixels())[0])


@pytest.mark.parametrize("layout", ["BCTHW", "BTCHW"])
def test_finish_writes_and_returns_out(layout):
    pixels = Pixels(layout=layout)
    out = pixels.empty(2, 3, (8, 12), "cpu").fill_(99)
    assert finish_planes([clip(seed=1), clip(seed=2)], (8, 12), pixels, out=out) is out
    assert (out != 99).all()
    rgb = torch.zeros(2, 3, 3, 8, 12, dtype=torch.uint8)
    assert finish_rgb(rgb, pixels, out=out) is out
    assert (out < 0).all()


@pytest.mark.parametrize(
    "options", [{"std": (0.2, 0.0, 0.2)}, {"mean": (0.5, 0.5)}, {"dtype": torch.uint8}, {"layout": "CTHW"}]
)
def test_invalid_pixel_settings_are_rejected(options):
    with pytest.raises(UsageError):
        Pixels(**options)


def test_chroma_that_alternates_as_in_nv12_is_read():
    plain = clip(seed=3)
    uv = torch.stack((plain.u, plain.v), -1)
    strided = replace(plain, u=uv[..., 0], v=uv[..., 1])
    assert torch.equal(finish_planes([strided], (6, 9), Pixels()), finish_planes([plain], (6, 9), Pixels()))


def test_output_may_be_channels_last():
    wanted = finish_planes([clip(seed=1), clip(seed=2)], (8, 12), Pixels())
    out = torch.full_like(wanted, float("nan")).contiguous(memory_format=torch.channels_last_3d)
    assert finish_planes([clip(seed=1), clip(seed=2)], (8, 12), Pixels(), out=out) is out
    assert torch.equal(out, wanted)


@pytest.fixture
def on_gpu(monkeypatch):
    """Move clips to a fake GPU, where Triton finds no driver."""
    cuda = fake_cuda.install(monkeypatch)
    pixels.kernel_problem.cache_clear()
    pixels._fused.cache_clear()
    yield lambda one: replace(one, **{name: cuda.upload(getattr(one, name), 1, False) for name in ("y", "u", "v")})
    pixels.kernel_problem.cache_clear()
    pixels._fused.cache_clear()


def test_kernel_that_does_not_compile_is_replaced_with_one_warning(on_gpu, caplog):
    batches = [finish_planes([on_gpu(clip(seed=1))], (8, 12), Pixels()) for _ in range(3)]
    assert torch.equal(batches[2].cpu(), finish_planes([clip(seed=1)], (8, 12), Pixels()))
    (warning,) = [record.getMessage() for record in caplog.records if record.name == pixels.__name__]
    assert warning.startswith("the fused kernel does not compile on cuda:1: ")


@pytest.mark.parametrize("wrong", [0.0, 20.0, float("nan")])
def test_kernel_is_used_only_if_its_pixels_are_right(on_gpu, caplog, monkeypatch, wrong):
    used = []

    def fused(clips, size, form, out):
        used.append(len(clips))
        return pixels._finish_plain(clips, size, form, out).add_(wrong)

    monkeypatch.setattr(pixels_fused, "finish_planes_fused", fused)
    moved = [on_gpu(clip(seed=seed)) for seed in (1, 2)]
    found = finish_planes(moved, (8, 12), Pixels())
    assert torch.equal(found.cpu(), finish_planes([clip(seed=1), clip(seed=2)], (8, 12), Pixels()))
    assert used == ([1] if wrong else [1, 2])
    assert [record.name for record in caplog.records].count(pixels.__name__) == (1 if wrong else 0)
