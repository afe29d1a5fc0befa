"""Typed code of a user. `make check` checks it with strict mypy; it is never run."""

from __future__ import annotations

import fastvid
from fastvid.sharding.job.job import JobReport
from fastvid.train import CenterCrop, DataConfig, Segments


def shards() -> JobReport:
    """`fastvid shard` as a function. mypy reports a wrong argument."""
    fastvid.shard(["videos/"], outs="shards/mine")  # type: ignore[call-arg]
    return fastvid.shard(["videos/"], out="shards/mine")


def samplers() -> fastvid.Segments:
    """Public names of `fastvid`. mypy reports a misspelt one."""
    fastvid.Segmnts(8)  # type: ignore[attr-defined]
    return fastvid.Segments(8)


def data() -> DataConfig:
    """Part of a recipe. mypy reports a wrong type."""
    DataConfig(path=8, frames=Segments(4), eval_frames=Segments(4), spatial=(), eval_spatial=())  # type: ignore[arg-type]
    crop = (CenterCrop(224),)
    return DataConfig(path="mine", frames=Segments(4), eval_frames=Segments(4), spatial=crop, eval_spatial=crop)
