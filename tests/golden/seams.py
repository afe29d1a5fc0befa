"""All that the golden digests take from inside fastvid. A module that moves or is renamed is changed here alone."""

from __future__ import annotations

import contextlib
import hashlib
import io
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fastvid
from fastvid.cli.main import main
from fastvid.decode.backends import Backend
from fastvid.decode.request import EncodedClip, Rgb
from fastvid.format.schema import Codec
from fastvid.format.shard import sample_members, write_shard
from fastvid.load.clips.augment import Spatial
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.runtime.arrays import IntArray
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.train.records.metrics import curve, read
from fastvid.train.run.eval_protocols import views as trainers
from tests import datasets

__all__ = ["PROFILES"]

# y, x, height and width of the crop, height and width of the output, flip.
REQUEST = np.dtype("<u2")
REQUEST_VALUES = 7
FLOW_BOUND = 127.0  # one pixel a level


class Recorder:
    """A decoder that writes down what is asked of it, in the first pixels of the first row, and decodes nothing."""

    max_clips = 1
    outputs = frozenset({Rgb})

    def decode(self, clips: Sequence[EncodedClip], outputs: Sequence[Rgb]) -> list[None]:
        for clip, output in zip(clips, outputs, strict=True):
            request, box = clip.request, clip.request.box
            asked = np.array([box.y, box.x, box.height, box.width, *request.size, request.flip], REQUEST)
            output.data[0, 0, 0, : asked.nbytes] = asked.view(np.uint8)
        return [None] * len(clips)

    def close(self) -> None:
        pass


RECORDER = Backend("recorder", f"{__name__}:Recorder", "cpu", frozenset(Codec), "nothing")


def pack(
    folder: Path, shards: list[list[tuple[str, bytes, int]]], classes: tuple[str, ...], **columns: list[object]
) -> fastvid.VideoDataset:
    """A dataset named "made": for each shard keys, MP4s and labels."""
    datasets.pack(folder, shards, classes=classes, columns=columns)
    return fastvid.open(folder)


def pack_flow(folder: Path, samples: list[tuple[str, bytes, bytes]]) -> fastvid.VideoDataset:
    """A dataset of samples with pictures and flow of `FLOW_BOUND`."""
    storage = datasets.pack(folder, [[(key, picture, 0) for key, picture, _ in samples]])
    meta = {"conforms": True, "flow": {"bound": FLOW_BOUND}}
    both = [
        (key, sample_members({"source_id": key, **meta}, {"rgb": picture, "flow": flow}))
        for key, picture, flow in samples
    ]
    write_shard(storage, "data-000000", both, streams=("rgb", "flow"))
    datasets.recommit(storage, streams=("rgb", "flow"))
    return fastvid.open(folder)


def command(*words: object) -> str:
    """What a command of ``fastvid`` says on stdout.

    Raises:
        AssertionError: It failed.
    """
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = main([str(word) for word in words])
    assert code == 0, f"fastvid {' '.join(map(str, words))} exits with {code}: {said.getvalue()}"
    return said.getvalue()


def encoder() -> tuple[str, str]:
    """The build of ffmpeg that encodes here: what decides its bytes as one word, and its name for people."""
    build = find_ffmpeg()
    # The program's own words, so that nothing that fastvid comes to record of a build makes it another one.
    says = subprocess.run([build.path, "-version"], capture_output=True, check=True).stdout
    word = hashlib.sha256(says + build.x264.encode()).hexdigest()[:16]
    return word, f"ffmpeg {build.version}, x264 {build.x264 or 'absent'}"


def losses(run: Path) -> list[float]:
    """The training losses of a run, step by step."""
    return [row["loss"] for row in curve(read(run / "metrics.jsonl"))]


RECIPE_IMPORTS = "from fastvid.train.config.config import Config, DataConfig, ModelConfig, OptimConfig, RunConfig"


# Views of a video, by the trainer and by `fastvid.Views`. Each gives the frames of the clips, int64 [N, T], and the
# crops (y, x, height, width, flip) of each clip.


def trainer_clips(protocol: str, sampler: Any, lengths: Sequence[int]) -> list[IntArray]:
    """By the trainer's protocol: for each number of frames the clips' frames."""
    asked = trainers(protocol.partition("x")[0])
    return [np.stack(asked.clips(sampler, length)) for length in lengths]


def trainer_crops(protocol: str, crop: Any, size: int | None, height: int, width: int) -> list[tuple[int, ...]]:
    """By the trainer's protocol: the crops of a video of that size."""
    asked = trainers("1x" + (protocol.partition("x")[2] or "1"))
    other = crop if size is None else fastvid.CenterCrop(size, crop.short_side)
    return loader_crops(asked, other, height, width)


def loader_clips(views: fastvid.Views, sampler: Any, lengths: Sequence[int]) -> list[IntArray]:
    """By the loader's views: for each number of frames the clips' frames."""
    return [sampler.spread(length, views.num_clips) for length in lengths]


def loader_crops(views: fastvid.Views, crop: Any, height: int, width: int) -> list[tuple[int, ...]]:
    """By the loader's views: the crops of a video of that size."""
    cuts = views.cuts(Spatial.of(crop), height, width)
    return [(cut.box.y, cut.box.x, cut.box.height, cut.box.width, int(cut.flip)) for cut in cuts]
