"""The configuration of a run's length, output, checkpoints and precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastvid.errors import UsageError
from fastvid.train.config.section import at_least, each_of_or_own, one_of

LoggerName = Literal["jsonl", "tensorboard", "wandb"]
Amp = Literal["off", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Length, output, checkpoints and precision of a run.

    Attributes:
        out: Local folder of the run: config.json, metrics.jsonl, summary.json and checkpoints/.
        checkpoints: Folder or URL of the checkpoints, for example s3://bucket/run; None uses ``out/checkpoints``. If
            each node has its own folder, the newest checkpoint of all nodes is loaded.
        epochs: Passes over the training split.
        seed: Seed of the sample order, augmentation, weight initialization and dropout.
        micro_batch_size: Maximum clips per forward pass of a rank; a larger share accumulates gradients, so that a
            smaller world keeps the global batch size. None computes the whole share in one pass.
        amp: Automatic mixed precision: "off", "bf16" or "fp16", which requires CUDA.
        log_every_steps: Steps between two rows of metrics; None is 20, or an epoch's if it has fewer.
        eval_every_epochs: Epochs between two evaluations; the last epoch is always evaluated.
        checkpoint_every_s: Seconds between two checkpoints inside an epoch; every epoch also ends with one.
        keep_checkpoints: How many of the newest checkpoints to keep, in addition to the best one.
        resume: Resume from the newest checkpoint; if False, a folder that has one is an error.
        timeout_s: Seconds to wait for a peer before it is considered dead.
        loggers: Where rank 0 sends metrics besides metrics.jsonl, which is always written: "tensorboard" (to
            `out`/tensorboard), "wandb", and ``module:name`` of a `fastvid.train.Logger`. "jsonl" may be named, too.
        callbacks: ``module:name`` of each `fastvid.train.Callback`, called on every rank at fixed points of the run.
        peak_tflops: Peak of one device, the denominator of MFU; None looks up the device's 16-bit peak.
    """

    out: str
    epochs: int
    seed: int = 0
    micro_batch_size: int | None = None
    amp: Amp = "off"
    log_every_steps: int | None = None
    eval_every_epochs: int = 1
    checkpoint_every_s: float = 600.0
    keep_checkpoints: int = 3
    checkpoints: str | None = None
    resume: bool = True
    timeout_s: float = 300.0
    loggers: tuple[str, ...] = ()
    callbacks: tuple[str, ...] = ()
    peak_tflops: float | None = None

    def __post_init__(self) -> None:
        if "://" in self.out:
            raise UsageError(f"run.out is {self.out!r}, expected a local folder")
        at_least(1, self, "epochs", "log_every_steps", "eval_every_epochs", "keep_checkpoints", "timeout_s")
        at_least(0, self, "seed", "checkpoint_every_s")
        at_least(1, self, "micro_batch_size")
        one_of(self, "amp", Amp)
        each_of_or_own(self, "loggers", LoggerName)
        each_of_or_own(self, "callbacks", None)
