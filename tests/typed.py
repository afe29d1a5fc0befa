"""What a user's own typed code says. `make check` has mypy read it, strictly; it is never run."""

from __future__ import annotations

import fastvid
from fastvid.sharding.job.job import JobReport
from fastvid.train import CenterCrop, DataConfig, Segments


def shards() -> JobReport:
    """The command as a function. A wrong argument is seen."""
    fastvid.shard(["videos/"], outs="shards/mine")  # type: ignore[call-arg]
    return fastvid.shard(["videos/"], out="shards/mine")


def samplers() -> fastvid.Segments:
    """Names come from the front door. A misspelt one is seen."""
    fastvid.Segmnts(8)  # type: ignore[attr-defined]
    return fastvid.Segments(8)


def data() -> DataConfig:
    """Part of a recipe. A wrong type is seen."""
    DataConfig(path=8, frames=Segments(4), eval_frames=Segments(4), spatial=(), eval_spatial=())  # type: ignore[arg-type]
    crop = (CenterCrop(224),)
    return DataConfig(path="mine", frames=Segments(4), eval_frames=Segments(4), spatial=crop, eval_spatial=crop)
