"""One label per clip: cross-entropy, top-1 and top-5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.nn import functional

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.batch.batch import Batch
from fastvid.load.order.mixture import Mixture
from fastvid.runtime.checks import check_least
from fastvid.train.tasks.mixup import Mixer
from fastvid.train.tasks.task import DataSettings, Phase, RunSettings, Task, check_column, output

_LABEL: Final = "label"  # column that contains the classes of the dataset
_TOP: Final = (1, 5)


@dataclass(frozen=True)
class Classification(Task):
    """The task ``task=classification``, the default: one label per clip, from the column `data.label`.

    The loss is the cross-entropy, in nats. Metrics are its mean without smoothing and mixing, in double precision, and
    ``top1_percent`` and ``top5_percent``: clips whose label has the highest logit, or one of the five highest. Ties and
    non-finite logits are never hits. Predictions are probabilities.

    Attributes:
        label_smoothing: Label smoothing of the cross-entropy, 0 <= x < 1.
        mixup: Mixup alpha within groups of `data.group_size` clips; 0 disables it. See `fastvid.train.tasks.mixup`.
        cutmix: CutMix alpha; 0 disables it.

    Raises:
        UsageError: If a value is out of range.
    """

    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    metric: ClassVar[str] = "top1_percent"
    higher_is_better: ClassVar[bool] = True
    probabilities: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_least(0.0, **{"task.mixup": self.mixup, "task.cutmix": self.cutmix})
        if not 0 <= self.label_smoothing < 1:
            raise UsageError(f"task.label_smoothing is {self.label_smoothing}, expected 0 <= x < 1")

    def check(self, config: RunSettings) -> None:
        if self._mixes and config.data.group_size < 2:
            raise UsageError(
                f"mixing needs groups of clips, data.group_size is {config.data.group_size}",
                hint="set data.group_size to a divisor of data.global_batch_size, for example 8",
            )

    def names(self, dataset: Dataset | Mixture, data: DataSettings) -> tuple[str, ...]:
        classes = tuple(dataset.classes)
        return classes if data.label == _LABEL else tuple(map(str, range(len(classes))))

    def check_data(self, dataset: Dataset | Mixture, config: RunSettings) -> None:
        assert config.model.num_classes is not None
        check_labels(dataset, config.data.label, config.model.num_classes)

    def check_streams(self, streams: tuple[str, ...]) -> None:
        if len(streams) > 1 and self._mixes:
            raise UsageError(
                "mixup and CutMix do not support models with several streams", hint="set task.mixup=0 and task.cutmix=0"
            )

    def prepare(self, batch: Batch, phase: Phase) -> Batch:
        if not (self._mixes and phase.training):
            return batch
        mixed = Mixer(self.mixup, self.cutmix, phase.group_size, phase.seed)(batch)
        return Batch(batch, video=mixed.video, partner_label=mixed.partner, own_share=mixed.own)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        logits = _logits(outputs)
        losses = self._losses(logits, batch.label)
        if "partner_label" in batch:
            own = batch.own_share.to(losses.dtype)
            losses = own * losses + (1 - own) * self._losses(logits, batch.partner_label)
        return losses

    def scored(self, batch: Batch) -> Tensor:
        return batch.valid & (batch.label >= 0)

    def measure(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        logits = _logits(outputs)
        label = batch.label.where(self.scored(batch), 0)
        losses = functional.cross_entropy(logits.double(), label, reduction="none")
        # A logit equal to the label's counts as above it, so that ties (for example constant logits) are never hits.
        own = logits.gather(1, label[:, None])
        above = (logits >= own).sum(1) - 1
        finite = logits.isfinite().all(1)
        return {"loss": losses, **{f"top{most}": finite & (above < most) for most in _TOP}}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {f"top{most}_percent": 100 * sums[f"top{most}"] / max(1.0, sums["clips"]) for most in _TOP}

    def predict(self, outputs: Any) -> Tensor:
        return _logits(outputs).double().softmax(1)

    def target(self, batch: Batch) -> Tensor:
        return batch.label

    def score(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        truth = targets[:, 0].long()
        own = predictions.gather(1, truth[:, None])
        # As in `measure`, neither ties nor non-finite values are hits.
        finite = predictions.isfinite().all(1)
        above = (predictions >= own).sum(1) - 1
        count = max(1, len(truth))
        return {
            "loss": float(-own.log().mean()) if len(truth) else float("nan"),
            **{f"top{most}_percent": 100 * float((finite & (above < most)).sum()) / count for most in _TOP},
        }

    def confusion(self, predictions: Tensor, targets: Tensor) -> Tensor:
        size = predictions.shape[1]
        guesses = predictions.nan_to_num(-1.0).argmax(1)
        return torch.bincount(targets[:, 0].long() * size + guesses, minlength=size * size).view(size, size)

    def per_output(self, predictions: Tensor, targets: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
        confusion = self.confusion(predictions, targets)
        rows = []
        for number, name in enumerate(names):
            row = confusion[number].clone()
            total, hits = int(row.sum()), int(row[number])
            row[number] = 0
            other = int(row.argmax())
            rows.append(
                {
                    "class": name,
                    "videos": total,
                    "top1_percent": 100 * hits / total if total else None,
                    "taken_for": names[other] if int(row[other]) else None,
                    "taken_for_videos": int(row[other]),
                }
            )
        return rows

    @property
    def _mixes(self) -> bool:
        return bool(self.mixup or self.cutmix)

    def _losses(self, logits: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(logits, label, reduction="none", label_smoothing=self.label_smoothing)


def _logits(outputs: Any) -> Tensor:
    logits = output(outputs)
    if logits.ndim != 2:
        raise UsageError(
            f"the model returned logits {list(logits.shape)}, expected [clips, classes]",
            hint="return one logit per class for each clip, or set task= to what the model learns",
        )
    return logits


def check_labels(dataset: Dataset | Mixture, column: str, num_classes: int) -> None:
    """Check that every sample has a label from 0 to ``num_classes - 1``."""
    check_column(
        dataset,
        column,
        lambda label: isinstance(label, int) and 0 <= label < num_classes,
        f"label from 0 to {num_classes - 1}",
        hint="set data.where, data.label or model.num_classes",
    )
