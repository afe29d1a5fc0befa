"""Section `pixels`: the kernel from planes to batches is right, fast, and compiled a bounded number of times."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from bench.gpu.measuring import synchronize, timed
from bench.gpu.settings import NUM_FRAMES, Notes, Settings
from fastvid.decode.colours import ClipPlanes, Pixels
from fastvid.decode.pixels import clip_to_rgb, finish_planes
from fastvid.format.schema import Matrix, Range

_SHAPES = 40
_CROPS = 200
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MATRICES = (Matrix.SMPTE170M, Matrix.BT709, Matrix.BT2020_NCL)
# Keeps levels 0 to 255, which all three dtypes represent exactly.
_LEVELS = ((0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255))


def measure(settings: Settings, notes: Notes) -> None:
    """Compare with the double-precision reference, then measure the bandwidth and count the compiled kernels."""
    most = 0.0
    for number in range(_SHAPES // 8 if settings.fake else _SHAPES):
        most = max(most, _difference(settings, np.random.default_rng(number)))
        notes.put(most_levels=most, shapes=number + 1)
    notes.put(**_bandwidth(settings))
    notes.put(**_compiled(settings))


def _difference(settings: Settings, rng: np.random.Generator) -> float:
    """Return the largest difference in levels of two random clips, over dtypes and chroma strides."""
    height, width, out_height, out_width = (int(side) * 2 for side in rng.integers(4, 80, 4))
    size, most = (out_height, out_width), 0.0
    for interleaved in (False, True):
        clips = [_clip(rng, 2, height, width, interleaved=interleaved) for _ in range(2)]
        wanted = np.stack([clip_to_rgb(clip, size).numpy() for clip in clips]).astype(np.float32)
        for dtype in _DTYPES:
            on_device = _moved(clips, settings.device, interleaved=interleaved)
            found = finish_planes(on_device, size, Pixels(*_LEVELS, dtype=dtype)).float().cpu().numpy()
            most = max(most, float(np.abs(found - wanted).max()))
    return most


def _clip(rng: np.random.Generator, frames: int, height: int, width: int, *, interleaved: bool) -> ClipPlanes:
    y = torch.from_numpy(rng.integers(0, 256, (frames, height, width), dtype=np.uint8))
    chroma = torch.from_numpy(rng.integers(0, 256, (frames, height // 2, width // 2, 2), dtype=np.uint8))
    u, v = (chroma[..., 0], chroma[..., 1]) if interleaved else (chroma[..., 0].clone(), chroma[..., 1].clone())
    matrix, sample_range = _MATRICES[int(rng.integers(3))], (Range.LIMITED, Range.FULL)[int(rng.integers(2))]
    return ClipPlanes(y, u, v, bool(rng.integers(2)), matrix, sample_range)


def _moved(clips: list[ClipPlanes], device: torch.device, *, interleaved: bool) -> list[ClipPlanes]:
    """Copy clips into one storage on the device, as a loader's batch has them."""
    sizes = [clip.y.numel() * 3 // 2 for clip in clips]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    found = []
    for clip, part in zip(clips, buffer.split(sizes), strict=True):
        frames, height, width = clip.y.shape
        y, chroma = part[: clip.y.numel()].view(clip.y.shape), part[clip.y.numel() :]
        half = (frames, height // 2, width // 2)
        pair = chroma.view(*half, 2) if interleaved else chroma.view(2, *half).permute(1, 2, 3, 0)
        for target, source in ((y, clip.y), (pair[..., 0], clip.u), (pair[..., 1], clip.v)):
            target.copy_(source)
        found.append(ClipPlanes(y, pair[..., 0], pair[..., 1], clip.flip, clip.matrix, clip.range))
    return found


def _bandwidth(settings: Settings) -> dict[str, Any]:
    """Return bytes read plus written per second, beside a plain copy of as many bytes on the device."""
    clips, side = (2, 64) if settings.fake else (settings.batch, 224)
    size = NUM_FRAMES * side * side * 3 // 2
    buffer = torch.randint(0, 256, (clips * size,), dtype=torch.uint8).to(settings.device)
    planes = [ClipPlanes.packed(buffer[n * size :], NUM_FRAMES, side, side, flip=bool(n % 2)) for n in range(clips)]
    wanted = Pixels(dtype=torch.bfloat16)
    out = wanted.empty(clips, NUM_FRAMES, (side, side), settings.device)
    moved = buffer.nbytes + out.nbytes
    source = torch.empty(moved // 2, dtype=torch.uint8, device=settings.device)
    target = torch.empty_like(source)
    kernel = moved / timed(lambda: finish_planes(planes, (side, side), wanted, out=out), settings)
    copy = 2 * source.nbytes / timed(lambda: target.copy_(source), settings)
    rates = {"kernel_gb_per_s": round(kernel / 1e9, 2), "copy_gb_per_s": round(copy / 1e9, 2)}
    return rates | {"share_of_copy": round(kernel / copy, 3)}


def _compiled(settings: Settings) -> dict[str, Any]:
    """Return how many kernels random resized crops compile, and the seconds that the crops take in total."""
    names: list[str] = []
    if not settings.fake:
        import triton

        def note(**facts: Any) -> None:
            names.append(str(facts.get("repr", "")))

        triton.knobs.runtime.jit_post_compile_hook = note
    rng, begun = np.random.default_rng(0), time.perf_counter()
    for _ in range(_CROPS // 20 if settings.fake else _CROPS):
        height, width = (int(side) * 2 for side in rng.integers(28, 170, 2))
        clips = [_clip(rng, 1, height, width, interleaved=False)]
        finish_planes(_moved(clips, settings.device, interleaved=False), (112, 112), Pixels(dtype=torch.bfloat16))
    synchronize(settings.device)
    return {"kernels": len(names), "crops_seconds": round(time.perf_counter() - begun, 1)}
