"""What a `BatchPipeline` works on: epochs, their batches, and the clips of these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from fastvid.load.batch.batch import Assembler, Batch
from fastvid.load.batch.canvas import Canvas
from fastvid.load.batch.sound import BatchSound
from fastvid.load.clips.clip import BatchRow
from fastvid.load.clips.plan import BatchPlan
from fastvid.load.clips.planner import ClipPlanner
from fastvid.load.workers.clip_worker import ClipTask
from fastvid.load.workers.stats import Counters
from fastvid.runtime.arrays import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class EpochPart:
    """One epoch of a pipeline, or the rest of one."""

    epoch: int
    plans: Iterator[BatchPlan]
    assembler: Assembler
    planner: ClipPlanner | None = None


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch in progress."""

    part: EpochPart
    plan: BatchPlan  # its samples and clips
    canvas: Canvas
    pending: int
    errors: dict[int, Exception]  # errors by row
    frames: dict[int, IntArray]  # frames shown by each row, filled as clips are planned
    sound: BatchSound | None = None
    counters: Counters = field(default_factory=Counters)
    finished: tuple[Batch, torch.cuda.Event | None] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class QueuedClip(ClipTask):
    """A clip that is queued or being processed; its target is a canvas. `number` counts all clips in order."""

    number: int
    clip: BatchRow
    work: PendingBatch
