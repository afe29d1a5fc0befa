"""The configuration of the datasets of a run and of its clips; samplers by name, for ``data.frames=``."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Final, Literal

from fastvid.decode.colours import IMAGENET_MEAN, IMAGENET_STD
from fastvid.errors import UsageError
from fastvid.load.after.chain import AnyTransform
from fastvid.load.clips.crops import Transform
from fastvid.load.clips.sampling import Dense, Sampler, Segments, Uniform, clip_length
from fastvid.load.clips.timed_sampling import Window
from fastvid.load.options import Kind
from fastvid.load.order.epoch import BlockShuffle, ClassBalanced, Last
from fastvid.runtime.names import import_name
from fastvid.runtime.values import check_choice, check_least
from fastvid.train.config.overrides import NAMED, at_least, check_kinds

MAIN: Final = "main"
"""Name of the dataset of `DataConfig.path` in a mixture."""


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """A dataset that a run trains on besides `DataConfig.path`.

    Attributes:
        path: Folder or URL of the dataset.
        split: Split to train on; None for all samples.
        where: Filter over the annotations' columns.
        generation: Number or tag of the dataset's generation, as `DataConfig.generation`.
        weight: Relative share of an epoch, positive; shares need not add up to one. None in a mixture without weights.
    """

    path: str
    split: str | None = "train"
    where: str | None = None
    generation: int | str | None = None
    weight: float | None = None


def check_mixture(mixture: Mapping[str, DatasetConfig], weight: float | None, epoch_samples: int | None) -> None:
    """Check the settings of a mixture.

    `weight`: weight of the dataset of `DataConfig.path`. `epoch_samples`: samples in an epoch.
    """
    check_least(1, **{"data.epoch_samples": epoch_samples})
    shares = {"data.weight": weight} | {f"data.mixture.{name}.weight": part.weight for name, part in mixture.items()}
    given = {key: share for key, share in shares.items() if share is not None}
    if not mixture and (given or epoch_samples is not None):
        raise UsageError(
            f"{next(iter(given), 'data.epoch_samples')} is set, but data.mixture names no further dataset",
            hint="set data.mixture.NAME.path, or remove it",
        )
    if MAIN in mixture:
        raise UsageError(
            f"data.mixture names a dataset {MAIN!r}, which is the name of data.path", hint="choose another name"
        )
    if epoch_samples is not None and not given:
        raise UsageError(
            f"data.epoch_samples is {epoch_samples}, but a mixture without weights visits every sample once",
            hint="set data.weight and the weight of each dataset, or remove data.epoch_samples",
        )
    for key, share in shares.items():
        if given and share is None:
            raise UsageError(f"{next(iter(given))} is set, but {key} is not", hint=f"set {key}, or no weight at all")
        if share is not None and not 0 < share < math.inf:
            raise UsageError(f"{key} is {share}, expected a positive number", hint="remove a dataset you do not want")


SAMPLERS: Final = {"segments": Segments, "dense": Dense, "uniform": Uniform, "window": Window}
"""Samplers of a fixed number of frames, by the name that ``data.frames=`` accepts."""


def find_sampler(name: str) -> type[Any]:
    """Return the class of a sampler, given its name or ``module:class``."""
    check_choice("unknown sampler {}", name, SAMPLERS, "module:class")
    kind = SAMPLERS.get(name) or import_name("sampler", name)
    if not (isinstance(kind, type) and is_dataclass(kind) and hasattr(kind, "draw")):
        raise UsageError(
            f"sampler is {name!r}, which is not a dataclass with a method draw",
            hint="write it like fastvid.Dense, see docs/extending.md",
        )
    return kind


Damaged = Literal["raise", "skip"]
Dtype = Literal["float32", "bfloat16", "float16"]
CHANNELS = 3


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """How the dataset is created: the arguments of ``fastvid shard``.

    Attributes:
        sources: Folders or files of raw videos.
        annotations: Label files, each as ``format:path``; empty where the folder of a video is its class.
        profile: Encode profile.
        options: Further options of the command, without the leading dashes.
    """

    sources: tuple[str, ...]
    annotations: tuple[str, ...] = ()
    profile: str = "compact"
    options: Mapping[str, str] = field(default_factory=dict)

    def command(self, out: str) -> str:
        """Return the shell command that creates the dataset at `out`."""
        words = ["fastvid", "shard", *self.sources, "--out", out]
        for source in self.annotations:
            words += ["--annotations", source]
        words += ["--profile", self.profile]
        for name, value in self.options.items():
            words += [f"--{name}", value]
        return shlex.join(words)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The dataset, and how its videos are sampled, cropped and batched.

    Attributes:
        path: Folder or URL of the dataset.
        split: Split to train on; None for all samples.
        eval_split: Split to evaluate on; None for no evaluation.
        where: Filter over the annotations' columns, for both splits.
        mixture: Further datasets to train on, by name, see `fastvid.Mixture`; the dataset of `path` has the name "main"
            there. Classes are merged by name, those of `path` first. Only the dataset of `path` is evaluated on.
        weight: Share of `path` in an epoch of a mixture with weights.
        epoch_samples: Samples in an epoch of a mixture with weights; None for the sum over all datasets.
        label: Column that contains the class, an integer from 0.
        frames: Sampler of the frames of a clip.
        eval_frames: The same for evaluation.
        spatial: Crop, resize and flip.
        eval_spatial: The same for evaluation.
        after: Transforms of the training clips on the device, see `fastvid.ClipLoader`.
        streams: Streams of each sample that the model takes: "rgb", "flow" or both.
        flow_stack: Flow fields per frame.
        global_batch_size: Clips per step over all ranks, whatever the world size.
        eval_batch_size: Clips per evaluation batch over all ranks.
        last: Samples left at the end of an epoch: "drop", "mask" or "keep", see `fastvid.Order`.
        generation: Number or tag of the generation (version) of the dataset; None is the current one. A run keeps the
            generation it started with, even if the tag moves.
        decoder: Name of a decoder back-end, ``module:name`` of one's own, or "auto".
        num_threads: Decode threads or worker processes per rank; None uses all cores available to the rank.
        workers: "thread", or "process", where decoding does not compete with the training step for the GIL, see
            `fastvid.Workers`.
        prefetch: Batches to prefetch.
        group_size: Consecutive clips of a global batch that always go to the same rank, so that operations over
            several clips (ghost batch norm, mixing) give the same result for any world size. Each rank's share then
            consists of whole groups.
        shuffle: True for a uniformly random order; a `fastvid.BlockShuffle` for an order that reads few shards at a
            time.
        balance: Class shares of an epoch, such as ``fastvid.ClassBalanced()``; None visits every sample once.
        clips_per_video: Clips of each video, adjacent in the batch (repeated augmentation); divides
            `global_batch_size`. An epoch still has as many videos, and this many times as many clips.
        fields: Columns of the annotations that batches contain, in `Batch.fields`.
        dtype: Type of the clips on the device: "float32", or "bfloat16" or "float16" with `run.amp`.
        mean: Mean of R, G, B, subtracted from pixel values in 0 to 1; ImageNet's by default.
        std: Standard deviation of R, G, B; values are divided by it after the mean is subtracted.
        on_error: What to do when a clip fails to decode: "raise" stops the run; "skip" masks it in the loss and
            counts it. It is never replaced by another clip.
    """

    path: str
    split: str | None = "train"
    eval_split: str | None = "val"
    where: str | None = None
    mixture: Mapping[str, DatasetConfig] = field(default_factory=dict)
    weight: float | None = None
    epoch_samples: int | None = None
    label: str = "label"
    frames: Sampler = field(metadata={NAMED: find_sampler})
    eval_frames: Sampler = field(metadata={NAMED: find_sampler})
    spatial: tuple[Transform, ...]
    eval_spatial: tuple[Transform, ...]
    after: tuple[AnyTransform, ...] = ()
    streams: tuple[str, ...] = ("rgb",)
    flow_stack: int = 1
    global_batch_size: int = 64
    eval_batch_size: int = 64
    last: Last = "drop"
    generation: int | str | None = None
    decoder: str = "auto"
    num_threads: int | None = None
    workers: Kind = "thread"
    prefetch: int = 2
    group_size: int = 1
    shuffle: bool | BlockShuffle = True
    balance: ClassBalanced | None = None
    clips_per_video: int = 1
    fields: tuple[str, ...] = ()
    dtype: Dtype = "float32"
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    on_error: Damaged = "raise"

    def __post_init__(self) -> None:
        check_kinds(self)
        at_least(1, self, "global_batch_size", "eval_batch_size", "flow_stack", "group_size", "clips_per_video")
        for name in ("mean", "std"):
            if len(getattr(self, name)) != CHANNELS:
                raise UsageError(f"data.{name} is {getattr(self, name)}, expected a number for each of R, G and B")
        if self.global_batch_size % self.clips_per_video:
            raise UsageError(
                f"data.global_batch_size is {self.global_batch_size}, not a multiple of data.clips_per_video "
                f"{self.clips_per_video}"
            )
        check_mixture(self.mixture, self.weight, self.epoch_samples)
        for name in ("frames", "eval_frames"):
            if clip_length(getattr(self, name)) is None:
                raise UsageError(
                    f"clips of data.{name}={getattr(self, name)!r} differ in length",
                    hint="use a sampler with a fixed number of frames, such as Segments(8)",
                )
        for name in ("spatial", "eval_spatial"):
            if any(getattr(transform, "output", ()) is None for transform in getattr(self, name)):
                raise UsageError(
                    f"clips of data.{name}={getattr(self, name)!r} differ in size",
                    hint="use a crop with a fixed size, such as RandomResizedCrop(224)",
                )
        if self.num_frames != clip_length(self.eval_frames):
            raise UsageError(
                f"data.frames samples {self.num_frames} frames per clip, data.eval_frames"
                f" {clip_length(self.eval_frames)}",
                hint="set both to the number of frames that the model takes",
            )

    @property
    def num_frames(self) -> int:
        """Number of frames of every clip."""
        length = clip_length(self.frames)
        assert length is not None
        return length

    @property
    def clip_shape(self) -> tuple[int, int, int, int, int] | None:
        """Shape of a batch of one clip of pictures, [1, 3, T, H, W]; None with other streams, or if no crop says it."""
        sizes = [size for one in self.spatial if (size := getattr(one, "output", None)) is not None]
        return (1, CHANNELS, self.num_frames, *sizes[0]) if sizes and self.streams == ("rgb",) else None
