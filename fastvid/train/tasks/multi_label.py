"""Several labels per clip: binary cross-entropy, mean average precision and F1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.batch.batch import Batch
from fastvid.load.batch.labels import MultiHot, MultiHotLabels
from fastvid.load.order.mixture import Mixture
from fastvid.runtime.values import check_fields
from fastvid.train.tasks.task import DataSettings, RunSettings, Task, output


@dataclass(frozen=True)
class MultiLabel(Task):
    """The task ``task=multi_label``: any number of labels per clip, from a column of lists.

    The loss of a clip is the mean over the classes of the binary cross-entropy, in nats. Metrics are
    ``map_percent``, the mean average precision over the classes that occur in the split, and ``micro_f1_percent``, the
    F1 score over the decisions for all classes together, at a probability of `threshold`. The average precision of a
    class is the sum, over thresholds, of the gain in recall times the precision, as in scikit-learn; samples with equal
    scores pass a threshold together. Predictions are probabilities.

    Attributes:
        column: The column of class names or class numbers, see `fastvid.MultiHot`.
        classes: Class names; None for those of the dataset.
        threshold: Probability above which a class is predicted, 0 < x < 1.

    Raises:
        UsageError: If a value is out of range.
    """

    column: str = "labels"
    classes: tuple[str, ...] | None = None
    threshold: float = 0.5

    metric: ClassVar[str] = "map_percent"
    higher_is_better: ClassVar[bool] = True
    scores_split: ClassVar[bool] = True
    probabilities: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields("task", self)
        if not 0 < self.threshold < 1:
            raise UsageError(f"task.threshold is {self.threshold}, expected 0 < x < 1")
        MultiHot(self.column, self.classes)

    def loader_arguments(self, data: DataSettings) -> dict[str, Any]:  # noqa: ARG002
        return {"labels": MultiHot(self.column, self.classes)}

    def names(self, dataset: Dataset | Mixture, data: DataSettings) -> tuple[str, ...]:  # noqa: ARG002
        classes = MultiHotLabels(MultiHot(self.column, self.classes), dataset).labels.classes
        return tuple(classes or ())

    def check_data(self, dataset: Dataset | Mixture, config: RunSettings) -> None:
        count = len(self.names(dataset, config.data))
        if config.model.num_classes != count:
            raise UsageError(
                f"model.num_classes is {config.model.num_classes}, column {self.column!r} has {count} classes",
                hint=f"set model.num_classes=none or {count}, and task.classes if datasets have different ones",
            )

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        logits = output(outputs)
        if logits.shape != batch.labels.shape:
            raise UsageError(
                f"the model returned logits {list(logits.shape)}, expected {list(batch.labels.shape)}",
                hint="return one logit per class for each clip",
            )
        return functional.binary_cross_entropy_with_logits(
            logits, batch.labels.to(logits.dtype), reduction="none"
        ).mean(1)

    def measure(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        return self._decisions(self.predict(outputs), batch.labels)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        right = 2 * sums["true_positives"]
        total = right + sums["false_positives"] + sums["false_negatives"]
        return {"micro_f1_percent": 100 * right / total if total else 0.0}

    def predict(self, outputs: Any) -> Tensor:
        return output(outputs).double().sigmoid()

    def target(self, batch: Batch) -> Tensor:
        return batch.labels

    def score(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        found = [average_precision(predictions[:, one], targets[:, one] > 0) for one in range(targets.shape[1])]
        known = [value for value in found if value is not None]
        decisions = self._decisions(predictions, targets)
        loss = functional.binary_cross_entropy(predictions.nan_to_num(0.5), targets) if len(targets) else float("nan")
        return {
            "loss": float(loss),
            "map_percent": 100 * sum(known) / len(known) if known else float("nan"),
            **self.metrics({name: float(counts.sum()) for name, counts in decisions.items()}),
        }

    def details(
        self, predictions: Tensor, targets: Tensor, names: Sequence[str]
    ) -> tuple[list[dict[str, Any]], Tensor | None]:
        rows: list[dict[str, Any]] = []
        for number, name in enumerate(names):
            true = targets[:, number] > 0
            precision = average_precision(predictions[:, number], true)
            rows.append(
                {
                    "class": name,
                    "videos": int(true.sum()),
                    "average_precision_percent": None if precision is None else 100 * precision,
                }
            )
        return rows, None

    def _decisions(self, predictions: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the numbers of right and wrong decisions of each clip, each [b]."""
        guessed, true = predictions > self.threshold, targets > 0
        return {
            "true_positives": (guessed & true).sum(1),
            "false_positives": (guessed & ~true).sum(1),
            "false_negatives": (~guessed & true).sum(1),
        }


def average_precision(scores: Tensor, true: Tensor) -> float | None:
    """Return the average precision of a class, 0 to 1; None if no sample has the class.

    `scores`: float64 [n]; NaN ranks last. `true`: bool [n].
    """
    if not bool(true.any()):
        return None
    ordered, order = scores.nan_to_num(-1.0).sort(descending=True)
    hits = true[order].double()
    found = hits.cumsum(0)
    # Samples with equal scores have no order, so all of them get the precision at the last one.
    stops = torch.cat([ordered.diff() != 0, torch.ones(1, dtype=torch.bool)]).nonzero()[:, 0]
    precision = found[stops] / (stops + 1)
    gained = found[stops].diff(prepend=found.new_zeros(1))
    return float((precision * gained).sum() / found[-1])
