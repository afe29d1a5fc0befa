"""Scores a checkpoint on a split, averaging each video's predictions over its views.

Of classes, probabilities are averaged, as in mmaction2 and SlowFast. One pass over the split delivers all views and
decodes each packet once. The model receives at most `eval_batch_size` clips at once, over all ranks, whatever the
number of views; a batch of the loader contains no more either, but at least the views of one video per rank. A video is
scored only if all of its views were decoded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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
from fastvid.train.parts.gathered import Gathered
from fastvid.train.ranks.elastic import Member, join
from fastvid.train.run import assemble, launch
from fastvid.train.run.eval_protocols import views, with_views
from fastvid.train.run.splits import open_datasets
from fastvid.train.tasks.task import Phase, Task

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class EvalReport:
    """The detailed result of an evaluation.

    Attributes:
        score: Score over all videos.
        protocol: Name of the protocol.
        num_views: Views per video.
        names: Names of the model's outputs: classes, or columns.
        rows: A row for each output, see `Task.per_output`.
        confusion: int64 [names, names], number of videos by true class (row) and predicted class (column); None where
            there are no classes.
    """

    score: Score
    protocol: str
    num_views: int
    names: tuple[str, ...]
    rows: Sequence[dict[str, Any]]
    confusion: Tensor | None

    def as_row(self) -> dict[str, Any]:
        """Return the score, protocol and number of views as a row."""
        return {**self.score.as_row(), "protocol": self.protocol, "views": self.num_views}


def report(task: Task, gathered: Gathered, num_views: int, protocol: str, names: Sequence[str]) -> EvalReport:
    """Score the predictions of all ranks.

    Args:
        task: What the model learns.
        gathered: Predictions and targets.
        num_views: Views per video.
        protocol: Name of the protocol.
        names: Names of the outputs.

    Raises:
        StateError: If a video has more views than the protocol.
    """
    predictions, targets, scored = gathered.means(num_views)
    if len(targets) < len(scored):
        log.warning("only %d of %d samples were scored: the others failed to decode", len(targets), len(scored))
    numbers = task.score(predictions, targets)
    return EvalReport(
        Score(numbers, task.value(numbers), len(targets), len(scored)),
        protocol,
        num_views,
        tuple(names),
        task.per_output(predictions, targets, names),
        task.confusion(predictions, targets),
    )


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
    check_predicts(config.task, "eval")
    asked = views(protocol)
    config = replace(config, data=with_views(config.data, asked, size))
    with join(config.run.timeout_s) as member:
        return _score(config, checkpoint, asked, protocol, member)


def _score(config: Config, checkpoint: str | None, asked: Views, protocol: str, member: Member) -> EvalReport:
    launch.quiet(member)
    config, model, state = trained(config, checkpoint, member)
    config, train, dataset = open_datasets(config, state, member)
    if dataset is None:
        raise UsageError("there is no evaluation split: data.eval_split is none", hint="set data.eval_split")
    gathered = Gathered(len(dataset))
    for batch in assemble.eval_data(config, dataset, member, asked).loader:
        add_batch(model, batch, gathered, member, config)
    strategy = Strategy(member)
    gathered.add_up(lambda values: strategy.total(values)())
    names = output_names(config.task.names(train, config.data), config)
    return report(config.task, gathered, asked.num_views, protocol, names)


@torch.no_grad()
def add_batch(
    model: nn.Module, batch: Batch, gathered: Gathered, member: Member, config: Config, *, targets: bool = True
) -> None:
    """Add the predictions for a batch, at most `eval_batch_size` clips at once.

    Without `targets`, all rows that are not masked are added, whether or not they have a label.
    """
    model.eval()
    task = config.task
    if batch.frame_index.ndim == 3:  # with an axis of views
        batch = _one_view_a_row(batch)
    most = -(-config.data.eval_batch_size // member.world.size)
    for first in range(0, batch.num_rows, most):
        part = batch.rows(slice(first, first + most))
        part = task.prepare(part, Phase(training=False, seed=config.run.seed))
        with autocast(member.device, config.run.amp):
            outputs = model(*task.inputs(part))
        scored = task.scored(part) if targets else part.valid
        gathered.add(task.predict(outputs), scored, part.sample, task.target(part) if targets else None)


def _one_view_a_row(batch: Batch) -> Batch:
    """Return a batch with a row for each view of each clip; view v of row b is row b * V + v."""
    rows, num_views = batch.frame_index.shape[:2]
    with_views = {"video", "flow", "frame_index", "seconds"}

    def repeated(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {inner: repeated(name, one) for inner, one in value.items()}
        if isinstance(value, Tensor) and value.ndim and len(value) == rows:
            return value.flatten(0, 1) if name in with_views else value.repeat_interleave(num_views, 0)
        if isinstance(value, tuple) and len(value) == rows:
            return tuple(one for one in value for _ in range(num_views))
        return value

    return Batch({name: repeated(name, value) for name, value in batch.items()})


def output_names(known: Sequence[str], config: Config) -> list[str]:
    """Return the names of the outputs if there are as many as the model has, else numbers as names."""
    count = config.model.num_classes
    return list(known) if count is None or len(known) == count else [str(number) for number in range(count)]


def check_predicts(task: Task, command: str) -> None:
    """Check that a task makes predictions.

    Raises:
        UsageError: If it does not.
    """
    if not task.predicts:
        raise UsageError(
            f"`fastvid {command}` needs predictions, but task {type(task).__name__} makes none",
            hint="add predict, target and score to the task, or read the run's own evaluations in metrics.jsonl",
        )


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
        model_config = replace(config.model, num_classes=state["config"]["model"]["num_classes"])
        config = replace(config, model=model_config)
    if config.model.num_classes is None and state is None:
        config, _, _ = open_datasets(config, state, member)
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
