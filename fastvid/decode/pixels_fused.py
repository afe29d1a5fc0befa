"""`fastvid.decode.pixels.finish_planes` as one Triton kernel for a whole batch.

Each thread computes one output pixel: it reads its luma and chroma samples (when resizing, all under the filter),
converts, clamps, filters, rounds, mirrors, normalises and writes three values. No intermediate result goes to memory:
per pixel 1.5 bytes are read and 3 values written, while plain PyTorch moves about 100 bytes.

Filter weights are those of PyTorch's antialiased bilinear resize (``aten/src/ATen/native/cuda/UpSample.cuh``), computed
in the kernel. How close it comes to a GPU's memory bandwidth is not measured; ``python -m bench gpu`` measures it.
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

_BLOCK: Final = 256  # output pixels of a program


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _weight(position: Any, centre: Any, scale: Any) -> Any:
    """Return the weight of a source sample in a triangle filter, not normalised."""
    distance = tl.abs((position + 0.5 - centre) / scale)
    return tl.where(distance < 1.0, 1.0 - distance, 0.0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _kernel(
    buffer: Any,  # uint8, begins with the luma of the first clip
    out: Any,
    table: Any,  # float64 [6 + 13 B]: scale and bias of R, G and B; then for each clip the offsets of Y, U and V,
    # chroma step, 1 if mirrored, crop height and width, black, luma scale, red of V, green of U and V, blue of U
    frames: Any,
    height: Any,
    width: Any,
    stride_clip: Any,
    stride_channel: Any,
    stride_frame: Any,
    stride_row: Any,
    stride_column: Any,
    rows: tl.constexpr,
    columns: tl.constexpr,
    resize: tl.constexpr,
    block: tl.constexpr,
) -> None:
    clip = tl.program_id(1)
    place = tl.program_id(0) * block + tl.arange(0, block)
    inside = place < frames * height * width
    column, row, frame = place % width, place // width % height, place // width // height
    # Offsets are whole numbers below 2**53, so float64 stores them exactly.
    start_y, start_u = tl.load(table + 6 + clip * 13).to(tl.int64), tl.load(table + 7 + clip * 13).to(tl.int64)
    start_v, step = tl.load(table + 8 + clip * 13).to(tl.int64), tl.load(table + 9 + clip * 13).to(tl.int32)
    flip = tl.load(table + 10 + clip * 13).to(tl.int32)
    h, w = tl.load(table + 11 + clip * 13).to(tl.int32), tl.load(table + 12 + clip * 13).to(tl.int32)
    black, luma_scale = tl.load(table + 13 + clip * 13).to(tl.float32), tl.load(table + 14 + clip * 13).to(tl.float32)
    red_v, green_u = tl.load(table + 15 + clip * 13).to(tl.float32), tl.load(table + 16 + clip * 13).to(tl.float32)
    green_v, blue_u = tl.load(table + 17 + clip * 13).to(tl.float32), tl.load(table + 18 + clip * 13).to(tl.float32)
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
                # `rows` and `columns` may be twice the filter's width: samples outside the filter are not read.
                valid = valid & (weight > 0.0)
                weight = tl.where(valid, weight, 0.0)
            else:
                weight = tl.where(valid, 1.0, 0.0)
            chroma = (frame * (h // 2) * (w // 2) + y // 2 * (w // 2) + x // 2) * step
            level = tl.load(buffer + start_y + frame * h * w + y * w + x, mask=valid, other=0).to(tl.float32)
            u = tl.load(buffer + start_u + chroma, mask=valid, other=0).to(tl.float32) - 128.0
            v = tl.load(buffer + start_v + chroma, mask=valid, other=0).to(tl.float32) - 128.0
            luma = (level - black) * luma_scale
            red += weight * tl.minimum(tl.maximum(luma + red_v * v, 0.0), 255.0)
            green += weight * tl.minimum(tl.maximum(luma + green_u * u + green_v * v, 0.0), 255.0)
            blue += weight * tl.minimum(tl.maximum(luma + blue_u * u, 0.0), 255.0)
            total += weight
    total = tl.where(total > 0.0, total, 1.0)
    target = out + clip.to(tl.int64) * stride_clip + frame.to(tl.int64) * stride_frame
    target += row.to(tl.int64) * stride_row + column.to(tl.int64) * stride_column
    red = tl.floor(red / total + 0.5) * tl.load(table).to(tl.float32) + tl.load(table + 1).to(tl.float32)
    green = tl.floor(green / total + 0.5) * tl.load(table + 2).to(tl.float32) + tl.load(table + 3).to(tl.float32)
    blue = tl.floor(blue / total + 0.5) * tl.load(table + 4).to(tl.float32) + tl.load(table + 5).to(tl.float32)
    tl.store(target, red.to(out.dtype.element_ty), mask=inside)
    tl.store(target + stride_channel, green.to(out.dtype.element_ty), mask=inside)
    tl.store(target + 2 * stride_channel, blue.to(out.dtype.element_ty), mask=inside)


def fits(clips: Sequence[ClipPlanes]) -> bool:
    """Return whether the kernel can read the planes: contiguous, or with U and V interleaved as in NV12."""
    return all(clip.y.is_contiguous() and _chroma_step(clip) is not None for clip in clips)


def finish_planes_fused(clips: Sequence[ClipPlanes], size: tuple[int, int], pixels: Pixels, out: Tensor) -> Tensor:
    """See `fastvid.decode.pixels.finish_planes`; requires `fits(clips)`. `out` may have any strides."""
    first = clips[0].y
    frames, (height, width) = len(first), size
    sizes = [tuple(clip.y.shape[1:]) for clip in clips]
    table = [number for channel in pixels.channels() for number in channel]
    for clip in clips:
        # Offsets are relative to the first clip, possibly in another allocation: the kernel adds them to its address.
        table += (plane.data_ptr() - first.data_ptr() for plane in (clip.y, clip.u, clip.v))
        table += (_chroma_step(clip) or 1, clip.flip, *clip.y.shape[1:], *conversion(clip.matrix, clip.range))
    resize = any(own != size for own in sizes)
    # From pinned memory the table is copied in stream order, and the host does not wait.
    on_gpu = first.device.type == "cuda"
    moved = torch.tensor(table, dtype=torch.float64, pin_memory=on_gpu).to(first.device, non_blocking=True)
    channel, frame = (1, 2) if pixels.layout == "BCTHW" else (2, 1)
    grid = (triton.cdiv(frames * height * width, _BLOCK), len(clips))
    _kernel[grid](
        first,
        out,
        moved,
        frames,
        height,
        width,
        out.stride(0),
        out.stride(channel),
        out.stride(frame),
        out.stride(3),
        out.stride(4),
        rows=taps(sizes, size, 0) if resize else 1,
        columns=taps(sizes, size, 1) if resize else 1,
        resize=resize,
        block=_BLOCK,
    )
    return out


def taps(sizes: Sequence[tuple[int, ...]], size: tuple[int, int], axis: int) -> int:
    """Return how many source samples along an axis the kernel visits for a pixel: 3, 5, 9, 17, ...

    Few different numbers, so that random crops compile few kernels. The filter's radius is one output pixel, or one
    source pixel when enlarging.
    """
    needed = max(ceil(2 * max(own[axis] / size[axis], 1.0)) + 1 for own in sizes)
    return (1 << (needed - 2).bit_length()) + 1


def _chroma_step(clip: ClipPlanes) -> int | None:
    """Return the bytes from one sample of U, and of V, to the next; None if there are gaps between rows or frames."""
    _, height, width = clip.u.shape
    step = clip.u.stride(2)
    wanted = (height * width * step, width * step, step)
    return step if clip.u.stride() == clip.v.stride() == wanted else None
