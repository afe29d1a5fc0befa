"""fastvid: video training data at full speed.

Public names are imported on first use; ``import fastvid`` loads neither torch nor any decoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastvid.runtime.lazy import importer

if TYPE_CHECKING:
    from fastvid.audio.window import Audio as Audio
    from fastvid.decode.access import FrameBatch as FrameBatch
    from fastvid.decode.access import Video as Video
    from fastvid.decode.access import VideoDataset as VideoDataset
    from fastvid.decode.access import open as open
    from fastvid.errors import FastvidError as FastvidError
    from fastvid.load.after.blur import GaussianBlur as GaussianBlur
    from fastvid.load.after.colour import ColorJitter as ColorJitter
    from fastvid.load.after.colour import Grayscale as Grayscale
    from fastvid.load.after.erasing import Erasing as Erasing
    from fastvid.load.after.rand_augment import RandAugment as RandAugment
    from fastvid.load.batch.multi_hot import MultiHot as MultiHot
    from fastvid.load.batch.text import Text as Text
    from fastvid.load.clip_dataset import ClipDataset as ClipDataset
    from fastvid.load.clips.augment import CenterCrop as CenterCrop
    from fastvid.load.clips.augment import HorizontalFlip as HorizontalFlip
    from fastvid.load.clips.augment import MultiScaleCrop as MultiScaleCrop
    from fastvid.load.clips.augment import RandomCrop as RandomCrop
    from fastvid.load.clips.augment import RandomResizedCrop as RandomResizedCrop
    from fastvid.load.clips.resize import Native as Native
    from fastvid.load.clips.resize import Resize as Resize
    from fastvid.load.clips.sampling import Dense as Dense
    from fastvid.load.clips.sampling import Segments as Segments
    from fastvid.load.clips.sampling import Uniform as Uniform
    from fastvid.load.clips.timed_sampling import AtFps as AtFps
    from fastvid.load.clips.timed_sampling import Deltas as Deltas
    from fastvid.load.clips.timed_sampling import Window as Window
    from fastvid.load.clips.video_info import VideoInfo as VideoInfo
    from fastvid.load.clips.views import Views as Views
    from fastvid.load.exact_sampler import ExactSampler as ExactSampler
    from fastvid.load.loader import Batch as Batch
    from fastvid.load.loader import ClipLoader as ClipLoader
    from fastvid.load.options import Output as Output
    from fastvid.load.options import Skip as Skip
    from fastvid.load.options import Workers as Workers
    from fastvid.load.order.blocks import BlockShuffle as BlockShuffle
    from fastvid.load.order.buckets import Buckets as Buckets
    from fastvid.load.order.epoch import ClassBalanced as ClassBalanced
    from fastvid.load.order.every_frame import EveryFrame as EveryFrame
    from fastvid.load.order.mixture import Mixture as Mixture
    from fastvid.load.order.packed import Packed as Packed
    from fastvid.load.order.random_draws import Draws as Draws
    from fastvid.load.workers.stats import LoaderStats as LoaderStats
    from fastvid.sharding.job.job import run_job as shard

__version__ = "0.2.0"

_HOMES = {
    "AtFps": "fastvid.load.clips.timed_sampling",
    "Audio": "fastvid.audio.window",
    "Batch": "fastvid.load.loader",
    "BlockShuffle": "fastvid.load.order.blocks",
    "Buckets": "fastvid.load.order.buckets",
    "CenterCrop": "fastvid.load.clips.augment",
    "ClassBalanced": "fastvid.load.order.epoch",
    "ClipDataset": "fastvid.load.clip_dataset",
    "ClipLoader": "fastvid.load.loader",
    "ColorJitter": "fastvid.load.after.colour",
    "Deltas": "fastvid.load.clips.timed_sampling",
    "Dense": "fastvid.load.clips.sampling",
    "Draws": "fastvid.load.order.random_draws",
    "Erasing": "fastvid.load.after.erasing",
    "EveryFrame": "fastvid.load.order.every_frame",
    "ExactSampler": "fastvid.load.exact_sampler",
    "FastvidError": "fastvid.errors",
    "FrameBatch": "fastvid.decode.access",
    "GaussianBlur": "fastvid.load.after.blur",
    "Grayscale": "fastvid.load.after.colour",
    "HorizontalFlip": "fastvid.load.clips.augment",
    "LoaderStats": "fastvid.load.workers.stats",
    "Mixture": "fastvid.load.order.mixture",
    "MultiHot": "fastvid.load.batch.multi_hot",
    "MultiScaleCrop": "fastvid.load.clips.augment",
    "Native": "fastvid.load.clips.resize",
    "Output": "fastvid.load.options",
    "Packed": "fastvid.load.order.packed",
    "RandAugment": "fastvid.load.after.rand_augment",
    "RandomCrop": "fastvid.load.clips.augment",
    "RandomResizedCrop": "fastvid.load.clips.augment",
    "Resize": "fastvid.load.clips.resize",
    "Segments": "fastvid.load.clips.sampling",
    "Skip": "fastvid.load.options",
    "Text": "fastvid.load.batch.text",
    "Uniform": "fastvid.load.clips.sampling",
    "Video": "fastvid.decode.access",
    "VideoDataset": "fastvid.decode.access",
    "VideoInfo": "fastvid.load.clips.video_info",
    "Views": "fastvid.load.clips.views",
    "Window": "fastvid.load.clips.timed_sampling",
    "Workers": "fastvid.load.options",
    "open": "fastvid.decode.access",
    "shard": "fastvid.sharding.job.job:run_job",
}

__all__ = [
    "AtFps",
    "Audio",
    "Batch",
    "BlockShuffle",
    "Buckets",
    "CenterCrop",
    "ClassBalanced",
    "ClipDataset",
    "ClipLoader",
    "ColorJitter",
    "Deltas",
    "Dense",
    "Draws",
    "Erasing",
    "EveryFrame",
    "ExactSampler",
    "FastvidError",
    "FrameBatch",
    "GaussianBlur",
    "Grayscale",
    "HorizontalFlip",
    "LoaderStats",
    "Mixture",
    "MultiHot",
    "MultiScaleCrop",
    "Native",
    "Output",
    "Packed",
    "RandAugment",
    "RandomCrop",
    "RandomResizedCrop",
    "Resize",
    "Segments",
    "Skip",
    "Text",
    "Uniform",
    "Video",
    "VideoDataset",
    "VideoInfo",
    "Views",
    "Window",
    "Workers",
    "__version__",
    "open",
    "shard",
]


if not TYPE_CHECKING:  # type checkers then see names that are not there
    __getattr__ = importer(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
