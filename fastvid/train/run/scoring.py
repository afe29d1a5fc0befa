"""A checkpoint on a split, by a protocol: the mean over views of each video's probabilities, then one score a video.

Probabilities are averaged, as mmaction2 and SlowFast do. All views come from one pass over the split, in which each
packet is decoded once. However many there are, the model gets at most `eval_batch_size` clips at once, over all ranks,
and a batch of the loader holds no more either, but at least the views of one video a rank. A video counts only when all
of its views decoded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastvid.errors import StateError, UsageError
from fastvid.load.batch.batch import Batch
from fastvid.load.clips.views import Views
from fastvid.train.config.config import Config
from fastvid.train.loop.strategy import Strategy
from fastvid.train.parts.evaluate import Score, autocast
from fastvid.train.parts.loader_protocol import inputs
from fastvid.train.ranks.elastic import Member, join
from fastvid.train.run import assemble, launch
from fastvid.train.run.eval_protocols import viewed, views

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Report:
    """An evaluation in detail.

    Attributes:
        score: Over all videos.
        protocol: Its name.
        num_views: Views of each video.
        classes: Names.
        confusion: int64 [classes, classes], videos by true class (row) and predicted class.
    """

    score: Score
    protocol: str
    num_views: int
    classes: tuple[str, ...]
    confusion: Tensor

    def per_class(self) -> list[dict[str, Any]]:
        """Videos and top-1 of each class, and what it is most often taken for."""
        rows = []
        for number, name in enumerate(self.classes):
            row = self.confusion[number].clone()
            total, hits = int(row.sum()), int(row[number])
            row[number] = 0
            other = int(row.argmax())
            rows.append(
                {
                    "class": name,
                    "videos": total,
                    "top1_percent": 100 * hits / total if total else None,
                    "taken_for": self.classes[other] if int(row[other]) else None,
                    "taken_for_videos": int(row[other]),
                }
            )
        return rows

    def as_row(self) -> dict[str, Any]:
        """The numbers over all videos."""
        return {**self.score.as_row(), "protocol": self.protocol, "views": self.num_views}


class Tally:
    """Sums of probabilities by sample.

    Args:
        total: Samples of the split.
        num_classes: Width of the logits.
    """

    def __init__(self, total: int, num_classes: int) -> None:
        # The last column counts views.
        self.sums = torch.zeros(total, num_classes + 1, dtype=torch.float64)

    def add(self, logits: Tensor, sample: Tensor, valid: Tensor) -> None:
        """Adds a batch: logits [b, classes], sample numbers int64 [b] on the host, valid bool [b]."""
        rows = valid.cpu()
        probabilities = logits[rows.to(logits.device)].double().softmax(1).cpu()
        ones = torch.ones(len(probabilities), 1, dtype=torch.float64)
        self.sums.index_add_(0, sample[rows], torch.cat([probabilities, ones], 1))

    def report(self, labels: Tensor, num_views: int, protocol: str, classes: Sequence[str]) -> Report:
        """Scores what was added up over all ranks.

        Args:
            labels: int64 [N], below 0 for none.
            num_views: Views that a video must have.
            protocol: Name.
            classes: Names.

        Raises:
            StateError: A video was seen more often than there are views.
        """
        seen = self.sums[:, -1]
        if bool((seen > num_views).any()):
            raise StateError(f"a video was scored {int(seen.max())} times, the protocol has {num_views} views")
        scored = (seen == num_views) & (labels >= 0)
        mean, truth = self.sums[scored, :-1] / num_views, labels[scored]
        own = mean.gather(1, truth[:, None])
        # As in `fastvid.train.parts.evaluate.count`: ties are no hits, and neither is what is not finite.
        finite = mean.isfinite().all(1)
        above = (mean >= own).sum(1) - 1
        guesses = mean.nan_to_num(-1.0).argmax(1)
        size = len(classes)
        confusion = torch.bincount(truth * size + guesses, minlength=size * size).view(size, size)
        count = max(1, len(truth))
        score = Score(
            loss=float(-own.log().mean()) if len(truth) else float("nan"),
            top1_percent=100 * float((finite & (above < 1)).sum()) / count,
            top5_percent=100 * float((finite & (above < 5)).sum()) / count,
            scored=len(truth),
            total=len(labels),
        )
        if len(truth) < len(labels):
            log.warning("%d of %d samples scored: the others did not decode", len(truth), len(labels))
        return Report(score, protocol, num_views, tuple(classes), confusion)


def score(config: Config, checkpoint: str | None = None, *, protocol: str = "1x1", size: int | None = None) -> Report:
    """Evaluates a checkpoint of a run, or a file of weights, on the evaluation split.

    Args:
        config: The run's.
        checkpoint: File name in the run's checkpoints, or "best"; None takes the newest.
        protocol: See `fastvid.train.run.eval_protocols`.
        size: Side of the crops; None keeps the recipe's.

    Raises:
        UsageError: There is no evaluation split, no checkpoint, or no such protocol.
        StateError: The checkpoint does not fit the model.
    """
    asked = views(protocol)
    config = replace(config, data=viewed(config.data, asked, size))
    with join(config.run.timeout_s) as member:
        return _score(config, checkpoint, asked, protocol, member)


def _score(config: Config, checkpoint: str | None, asked: Views, protocol: str, member: Member) -> Report:
    launch.quiet(member)
    config, model, state = trained(config, checkpoint, member)
    _, _, dataset = assemble.datasets(config, state, member)
    if dataset is None:
        raise UsageError("data.eval_split is none, so there is nothing to evaluate")
    assert config.model.num_classes is not None
    tally = Tally(len(dataset), config.model.num_classes)
    for batch in assemble.eval_data(config, dataset, member, asked).loader:
        add_batch(model, batch, tally, member, config)
    tally.sums = Strategy(member).total(tally.sums)()
    labels = torch.tensor(dataset.column(config.data.label).to_pylist())
    names = class_names(dataset.classes, config)
    return tally.report(labels, asked.num_views, protocol, names)


@torch.no_grad()
def add_batch(model: nn.Module, batch: Batch, tally: Tally, member: Member, config: Config) -> None:
    """Adds what a model says of one batch to a tally. The model gets no more clips at once than evaluation does."""
    model.eval()
    streams, sample, valid = inputs(batch), batch.sample, batch.valid
    if batch.frame_index.ndim == 3:  # with an axis of views
        num_views = batch.frame_index.shape[1]
        streams = tuple(clips.flatten(0, 1) for clips in streams)
        sample, valid = sample.repeat_interleave(num_views), valid.repeat_interleave(num_views)
    most = -(-config.data.eval_batch_size // member.world.size)
    for first in range(0, len(sample), most):
        part = slice(first, first + most)
        with autocast(member.device, config.run.amp):
            logits = model(*(clips[part] for clips in streams))
        tally.add(logits, sample[part], valid[part])


def class_names(known: Sequence[str], config: Config) -> list[str]:
    """The dataset's names where they are those of the label, else numbers."""
    count = config.model.num_classes
    assert count is not None
    return list(known) if len(known) == count and config.data.label == "label" else [str(n) for n in range(count)]


def trained(config: Config, checkpoint: str | None, member: Member) -> tuple[Config, nn.Module, dict[str, Any] | None]:
    """The model of a run with the weights of a checkpoint, or with those of `model.weights` where there is none.

    Returns:
        The configuration with its number of classes filled in, the model, and what the checkpoint holds.

    Raises:
        UsageError: There is neither checkpoint nor file of weights.
        StateError: The checkpoint does not fit the model.
    """
    checkpoints = launch.checkpoints_of(config)
    name, state = launch.read_state(checkpoints, member, checkpoint)
    if state is None and config.model.weights is None:
        raise UsageError(
            "run has no checkpoint",
            file=checkpoints.storage.url,
            hint="model.weights=FILE evaluates a file of weights",
        )
    if state is not None and config.model.num_classes is None:
        model_config = replace(config.model, num_classes=int(state["config"]["model"]["num_classes"]))
        config = replace(config, model=model_config)
    if config.model.num_classes is None:
        config, _, _ = assemble.datasets(config, state, member)
    model = assemble.build_model(config, member)
    if state is None:
        assemble.load_initial_weights(config, model)
        return config, model, state
    try:
        # The average of the weights, where the run kept one, is what it evaluated.
        model.load_state_dict({**state["replica"]["model"], **(state["replica"].get("average") or {})})
    except RuntimeError as error:
        raise StateError(f"checkpoint does not fit the model: {error}", file=name) from error
    return config, model, state
