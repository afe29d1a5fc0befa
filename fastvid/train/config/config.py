"""The configuration of a run: frozen dataclasses that validate themselves, one per section.

A recipe is a Python file with a function ``recipe() -> Config``; see `fastvid.train.config.recipes`. On the command
line, ``key=value`` overrides a single value; see `fastvid.train.config.overrides`.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args

from fastvid.errors import UsageError
from fastvid.load.after.callables import CallableTransform
from fastvid.load.after.chain import AnyTransform
from fastvid.load.clips.augment import Transform
from fastvid.load.clips.sampling import Sampler, clip_length
from fastvid.load.options import Kind
from fastvid.load.order.batches import Last
from fastvid.runtime.checks import check_choice, check_least
from fastvid.train.config.overrides import NAMED
from fastvid.train.tasks.classification import Classification
from fastvid.train.tasks.task import Task, check_task, find_task

OptimizerName = Literal["sgd", "adam", "adamw", "adagrad", "lars", "lamb"]
Groups = Literal["plain", "tsm"]
Damaged = Literal["raise", "skip"]
Decay = Literal["constant", "step", "cosine"]
Amp = Literal["off", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """How the dataset is created: the arguments of ``fastvid shard``.

    Attributes:
        sources: Folders or files of raw videos.
        annotations: Label files, each as ``format:path``; empty where the folder of a video is its class.
        profile: Encode profile.
        options: Further options of the command, without the leading dashes.
    """

    sources: tuple[str, ...]
    annotations: tuple[str, ...] = ()
    profile: str = "compact"
    options: Mapping[str, str] = field(default_factory=dict)

    def command(self, out: str) -> str:
        """Return the shell command that creates the dataset at `out`."""
        words = ["fastvid", "shard", *self.sources, "--out", out]
        for source in self.annotations:
            words += ["--annotations", source]
        words += ["--profile", self.profile]
        for name, value in self.options.items():
            words += [f"--{name}", value]
        return shlex.join(words)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The dataset, and how its videos are sampled, cropped and batched.

    Attributes:
        path: Folder or URL of the dataset.
        split: Split to train on; None for all samples.
        eval_split: Split to evaluate on; None for no evaluation.
        where: Filter over the annotations' columns, for both splits.
        label: Column that contains the class, an integer from 0.
        frames: Sampler of the frames of a clip.
        eval_frames: The same for evaluation.
        spatial: Crop, resize and flip.
        eval_spatial: The same for evaluation.
        after: Transforms of the training clips on the device, see `fastvid.ClipLoader`.
        streams: Streams of each sample that the model takes: "rgb", "flow" or both.
        flow_stack: Flow fields per frame.
        global_batch_size: Clips per step over all ranks, whatever the world size.
        eval_batch_size: Clips per evaluation batch over all ranks.
        last: Samples left at the end of an epoch: "drop", "mask" or "keep", see `fastvid.Workers`.
        generation: Number or tag of the generation of the dataset; None is the current one. A run keeps the generation
            with which it starts, also if the tag moves.
        decoder: Decoder backend, or "auto".
        num_threads: Decode threads or worker processes per rank; None uses all cores available to the rank.
        workers: "thread", or "process", which keeps decoding off the GIL of the step, see `fastvid.Workers`.
        prefetch: Batches to prefetch.
        group_size: Consecutive clips of a global batch that always go to the same rank, so that operations over
            several clips (ghost batch norm, mixing) give the same result for any world size. Each rank's share then
            consists of whole groups.
        on_error: What to do when a clip fails to decode: "raise" stops the run; "skip" masks it in the loss and
            counts it. It is never replaced by another clip.
    """

    path: str
    split: str | None = "train"
    eval_split: str | None = "val"
    where: str | None = None
    label: str = "label"
    frames: Sampler
    eval_frames: Sampler
    spatial: tuple[Transform, ...]
    eval_spatial: tuple[Transform, ...]
    after: tuple[AnyTransform, ...] = ()
    streams: tuple[str, ...] = ("rgb",)
    flow_stack: int = 1
    global_batch_size: int = 64
    eval_batch_size: int = 64
    last: Last = "drop"
    generation: int | str | None = None
    decoder: str = "auto"
    num_threads: int | None = None
    workers: Kind = "thread"
    prefetch: int = 2
    group_size: int = 1
    on_error: Damaged = "raise"

    def __post_init__(self) -> None:
        _at_least(1, self, "global_batch_size", "eval_batch_size", "flow_stack", "group_size")
        _one_of(self, "on_error", Damaged)
        _one_of(self, "last", Last)
        _one_of(self, "workers", Kind)
        for name in ("frames", "eval_frames"):
            if clip_length(getattr(self, name)) is None:
                raise UsageError(
                    f"clips of data.{name}={getattr(self, name)!r} differ in length",
                    hint="use a sampler with a fixed number of frames, such as Segments(8)",
                )
        for name in ("spatial", "eval_spatial"):
            if any(getattr(transform, "output", ()) is None for transform in getattr(self, name)):
                raise UsageError(
                    f"clips of data.{name}={getattr(self, name)!r} differ in size",
                    hint="use a crop with a fixed size, such as RandomResizedCrop(224)",
                )
        if self.num_frames != clip_length(self.eval_frames):
            raise UsageError(
                f"data.frames samples {self.num_frames} frames per clip, data.eval_frames"
                f" {clip_length(self.eval_frames)}",
                hint="set both to the number of frames that the model takes",
            )

    @property
    def num_frames(self) -> int:
        """Frames of every clip."""
        length = clip_length(self.frames)
        assert length is not None
        return length


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to train.

    Attributes:
        name: A name from `fastvid.models.zoo`, or ``module:callable``.
        num_classes: Width of the last layer; None uses the number of classes in the dataset.
        channels_last: Use the channels-last memory format for the model and its batches, equal up to rounding; None
            uses it on GPUs with `run.amp`, whose 16-bit convolutions would otherwise transpose every input.
        weights: File of initial weights, see `fastvid.models.weights`; None uses random initialization. Two-stream
            networks take one file for both streams, or SPATIAL,TEMPORAL.
        ghost_norm: Compute batch norm over groups of `data.group_size` clips instead of over a rank's micro-batch.
        compile: Run the model through ``torch.compile``; the first steps take longer.
        pipeline: Devices of one machine that a replica is spread over, see `fastvid.models.pipeline`. Start one rank
            per `pipeline` devices.
        pipeline_batches: Micro-batches in the pipeline; norm layers see one at a time.
        options: Keyword arguments of the model, for example ``{"dropout": 0.8}``; None keeps the model's default.
    """

    name: str
    num_classes: int | None = None
    channels_last: bool | None = None
    weights: str | None = None
    ghost_norm: bool = False
    compile: bool = False
    pipeline: int = 1
    pipeline_batches: int = 4
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _at_least(1, self, "num_classes", "pipeline", "pipeline_batches")
        if self.pipeline > 1 and self.compile:
            raise UsageError(
                "model.compile cannot be combined with model.pipeline",
                hint="set model.compile=false or model.pipeline=1",
            )

    @property
    def arguments(self) -> dict[str, Any]:
        """The options that are not None."""
        return {name: value for name, value in self.options.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, its parameter groups and its learning rate as a function of the samples seen.

    The rate is ``base_lr * global_batch_size / base_batch_size``, the linear scaling rule of Goyal et al. 2017, times
    the factor of warm-up and decay. Epochs are counted in samples, so the schedule is independent of the world size.

    Attributes:
        base_lr: Learning rate at `base_batch_size`.
        base_batch_size: Global batch size, in clips, that `base_lr` was tuned for.
        name: "sgd", "adam" (L2 regularization), "adamw" (decoupled weight decay), "adagrad", "lars" (SGD with
            layer-wise rates) or "lamb" (AdamW with layer-wise rates), see `fastvid.train.parts.optim_large`.
        momentum: Momentum of SGD and LARS.
        nesterov: Whether SGD uses Nesterov momentum.
        trust: Trust coefficient of LARS: fraction of a layer's weight norm that a step at rate 1 moves.
        beta1: Decay rate of Adam's first moment.
        beta2: Decay rate of Adam's second moment.
        eps: Added to the square root of the second moment in Adam and AdaGrad.
        weight_decay: Weight decay of convolution and linear weights.
        groups: "plain" applies no weight decay to biases and norm layers; "tsm" adds TSM's rate multipliers.
        no_decay: Parameters without weight decay, besides those that the model's own ``no_weight_decay()`` names, as
            timm's models do: each is a part of a dotted name. The default are the position and class tokens of vision
            transformers, as timm and transformers name them.
        warmup_epochs: Epochs of linear warm-up; may be fractional.
        warmup_start: Fraction of the rate at which warm-up starts.
        decay: Schedule after warm-up: "constant", "step" or "cosine".
        milestones: Epochs at which "step" multiplies the rate by `gamma`.
        gamma: Factor of "step".
        final: Fraction of the rate at which "cosine" ends.
        clip_norm: Maximum norm of the whole gradient; None disables clipping.
        ema_decay: Decay of an exponential moving average of the weights for each step of `base_batch_size` clips; a
            larger batch counts as several such steps. Evaluation uses the average. None disables it.
        head_lr_mult: Multiplier of the last layer's rate, in addition to those of `groups`.
        freeze: Frozen parts: ``PREFIX`` for the whole run, or ``PREFIX:EPOCHS``; see `fastvid.train.parts.freeze`.
    """

    base_lr: float
    base_batch_size: int
    name: OptimizerName = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    trust: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-4
    groups: Groups = "plain"
    no_decay: tuple[str, ...] = (
        "cls_token", "dist_token", "distillation_token", "mask_token", "pos_embed", "position_embeddings",
        "time_embeddings",
    )  # fmt: skip
    warmup_epochs: float = 0.0
    warmup_start: float = 0.1
    decay: Decay = "step"
    milestones: tuple[float, ...] = ()
    gamma: float = 0.1
    final: float = 0.0
    clip_norm: float | None = None
    ema_decay: float | None = None
    head_lr_mult: float = 1.0
    freeze: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _at_least(1, self, "base_batch_size")
        _at_least(0.0, self, "base_lr", "momentum", "weight_decay", "warmup_epochs", "warmup_start", "gamma", "final")
        _at_least(0.0, self, "trust", "head_lr_mult")
        _one_of(self, "name", OptimizerName)
        _one_of(self, "groups", Groups)
        _one_of(self, "decay", Decay)
        if list(self.milestones) != sorted(set(self.milestones)):
            raise UsageError(f"optim.milestones is {self.milestones}, expected ascending epochs")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise UsageError(f"optim.clip_norm is {self.clip_norm}, expected more than 0, or none")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise UsageError(f"optim.ema_decay is {self.ema_decay}, expected 0 <= x < 1, or none")


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
        log_every_steps: Steps between two rows of metrics.
        eval_every_epochs: Epochs between two evaluations; the last epoch is always evaluated.
        checkpoint_every_s: Seconds between two checkpoints inside an epoch; every epoch also ends with one.
        keep_checkpoints: How many of the newest checkpoints to keep, in addition to the best one.
        resume: Resume from the newest checkpoint; if False, a folder that has one is an error.
        timeout_s: Seconds to wait for a peer before it is considered dead.
        tensorboard: Also write metrics for TensorBoard, to `out`/tensorboard.
        peak_tflops: Peak of one device, the denominator of MFU; None looks up the device's 16-bit peak.
    """

    out: str
    epochs: int
    seed: int = 0
    micro_batch_size: int | None = None
    amp: Amp = "off"
    log_every_steps: int = 20
    eval_every_epochs: int = 1
    checkpoint_every_s: float = 600.0
    keep_checkpoints: int = 3
    checkpoints: str | None = None
    resume: bool = True
    timeout_s: float = 300.0
    tensorboard: bool = False
    peak_tflops: float | None = None

    def __post_init__(self) -> None:
        if "://" in self.out:
            raise UsageError(f"run.out is {self.out!r}, expected a local folder")
        _at_least(1, self, "epochs", "log_every_steps", "eval_every_epochs", "keep_checkpoints", "timeout_s")
        _at_least(0, self, "seed", "checkpoint_every_s")
        _at_least(1, self, "micro_batch_size")
        _one_of(self, "amp", Amp)


def _default_sync() -> str:
    # Imported by name because the strategies import this module.
    return str(importlib.import_module("fastvid.train.strategies").DEFAULT)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The complete configuration of a run.

    Attributes:
        data: Dataset, decoding and loading.
        model: The model.
        optim: Optimizer and learning rate schedule.
        run: Length, output, checkpoints and precision.
        task: What is learnt: `Classification`, `MultiLabel`, `Regression` or an object of your own class. On the
            command line ``task=`` takes classification, multi_label, regression or ``module:class``, and
            ``task.OPTION=`` an option of it.
        shard: How the dataset is created; None if the recipe does not say.
        sync: Synchronization strategy: a name from `fastvid.train.strategies`, which also defines the default, or
            ``module:class``.
        sync_options: Options of that strategy.
    """

    data: DataConfig
    model: ModelConfig
    optim: OptimConfig
    run: RunConfig
    task: Task = field(default_factory=Classification, metadata={NAMED: find_task})
    shard: ShardConfig | None = None
    sync: str = field(default_factory=_default_sync)
    sync_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.data.group_size
        check_task(self.task)
        self.task.check(self)
        if self.model.ghost_norm and size < 2:
            raise UsageError(
                f"model.ghost_norm needs groups of clips, data.group_size is {size}",
                hint="set data.group_size to a divisor of data.global_batch_size, for example 8",
            )
        if self.model.ghost_norm and self.run.micro_batch_size is not None and self.run.micro_batch_size % size:
            raise UsageError(
                f"run.micro_batch_size is {self.run.micro_batch_size}, not a multiple of data.group_size {size}"
            )


def to_json(value: Any) -> Any:
    """Return a configuration as JSON values; samplers and transforms get a key ``type``, callables are text."""
    if is_dataclass(value) and not isinstance(value, type):
        inner = {item.name: to_json(getattr(value, item.name)) for item in fields(value)}
        return inner if type(value).__module__ == __name__ else {"type": type(value).__name__, **inner}
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    return repr(CallableTransform(value)) if callable(value) else value


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a configuration's JSON with dotted keys, for comparing two of them."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _section(config: object) -> str:
    return type(config).__name__.removesuffix("Config").lower()


def _at_least(least: float, config: Any, *names: str) -> None:
    check_least(least, **{f"{_section(config)}.{name}": getattr(config, name) for name in names})


def _one_of(config: Any, name: str, allowed: Any) -> None:
    check_choice(f"{_section(config)}.{name}", getattr(config, name), get_args(allowed))
