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
    """One epoch of a pipeline, or the rest of one.

    Attributes:
        epoch: The epoch.
        plans: Its batches in order; computed in the planner thread.
        assembler: Makes its batches of complete canvases.
        planner: Plans, in worker processes, the clips that `plans` left unplanned.
    """

    epoch: int
    plans: Iterator[BatchPlan]
    assembler: Assembler
    planner: ClipPlanner | None = None


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch in progress.

    Attributes:
        part: Its epoch.
        plan: Its samples and clips.
        canvas: Its memory.
        pending: Number of clips not finished.
        errors: Errors by row.
        frames: Frames shown by each row, filled as clips are planned.
        sound: Its sound; None for none.
        counters: Its cost.
        finished: The finished batch, with an event of the loader's stream behind its work, until it is delivered.
    """

    part: EpochPart
    plan: BatchPlan
    canvas: Canvas
    pending: int
    errors: dict[int, Exception]
    frames: dict[int, IntArray]
    sound: BatchSound | None = None
    counters: Counters = field(default_factory=Counters)
    finished: tuple[Batch, torch.cuda.Event | None] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class QueuedClip(ClipTask):
    """A clip that is queued or being processed; its target is a canvas. `number` counts all clips in order."""

    number: int
    clip: BatchRow
    work: PendingBatch
