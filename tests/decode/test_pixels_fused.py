"""The one-pass kernel against the reference in double precision, on the CPU by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")

CODE = """
import numpy as np
import torch
from fastvid.decode import pixels_fused
from fastvid.decode.pixels import ClipPlanes, Pixels, clip_to_rgb, finish_rgb
from fastvid.format.schema import Matrix, Range

rng = np.random.default_rng(0)
shapes = [(16, 24), (16, 24), (10, 14), (32, 20)]
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
assert not pixels_fused.fits([clips[0], ClipPlanes(clips[0].y.clone(), clips[0].u, clips[0].v)])
for layout in ("BCTHW", "BTCHW"):
    for size, chosen in (((16, 24), clips[:2]), ((12, 12), clips), ((24, 40), clips)):
        pixels = Pixels(layout=layout)
        out = pixels.empty(len(chosen), frames, size, "cpu")
        pixels_fused.finish_planes_fused(chosen, size, pixels, out)
        rgb = torch.stack([clip_to_rgb(clip, size) for clip in chosen])
        expected = finish_rgb(rgb, pixels)
        levels = (out - expected).abs() * 255 * 0.229
        assert levels.max() < 1.05, (layout, size, float(levels.max()))
        assert (levels > 0.5).float().mean() < 0.03, (layout, size, float((levels > 0.5).float().mean()))
print("equal")
"""


def test_every_clip_of_a_batch_is_the_reference():
    run = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"}
    )
    assert run.stdout.strip() == "equal", run.stderr
