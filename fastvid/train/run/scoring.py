"""Scores a checkpoint on a split, averaging each video's probabilities over its views.

Probabilities are averaged, as in mmaction2 and SlowFast. One pass over the split delivers all views and decodes each
packet once. The model receives at most `eval_batch_size` clips at once, over all ranks, whatever the number of views; a
batch of the loader contains no more either, but at least the views of one video per rank. A video is scored only if all
of its views were decoded.
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
from fastvid.train.run.eval_protocols import views, with_views

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class EvalReport:
    """The detailed result of an evaluation.

    Attributes:
        score: Score over all videos.
        protocol: Name of the protocol.
        num_views: Views per video.
        classes: Class names.
        confusion: int64 [classes, classes], number of videos by true class (row) and predicted class (column).
    """

    score: Score
    protocol: str
    num_views: int
    classes: tuple[str, ...]
    confusion: Tensor

    def per_class(self) -> list[dict[str, Any]]:
        """Return videos, top-1 and the most frequent wrong prediction of each class."""
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
        """Return the score, protocol and number of views as a row."""
        return {**self.score.as_row(), "protocol": self.protocol, "views": self.num_views}


class Tally:
    """Sums class probabilities and counts views per sample.

    Args:
        total: Number of samples in the split.
        num_classes: Width of the logits.
    """

    def __init__(self, total: int, num_classes: int) -> None:
        # The last column counts views.
        self.sums = torch.zeros(total, num_classes + 1, dtype=torch.float64)

    def add(self, logits: Tensor, sample: Tensor, valid: Tensor) -> None:
        """Add a batch: logits [b, classes], sample numbers int64 [b] on the CPU, valid bool [b]."""
        rows = valid.cpu()
        probabilities = logits[rows.to(logits.device)].double().softmax(1).cpu()
        ones = torch.ones(len(probabilities), 1, dtype=torch.float64)
        self.sums.index_add_(0, sample[rows], torch.cat([probabilities, ones], 1))

    def report(self, labels: Tensor, num_views: int, protocol: str, classes: Sequence[str]) -> EvalReport:
        """Score the sums over all ranks.

        Args:
            labels: int64 [N], negative for no label.
            num_views: Views per video.
            protocol: Name of the protocol.
            classes: Class names.

        Raises:
            StateError: If a video has more views than the protocol.
        """
        seen = self.sums[:, -1]
        if bool((seen > num_views).any()):
            raise StateError(f"a video was scored {int(seen.max())} times, the protocol has {num_views} views")
        scored = (seen == num_views) & (labels >= 0)
        mean, truth = self.sums[scored, :-1] / num_views, labels[scored]
        own = mean.gather(1, truth[:, None])
        # As in `fastvid.train.parts.evaluate.count`, neither ties nor non-finite values are hits.
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
            log.warning("only %d of %d samples were scored: the others failed to decode", len(truth), len(labels))
        return EvalReport(score, protocol, num_views, tuple(classes), confusion)


def score(
    config: Config, checkpoint: str | None = None, *, protocol: str = "1x1", size: int | None = None
) -> EvalReport:
    """Evaluate a checkpoint of a run, or a file of weights, on the evaluation split.

    Args:
        config: Configuration of the run.
        checkpoint: File name of a checkpoint of the run, or "best"; None uses the newest.
        protocol: See `fastvid.train.run.eval_protocols`.
        size: Side of the crops in pixels; None keeps the recipe's.

    Raises:
        UsageError: If there is no evaluation split, checkpoint or protocol of that name.
        StateError: If the checkpoint does not fit the model.
    """
    asked = views(protocol)
    config = replace(config, data=with_views(config.data, asked, size))
    with join(config.run.timeout_s) as member:
        return _score(config, checkpoint, asked, protocol, member)


def _score(config: Config, checkpoint: str | None, asked: Views, protocol: str, member: Member) -> EvalReport:
    launch.quiet(member)
    config, model, state = trained(config, checkpoint, member)
    _, _, dataset = assemble.datasets(config, state, member)
    if dataset is None:
        raise UsageError("there is no evaluation split: data.eval_split is none", hint="set data.eval_split")
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
    """Add the predictions for a batch to a tally, at most `eval_batch_size` clips at once."""
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
    """Return the dataset's class names if they apply to the label column, else numbers as names."""
    count = config.model.num_classes
    assert count is not None
    return list(known) if len(known) == count and config.data.label == "label" else [str(n) for n in range(count)]


def trained(config: Config, checkpoint: str | None, member: Member) -> tuple[Config, nn.Module, dict[str, Any] | None]:
    """Return the model of a run with the weights of a checkpoint, or else of `model.weights`.

    Returns:
        The configuration with the number of classes filled in, the model, and the state in the checkpoint.

    Raises:
        UsageError: If there is neither a checkpoint nor a file of weights.
        StateError: If the checkpoint does not fit the model.
    """
    checkpoints = launch.checkpoints_of(config)
    name, state = launch.read_state(checkpoints, member, checkpoint)
    if state is None and config.model.weights is None:
        raise UsageError(
            "run has no checkpoint",
            file=checkpoints.storage.url,
            hint="set model.weights=FILE to use a file of weights",
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
        # If the run kept an average of the weights, use it, as the run's own evaluations did.
        model.load_state_dict({**state["replica"]["model"], **(state["replica"].get("average") or {})})
    except RuntimeError as error:
        raise StateError(f"checkpoint does not fit the model: {error}", file=name) from error
    return config, model, state
