"""Score a checkpoint on a split, and predict video files, averaging each video's predictions over its views.

A view is one crop of one clip of a video. A protocol says how many clips and crops there are:

    1x1         one clip, one crop, as in the recipe's evaluation
    10x3        ten clips, three crops along the longer side, as for I3D, SlowFast and dense TSM
    1x10        one clip; four corners, center and their mirror images, the "10-crop" of TSN and TSM
    twice       two clips, one crop: TSM's "twice sample", at the middle and at the start of each segment
    twicex3     the same with three crops, TSM's protocol for Something-Something

The general form is ``CLIPSxCROPS`` with 1, 3, 5 or 10 crops, the arguments of `fastvid.Views`, which documents where
clips and crops are taken.

For classes, probabilities are averaged, as in mmaction2 and SlowFast. One pass over the split delivers all views and
decodes each packet once. The model receives at most `eval_batch_size` clips at once, over all ranks, whatever the
number of views. A batch of the loader is no larger, except that it has at least all views of one video per rank. A
video is scored only if all of its views were decoded.

Videos to predict are probed, encoded and verified like the sources of a dataset, into a temporary dataset with the
recipe's profile. The model therefore sees the same size, color and compression as in training, hostile files face the
same checks, and an unusable video is reported with its reason. The cost is one encode, a fraction of its duration.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fastvid.errors import JobError, SourceError, StateError, UsageError
from fastvid.format.schema import LEDGER
from fastvid.load.batch.batch import Batch
from fastvid.load.clips.crops import CenterCrop, Spatial
from fastvid.load.clips.views import Views, check_views
from fastvid.runtime.processes import World
from fastvid.sharding.encode.profiles import Profile, get_profile
from fastvid.sharding.job.job import run_job
from fastvid.sharding.job.ledger import read_ledger
from fastvid.storage import open_storage
from fastvid.train.config.config import Config
from fastvid.train.config.data import DataConfig
from fastvid.train.loop.strategy import Strategy
from fastvid.train.parts.evaluate import Gathered, Score, autocast
from fastvid.train.ranks import Member, join
from fastvid.train.records.checkpoint import evaluated_weights
from fastvid.train.run import assemble
from fastvid.train.run.assemble import checkpoints_of, known_classes, open_datasets, quiet, read_state
from fastvid.train.tasks.task import Phase, Task
from fastvid.videos.dataset import open as open_dataset

log = logging.getLogger(__name__)


_NAME: Final = re.compile(r"(\d+|twice)(?:x(\d+))?")
_TWICE: Final = (0.5, 0.0)
"""TSM's two positions in each segment, 0 (start) to 1 (mit-han-lab/temporal-shift-module ops/dataset.py at 1f6a834,
_get_test_indices)."""


def views(protocol: str) -> Views:
    """Return the views that a protocol averages over."""
    match = _NAME.fullmatch(protocol)
    if match is None:
        raise UsageError(
            f"unknown protocol {protocol!r}",
            hint="use CLIPSxCROPS, such as 1x1 or 10x3; or twice or twicex3, for two clips",
        )
    clips, crops = match[1], int(match[2] or 1)
    return Views(len(_TWICE), crops, _TWICE) if clips == "twice" else Views(int(clips), crops)


def with_views(data: DataConfig, asked: Views, size: int | None = None) -> DataConfig:
    """Return a recipe's data section with the evaluation crop adjusted to the views.

    `size`: side of the crops in pixels, for example 256 for "full resolution"; None keeps the recipe's.
    """
    crop = Spatial.of(data.eval_spatial).crop
    if size is not None:
        data = replace(data, eval_spatial=(CenterCrop(size, getattr(crop, "short_side", None)),))
    elif asked.num_crops > 1:
        data = replace(data, eval_spatial=(crop,))
    check_views(asked, data.eval_frames, Spatial.of(data.eval_spatial))
    return data


@dataclass(frozen=True, eq=False)
class EvalReport:
    """The detailed result of an evaluation."""

    score: Score
    protocol: str
    num_views: int
    names: tuple[str, ...]
    rows: Sequence[dict[str, Any]]  # a row for each of the model's outputs, see `Task.details`
    # int64 [names, names], number of videos by true class (row) and predicted class (column); None if the task does
    # not predict classes.
    confusion: Tensor | None

    def as_row(self) -> dict[str, Any]:
        """Return the score, protocol and number of views as a row."""
        return {**self.score.as_row(), "protocol": self.protocol, "views": self.num_views}


def report(task: Task, gathered: Gathered, num_views: int, protocol: str, known: Sequence[str]) -> EvalReport:
    """Score the samples whose views were all seen, from the predictions of all ranks."""
    predictions, targets, scored = gathered.means(num_views)
    names = output_names(known, predictions.shape[1])
    if len(targets) < len(scored):
        log.warning("only %d of %d samples were scored: the others failed to decode", len(targets), len(scored))
    numbers = task.score(predictions, targets)
    score = Score(numbers, task.value(numbers), len(targets), len(scored))
    return EvalReport(score, protocol, num_views, tuple(names), *task.details(predictions, targets, names))


def score(
    config: Config, checkpoint: str | None = None, *, protocol: str = "1x1", size: int | None = None
) -> EvalReport:
    """Evaluate a checkpoint of a run, or a file of weights, on the evaluation split.

    `size`: side of the crops in pixels; None keeps the recipe's.
    """
    check_predicts(config.task, "eval")
    asked = views(protocol)
    config = replace(config, data=with_views(config.data, asked, size))
    with join(config.run.timeout_s) as member:
        return _score(config, checkpoint, asked, protocol, member)


def _score(config: Config, checkpoint: str | None, asked: Views, protocol: str, member: Member) -> EvalReport:
    quiet(member)
    config, model, state = trained(config, checkpoint, member)
    config, train, dataset = open_datasets(config, state, member)
    if dataset is None:
        raise UsageError("there is no evaluation split: data.eval_split is none", hint="set data.eval_split")
    gathered = Gathered(len(dataset))
    for batch in assemble.make_loader(config, dataset, member, asked):
        add_batch(model, batch, gathered, member, config)
    strategy = Strategy(member)
    gathered.add_up(lambda values: strategy.total(values)())
    return report(config.task, gathered, asked.num_views, protocol, config.task.names(train, config.data))


@torch.no_grad()
def add_batch(
    model: nn.Module, batch: Batch, gathered: Gathered, member: Member, config: Config, *, targets: bool = True
) -> None:
    """Predict a batch, at most `eval_batch_size` clips at once, and add the predictions to `gathered`.

    `targets`: whether to add targets too, and only the rows that the task scores; False adds all rows that are not
    masked.
    """
    model.eval()
    task = config.task
    if batch.frame_index.ndim == 3:  # [B, V, T]: there are several views
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
    """Return a batch with one row per view instead of per video: view v of row b becomes row b * V + v."""
    rows, num_views = batch.frame_index.shape[:2]
    viewed = {"video", "flow", "frame_index", "seconds"}

    def repeated(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {inner: repeated(name, one) for inner, one in value.items()}
        if isinstance(value, Tensor) and value.ndim and len(value) == rows:
            return value.flatten(0, 1) if name in viewed else value.repeat_interleave(num_views, 0)
        if isinstance(value, tuple) and len(value) == rows:
            return tuple(one for one in value for _ in range(num_views))
        return value

    return Batch({name: repeated(name, value) for name, value in batch.items()})


def output_names(known: Sequence[str], count: int) -> list[str]:
    """Return `known`, the names of the outputs, if there are `count` outputs, else their numbers as names."""
    return list(known) if len(known) == count else [str(number) for number in range(count)]


def check_predicts(task: Task, command: str) -> None:
    """Raise UsageError if a task makes no predictions, which `command` needs."""
    if not task.predicts:
        raise UsageError(
            f"`fastvid {command}` needs predictions, but task {type(task).__name__} makes none",
            hint="add predict, target and score to the task, or read the run's own evaluations in metrics.jsonl",
        )


def trained(config: Config, checkpoint: str | None, member: Member) -> tuple[Config, nn.Module, dict[str, Any] | None]:
    """Return the model of a run with the weights of a checkpoint or, if the run has none, those of `model.weights`.

    Returns the configuration with the number of classes filled in, the model, and the checkpoint's state or None.
    """
    checkpoints = checkpoints_of(config)
    name, state = read_state(checkpoints, member, checkpoint)
    if state is None and config.model.weights is None:
        raise UsageError(
            "run has no checkpoint",
            file=checkpoints.storage.url,
            hint="train it with `fastvid train`, or set model.weights=FILE to use a file of weights",
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
        model.load_state_dict(evaluated_weights(state))
    except RuntimeError as error:
        raise StateError(f"checkpoint does not fit the model: {error}", file=name) from error
    return config, model, state


WHOLE_S: Final = 86_400.0  # maximum seconds of a sample: a day, so that a video is not split into several samples
_BATCH: Final = 8  # clips that the model predicts at once


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """What a model predicts for one video."""

    video: str  # path of the file
    top: tuple[tuple[str, float], ...]  # name and value of each output; classes by falling probability
    frames: tuple[int, ...]  # indices of the frames of the first view
    pictures: npt.NDArray[np.uint8]  # these frames as stored in the dataset, uint8 [T, H, W, 3]
    probabilities: bool = True  # whether the values are probabilities of classes

    def as_row(self) -> dict[str, Any]:
        """Return all fields except the pictures as JSON values."""
        found: dict[str, Any] = {"values": dict(self.top)}
        if self.probabilities:
            found = {"top": [{"class": name, "probability": share} for name, share in self.top]}
        return {"video": self.video, **found, "frames": list(self.frames)}


def predict(
    config: Config,
    videos: Sequence[str],
    checkpoint: str | None = None,
    *,
    protocol: str = "1x1",
    size: int | None = None,
    top: int = 5,
) -> list[Prediction]:
    """Predict classes or numbers of videos with a checkpoint of a run.

    Args:
        config: Configuration of the run.
        videos: Paths of video files.
        checkpoint: File name of a checkpoint of the run, or "best"; None uses the newest.
        protocol: Clips and crops per video, such as "10x3", see the module docstring.
        size: Side of the crops in pixels; None keeps the recipe's.
        top: Number of classes to return per video; numbers are all returned.

    Raises:
        UsageError: If a file, the checkpoint or the protocol does not exist, or the task makes no predictions.
        SourceError: If a video cannot be used; contains the reason.
    """
    check_predicts(config.task, "predict")
    if not videos:
        raise UsageError("no videos given", hint="name at least one video file")
    for video in videos:
        if not Path(video).is_file():
            if Path(video).is_dir():
                hint = f"name its videos, for example {Path(video) / '*.mp4'}"
                raise UsageError("expected a video, got a folder", file=video, hint=hint)
            raise UsageError("video does not exist", file=video)
    asked = views(protocol)
    data = replace(
        with_views(config.data, asked, size), label="label", where=None, on_error="raise", eval_batch_size=_BATCH
    )
    config = replace(config, data=data)
    member = Member(World(), torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    config, model, _ = trained(config, checkpoint, member)
    with tempfile.TemporaryDirectory(prefix="fastvid-predict-") as folder:
        keys = _encoded(config, videos, folder)
        dataset = open_dataset(folder)
        gathered = Gathered(len(dataset))
        frames: dict[str, tuple[int, ...]] = {}
        config = replace(config, data=replace(config.data, path=folder))
        for batch in assemble.make_loader(config, dataset, member, asked, targets=False):
            add_batch(model, batch, gathered, member, config, targets=False)
            first = batch.frame_index.flatten(1)[:, : config.data.num_frames]
            frames |= {key: tuple(shown) for key, shown in zip(batch.key, first.tolist(), strict=True)}
        means, _, _ = gathered.means(asked.num_views)
        names = output_names(known_classes(config), means.shape[1])
        ranked, predictions = config.task.probabilities, []
        for video, key in zip(videos, keys, strict=True):
            values = means[dataset.find(key)]
            best = values.argsort(descending=True)[:top].tolist() if ranked else range(len(values))
            chosen = tuple((names[number], float(values[number])) for number in best)
            pictures = dataset[key].frames(list(frames[key])).data
            predictions.append(Prediction(video, chosen, frames[key], np.ascontiguousarray(pictures), ranked))
    return predictions


def _encoded(config: Config, videos: Sequence[str], folder: str) -> list[str]:
    """Create a dataset of the videos, and return their keys."""
    # Symlinks with numbered names: two videos may have the same name, and their folders must not be taken for classes.
    with tempfile.TemporaryDirectory(prefix="fastvid-predict-") as links:
        paths = [Path(links) / f"{number:06d}{Path(video).suffix}" for number, video in enumerate(videos)]
        for path, video in zip(paths, videos, strict=True):
            path.symlink_to(Path(video).resolve())
        try:
            run_job(
                [str(path) for path in paths], folder, profile=_profile(config), max_seconds=WHOLE_S, follow_links=True
            )
        except JobError:
            # No video could be packed; the ledger contains the reasons.
            if not open_storage(folder).exists(LEDGER):
                raise
    ledger, _ = read_ledger(open_storage(folder))
    rows = sorted(ledger.to_pylist(), key=lambda row: str(row["source_id"]))
    if len(rows) != len(videos):
        known = {str(row["source_id"]) for row in rows}
        other = next(video for video, path in zip(videos, paths, strict=True) if path.name not in known)
        raise UsageError("file is not a video", file=other, hint="rename it to have the extension of a video, as .mp4")
    if broken := [(video, row) for video, row in zip(videos, rows, strict=True) if row["status"] != "packed"]:
        told = "; ".join(f"{video}: {row['message']}" for video, row in broken)
        told = f"{len(broken)} of {len(rows)} videos cannot be used: {told}"
        raise SourceError(told, reason=str(broken[0][1]["reason"]), hint="leave them out")
    return [str(row["key"]) for row in rows]


def _profile(config: Config) -> Profile:
    """Return the encode profile that the recipe creates its dataset with; "compact" if the recipe does not say."""
    if config.shard is None:
        return get_profile("compact")
    options, profile = config.shard.options, get_profile(config.shard.profile)
    side, crf, gop = (int(options[name]) if name in options else None for name in ("short-side", "crf", "gop"))
    return profile.changed(short_side=side, crf=crf, gop=gop, fps=options.get("fps"), hdr=options.get("hdr"))
