"""`Batch`: what a loader yields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fastvid.load.clips.plan import BatchPlan
from fastvid.load.order.batches import MASKED

IGNORED_LABEL: Final = -100
"""Label of masked and unlabelled rows: the default ignore_index of torch's cross_entropy."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One rank's rows of one global batch: B clips of T frames.

    A row is masked (`valid` False, zeros in `video`, weight 0) if it pads the last batch of an epoch or if its clip was
    skipped. The mean loss over the global batch is the sum over ranks of
    ``(loss_of_each_clip * batch.weight).sum()``; DistributedDataParallel divides by the world size, so multiply by it
    there.

    Attributes:
        video: The first stream on the loader's device: RGB frames [B, 3, T, H, W] or [B, T, 3, H, W], or flow; with
            views [B, V, 3, T, H, W] or [B, V, T, 3, H, W].
        label: int64 [B], on the device; IGNORED_LABEL if the row is masked or its sample has no label.
        weight: float32 [B], on the device; one over the samples of the global batch, 0 for masked rows.
        valid: bool [B], on the device; False for masked rows.
        key: Key of each row's sample; empty for padding.
        frame_index: Frames shown, int64 [B, T], with views [B, V, T], on the host; -1 for masked rows.
        sample: Index of each row's sample in the dataset, int64 [B], on the host; -1 for padding.
        position: Position of each row in the epoch's order, int64 [B], on the host; -1 for padding.
        epoch: The epoch.
        start: First position of the global batch.
        stop: One past the last position of the global batch.
        fields: The annotation columns requested by `fields=`, one value per row; None for padding.
        flow: Optical flow [B, 2L, T, H, W] or [B, T, 2L, H, W] of the frames in `video`, in output pixels per frame: x
            and y of L flows around each frame, L = `flow_stack`. None unless the stream "flow" was requested.
    """

    video: Tensor
    label: Tensor
    weight: Tensor
    valid: Tensor
    key: tuple[str, ...]
    frame_index: Tensor
    sample: Tensor
    position: Tensor
    epoch: int
    start: int
    stop: int
    fields: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    flow: Tensor | None = None

    def __len__(self) -> int:
        return len(self.video)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.video.shape))
        valid = int(self.valid.sum())
        return (
            f"Batch(video={shape} {self.video.dtype} on {self.video.device}, {valid} of {len(self)} rows valid,"
            f" epoch {self.epoch}, positions {self.start} to {self.stop - 1})"
        )


def assemble(
    video: Tensor,
    plan: BatchPlan,
    shown: Mapping[int, np.ndarray[Any, np.dtype[np.int64]]],
    failed: set[int],
    *,
    labels: np.ndarray[Any, np.dtype[np.int64]],
    frames_shape: tuple[int, ...],
    epoch: int,
    fields: Mapping[str, tuple[Any, ...]],
    flow: Tensor | None = None,
) -> Batch:
    """Build a batch from its pixels and its plan.

    Args:
        video: The finished tensor.
        plan: The plan of the batch.
        shown: Frames of each row; with views, V consecutive rows per row of the batch.
        failed: Rows that were skipped.
        labels: Label of each sample of the dataset, int64 [N], -1 for none.
        frames_shape: (T,), or (V, T) with views.
        epoch: The epoch.
        fields: Annotation columns, one value per row.
        flow: The finished flow.
    """
    samples = np.asarray(plan.samples, dtype=np.int64)
    present = samples != MASKED
    valid = present.copy()
    valid[list(failed)] = False
    label = np.where(valid, labels[samples], -1)
    frames = np.full((len(samples), *frames_shape), -1, dtype=np.int64)
    flat = frames.reshape(-1, frames_shape[-1])
    for row in np.flatnonzero(np.repeat(valid, len(flat) // len(frames))).tolist():
        flat[row] = shown[row]
    device = video.device
    return Batch(
        video=video,
        label=torch.from_numpy(np.where(label < 0, IGNORED_LABEL, label)).to(device),
        weight=torch.from_numpy(np.where(valid, plan.share.weight, 0).astype(np.float32)).to(device),
        valid=torch.from_numpy(valid).to(device),
        key=tuple(plan.keys),
        frame_index=torch.from_numpy(frames),
        sample=torch.from_numpy(samples),
        position=torch.from_numpy(plan.share.positions),
        epoch=epoch,
        start=plan.share.start,
        stop=plan.share.stop,
        fields=fields,
        flow=flow,
    )
