"""Predicts classes or numbers of video files with a trained model.

Videos are probed, encoded and verified like the sources of a dataset, into a temporary dataset with the recipe's
profile. The model therefore sees the same size, color and compression as in training, hostile files face the same
checks, and an unusable video is reported with its reason. The cost is one encode, a fraction of a video's duration.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from fastvid.decode.access import open as open_dataset
from fastvid.errors import JobError, SourceError, UsageError
from fastvid.format.schema import LEDGER
from fastvid.runtime.world import World
from fastvid.sharding.encode.profile import Profile
from fastvid.sharding.encode.profiles import get_profile
from fastvid.sharding.job.job import run_job
from fastvid.sharding.job.ledger import read_ledger
from fastvid.storage import open_storage
from fastvid.train.config.config import Config
from fastvid.train.parts.gathered import Gathered
from fastvid.train.ranks.elastic import Member
from fastvid.train.run import assemble, launch, scoring
from fastvid.train.run.eval_protocols import views, with_views

WHOLE_S: Final = 86_400.0  # a video is one sample, however long
_BATCH: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """What a model predicts for one video.

    Attributes:
        video: Its path, as given by the caller.
        top: Names of outputs with their prediction: classes with their probability, 0 to 1, most probable first; or
            columns with their number.
        frames: Frame indices of the first view.
        pictures: These frames as stored in the dataset, uint8 [T, H, W, 3].
        probabilities: Whether predictions are probabilities.
    """

    video: str
    top: tuple[tuple[str, float], ...]
    frames: tuple[int, ...]
    pictures: npt.NDArray[np.uint8]
    probabilities: bool = True

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
        protocol: See `fastvid.train.run.eval_protocols`.
        size: Side of the crops in pixels; None keeps the recipe's.
        top: Number of classes to return per video; numbers are all returned.

    Raises:
        UsageError: If a file, the checkpoint or the protocol does not exist, or the task makes no predictions.
        SourceError: If a video cannot be used; contains the reason.
    """
    scoring.check_predicts(config.task, "predict")
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
    config, model, _ = scoring.trained(config, checkpoint, member)
    names = scoring.output_names(launch.known_classes(config), config)
    with tempfile.TemporaryDirectory(prefix="fastvid-predict-") as folder:
        keys = _encoded(config, videos, folder)
        dataset = open_dataset(folder)
        gathered = Gathered(len(dataset))
        frames: dict[str, tuple[int, ...]] = {}
        config = replace(config, data=replace(config.data, path=folder))
        for batch in assemble.eval_data(config, dataset, member, asked, targets=False).loader:
            scoring.add_batch(model, batch, gathered, member, config, targets=False)
            first = batch.frame_index.flatten(1)[:, : config.data.num_frames]
            frames |= {key: tuple(shown) for key, shown in zip(batch.key, first.tolist(), strict=True)}
        means, _, _ = gathered.means(asked.num_views)
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
    # Symlinks with numbered names, because two videos may have the same name, and their folders are not classes.
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
        raise UsageError("file is not a video", file=other, hint="give it the file name extension of a video")
    for video, row in zip(videos, rows, strict=True):
        if row["status"] != "packed":
            raise SourceError(str(row["message"]), reason=str(row["reason"]), file=video)
    return [str(row["key"]) for row in rows]


def _profile(config: Config) -> Profile:
    """Return the encode profile of the recipe, with which its dataset was created."""
    if config.shard is None:
        return get_profile("compact")
    options = config.shard.options
    side, crf, gop = (int(options[name]) if name in options else None for name in ("short-side", "crf", "gop"))
    return get_profile(config.shard.profile).changed(short_side=side, crf=crf, gop=gop, fps=options.get("fps"))
