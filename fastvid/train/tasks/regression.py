"""Numbers per clip: mean squared, absolute or Huber error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.batch.batch import Batch
from fastvid.load.order.mixture import Mixture
from fastvid.runtime.values import check_fields
from fastvid.train.tasks.task import DataSettings, Phase, RunSettings, Task, check_column, output

Error = Literal["mse", "l1", "huber"]


@dataclass(frozen=True)
class Regression(Task):
    """The task ``task=regression``: one or more numbers per clip, from columns of the annotations.

    The loss of a clip is the mean error over the columns. Metrics are ``mae`` and ``rmse``, the mean absolute and the
    root mean squared error over all columns, in the columns' unit, and ``r2``, the fraction of explained variance, as a
    mean over the columns: 1 is perfect, 0 is as good as predicting the mean. Columns of a constant value are left out
    of ``r2``.

    Attributes:
        columns: The columns of numbers, in the order of the model's outputs.
        error: "mse" (squared), "l1" (absolute) or "huber".
        delta: Error from which "huber" is linear, above 0.

    Raises:
        UsageError: If a value is invalid.
    """

    columns: tuple[str, ...] = ()
    error: Error = "mse"
    delta: float = 1.0

    def __post_init__(self) -> None:
        check_fields("task", self)
        if not self.delta > 0:
            raise UsageError(f"task.delta is {self.delta}, expected more than 0")
        if not self.columns or len(set(self.columns)) < len(self.columns):
            raise UsageError(
                f"task.columns is {self.columns}", hint="name the columns of the annotations to learn, each once"
            )

    def loader_arguments(self, data: DataSettings) -> dict[str, Any]:  # noqa: ARG002
        return {"fields": self.columns}

    def names(self, dataset: Dataset | Mixture, data: DataSettings) -> tuple[str, ...]:  # noqa: ARG002
        return self.columns

    def check_data(self, dataset: Dataset | Mixture, config: RunSettings) -> None:
        if config.model.num_classes != len(self.columns):
            raise UsageError(
                f"model.num_classes is {config.model.num_classes}, task.columns has {len(self.columns)}",
                hint=f"set model.num_classes=none or {len(self.columns)}",
            )
        for column in self.columns:
            check_column(dataset, column, _is_number, "finite number", hint="set data.where or task.columns")

    def prepare(self, batch: Batch, phase: Phase) -> Batch:  # noqa: ARG002
        if not all(name in batch.fields for name in self.columns):
            return batch  # videos that are only predicted have no annotations
        columns = [[0.0 if value is None else float(value) for value in batch.fields[name]] for name in self.columns]
        numbers = torch.tensor(columns, dtype=torch.float64).T
        return Batch(batch, numbers=numbers.to(batch.video.device, non_blocking=True))

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        values = self._values(outputs)
        if values.shape != batch.numbers.shape:
            raise UsageError(
                f"the model returned {list(values.shape)}, expected {list(batch.numbers.shape)}",
                hint="return one number per column of task.columns for each clip",
            )
        numbers = batch.numbers.to(values.dtype)
        errors = values - numbers
        if self.error == "huber":
            losses: Tensor = functional.huber_loss(values, numbers, reduction="none", delta=self.delta)
        else:
            losses = errors.abs() if self.error == "l1" else errors.square()
        return losses.mean(1)

    def measure(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        numbers = batch.numbers
        errors: Tensor = self._values(outputs).double() - numbers
        sums = {"absolute": errors.abs().mean(1)}
        for index, name in enumerate(self.columns):
            sums |= {
                f"{name} error squared": errors[:, index].square(),
                f"{name} value": numbers[:, index],
                f"{name} value squared": numbers[:, index].square(),
            }
        return sums

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        clips = max(1.0, sums["clips"])
        squared = [sums[f"{name} error squared"] for name in self.columns]
        spread = [sums[f"{name} value squared"] - sums[f"{name} value"] ** 2 / clips for name in self.columns]
        return {
            "mae": sums["absolute"] / clips,
            "rmse": math.sqrt(sum(squared) / len(squared) / clips),
            "r2": _explained(squared, spread, [sums[f"{name} value squared"] for name in self.columns]),
        }

    def predict(self, outputs: Any) -> Tensor:
        values: Tensor = self._values(outputs).double()
        return values

    def target(self, batch: Batch) -> Tensor:
        numbers: Tensor = batch.numbers
        return numbers

    def score(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        if not len(targets):
            return dict.fromkeys(("loss", "mae", "rmse", "r2"), math.nan)
        errors = predictions - targets
        squared, spread = errors.square().sum(0), (targets - targets.mean(0)).square().sum(0)
        one = Batch(label=targets, numbers=targets)
        return {
            "loss": float(self.loss(predictions, one).mean()),
            "mae": float(errors.abs().mean()),
            "rmse": math.sqrt(float(errors.square().mean())),
            "r2": _explained(squared.tolist(), spread.tolist(), targets.square().sum(0).tolist()),
        }

    def details(
        self, predictions: Tensor, targets: Tensor, names: Sequence[str]
    ) -> tuple[list[dict[str, Any]], Tensor | None]:
        errors = predictions - targets
        rows = [
            {
                "column": name,
                "videos": len(targets),
                "mae": float(errors[:, index].abs().mean()),
                "rmse": math.sqrt(float(errors[:, index].square().mean())),
            }
            for index, name in enumerate(names)
        ]
        return rows, None

    def _values(self, outputs: Any) -> Tensor:
        values = output(outputs)
        return values[:, None] if values.ndim == 1 else values


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _explained(squared: Sequence[float], spread: Sequence[float], scale: Sequence[float]) -> float:
    # A variance below the rounding error of a difference of sums means that all values of the column are equal.
    known = [1 - error / all_ for error, all_, size in zip(squared, spread, scale, strict=True) if all_ > 1e-12 * size]
    return sum(known) / len(known) if known else math.nan
