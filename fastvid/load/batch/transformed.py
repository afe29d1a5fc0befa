"""Transform the RGB of a batch between decoding and normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from fastvid.decode.colours import Pixels, empty_batch
from fastvid.errors import UsageError
from fastvid.load.after.chain import TransformChain
from fastvid.load.batch.video import Collate, Video, VideoSpec
from fastvid.load.clips.clip import BatchRow
from fastvid.load.memory.device import upload
from fastvid.load.order.batches import ClipShape
from fastvid.load.order.random_draws import Draws

ClipDraws = tuple[Draws, int]
"""The random numbers of a clip's sample, and the number of the clip among its views."""

_NO_DRAWS: Final[ClipDraws] = (Draws(0, 0, 0), 0)

# Values 0 to 1 without normalisation, as transforms expect them.
_UNIT: Final = Pixels((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@dataclass(frozen=True)
class TransformStage:
    """Applies the transforms of a loader to the RGB of its batches, then normalises it."""

    chain: TransformChain
    spec: VideoSpec

    @property
    def decoded(self) -> VideoSpec:
        """What decoders make for the transforms: float32 RGB in 0 to 1, [B, 3, T, H, W] or a list of [3, T, H, W]."""
        collate: Collate = "stack" if self.spec.collate == "stack" else "list"
        return VideoSpec(self.spec.shape, "BCTHW", _UNIT, self.spec.stream, collate=collate)

    def finish(
        self,
        video: Video,
        clips: Sequence[BatchRow | None],
        planned: ClipShape | None,
        draws: Sequence[ClipDraws | None],
    ) -> Video:
        """Return the video of a batch; masked rows are zero.

        `clips`: the planned clip of each row. `planned`: the shape that the plan gives all rows, if any.
        `draws`: the random numbers of each row; None for a masked row.
        """
        if isinstance(video, Tensor):
            return self._stacked(video, draws)
        made = [
            self._empty(1, clip.shape[1:]).zero_()[0] if one is None else self._stacked(clip[None], [one])[0]
            for clip, one in zip(video, draws, strict=True)
        ]
        if self.spec.collate == "list":
            return made
        shapes = self.spec.shapes(clips, planned)
        for clip, (_, *size) in zip(made, shapes.rows, strict=True):
            if list(clip.shape[2:]) != size:
                raise UsageError(
                    f"the transforms {self.chain} resized a clip of {size} to {list(clip.shape[2:])} pixels",
                    hint="keep the size, or use collate='list'",
                )
        return self.spec.collated(made, replace(shapes, padded=shapes.padded or shapes.uniform))

    def _stacked(self, video: Tensor, draws: Sequence[ClipDraws | None]) -> Tensor:
        rows = [row for row, one in enumerate(draws) if one is not None]
        whole = len(rows) == len(video)
        # Row by row, because a list of rows would be copied to the device, and the host would wait for that. If every
        # row is masked, one is transformed to learn the size of the result.
        chosen = video if whole else torch.stack([video[row] for row in rows or [0]])
        made = self.chain.apply(chosen, [one for one in draws if one is not None] or [_NO_DRAWS])
        made = self._normalised(made)
        spec = self.spec
        dtype = torch.uint8 if spec.pixels is None else spec.pixels.dtype
        if whole and made.dtype is dtype and spec.layout == "BCTHW" and not spec.channels_last:
            return made
        out = self._empty(len(video), made.shape[2:])
        target = out if spec.layout == "BCTHW" else out.transpose(1, 2)
        if whole:
            target.copy_(made)
        else:
            out.zero_()
            for row, clip in zip(rows, made, strict=False):
                target[row] = clip
        return out

    def _normalised(self, clips: Tensor) -> Tensor:
        """Normalise clips in place, float32 [N, 3, T, H, W]; as levels 0 to 255 if that is what the batch gets."""
        pixels = self.spec.pixels
        if pixels is None:
            return clips.mul_(255).round_().clamp_(0, 255)
        numbers = [
            [1 / std for std in pixels.std],
            [-mean / std for mean, std in zip(pixels.mean, pixels.std, strict=True)],
        ]
        scale, bias = upload(torch.tensor(numbers, dtype=torch.float32), clips.device).view(2, 3, 1, 1, 1)
        return clips.mul_(scale).add_(bias)

    def _empty(self, count: int, shape: Sequence[int]) -> Tensor:
        spec = self.spec
        dtype = torch.uint8 if spec.pixels is None else spec.pixels.dtype
        whole = (count, 3, shape[0], shape[1], shape[2])
        return empty_batch(whole, spec.layout, dtype, spec.stream.device, channels_last=spec.channels_last)
