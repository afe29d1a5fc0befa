"""The trainer: configuration, loop, checkpoints, elasticity, evaluation and strategies.

Recipes and user-defined strategies import every name they need from here, for example
``from fastvid.train import Config, DataConfig, Segments``. Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastvid.runtime.lazy import importer

if TYPE_CHECKING:
    from fastvid.load.after.blur import GaussianBlur as GaussianBlur
    from fastvid.load.after.colour import ColorJitter as ColorJitter
    from fastvid.load.after.colour import Grayscale as Grayscale
    from fastvid.load.after.erasing import Erasing as Erasing
    from fastvid.load.after.rand_augment import RandAugment as RandAugment
    from fastvid.load.clips.augment import CenterCrop as CenterCrop
    from fastvid.load.clips.augment import HorizontalFlip as HorizontalFlip
    from fastvid.load.clips.augment import MultiScaleCrop as MultiScaleCrop
    from fastvid.load.clips.augment import RandomCrop as RandomCrop
    from fastvid.load.clips.augment import RandomResizedCrop as RandomResizedCrop
    from fastvid.load.clips.resize import Resize as Resize
    from fastvid.load.clips.sampling import Dense as Dense
    from fastvid.load.clips.sampling import Segments as Segments
    from fastvid.load.clips.sampling import Uniform as Uniform
    from fastvid.load.clips.timed_sampling import AtFps as AtFps
    from fastvid.load.clips.timed_sampling import Deltas as Deltas
    from fastvid.load.clips.timed_sampling import Window as Window
    from fastvid.train.config.config import Config as Config
    from fastvid.train.config.data import DataConfig as DataConfig
    from fastvid.train.config.data import ShardConfig as ShardConfig
    from fastvid.train.config.model import ModelConfig as ModelConfig
    from fastvid.train.config.optim import OptimConfig as OptimConfig
    from fastvid.train.config.run import RunConfig as RunConfig
    from fastvid.train.loop.strategy import Round as Round
    from fastvid.train.loop.strategy import Strategy as Strategy

_HOMES = {
    "AtFps": "fastvid.load.clips.timed_sampling",
    "CenterCrop": "fastvid.load.clips.augment",
    "ColorJitter": "fastvid.load.after.colour",
    "Config": "fastvid.train.config.config",
    "DataConfig": "fastvid.train.config.data",
    "Deltas": "fastvid.load.clips.timed_sampling",
    "Dense": "fastvid.load.clips.sampling",
    "Erasing": "fastvid.load.after.erasing",
    "GaussianBlur": "fastvid.load.after.blur",
    "Grayscale": "fastvid.load.after.colour",
    "HorizontalFlip": "fastvid.load.clips.augment",
    "ModelConfig": "fastvid.train.config.model",
    "MultiScaleCrop": "fastvid.load.clips.augment",
    "OptimConfig": "fastvid.train.config.optim",
    "RandAugment": "fastvid.load.after.rand_augment",
    "RandomCrop": "fastvid.load.clips.augment",
    "RandomResizedCrop": "fastvid.load.clips.augment",
    "Resize": "fastvid.load.clips.resize",
    "Round": "fastvid.train.loop.strategy",
    "RunConfig": "fastvid.train.config.run",
    "Segments": "fastvid.load.clips.sampling",
    "ShardConfig": "fastvid.train.config.data",
    "Strategy": "fastvid.train.loop.strategy",
    "Uniform": "fastvid.load.clips.sampling",
    "Window": "fastvid.load.clips.timed_sampling",
}

__all__ = [
    "AtFps",
    "CenterCrop",
    "ColorJitter",
    "Config",
    "DataConfig",
    "Deltas",
    "Dense",
    "Erasing",
    "GaussianBlur",
    "Grayscale",
    "HorizontalFlip",
    "ModelConfig",
    "MultiScaleCrop",
    "OptimConfig",
    "RandAugment",
    "RandomCrop",
    "RandomResizedCrop",
    "Resize",
    "Round",
    "RunConfig",
    "Segments",
    "ShardConfig",
    "Strategy",
    "Uniform",
    "Window",
]

if not TYPE_CHECKING:  # otherwise type checkers would accept names that do not exist
    __getattr__ = importer(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
