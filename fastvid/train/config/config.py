"""The configuration of a run: frozen dataclasses that validate themselves, one per section.

A recipe is a Python file with a function ``recipe() -> Config``; see `fastvid.train.config.recipes`. On the command
line, ``key=value`` overrides a single value; see `fastvid.train.config.overrides`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from fastvid.errors import UsageError
from fastvid.load.after.callables import CallableTransform
from fastvid.train.config.data import DataConfig, ShardConfig
from fastvid.train.config.model import ModelConfig
from fastvid.train.config.optim import OptimConfig
from fastvid.train.config.overrides import NAMED
from fastvid.train.config.run import RunConfig
from fastvid.train.tasks.classification import Classification
from fastvid.train.tasks.task import Task, check_task, find_task


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
