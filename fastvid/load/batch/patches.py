"""Clips as patches one after the other, as a model with packed sequences takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fastvid.decode.colours import Layout
from fastvid.load.order.batches import ClipShape
from fastvid.runtime.arrays import IntArray


@dataclass(frozen=True, slots=True)
class Patches:
    """How clips are cut into patches."""

    patch: ClipShape  # frames pt, height ph and width pw of a patch
    merge: int  # patches in each direction of a picture that follow each other; 1 for row after row
    layout: Layout

    def grids(self, clips: Sequence[Tensor]) -> IntArray:
        """Return the patches of each clip along time, height and width, int64 [n, 3].

        A clip without frames, as of a masked row, has `merge` x `merge` patches, because some attention kernels refuse
        empty sequences.
        """
        across = [1, self.merge, self.merge]
        steps = np.asarray(self.patch, dtype=np.int64) * np.asarray(across, dtype=np.int64)
        sides = np.asarray([[one.shape[axis] for axis in self._axes] for one in clips], dtype=np.int64)
        grids: IntArray = np.maximum(-(-sides // steps), 1) * np.asarray(across, dtype=np.int64)
        return grids

    def pack(self, clips: Sequence[Tensor]) -> tuple[Tensor, IntArray]:
        """Cut clips into patches.

        The values of a patch are in the order channel, time, row, column. The patches of a clip are in the order time,
        row, column; with `merge` in blocks of merge x merge patches, the blocks in that order and the patches within
        each of them. This is the order of Qwen2-VL's processor. Where a clip is not a multiple of the patch, its last
        frame is repeated, and zeros are added on the right and below.

        `clips`: tensors of one dtype and device, each [3, T, H, W] or [T, 3, H, W]; at least one. Returns the
        patches [N, 3 * pt * ph * pw], and `grids`.
        """
        grids = self.grids(clips)
        ends = np.cumsum(grids.prod(axis=1)).tolist()
        (pt, ph, pw), merge = self.patch, self.merge
        packed = clips[0].new_empty((ends[-1], 3 * pt * ph * pw))
        for clip, (t, h, w), end in zip(clips, grids.tolist(), ends, strict=True):
            into = packed[end - t * h * w : end]
            if not clip.numel():
                into.zero_()
                continue
            video = self._whole(clip if self.layout == "BCTHW" else clip.transpose(0, 1), (t * pt, h * ph, w * pw))
            blocks = video.view(3, t, pt, h // merge, merge, ph, w // merge, merge, pw)
            blocks = blocks.permute(1, 3, 6, 4, 7, 0, 2, 5, 8)
            into.view(blocks.shape).copy_(blocks)
        return packed, grids

    @property
    def _axes(self) -> tuple[int, int, int]:
        """Axes of frames, height and width of a clip."""
        return (1, 2, 3) if self.layout == "BCTHW" else (0, 2, 3)

    @staticmethod
    def _whole(video: Tensor, shape: ClipShape) -> Tensor:
        """Return a video [3, T, H, W] extended to a multiple of the patch."""
        frames, height, width = (side - own for side, own in zip(shape, video.shape[1:], strict=True))
        if frames:
            video = torch.cat([video, video[:, -1:].expand(-1, frames, -1, -1)], dim=1)
        if height or width:
            video = pad(video, (0, width, 0, height))
        return video
