"""`fastvid.decode.pixels.finish_planes` as one Triton kernel for a whole batch.

Each thread computes one output pixel: it reads its luma and chroma samples (when resizing, all under the filter),
converts, clamps, filters, rounds, mirrors, normalises and writes three values. No intermediate result goes to memory:
per pixel 1.5 bytes are read and 3 values written, while plain PyTorch moves about 100 bytes.

Filter weights are those of PyTorch's antialiased bilinear resize (``aten/src/ATen/native/cuda/UpSample.cuh``), computed
on the fly.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastvid.decode.colours import ClipPlanes, Pixels, conversion

_BLOCK: Final = 256


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _weight(position: Any, centre: Any, scale: Any) -> Any:
    """Return the unnormalised triangle filter weight of a source sample."""
    distance = tl.abs((position + 0.5 - centre) / scale)
    return tl.where(distance < 1.0, 1.0 - distance, 0.0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _kernel(
    buffer: Any,  # uint8, all planes of all clips
    out: Any,
    places: Any,  # int64 [B, 4]: offsets of a clip's Y, U and V, and 1 if it is mirrored
    sizes: Any,  # int32 [B, 2]: height and width of a clip's crop
    colours: Any,  # float32 [B, 6]: black, luma scale, red of V, green of U, green of V, blue of U
    affine: Any,  # float32 [3, 2]: scale and bias of R, G and B
    frames: Any,
    height: Any,
    width: Any,
    stride_clip: Any,
    stride_channel: Any,
    stride_frame: Any,
    rows: tl.constexpr,
    columns: tl.constexpr,
    resize: tl.constexpr,
    block: tl.constexpr,
) -> None:
    clip = tl.program_id(1)
    place = tl.program_id(0) * block + tl.arange(0, block)
    inside = place < frames * height * width
    column, row, frame = place % width, place // width % height, place // width // height
    start_y, start_u, start_v = (
        tl.load(places + clip * 4),
        tl.load(places + clip * 4 + 1),
        tl.load(places + clip * 4 + 2),
    )
    flip = tl.load(places + clip * 4 + 3).to(tl.int32)
    h, w = tl.load(sizes + clip * 2), tl.load(sizes + clip * 2 + 1)
    black, luma_scale = tl.load(colours + clip * 6), tl.load(colours + clip * 6 + 1)
    red_v, green_u = tl.load(colours + clip * 6 + 2), tl.load(colours + clip * 6 + 3)
    green_v, blue_u = tl.load(colours + clip * 6 + 4), tl.load(colours + clip * 6 + 5)
    across = column + flip * (width - 1 - 2 * column)

    red = tl.zeros((block,), tl.float32)
    green = tl.zeros((block,), tl.float32)
    blue = tl.zeros((block,), tl.float32)
    total = tl.zeros((block,), tl.float32)
    if resize:
        scale_y, scale_x = h.to(tl.float32) / height, w.to(tl.float32) / width
        reach_y, reach_x = tl.maximum(scale_y, 1.0), tl.maximum(scale_x, 1.0)
        centre_y, centre_x = scale_y * (row + 0.5), scale_x * (across + 0.5)
        first_y = tl.maximum((centre_y - reach_y + 0.5).to(tl.int32), 0)
        first_x = tl.maximum((centre_x - reach_x + 0.5).to(tl.int32), 0)
    else:
        first_y, first_x = row, across
    for tap_y in range(rows):
        for tap_x in range(columns):
            y, x = first_y + tap_y, first_x + tap_x
            valid = inside & (y < h) & (x < w)
            if resize:
                weight = _weight(y.to(tl.float32), centre_y, reach_y) * _weight(x.to(tl.float32), centre_x, reach_x)
                weight = tl.where(valid, weight, 0.0)
            else:
                weight = tl.where(valid, 1.0, 0.0)
            chroma = frame * (h // 2) * (w // 2) + y // 2 * (w // 2) + x // 2
            level = tl.load(buffer + start_y + frame * h * w + y * w + x, mask=valid, other=0).to(tl.float32)
            u = tl.load(buffer + start_u + chroma, mask=valid, other=0).to(tl.float32) - 128.0
            v = tl.load(buffer + start_v + chroma, mask=valid, other=0).to(tl.float32) - 128.0
            luma = (level - black) * luma_scale
            red += weight * tl.minimum(tl.maximum(luma + red_v * v, 0.0), 255.0)
            green += weight * tl.minimum(tl.maximum(luma + green_u * u + green_v * v, 0.0), 255.0)
            blue += weight * tl.minimum(tl.maximum(luma + blue_u * u, 0.0), 255.0)
            total += weight
    total = tl.where(total > 0.0, total, 1.0)
    target = out + clip.to(tl.int64) * stride_clip + frame.to(tl.int64) * stride_frame + row * width + column
    red = tl.floor(red / total + 0.5) * tl.load(affine) + tl.load(affine + 1)
    green = tl.floor(green / total + 0.5) * tl.load(affine + 2) + tl.load(affine + 3)
    blue = tl.floor(blue / total + 0.5) * tl.load(affine + 4) + tl.load(affine + 5)
    tl.store(target, red.to(out.dtype.element_ty), mask=inside)
    tl.store(target + stride_channel, green.to(out.dtype.element_ty), mask=inside)
    tl.store(target + 2 * stride_channel, blue.to(out.dtype.element_ty), mask=inside)


def fits(clips: Sequence[ClipPlanes]) -> bool:
    """Return whether all planes of all clips are contiguous views of one storage, as in a loader's batch."""
    storage = clips[0].y.untyped_storage().data_ptr()
    planes = [plane for clip in clips for plane in (clip.y, clip.u, clip.v)]
    return all(plane.is_contiguous() and plane.untyped_storage().data_ptr() == storage for plane in planes)


def finish_planes_fused(clips: Sequence[ClipPlanes], size: tuple[int, int], pixels: Pixels, out: Tensor) -> Tensor:
    """See `fastvid.decode.pixels.finish_planes`; requires `fits(clips)` and a contiguous `out`."""
    device = clips[0].y.device
    frames, (height, width) = len(clips[0].y), size
    sizes = [tuple(clip.y.shape[1:]) for clip in clips]
    buffer = torch.empty(0, dtype=torch.uint8, device=device).set_(clips[0].y.untyped_storage())
    places = [[*(int(plane.storage_offset()) for plane in (clip.y, clip.u, clip.v)), int(clip.flip)] for clip in clips]
    resize = any(own != size for own in sizes)
    taps = [1, 1]
    if resize:
        # The filter's radius is one output pixel, or one source pixel when enlarging.
        taps = [max(ceil(2 * max(own[axis] / size[axis], 1.0)) + 1 for own in sizes) for axis in (0, 1)]

    def table(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
        return torch.tensor(rows, dtype=dtype).to(device, non_blocking=True)

    channel, frame = (out.stride(1), out.stride(2)) if pixels.layout == "BCTHW" else (out.stride(2), out.stride(1))
    grid = (triton.cdiv(frames * height * width, _BLOCK), len(clips))
    _kernel[grid](
        buffer,
        out,
        table(places, torch.int64),
        table(sizes, torch.int32),
        table([conversion(clip.matrix, clip.range) for clip in clips], torch.float32),
        table(pixels.channels(), torch.float32),
        frames,
        height,
        width,
        out.stride(0),
        channel,
        frame,
        rows=taps[0],
        columns=taps[1],
        resize=resize,
        block=_BLOCK,
    )
    return out
