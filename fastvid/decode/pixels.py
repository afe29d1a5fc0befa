"""Convert YUV planes or RGB to batches on any device: convert, resize, flip, normalise and lay out.

This file is the colour reference of fastvid: each chroma sample is repeated for its pixels, coefficients are those of
the standards, unrounded RGB is resized with an antialiased bilinear filter, and values are rounded once, to integer
levels 0 to 255, then normalised. Every back-end documents its difference from it.

Shape letters: B clips, T frames, h and w crop, H and W output.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fastvid.decode.colours import ClipPlanes, Pixels, conversion
from fastvid.format.schema import Matrix, Range

_log = logging.getLogger(__name__)


def yuv_to_rgb(
    y: Tensor,
    u: Tensor,
    v: Tensor,
    *,
    matrix: Matrix = Matrix.SMPTE170M,
    sample_range: Range = Range.LIMITED,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Convert 4:2:0 planes to RGB; each chroma sample is repeated for its four pixels.

    `y`: uint8 [..., T, h, w], h and w even. `u`: uint8 [..., T, h/2, w/2]. `v`: uint8 [..., T, h/2, w/2].
    `sample_range`: range of the samples; unknown is treated as limited. Returns RGB [..., 3, T, h, w], 0 to 255, not
    rounded.
    """
    black, luma_scale, red_v, green_u, green_v, blue_u = conversion(matrix, sample_range)
    *lead, height, width = y.shape
    blue, red = u.to(dtype) - 128, v.to(dtype) - 128
    luma = ((y.to(dtype) - black) * luma_scale).view(*lead, height // 2, 2, width // 2, 2)
    rgb = torch.empty((*lead[:-1], 3, lead[-1], height, width), dtype=dtype, device=y.device)
    shares = (red_v * red, green_u * blue + green_v * red, blue_u * blue)
    for channel, share in enumerate(shares):
        # One chroma sample is broadcast over two rows and two columns.
        target = rgb.select(-4, channel).view(luma.shape)
        torch.add(luma, share[..., :, None, :, None], out=target)
    return rgb.clamp_(0, 255)


def resize(rgb: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize floating-point pictures [..., h, w] to [..., H, W], antialiased bilinear; a no-op for the same size."""
    if tuple(rgb.shape[-2:]) == size:
        return rgb
    pictures = rgb.reshape(-1, 1, *rgb.shape[-2:])
    resized = functional.interpolate(pictures, size, mode="bilinear", antialias=True, align_corners=False)
    return resized.view(*rgb.shape[:-2], *size)


def clip_to_rgb(clip: ClipPlanes, size: tuple[int, int]) -> Tensor:
    """Convert, resize, round and flip a clip in double precision: the reference, uint8 [3, T, H, W]."""
    rgb = yuv_to_rgb(clip.y, clip.u, clip.v, matrix=clip.matrix, sample_range=clip.range, dtype=torch.float64)
    rgb = resize(rgb, size).round_().to(torch.uint8)
    return rgb.flip(-1) if clip.flip else rgb


def finish_planes(
    clips: Sequence[ClipPlanes], size: tuple[int, int], pixels: Pixels, *, out: Tensor | None = None
) -> Tensor:
    """Convert decoded planes to a batch. Clips with the same crop size are converted together.

    `clips`: all with T frames, on one device. Chroma may be strided by 2, as in views of NV12. `pixels`: the pixel
    format of the batch. Returns the batch [B, 3, T, H, W], or [B, T, 3, H, W] by `pixels.layout`, of
    `pixels.dtype`.
    """
    device = clips[0].y.device
    if out is None:
        out = pixels.empty(len(clips), len(clips[0].y), size, device)
    fused = _fused(device) if device.type == "cuda" else None
    if fused is not None and fused.fits(clips):
        done: Tensor = fused.finish_planes_fused(clips, size, pixels, out)
        return done
    return _finish_plain(clips, size, pixels, out)


def _finish_plain(clips: Sequence[ClipPlanes], size: tuple[int, int], pixels: Pixels, out: Tensor) -> Tensor:
    target = _channels_first(out, pixels)
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, clip in enumerate(clips):
        groups.setdefault((clip.y.shape, clip.flip, clip.matrix, clip.range), []).append(number)
    for members in groups.values():
        first = clips[members[0]]
        planes = [torch.stack([getattr(clips[member], name) for member in members]) for name in ("y", "u", "v")]
        rgb = resize(yuv_to_rgb(*planes, matrix=first.matrix, sample_range=first.range), size).round_()
        if first.flip:
            rgb = rgb.flip(-1)
        for channel, (scale, bias) in enumerate(pixels.channels()):
            rgb[:, channel].mul_(scale).add_(bias)
        if len(members) == len(clips):
            target.copy_(rgb)
        else:
            for row, member in enumerate(members):
                target[member].copy_(rgb[row])
    return out


def finish_rgb(rgb: Tensor, pixels: Pixels, *, out: Tensor | None = None) -> Tensor:
    """Normalise finished uint8 RGB and lay it out as a batch.

    `rgb`: uint8 [B, 3, T, H, W], cropped, resized and flipped. `pixels`: the pixel format of the batch. Returns the
    batch [B, 3, T, H, W], or [B, T, 3, H, W] by `pixels.layout`, of `pixels.dtype`.
    """
    if out is None:
        out = pixels.empty(rgb.shape[0], rgb.shape[2], (rgb.shape[3], rgb.shape[4]), rgb.device)
    target = _channels_first(out, pixels)
    channels = pixels.channels()
    # bias + scale * level in one pass per channel and clip, which fits in the cache, unlike the passes of
    # (rgb.float() / 255 - mean) / std.
    # The bias is created on the device: copied there from the host, the host would wait for the copy.
    bias = [torch.full((), bias, dtype=torch.float32, device=rgb.device) for _, bias in channels]
    for source, clip in zip(rgb, target, strict=True):
        for channel, (scale, _) in enumerate(channels):
            torch.add(bias[channel], source[channel], alpha=scale, out=clip[channel])
    return out


@cache
def kernel_problem(device: torch.device) -> str | None:
    """Return None if the one-pass kernel works on a GPU, else one sentence that says why PyTorch is used instead.

    Compiles the kernel and compares one clip with plain PyTorch, which takes seconds, so the result is cached.
    """
    try:
        from fastvid.decode import pixels_fused

        frames, pixels = 2, Pixels()
        ramp = torch.arange(frames * 10 * 14 * 3 // 2, device=device, dtype=torch.float32)
        clip = ClipPlanes.packed((ramp % 251).to(torch.uint8), frames, 10, 14)
        plain, fused = (pixels.empty(1, frames, (8, 8), device).fill_(float("nan")) for _ in range(2))
        _finish_plain([clip], (8, 8), pixels, plain)
        pixels_fused.finish_planes_fused([clip], (8, 8), pixels, fused)
        levels = float(((plain - fused).abs().amax() * 255 * max(pixels.std)).cpu())
    except Exception as error:  # noqa: BLE001 - Triton and the compiler that it starts may raise any exception
        lines = str(error).strip().splitlines() or [""]
        return f"the fused kernel does not compile on {device}: {type(error).__name__}: {lines[0]}"
    # Another order of summation may round to the next level. NaN compares false.
    return None if levels < 1.5 else f"the fused kernel differs from PyTorch by {levels:.1f} levels on {device}"


@cache
def _fused(device: torch.device) -> Any:
    """Return the module of the one-pass kernel if it works on the device; else warn once and return None."""
    problem = kernel_problem(device)
    if problem is not None:
        _log.warning("%s; batches are converted by plain PyTorch, which is slower", problem)
        return None
    from fastvid.decode import pixels_fused

    return pixels_fused


def _channels_first(out: Tensor, pixels: Pixels) -> Tensor:
    return out if pixels.layout == "BCTHW" else out.transpose(1, 2)
