"""One label per clip: cross-entropy, top-1 and top-5; mixup and CutMix.

Clips are mixed within groups of consecutive clips that are on the same rank for any world size. A clip is mixed with
the clip at the mirrored index of its group: in groups of four, 0 with 3 and 1 with 2. All random numbers are a function
of the run's seed, the epoch and the group's position in the epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.batch.batch import Batch
from fastvid.load.device import upload
from fastvid.load.order.mixture import Mixture
from fastvid.runtime.values import check_fields, check_least
from fastvid.train.tasks.task import DataSettings, Phase, RunSettings, Task, check_column, output


@dataclass(frozen=True)
class Mixer:
    """Mixes the clips of a batch.

    Mixup (Zhang et al. 2017, arXiv 1710.09412) adds two clips, weighted; the first's weight is drawn from Beta(alpha,
    alpha), the second's is the rest to 1. CutMix
    (Yun et al. 2019, arXiv 1905.04899) pastes a box of the partner into the clip, the same in all frames. If both are
    enabled, each group uses one of them with equal probability.
    """

    mixup: float
    cutmix: float
    group_size: int  # clips per group, at least 2
    seed: int

    def __call__(self, batch: Batch) -> Batch:
        """Mix a batch of whole groups; a pair with a masked clip is left unchanged.

        The batch gets two further entries: ``partner_label``, int64 [B], the label of the clip that each clip was mixed
        with, and ``own_share``, float64 [B], the weight of the clip's own label, 0 to 1.
        """
        rows, size = batch.num_rows, self.group_size
        assert rows % size == 0, (rows, size)
        video = batch.video
        partner = batch.label.view(-1, size).flip(1).reshape(-1)
        # Read from `frame_index`, which is on the host: reading `batch.valid` would wait for all work of the device.
        shown = (batch.frame_index.flatten(1)[:, 0] >= 0).view(-1, size)
        both = (shown & shown.flip(1)).reshape(-1).tolist()
        out = video.clone()
        own = torch.ones(rows, dtype=torch.float64)
        for first in range(0, rows, size):
            draws = self._draws(batch.epoch, int(batch.position[first]))
            box = bool(self.cutmix) and (not self.mixup or draws.random() < 0.5)
            alpha = self.cutmix if box else self.mixup
            share = float(draws.beta(alpha, alpha))
            region = _region(share, draws, video.shape[-2], video.shape[-1]) if box else None
            for row in range(first, first + size):
                other = first + size - 1 - (row - first)
                if not both[row] or other == row:
                    continue
                if region is None:
                    out[row] = video[row] * share + video[other] * (1.0 - share)
                    own[row] = share
                else:
                    down, right, height, width = region
                    part = (..., slice(down, down + height), slice(right, right + width))
                    out[row][part] = video[other][part]
                    own[row] = 1.0 - height * width / (video.shape[-2] * video.shape[-1])
        return Batch(batch, video=out, partner_label=partner, own_share=upload(own, video.device))

    def _draws(self, epoch: int, position: int) -> np.random.Generator:
        words = hashlib.blake2b(f"{self.seed}:{epoch}:{position}".encode(), digest_size=16).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(words, "little")))


def _region(share: float, draws: np.random.Generator, height: int, width: int) -> tuple[int, int, int, int]:
    """Return top, left, height and width of a random box with ``1 - share`` of the area, clipped at the border.

    It is computed as in the authors' code.
    """
    side = float(np.sqrt(1.0 - share))
    down, right = int(draws.integers(height)), int(draws.integers(width))
    half_h, half_w = int(height * side) // 2, int(width * side) // 2
    top, left = max(0, down - half_h), max(0, right - half_w)
    return top, left, min(height, down + half_h) - top, min(width, right + half_w) - left


_LABEL: Final = "label"  # column that contains the classes of the dataset
_TOP: Final = (1, 5)


@dataclass(frozen=True)
class Classification(Task):
    """The task ``task=classification``, the default: one label per clip, from the column `data.label`.

    The loss is the cross-entropy, in nats. Metrics are the mean cross-entropy without smoothing and mixing, in double
    precision, and ``top1_percent`` and ``top5_percent``: the percentage of clips whose label has the highest logit, or
    one of the five highest. Ties and non-finite logits never count as hits. Predictions are probabilities.

    Attributes:
        label_smoothing: Label smoothing of the cross-entropy, 0 <= x < 1.
        mixup: Mixup alpha within groups of `data.group_size` clips; 0 disables it.
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
        check_fields("task", self)
        check_least(0.0, **{"task.mixup": self.mixup, "task.cutmix": self.cutmix})
        if not 0 <= self.label_smoothing < 1:
            raise UsageError(f"task.label_smoothing is {self.label_smoothing}, expected 0 <= x < 1")

    def check(self, config: RunSettings) -> None:
        if self._mixes and config.data.group_size < 2:
            raise UsageError(
                f"mixing needs groups of clips, data.group_size is {config.data.group_size}",
                hint="set data.group_size to a divisor of data.global_batch_size, for example 8",
            )
        if self._mixes and len(config.data.streams) > 1:
            raise UsageError(
                "mixup and CutMix do not support models with several streams", hint="set task.mixup=0 and task.cutmix=0"
            )

    def names(self, dataset: Dataset | Mixture, data: DataSettings) -> tuple[str, ...]:
        classes = tuple(dataset.classes)
        return classes if data.label == _LABEL else tuple(map(str, range(len(classes))))

    def check_data(self, dataset: Dataset | Mixture, config: RunSettings) -> None:
        count = config.model.num_classes
        if count is None:
            raise UsageError(
                "the samples have no classes",
                hint="put the videos into a folder for each class, or label them by `fastvid relabel`",
            )
        check_column(
            dataset,
            config.data.label,
            lambda label: isinstance(label, int) and 0 <= label < count,
            f"label from 0 to {count - 1}",
            hint=f'set data.where="{config.data.label} BETWEEN 0 AND {count - 1}", data.label or model.num_classes',
        )

    def prepare(self, batch: Batch, phase: Phase) -> Batch:
        if not (self._mixes and phase.training):
            return batch
        return Mixer(self.mixup, self.cutmix, phase.group_size, phase.seed)(batch)

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
        return {"loss": losses, **_hits(logits, label)}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {f"top{most}_percent": 100 * sums[f"top{most}"] / max(1.0, sums["clips"]) for most in _TOP}

    def predict(self, outputs: Any) -> Tensor:
        return _logits(outputs).double().softmax(1)

    def target(self, batch: Batch) -> Tensor:
        return batch.label

    def score(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        truth = targets[:, 0].long()
        own, count = predictions.gather(1, truth[:, None]), max(1, len(truth))
        return {
            "loss": float(-own.log().mean()) if len(truth) else float("nan"),
            **{f"{top}_percent": 100 * float(hit.sum()) / count for top, hit in _hits(predictions, truth).items()},
        }

    def details(
        self, predictions: Tensor, targets: Tensor, names: Sequence[str]
    ) -> tuple[list[dict[str, Any]], Tensor | None]:
        size = predictions.shape[1]
        guesses = predictions.nan_to_num(-1.0).argmax(1)
        confusion = torch.bincount(targets[:, 0].long() * size + guesses, minlength=size * size).view(size, size)
        rows: list[dict[str, Any]] = []
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
        return rows, confusion

    @property
    def _mixes(self) -> bool:
        return bool(self.mixup or self.cutmix)

    def _losses(self, logits: Tensor, label: Tensor) -> Tensor:
        try:
            return functional.cross_entropy(logits, label, reduction="none", label_smoothing=self.label_smoothing)
        except IndexError as error:
            raise UsageError(
                f"the model returned logits {list(logits.shape)}, fewer than there are classes: {error}",
                hint="return one logit per class for each clip",
            ) from error


def _hits(scores: Tensor, label: Tensor) -> dict[str, Tensor]:
    """Return whether each label is among the 1 and the 5 highest scores: {"top1": bool [b], "top5": bool [b]}."""
    # A score equal to the label's counts as above it, so that ties (for example constant logits) are never hits.
    above = (scores >= scores.gather(1, label[:, None])).sum(1) - 1
    finite = scores.isfinite().all(1)
    return {f"top{most}": finite & (above < most) for most in _TOP}


def _logits(outputs: Any) -> Tensor:
    logits = output(outputs)
    if logits.ndim != 2:
        raise UsageError(
            f"the model returned logits {list(logits.shape)}, expected [clips, classes]",
            hint="return one logit per class for each clip, or set task= to what the model learns",
        )
    return logits
