"""The configuration of a run: frozen dataclasses that validate themselves, one per section.

A recipe is a Python file with a function ``recipe() -> Config``, found by name or path. A sweep has a function
``sweep() -> list[Config]`` as well, or instead: one entry per model, for a strategy that trains several models. Recipes
given by name are files in ``pipelines/``, a folder next to the package in a checkout and inside it when installed. On
the command line, ``key=value`` overrides a single value; see `fastvid.train.config.overrides`.
"""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import fastvid
from fastvid.errors import UsageError
from fastvid.load.after.chain import CallableTransform
from fastvid.runtime.names import meant
from fastvid.train.config import overrides
from fastvid.train.config.data import DataConfig, ShardConfig
from fastvid.train.config.overrides import NAMED, at_least, check_kinds, each_of_or_own, one_of_or_own
from fastvid.train.tasks.classification import Classification
from fastvid.train.tasks.task import Task, check_task, find_task


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to train.

    Attributes:
        name: A name from `fastvid.models.zoo`, or ``module:callable``.
        num_classes: Width of the last layer; None uses the number of classes in the dataset.
        channels_last: Use the channels-last memory format for the model and its batches; results are equal up to
            rounding. None uses it on GPUs with `run.amp`, where 16-bit convolutions would transpose every input.
        weights: File of initial weights, see `fastvid.models.weights`; None uses random initialization. Two-stream
            networks take one file for both streams, or SPATIAL,TEMPORAL.
        ghost_norm: Compute batch norm over groups of `data.group_size` clips instead of over a rank's micro-batch.
        compile: Run the model through ``torch.compile``; the first steps take longer.
        options: Keyword arguments of the model, for example ``{"dropout": 0.8}``; None keeps the model's default.
    """

    name: str
    num_classes: int | None = None
    channels_last: bool | None = None
    weights: str | None = None
    ghost_norm: bool = False
    compile: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_kinds(self)
        at_least(1, self, "num_classes")

    @property
    def arguments(self) -> dict[str, Any]:
        """The options that are not None."""
        return {name: value for name, value in self.options.items() if value is not None}


OptimizerName = Literal["sgd", "adam", "adamw", "adagrad", "lars", "lamb"]
Groups = Literal["plain", "tsm"]
Decay = Literal["constant", "step", "cosine"]


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, its parameter groups and its learning rate as a function of the samples seen.

    The rate is ``base_lr * global_batch_size / base_batch_size``, the linear scaling rule of Goyal et al. 2017, times
    the factor of warm-up and decay. Epochs are counted in samples, so the schedule is independent of the world size.

    Attributes:
        base_lr: Learning rate at `base_batch_size`.
        base_batch_size: Global batch size, in clips, that `base_lr` was tuned for.
        name: "sgd", "adam" (L2 regularization), "adamw" (decoupled weight decay), "adagrad", "lars" (SGD with
            layer-wise rates) or "lamb" (AdamW with layer-wise rates), see `fastvid.train.parts.optim`. Or
            ``module:name``, called with the parameter groups, with ``lr`` if it accepts that, and with `options`; it
            returns a `torch.optim.Optimizer` of these groups.
        options: Keyword arguments of an optimizer named as ``module:name``, which gets no other settings.
        momentum: Momentum of SGD and LARS.
        nesterov: Whether SGD uses Nesterov momentum.
        trust: Trust coefficient of LARS: fraction of a layer's weight norm that a step at rate 1 moves.
        beta1: Decay rate of Adam's first moment.
        beta2: Decay rate of Adam's second moment.
        eps: Added to the square root of the second moment in Adam and AdaGrad.
        weight_decay: Weight decay of convolution and linear weights.
        groups: "plain" applies no weight decay to biases and norm layers; "tsm" adds TSM's rate multipliers.
        no_decay: Parts of dotted names: parameters whose name has one of them get no weight decay, nor do those that
            the model's own ``no_weight_decay()`` names, as in timm. The default names the position and class tokens of
            vision transformers in timm and transformers.
        warmup_epochs: Epochs of linear warm-up; may be fractional.
        warmup_start: Fraction of the rate at which warm-up starts.
        decay: Schedule after warm-up: "constant", "step" or "cosine". Or ``module:name``: a pure function of the
            progress from the end of warm-up (0) to the end of the run (1), in samples, and of `decay_options`, that
            returns the factor of the rate, such as 1 at first and 0 at the end.
        decay_options: Keyword arguments of a schedule named as ``module:name``.
        milestones: Epochs at which "step" multiplies the rate by `gamma`.
        gamma: Factor of "step".
        final: Fraction of the rate at which "cosine" ends.
        clip_norm: Maximum norm of the whole gradient; None disables clipping.
        ema_decay: Decay of an exponential moving average of the weights for each step of `base_batch_size` clips; a
            larger batch counts as several such steps. Evaluation uses the average. None disables it.
        head_lr_mult: Multiplier of the rate of the last layer, or of both streams' last layers, on top of the
            multipliers of `groups`.
        layer_decay: Multiplier of the rate from each layer to the one below, 0 < x <= 1, for fine-tuning; see
            `fastvid.train.parts.optim`. None uses one rate for all layers.
        freeze: Frozen parts: ``PREFIX`` for the whole run, or ``PREFIX:EPOCHS``; see `fastvid.train.parts.replica`.
    """

    base_lr: float
    base_batch_size: int
    name: str = "sgd"
    options: Mapping[str, Any] = field(default_factory=dict)
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
    decay: str = "step"
    decay_options: Mapping[str, Any] = field(default_factory=dict)
    milestones: tuple[float, ...] = ()
    gamma: float = 0.1
    final: float = 0.0
    clip_norm: float | None = None
    ema_decay: float | None = None
    head_lr_mult: float = 1.0
    layer_decay: float | None = None
    freeze: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_kinds(self)
        at_least(1, self, "base_batch_size")
        at_least(0.0, self, "base_lr", "momentum", "weight_decay", "warmup_epochs", "warmup_start", "gamma", "final")
        at_least(0.0, self, "trust", "head_lr_mult", "eps")
        one_of_or_own(self, "name", OptimizerName, self.options, "options")
        one_of_or_own(self, "decay", Decay, self.decay_options, "decay_options")
        if list(self.milestones) != sorted(set(self.milestones)):
            raise UsageError(f"optim.milestones is {self.milestones}, expected ascending epochs")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise UsageError(f"optim.clip_norm is {self.clip_norm}, expected more than 0, or none")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise UsageError(f"optim.layer_decay is {self.layer_decay}, expected 0 < x <= 1, or none")
        for name in ("beta1", "beta2", "ema_decay"):
            if (value := getattr(self, name)) is not None and not 0 <= value < 1:
                raise UsageError(f"optim.{name} is {value}, expected 0 <= x < 1")
        if self.nesterov and not self.momentum:
            raise UsageError("optim.nesterov is set, but optim.momentum is 0", hint="set optim.momentum=0.9")


LoggerName = Literal["jsonl", "tensorboard", "wandb"]
Amp = Literal["off", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Length, output, checkpoints and precision of a run.

    Attributes:
        out: Local folder of the run: config-001.json and so on, one for each start, config.json, a copy of the newest,
            metrics.jsonl, summary.json and checkpoints/.
        checkpoints: Folder or URL of the checkpoints, for example s3://bucket/run; None uses ``out/checkpoints``. If
            each node has its own folder, the newest checkpoint of all nodes is loaded.
        epochs: Passes over the training split.
        seed: Seed of the sample order, augmentation, weight initialization and dropout.
        micro_batch_size: Maximum clips per forward pass of a rank; if its share of a batch is larger, gradients are
            accumulated, so that fewer ranks can train with the same global batch size. None computes the whole share in
            one pass.
        amp: Automatic mixed precision: "off", "bf16" or "fp16", which requires CUDA.
        log_every_steps: Steps between two rows of metrics. None is 20, or fewer in a short run: at least one row per
            epoch and 50 rows in total.
        eval_every_epochs: Epochs between two evaluations; the last epoch is always evaluated.
        checkpoint_every_s: Seconds between two checkpoints inside an epoch; every epoch also ends with one.
        keep_checkpoints: How many of the newest checkpoints to keep, in addition to the best one.
        resume: Resume from the newest checkpoint; if False, a folder that has one is an error.
        timeout_s: Seconds to wait for another rank before it is considered dead.
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
        check_kinds(self)
        if "://" in self.out:
            raise UsageError(f"run.out is {self.out!r}, expected a local folder")
        at_least(1, self, "epochs", "log_every_steps", "eval_every_epochs", "keep_checkpoints", "timeout_s")
        at_least(0, self, "seed", "checkpoint_every_s", "peak_tflops")
        at_least(1, self, "micro_batch_size")
        each_of_or_own(self, "loggers", LoggerName)
        each_of_or_own(self, "callbacks", None)


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
        if self.data.dtype != "float32" and self.run.amp == "off":
            raise UsageError(
                f"data.dtype is {self.data.dtype!r}, but weights are float32 and run.amp is off",
                hint="set run.amp=bf16, or data.dtype=float32",
            )
        if self.model.ghost_norm and self.run.micro_batch_size is not None and self.run.micro_batch_size % size:
            raise UsageError(
                f"run.micro_batch_size is {self.run.micro_batch_size}, not a multiple of data.group_size {size}"
            )


def to_json(value: Any) -> Any:
    """Return a configuration as JSON values; samplers and transforms get a key ``type``, callables are text."""
    if is_dataclass(value) and not isinstance(value, type):
        inner = {item.name: to_json(getattr(value, item.name)) for item in fields(value)}
        section = type(value).__module__.startswith(f"{__package__}.")
        return inner if section else {"type": type(value).__name__, **inner}
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


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values are not the same in all of several mappings."""
    keys = dict.fromkeys(key for setting in settings for key in setting)
    return [key for key in keys if any(setting.get(key) != settings[0].get(key) for setting in settings)]


_SUFFIX = ".py"


def names() -> list[str]:
    """Return the names of the recipes that come with fastvid, sorted."""
    return sorted(path.stem for path in _folder().glob(f"*{_SUFFIX}"))


def load(recipe: str, changes: Sequence[str] = ()) -> Config:
    """Return the configuration of a recipe.

    Args:
        recipe: A name from `names`, or the path of a Python file. The file is executed.
        changes: ``key=value`` overrides, see `fastvid.train.config.overrides`.

    Raises:
        UsageError: If the recipe does not exist or does not return a Config, or an override is wrong. Exceptions raised
            by the file itself are not caught.
    """
    path = find(recipe)
    return overrides.apply(_configuration(path, _functions(path)), changes)


def load_all(recipe: str, changes: Sequence[str] = ()) -> list[Config]:
    """Return the configurations of all models: those of ``sweep()`` if the recipe has it, else the one of `load`."""
    path = find(recipe)
    functions = _functions(path)
    if "sweep" not in functions:
        return [overrides.apply(_configuration(path, functions), changes)]
    configs = functions["sweep"]()
    if not isinstance(configs, list) or not configs or not all(isinstance(config, Config) for config in configs):
        raise UsageError("sweep() did not return a list of fastvid.train.Config", file=path)
    return [overrides.apply(config, changes) for config in configs]


def _functions(path: Path) -> dict[str, Callable[[], Any]]:
    """Execute a recipe file and return what can be called in it, by name."""
    found = runpy.run_path(str(path), run_name=f"fastvid_recipe_{path.stem}")
    return {name: value for name, value in found.items() if callable(value)}


def _configuration(path: Path, functions: Mapping[str, Callable[[], Any]]) -> Config:
    """Return the configuration of a recipe file, given its functions."""
    if "recipe" not in functions:
        raise UsageError("recipe has no function recipe()", file=path, hint="define recipe() -> Config in the file")
    config = functions["recipe"]()
    if not isinstance(config, Config):
        raise UsageError(f"recipe() returned {type(config).__name__}, not fastvid.train.Config", file=path)
    return config


def find(recipe: str) -> Path:
    """Return the file of a recipe."""
    path = Path(recipe)
    if path.suffix == _SUFFIX or path.name != recipe:
        if path.is_file():
            return path
        raise UsageError("recipe does not exist", file=recipe, hint=f"a recipe is a file *{_SUFFIX}")
    path = _folder() / f"{recipe}{_SUFFIX}"
    if not path.is_file():
        hint = f"{meant(recipe, names()) or ''} use one of {', '.join(names())}; or the path of a file *{_SUFFIX}"
        raise UsageError(f"unknown recipe {recipe!r}", hint=hint.lstrip())
    return path


def _folder() -> Path:
    package = Path(fastvid.__file__).parent
    installed = package / "pipelines"
    return installed if installed.is_dir() else package.parent / "pipelines"
