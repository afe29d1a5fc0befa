"""`Batch`: what a loader yields."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from fastvid.load.batch.canvas import Canvas
from fastvid.load.clips.plan import BatchPlan
from fastvid.load.memory.device import LoaderStream
from fastvid.load.order.batches import MASKED
from fastvid.runtime.arrays import IntArray

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

    @property
    def device_tensors(self) -> tuple[Tensor, ...]:
        """One tensor of each block of memory on the device; weight and valid are in the block of label."""
        return tuple(one for one in (self.video, self.flow, self.label) if one is not None)

    def __len__(self) -> int:
        return len(self.video)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.video.shape))
        valid = int(self.valid.sum())
        return (
            f"Batch(video={shape} {self.video.dtype} on {self.video.device}, {valid} of {len(self)} rows valid,"
            f" epoch {self.epoch}, positions {self.start} to {self.stop - 1})"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Assembler:
    """Makes the batches of an epoch from complete canvases.

    Attributes:
        device: Where batches are finished.
        streams: Names of the streams.
        num_frames: Frames per clip, T.
        views: (V,) if each row is V clips of one sample, else ().
        labels: Label of each sample of the dataset, int64 [N], -1 for none.
        columns: Annotation columns to deliver, one value per sample.
        epoch: The epoch.
    """

    device: LoaderStream
    streams: tuple[str, ...]
    num_frames: int
    views: tuple[int, ...]
    labels: IntArray
    columns: Mapping[str, pa.ChunkedArray]
    epoch: int

    def make(
        self, plan: BatchPlan, canvas: Canvas, shown: Mapping[int, IntArray], errors: Collection[int]
    ) -> tuple[Batch, torch.cuda.Event | None]:
        """Finish a batch on the loader's stream, without waiting for it.

        Args:
            plan: The plan of the batch.
            canvas: Its memory, with every row done.
            shown: Frames of each canvas row.
            errors: Canvas rows that failed.

        Returns:
            The batch, and an event after its last operation; None on a CPU.
        """
        with self.device.use():
            made = [video.view(-1, *self.views, *video.shape[1:]) for video in canvas.finish()]
            # If one stream or view of a clip failed, the whole clip failed.
            failed = {row // math.prod(self.views) % len(plan.samples) for row in errors}
            for video in made:
                for row in failed:
                    video[row] = 0
            return self._assemble(dict(zip(self.streams, made, strict=True)), plan, shown, failed), self.device.mark()

    def _assemble(
        self, streams: Mapping[str, Tensor], plan: BatchPlan, shown: Mapping[int, IntArray], failed: Collection[int]
    ) -> Batch:
        samples = np.asarray(plan.samples, dtype=np.int64)
        valid = samples != MASKED
        valid[list(failed)] = False
        frames = np.full((len(samples), *self.views, self.num_frames), -1, dtype=np.int64)
        flat = frames.reshape(-1, self.num_frames)
        for row in np.flatnonzero(np.repeat(valid, math.prod(self.views))).tolist():
            flat[row] = shown[row]
        rows = [None if sample == MASKED else sample for sample in plan.samples]
        label = np.where(valid, self.labels[samples], -1)
        label = np.where(label < 0, IGNORED_LABEL, label)
        weight = np.where(valid, plan.share.weight, 0).astype(np.float32)
        on_device = _upload((label, weight, valid), self.device)
        return Batch(
            video=streams[self.streams[0]],
            label=on_device[0],
            weight=on_device[1],
            valid=on_device[2],
            key=tuple(plan.keys),
            frame_index=torch.from_numpy(frames),
            sample=torch.from_numpy(samples),
            position=torch.from_numpy(plan.share.positions),
            epoch=self.epoch,
            start=plan.share.start,
            stop=plan.share.stop,
            fields={
                name: tuple(None if row is None else column[row].as_py() for row in rows)
                for name, column in self.columns.items()
            },
            flow=streams.get("flow"),
        )


def _upload(parts: Sequence[npt.NDArray[Any]], device: LoaderStream) -> list[Tensor]:
    """Return arrays as tensors on the device: views of one block that is copied once.

    Args:
        parts: In decreasing order of their item sizes, so that each begins at a multiple of its own.
        device: The device.
    """
    host = torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8, pin_memory=device.is_asynchronous)
    packed, stops = host.numpy(), np.cumsum([part.nbytes for part in parts]).tolist()
    views = [slice(stop - part.nbytes, stop) for part, stop in zip(parts, stops, strict=True)]
    for part, view in zip(parts, views, strict=True):
        packed[view].view(part.dtype)[:] = part
    block = device.upload(host)
    return [block[view].view(torch.from_numpy(part).dtype) for part, view in zip(parts, views, strict=True)]
