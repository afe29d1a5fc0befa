"""fastvid: video training data at full speed.

Public names are imported on first use; ``import fastvid`` loads neither torch nor any decoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastvid.runtime.names import importer, listed_names

if TYPE_CHECKING:
    from fastvid.decode.sound import Audio as Audio
    from fastvid.errors import FastvidError as FastvidError
    from fastvid.load.after.augment import ColorJitter as ColorJitter
    from fastvid.load.after.augment import Erasing as Erasing
    from fastvid.load.after.augment import GaussianBlur as GaussianBlur
    from fastvid.load.after.augment import Grayscale as Grayscale
    from fastvid.load.after.augment import RandAugment as RandAugment
    from fastvid.load.batch.labels import Extras as Extras
    from fastvid.load.batch.labels import MultiHot as MultiHot
    from fastvid.load.batch.labels import Text as Text
    from fastvid.load.clip_dataset import ClipDataset as ClipDataset
    from fastvid.load.clip_dataset import ExactSampler as ExactSampler
    from fastvid.load.clips.crops import CenterCrop as CenterCrop
    from fastvid.load.clips.crops import HorizontalFlip as HorizontalFlip
    from fastvid.load.clips.crops import MultiScaleCrop as MultiScaleCrop
    from fastvid.load.clips.crops import Native as Native
    from fastvid.load.clips.crops import RandomCrop as RandomCrop
    from fastvid.load.clips.crops import RandomResizedCrop as RandomResizedCrop
    from fastvid.load.clips.crops import Resize as Resize
    from fastvid.load.clips.sampling import Dense as Dense
    from fastvid.load.clips.sampling import Segments as Segments
    from fastvid.load.clips.sampling import Uniform as Uniform
    from fastvid.load.clips.sampling import VideoInfo as VideoInfo
    from fastvid.load.clips.timed_sampling import AtFps as AtFps
    from fastvid.load.clips.timed_sampling import Deltas as Deltas
    from fastvid.load.clips.timed_sampling import Window as Window
    from fastvid.load.clips.views import Views as Views
    from fastvid.load.loader import Batch as Batch
    from fastvid.load.loader import ClipLoader as ClipLoader
    from fastvid.load.options import Output as Output
    from fastvid.load.options import Skip as Skip
    from fastvid.load.options import Workers as Workers
    from fastvid.load.order.buckets import Buckets as Buckets
    from fastvid.load.order.draws import Draws as Draws
    from fastvid.load.order.epoch import BlockShuffle as BlockShuffle
    from fastvid.load.order.epoch import ClassBalanced as ClassBalanced
    from fastvid.load.order.epoch import EveryFrame as EveryFrame
    from fastvid.load.order.epoch import Order as Order
    from fastvid.load.order.mixture import Mixture as Mixture
    from fastvid.load.order.packed import Packed as Packed
    from fastvid.load.stats import LoaderStats as LoaderStats
    from fastvid.sharding.job.job import run_job as shard
    from fastvid.videos.dataset import VideoDataset as VideoDataset
    from fastvid.videos.dataset import open as open
    from fastvid.videos.video import FrameBatch as FrameBatch
    from fastvid.videos.video import Video as Video

__version__ = "0.3.0"

_HOMES = listed_names(__spec__)
__all__ = ["__version__", "shard"]  # type checkers see the others by their `as`
__all__ += sorted({*_HOMES} - {"shard"})
__all__.sort()

if not TYPE_CHECKING:  # type checkers then see names that are not there
    __getattr__ = importer(__name__, _HOMES)


def __dir__() -> list[str]:
    return list(__all__)
