"""Mixup and CutMix within fixed groups of positions, so that the world size does not matter.

A clip is mixed with the one at the mirrored index of its group: in groups of four, 0 with 3 and 1 with 2. All random
numbers are a function of the run's seed, the epoch and the group's position in the epoch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastvid.load.batch.batch import Batch
from fastvid.load.memory.device import upload


@dataclass(frozen=True, eq=False)
class Mixed:
    """A batch after mixing.

    Attributes:
        video: Mixed clips, same shape and dtype as the batch's video.
        partner: int64 [B], label of the clip that each clip was mixed with.
        own: float64 [B], weight of the clip's own label, 0 to 1.
    """

    video: Tensor
    partner: Tensor
    own: Tensor


@dataclass(frozen=True)
class Mixer:
    """Mixes the clips of a batch.

    Mixup (Zhang et al. 2017, arXiv 1710.09412) adds clips; a clip's own weight is drawn from Beta(alpha, alpha). CutMix
    (Yun et al. 2019, arXiv 1905.04899) pastes a box of the partner into the clip, the same in all frames. If both are
    enabled, each group uses one of them with equal probability.

    Attributes:
        mixup: Mixup alpha; 0 disables it.
        cutmix: CutMix alpha; 0 disables it.
        group_size: Clips per group, at least 2.
        seed: Seed of the run.
    """

    mixup: float
    cutmix: float
    group_size: int
    seed: int

    def __call__(self, batch: Batch) -> Mixed:
        """Mix a batch of whole groups; a pair with a masked clip is left unchanged."""
        rows, size = batch.num_rows, self.group_size
        assert rows % size == 0, (rows, size)
        video = batch.video
        partner = batch.label.view(-1, size).flip(1).reshape(-1)
        # Read from the host's copy: `batch.valid` is on the device, and the host would wait for all of its work.
        shown = (batch.frame_index.flatten(1)[:, 0] >= 0).view(-1, size)
        both = (shown & shown.flip(1)).reshape(-1).tolist()
        out = video.clone()
        own = torch.ones(rows, dtype=torch.float64)
        for first in range(0, rows, size):
            draws = self._draws(batch.epoch, int(batch.position[first]))
            box = bool(self.cutmix) and (not self.mixup or draws.random() < 0.5)
            alpha = self.cutmix if box else self.mixup
            share = float(draws.beta(alpha, alpha))
            region = _region(share, draws, video.shape[-2], video.shape[-1]) if box else None
            for row in range(first, first + size):
                other = first + size - 1 - (row - first)
                if not both[row] or other == row:
                    continue
                if region is None:
                    out[row] = video[row] * share + video[other] * (1.0 - share)
                    own[row] = share
                else:
                    down, right, height, width = region
                    part = (..., slice(down, down + height), slice(right, right + width))
                    out[row][part] = video[other][part]
                    own[row] = 1.0 - height * width / (video.shape[-2] * video.shape[-1])
        return Mixed(out, partner, upload(own, video.device))

    def _draws(self, epoch: int, position: int) -> np.random.Generator:
        words = hashlib.blake2b(f"{self.seed}:{epoch}:{position}".encode(), digest_size=16).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(words, "little")))


def _region(share: float, draws: np.random.Generator, height: int, width: int) -> tuple[int, int, int, int]:
    """Return top, left, height and width of a box of ``1 - share`` of the area, clipped at the border.

    The same as in the paper's code.
    """
    side = float(np.sqrt(1.0 - share))
    down, right = int(draws.integers(height)), int(draws.integers(width))
    half_h, half_w = int(height * side) // 2, int(width * side) // 2
    top, left = max(0, down - half_h), max(0, right - half_w)
    return top, left, min(height, down + half_h) - top, min(width, right + half_w) - left
