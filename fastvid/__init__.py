"""fastvid: video training data at full speed.

Public names are imported on first use; ``import fastvid`` loads neither torch nor any decoder.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastvid import shard as shard
    from fastvid.decode.access import VideoDataset as VideoDataset
    from fastvid.decode.access import open as open
    from fastvid.errors import FastvidError as FastvidError
    from fastvid.load.augment import CenterCrop as CenterCrop
    from fastvid.load.augment import HorizontalFlip as HorizontalFlip
    from fastvid.load.augment import MultiScaleCrop as MultiScaleCrop
    from fastvid.load.augment import RandomCrop as RandomCrop
    from fastvid.load.augment import RandomResizedCrop as RandomResizedCrop
    from fastvid.load.blocks import BlockShuffle as BlockShuffle
    from fastvid.load.loader import Batch as Batch
    from fastvid.load.loader import ClipLoader as ClipLoader
    from fastvid.load.mixture import Mixture as Mixture
    from fastvid.load.sampling import Dense as Dense
    from fastvid.load.sampling import Segments as Segments
    from fastvid.load.sampling import Uniform as Uniform
    from fastvid.load.views import Views as Views
    from fastvid.load.visits import ClassBalanced as ClassBalanced

__version__ = "0.1.0"

_HOMES = {
    "Batch": "fastvid.load.loader",
    "BlockShuffle": "fastvid.load.blocks",
    "CenterCrop": "fastvid.load.augment",
    "ClassBalanced": "fastvid.load.visits",
    "ClipLoader": "fastvid.load.loader",
    "Dense": "fastvid.load.sampling",
    "FastvidError": "fastvid.errors",
    "HorizontalFlip": "fastvid.load.augment",
    "Mixture": "fastvid.load.mixture",
    "MultiScaleCrop": "fastvid.load.augment",
    "RandomCrop": "fastvid.load.augment",
    "RandomResizedCrop": "fastvid.load.augment",
    "Segments": "fastvid.load.sampling",
    "Uniform": "fastvid.load.sampling",
    "VideoDataset": "fastvid.decode.access",
    "Views": "fastvid.load.views",
    "open": "fastvid.decode.access",
}

__all__ = [
    "Batch",
    "BlockShuffle",
    "CenterCrop",
    "ClassBalanced",
    "ClipLoader",
    "Dense",
    "FastvidError",
    "HorizontalFlip",
    "Mixture",
    "MultiScaleCrop",
    "RandomCrop",
    "RandomResizedCrop",
    "Segments",
    "Uniform",
    "VideoDataset",
    "Views",
    "__version__",
    "open",
    "shard",
]


def __getattr__(name: str) -> Any:
    if name == "shard":
        # Both the package and the command as a function: the package is callable.
        return importlib.import_module("fastvid.shard")
    if name in _HOMES:
        from fastvid.errors import naming_extras

        with naming_extras():
            value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fastvid' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
