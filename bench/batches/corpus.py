"""Lengths and sizes of clips as in Kinetics and Panda-70M together, without the videos."""

from __future__ import annotations

from typing import Final

import numpy as np

from fastvid.load.clips.crops import Native, Spatial
from fastvid.load.clips.timed_sampling import AtFps
from fastvid.load.order.buckets import ClipSizes

SIDES: Final = ((720, 1280), (1080, 1920), (480, 640), (1280, 720), (360, 640), (1080, 1080))
"""Height and width of the videos."""

_SHARES: Final = (0.45, 0.2, 0.15, 0.1, 0.05, 0.05)

FRAMES: Final = AtFps(2, min_frames=4, max_frames=256, multiple=2)
"""The rate of Qwen2-VL's processor. No clip is larger than a bin: 256 frames have 8,192 tokens."""

PIXELS: Final = 224 * 224


def clip_sizes(samples: int, seed: int = 0) -> ClipSizes:
    """Return the sizes of clips at 2 frames a second and at most about 224 x 224 pixels.

    Two fifths are like Kinetics: 10 seconds, one in ten shorter. The others are like Panda-70M: log-normal durations of
    8.5 seconds on average (its paper, table 1), here with a median of 6.1 and a sigma of 0.8.
    """
    draws = np.random.default_rng(seed)
    cut = np.where(draws.random(samples) < 0.9, 10.0, draws.uniform(2, 10, samples))
    shot = np.exp(draws.normal(np.log(6.1), 0.8, samples))
    seconds = np.where(draws.random(samples) < 0.4, cut, shot)
    sides = np.asarray(SIDES)[draws.choice(len(SIDES), samples, p=_SHARES)]
    spatial = Spatial.of(Native(28, max_pixels=PIXELS))
    num_frames = np.maximum(1, np.rint(seconds * 30)).astype(np.int64)
    frames = FRAMES.count(num_frames, np.full(samples, 30.0))
    return ClipSizes(frames, *spatial.sizes(sides[:, 0].copy(), sides[:, 1].copy()))
