"""The trainer: configuration, loop, checkpoints, elasticity, evaluation and strategies.

Recipes and user-defined strategies import every name they need from here, for example
``from fastvid.train import Config, DataConfig, Segments``. Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastvid.runtime.names import importer, listed_names

if TYPE_CHECKING:
    from fastvid.load.after.augment import ColorJitter as ColorJitter
    from fastvid.load.after.augment import Erasing as Erasing
    from fastvid.load.after.augment import GaussianBlur as GaussianBlur
    from fastvid.load.after.augment import Grayscale as Grayscale
    from fastvid.load.after.augment import RandAugment as RandAugment
    from fastvid.load.clips.crops import CenterCrop as CenterCrop
    from fastvid.load.clips.crops import HorizontalFlip as HorizontalFlip
    from fastvid.load.clips.crops import MultiScaleCrop as MultiScaleCrop
    from fastvid.load.clips.crops import RandomCrop as RandomCrop
    from fastvid.load.clips.crops import RandomResizedCrop as RandomResizedCrop
    from fastvid.load.clips.crops import Resize as Resize
    from fastvid.load.clips.sampling import Dense as Dense
    from fastvid.load.clips.sampling import Segments as Segments
    from fastvid.load.clips.sampling import Uniform as Uniform
    from fastvid.load.clips.timed_sampling import AtFps as AtFps
    from fastvid.load.clips.timed_sampling import Deltas as Deltas
    from fastvid.load.clips.timed_sampling import Window as Window
    from fastvid.train.config.config import Config as Config
    from fastvid.train.config.config import ModelConfig as ModelConfig
    from fastvid.train.config.config import OptimConfig as OptimConfig
    from fastvid.train.config.config import RunConfig as RunConfig
    from fastvid.train.config.data import DataConfig as DataConfig
    from fastvid.train.config.data import DatasetConfig as DatasetConfig
    from fastvid.train.config.data import ShardConfig as ShardConfig
    from fastvid.train.loop.strategy import Round as Round
    from fastvid.train.loop.strategy import Strategy as Strategy
    from fastvid.train.records.records import Callback as Callback
    from fastvid.train.records.records import Logger as Logger
    from fastvid.train.records.records import RunInfo as RunInfo
    from fastvid.train.run.launch import Result as Result
    from fastvid.train.run.launch import fit as fit
    from fastvid.train.tasks.classification import Classification as Classification
    from fastvid.train.tasks.multi_label import MultiLabel as MultiLabel
    from fastvid.train.tasks.regression import Regression as Regression
    from fastvid.train.tasks.task import Phase as Phase
    from fastvid.train.tasks.task import Task as Task

_HOMES = listed_names(__spec__)
__all__ = sorted(_HOMES)

if not TYPE_CHECKING:  # otherwise type checkers would accept names that do not exist
    __getattr__ = importer(__name__, _HOMES)


def __dir__() -> list[str]:
    return list(__all__)
