"""What a trained model says of videos that are in no dataset.

A video goes through the same probe, encode and verify as a dataset does, into a temporary one of the recipe's profile.
So the model sees what it was trained on (size, colour, compression), hostile files meet the same guards, and a video
that cannot be used is named with its reason. It costs an encode, a fraction of a video's duration.
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
from fastvid.train.ranks.elastic import Member
from fastvid.train.run import assemble, launch, scoring
from fastvid.train.run.eval_protocols import viewed, views

WHOLE_S: Final = 86_400.0  # a video is one sample, however long
_BATCH: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """What a model says of one video.

    Attributes:
        video: Its path as it was given.
        top: Classes with their probability, 0 to 1, the likeliest first.
        frames: Frames of the first view, int64 [T].
        pictures: These frames as the dataset holds them, uint8 [T, H, W, 3].
    """

    video: str
    top: tuple[tuple[str, float], ...]
    frames: tuple[int, ...]
    pictures: npt.NDArray[np.uint8]

    def as_row(self) -> dict[str, Any]:
        """All but the pictures."""
        return {
            "video": self.video,
            "top": [{"class": name, "probability": share} for name, share in self.top],
            "frames": list(self.frames),
        }


def predict(
    config: Config,
    videos: Sequence[str],
    checkpoint: str | None = None,
    *,
    protocol: str = "1x1",
    size: int | None = None,
    top: int = 5,
) -> list[Prediction]:
    """Scores videos with a checkpoint of a run.

    Args:
        config: The run's.
        videos: Files.
        checkpoint: File name in the run's checkpoints, or "best"; None takes the newest.
        protocol: See `fastvid.train.run.eval_protocols`.
        size: Side of the crops; None keeps the recipe's.
        top: How many classes to tell.

    Raises:
        UsageError: A file does not exist, or there is no checkpoint or protocol.
        SourceError: A video cannot be used; says why.
    """
    if not videos:
        raise UsageError("no video is given")
    for video in videos:
        if not Path(video).is_file():
            raise UsageError("video does not exist", file=video)
    asked = views(protocol)
    data = replace(
        viewed(config.data, asked, size), label="label", where=None, on_error="raise", eval_batch_size=_BATCH
    )
    config = replace(config, data=data)
    member = Member(World(), torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    config, model, _ = scoring.trained(config, checkpoint, member)
    names = scoring.class_names(launch.known_classes(config), config)
    with tempfile.TemporaryDirectory(prefix="fastvid-predict-") as folder:
        keys = _encoded(config, videos, folder)
        dataset = open_dataset(folder)
        tally = scoring.Tally(len(dataset), len(names))
        frames: dict[str, tuple[int, ...]] = {}
        config = replace(config, data=replace(config.data, path=folder))
        for batch in assemble.eval_data(config, dataset, member, asked).loader:
            scoring.add_batch(model, batch, tally, member, config)
            first = batch.frame_index.flatten(1)[:, : config.data.eval_frames.num_frames]
            frames |= {key: tuple(shown) for key, shown in zip(batch.key, first.tolist(), strict=True)}
        found = []
        for video, key in zip(videos, keys, strict=True):
            shares = tally.sums[dataset.find(key), :-1] / asked.num_views
            best = shares.argsort(descending=True)[:top].tolist()
            chosen = tuple((names[number], float(shares[number])) for number in best)
            pictures = dataset[key].frames(list(frames[key])).data
            found.append(Prediction(video, chosen, frames[key], np.ascontiguousarray(pictures)))
    return found


def _encoded(config: Config, videos: Sequence[str], folder: str) -> list[str]:
    """Makes a dataset of the videos; the key of each."""
    # Links of numbered names: two videos may be called alike, and their folders are no classes.
    with tempfile.TemporaryDirectory(prefix="fastvid-predict-") as links:
        paths = [Path(links) / f"{number:06d}{Path(video).suffix}" for number, video in enumerate(videos)]
        for path, video in zip(paths, videos, strict=True):
            path.symlink_to(Path(video).resolve())
        try:
            run_job(
                [str(path) for path in paths], folder, profile=_profile(config), max_seconds=WHOLE_S, follow_links=True
            )
        except JobError:
            # None could be packed; the ledger says why.
            if not open_storage(folder).exists(LEDGER):
                raise
    ledger, _ = read_ledger(open_storage(folder))
    rows = sorted(ledger.to_pylist(), key=lambda row: str(row["source_id"]))
    if len(rows) != len(videos):
        known = {str(row["source_id"]) for row in rows}
        other = next(video for video, path in zip(videos, paths, strict=True) if path.name not in known)
        raise UsageError("file is no video", file=other, hint="its name must end as a video's does")
    for video, row in zip(videos, rows, strict=True):
        if row["status"] != "packed":
            raise SourceError(str(row["message"]), reason=str(row["reason"]), file=video)
    return [str(row["key"]) for row in rows]


def _profile(config: Config) -> Profile:
    """The recipe's profile, which is the one its dataset was made with."""
    if config.shard is None:
        return get_profile("compact")
    options = config.shard.options
    side, crf, gop = (int(options[name]) if name in options else None for name in ("short-side", "crf", "gop"))
    return get_profile(config.shard.profile).changed(short_side=side, crf=crf, gop=gop, fps=options.get("fps"))
