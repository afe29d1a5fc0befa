"""The fused kernel compared with the double-precision reference, on the CPU in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

# The interpreter is slow for each filter tap of each 256 pixels, so pictures are tiny. bfloat16 is not tested: the
# interpreter truncates to it, while a GPU rounds.
CODE = """
import numpy as np
import torch
from fastvid.decode import pixels_fused
from fastvid.decode.colours import ClipPlanes, Pixels
from fastvid.decode.pixels import clip_to_rgb, finish_rgb
from fastvid.format.schema import Matrix, Range

rng = np.random.default_rng(0)
shapes = [(10, 14), (10, 14), (6, 10), (16, 8)]
frames, total = 2, sum(2 * h * w * 3 // 2 + 64 for h, w in shapes)
buffer = torch.from_numpy(rng.integers(0, 256, total, dtype=np.uint8))
kinds = [
    dict(flip=False, matrix=Matrix.SMPTE170M, sample_range=Range.LIMITED),
    dict(flip=True, matrix=Matrix.BT709, sample_range=Range.LIMITED),
    dict(flip=True, matrix=Matrix.SMPTE170M, sample_range=Range.FULL),
    dict(flip=False, matrix=Matrix.BT2020_NCL, sample_range=Range.UNKNOWN),
]
clips, at = [], 0
for (h, w), kind in zip(shapes, kinds):
    clips.append(ClipPlanes.packed(buffer[at:], frames, h, w, **kind))
    at += frames * h * w * 3 // 2 + 64
assert pixels_fused.fits(clips)
# Planes of a clip may lie in memory of their own, and chroma may alternate as in NV12; rows may not have gaps.
uv = torch.stack((clips[1].u, clips[1].v), -1)
clips[1] = ClipPlanes(clips[1].y.clone(), uv[..., 0], uv[..., 1], True, Matrix.BT709)
assert pixels_fused.fits(clips)
assert not pixels_fused.fits([ClipPlanes(clips[0].y[..., :-2], clips[0].u, clips[0].v)])
assert not pixels_fused.fits([ClipPlanes(clips[0].y, clips[0].u[..., :-1], clips[0].v[..., :-1])])
assert not pixels_fused.fits([ClipPlanes(clips[0].y, clips[1].u, clips[0].v)])
for layout, dtype, size, chosen, last in (
    ("BCTHW", torch.float32, (10, 14), clips[:2], False),
    ("BTCHW", torch.float16, (10, 14), clips[:2], False),
    ("BCTHW", torch.float16, (8, 8), clips, True),
    ("BTCHW", torch.float32, (18, 20), clips, False),
    ("BCTHW", torch.float32, (4, 3), clips[2:3], False),
):
    pixels = Pixels(layout=layout, dtype=dtype)
    # The output has room for one more clip, which must stay unwritten; all others must be fully written.
    room = pixels.empty(len(chosen) + 1, frames, size, "cpu").fill_(float("nan"))
    if last:
        room = room.contiguous(memory_format=torch.channels_last_3d)
        assert room.stride(1) == 1
    pixels_fused.finish_planes_fused(chosen, size, pixels, room[:-1])
    assert room[-1].isnan().all(), (layout, size)
    rgb = torch.stack([clip_to_rgb(clip, size) for clip in chosen])
    levels = (room[:-1].float() - finish_rgb(rgb, Pixels(layout=layout))).abs() * 255 * 0.229
    assert levels.max() < 1.05, (layout, size, float(levels.max()))
    assert (levels > 0.5).float().mean() < 0.03, (layout, size, float((levels > 0.5).float().mean()))
assert {pixels_fused.taps([(h, w)], (224, 224), 0) for h in range(20, 900) for w in (100,)} == {3, 5, 9, 17}
for own in range(20, 900):
    assert pixels_fused.taps([(own, 1)], (224, 1), 0) >= 2 * max(own / 224, 1) + 1
print("equal")
"""


def test_fused_kernel_matches_the_reference():
    run = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"}
    )
    assert run.stdout.strip() == "equal", run.stderr
