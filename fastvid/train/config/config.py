"""The configuration of a run: frozen dataclasses that check themselves, one for each part of the path.

A recipe is a Python file with a function ``recipe() -> Config``; see `fastvid.train.config.recipes`. Single values are
changed on the command line by ``key=value``; see `fastvid.train.config.overrides`.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args

from fastvid.errors import UsageError
from fastvid.load.clips.augment import Transform
from fastvid.load.clips.sampling import Sampler
from fastvid.load.order.batches import Last
from fastvid.load.workers.skips import OnError, Workers
from fastvid.runtime.checks import check_choice, check_least

OptimizerName = Literal["sgd", "adam", "adamw", "adagrad", "lars", "lamb"]
Groups = Literal["plain", "tsm"]
Decay = Literal["constant", "step", "cosine"]
Amp = Literal["off", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """How the dataset is made: the arguments of ``fastvid shard``.

    Attributes:
        sources: Folders or files of raw videos.
        annotations: ``format:path`` of the labels each; none where the folder of a video is its class.
        profile: Encode profile.
        options: Further options of the command, without their dashes.
    """

    sources: tuple[str, ...]
    annotations: tuple[str, ...] = ()
    profile: str = "compact"
    options: Mapping[str, str] = field(default_factory=dict)

    def command(self, out: str) -> str:
        """The shell command that makes the dataset at `out`."""
        words = ["fastvid", "shard", *self.sources, "--out", out]
        for source in self.annotations:
            words += ["--annotations", source]
        words += ["--profile", self.profile]
        for name, value in self.options.items():
            words += [f"--{name}", value]
        return shlex.join(words)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read and how it is cut into clips.

    Attributes:
        path: Folder or URL of the dataset.
        split: Split to train on; None for all samples.
        eval_split: Split to evaluate on; None for no evaluation.
        where: Filter over the annotations' columns, for both splits.
        label: Column that holds the class, a number from 0.
        frames: Which frames make a clip.
        eval_frames: The same for evaluation.
        spatial: Crop, resize and flip.
        eval_spatial: The same for evaluation.
        streams: Streams of each sample that the model takes: "rgb", "flow" or both.
        flow_stack: Flows for each frame.
        global_batch_size: Clips of a step, over all ranks; does not change with the world.
        eval_batch_size: Clips that all ranks together evaluate at once.
        last: Samples left at the end of an epoch: "drop", "mask" or "keep", see `fastvid.ClipLoader`.
        generation: Of the dataset; None pins the current one when the run begins.
        decoder: Back-end, or "auto".
        num_threads: Decode threads of a rank, or processes; None takes the cores it may use.
        workers: "thread", or "process", which leaves the interpreter to the step, see `fastvid.ClipLoader`.
        prefetch: Batches made ahead.
        group_size: Neighbouring clips of a global batch that one rank always gets together, so that what looks at
            several clips, ghost batch norm and mixing, is the same in any world. Shares are whole groups then.
        on_error: What a clip that does not decode does: "raise" stops the run; "skip" leaves it out of the loss and
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
    streams: tuple[str, ...] = ("rgb",)
    flow_stack: int = 1
    global_batch_size: int = 64
    eval_batch_size: int = 64
    last: Last = "drop"
    generation: int | None = None
    decoder: str = "auto"
    num_threads: int | None = None
    workers: Workers = "thread"
    prefetch: int = 2
    group_size: int = 1
    on_error: OnError = "raise"

    def __post_init__(self) -> None:
        _at_least(1, self, "global_batch_size", "eval_batch_size", "flow_stack", "group_size")
        _one_of(self, "on_error", OnError)
        _one_of(self, "last", Last)
        _one_of(self, "workers", Workers)
        if self.frames.num_frames != self.eval_frames.num_frames:
            raise UsageError(
                f"data.frames gives clips of {self.frames.num_frames} frames, "
                f"data.eval_frames of {self.eval_frames.num_frames}",
                hint="a model has one number of frames",
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is trained.

    Attributes:
        name: A name of `fastvid.models.zoo`, or ``module:callable``.
        num_classes: Width of the last layer; None takes the dataset's classes.
        channels_last: Keep channels innermost in memory; faster on most devices, the same numbers up to rounding.
        weights: File of the weights that training starts from, see `fastvid.models.weights`; None starts afresh. Nets
            of two streams take one for both, or SPATIAL,TEMPORAL.
        ghost_norm: Batch norm over groups of `data.group_size` clips instead of over what a rank holds.
        compile: Run the model through ``torch.compile``; the first steps take longer.
        pipeline: Devices of a machine that one replica spans, its blocks in a row, see `fastvid.models.pipeline`. Start
            as many ranks as there are devices, divided by this.
        pipeline_batches: Micro-batches that follow each other through the row; norm layers see one at a time.
        options: Options of the model, such as ``{"dropout": 0.8}``; None leaves one to the model.
    """

    name: str
    num_classes: int | None = None
    channels_last: bool = False
    weights: str | None = None
    ghost_norm: bool = False
    compile: bool = False
    pipeline: int = 1
    pipeline_batches: int = 4
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _at_least(1, self, "num_classes", "pipeline", "pipeline_batches")
        if self.pipeline > 1 and self.compile:
            raise UsageError("model.compile does not go with model.pipeline")

    @property
    def arguments(self) -> dict[str, Any]:
        """The options that are given."""
        return {name: value for name, value in self.options.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimiser, its parameter groups and its learning rate as a function of the samples seen.

    The rate is ``base_lr * global_batch_size / base_batch_size``, the linear scaling rule of Goyal et al. 2017, times
    the factor of warm-up and decay. Epochs are counted in samples, so the schedule does not depend on the world.

    Attributes:
        base_lr: Learning rate at `base_batch_size`.
        base_batch_size: Global batch that `base_lr` was tuned for, in clips.
        name: "sgd", "adam" (weight decay is added to the gradient), "adamw" (it is not), "adagrad", "lars" (SGD with
            a rate for each layer) or "lamb" (AdamW with one), see `fastvid.train.parts.optim_large`.
        momentum: Of SGD and LARS.
        nesterov: Nesterov's momentum, of SGD.
        trust: Of LARS: share of a layer's weights that a step at rate 1 moves.
        beta1: Decay of Adam's first moment.
        beta2: Decay of Adam's second moment.
        eps: Of Adam and AdaGrad, added to the root of the second moment.
        weight_decay: Of convolution and linear weights.
        groups: "plain" leaves biases and norm layers undecayed; "tsm" has TSM's multipliers as well.
        warmup_epochs: Epochs of linear warm-up; need not be whole.
        warmup_start: Share of the rate at which warm-up starts.
        decay: What follows: "constant", "step" or "cosine".
        milestones: Epochs at which "step" multiplies the rate by `gamma`.
        gamma: Factor of "step".
        final: Share of the rate at which "cosine" ends.
        clip_norm: Largest norm of the whole gradient; None does not clip.
        label_smoothing: Of the cross-entropy.
        mixup: alpha of mixup inside groups of `data.group_size` clips; 0 is off. See `fastvid.train.parts.mixup`.
        cutmix: alpha of CutMix; 0 is off.
        ema_decay: Of a moving average of the weights, each step at `base_batch_size`; a step of a larger batch has the
            effect of several. The average is what is evaluated. None keeps none.
        head_lr_mult: Factor of the last layer's rate, besides those of `groups`.
        freeze: Parts that do not move, ``PREFIX`` for ever or ``PREFIX:EPOCHS``; see `fastvid.train.parts.freeze`.
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
    warmup_epochs: float = 0.0
    warmup_start: float = 0.1
    decay: Decay = "step"
    milestones: tuple[float, ...] = ()
    gamma: float = 0.1
    final: float = 0.0
    clip_norm: float | None = None
    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    ema_decay: float | None = None
    head_lr_mult: float = 1.0
    freeze: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _at_least(1, self, "base_batch_size")
        _at_least(0.0, self, "base_lr", "momentum", "weight_decay", "warmup_epochs", "warmup_start", "gamma", "final")
        _at_least(0.0, self, "trust", "mixup", "cutmix", "head_lr_mult")
        _one_of(self, "name", OptimizerName)
        _one_of(self, "groups", Groups)
        _one_of(self, "decay", Decay)
        if list(self.milestones) != sorted(set(self.milestones)):
            raise UsageError(f"optim.milestones is {self.milestones}, expected ascending epochs")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise UsageError(f"optim.clip_norm is {self.clip_norm}, expected more than 0, or none")
        if not 0 <= self.label_smoothing < 1:
            raise UsageError(f"optim.label_smoothing is {self.label_smoothing}, expected 0 <= x < 1")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise UsageError(f"optim.ema_decay is {self.ema_decay}, expected 0 <= x < 1, or none")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long, where to, and how a process does its part.

    Attributes:
        out: Local folder of the run: config.json, metrics.jsonl, summary.json and checkpoints/.
        checkpoints: Folder or URL of the checkpoints, such as s3://bucket/run; None takes the one in `out`. Of several
            nodes' folders, the one with the newest checkpoint is read.
        epochs: Passes over the training split.
        seed: Of the order, the augmentation, fresh weights and dropout.
        micro_batch_size: Most clips that a rank computes at once; larger shares are accumulated, so that a smaller
            world keeps the global batch. None computes a share at once.
        amp: Automatic mixed precision; "fp16" needs CUDA.
        log_every_steps: Steps between two lines of metrics.
        eval_every_epochs: Epochs between two evaluations; the last epoch is always evaluated.
        checkpoint_every_s: Seconds between two checkpoints inside an epoch; the end of an epoch always makes one.
        keep_checkpoints: How many of the newest to keep, besides the one that scored best.
        resume: Go on from the newest checkpoint in `out`; False refuses a folder that has one.
        timeout_s: How long to wait for a peer before it counts as dead.
        tensorboard: Write metrics for TensorBoard as well, into `out`/tensorboard.
        peak_tflops: Of one device, which MFU is relative to; None looks up the device's 16-bit peak.
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
    # Imported by name: the strategies are built on the configuration, so it cannot import them.
    return str(importlib.import_module("fastvid.train.strategies").DEFAULT)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole path of a run.

    Attributes:
        data: Dataset, decoding and loading.
        model: What is trained.
        optim: How weights move.
        run: How long and where to.
        shard: How the dataset is made; None when a recipe does not say.
        sync: How replicas agree: a name of `fastvid.train.strategies`, where the default is too, or ``module:class``
            of your own.
        sync_options: Options of that strategy.
    """

    data: DataConfig
    model: ModelConfig
    optim: OptimConfig
    run: RunConfig
    shard: ShardConfig | None = None
    sync: str = field(default_factory=_default_sync)
    sync_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.data.group_size
        mixes = self.optim.mixup or self.optim.cutmix
        if (mixes or self.model.ghost_norm) and size < 2:
            raise UsageError(
                f"{'mixing' if mixes else 'model.ghost_norm'} needs groups of clips, data.group_size is {size}",
                hint="set data.group_size, such as 8; it divides data.global_batch_size",
            )
        if self.model.ghost_norm and self.run.micro_batch_size is not None and self.run.micro_batch_size % size:
            raise UsageError(
                f"run.micro_batch_size is {self.run.micro_batch_size}, no multiple of data.group_size {size}"
            )


def to_json(value: Any) -> Any:
    """A configuration as dicts, lists and scalars; classes that a field may choose between are named by ``type``."""
    if is_dataclass(value) and not isinstance(value, type):
        inner = {item.name: to_json(getattr(value, item.name)) for item in fields(value)}
        return inner if type(value).__module__ == __name__ else {"type": type(value).__name__, **inner}
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    return value


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration's JSON as dotted keys, to compare two of them."""
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
