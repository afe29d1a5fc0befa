"""Digests of batches: the frames and the flow of grey films, in every form that a loader delivers.

Values are rounded to grey levels and pixels of flow, so that they do not depend on the rounding of colour converters.
Nothing is resized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import fastvid
from tests.golden.films import GREY_LEVELS, film
from tests.golden.golden import Sha
from tests.golden.runs import MEAN, STD
from tests.golden.seams import pack, pack_flow
from tests.load.loaders import clip_loader

NAME = "pictures"
CROP = (fastvid.RandomCrop((24, 32)), fastvid.HorizontalFlip())
STILL = {"frames": fastvid.Dense(4, 3, jitter=False), "spatial": fastvid.CenterCrop(24)}

# Arguments of the loader by form.
FORMS: Mapping[str, dict[str, Any]] = {
    "levels": {"dtype": torch.uint8},
    "float32": {},
    "float16, frames first": {"dtype": torch.float16, "layout": "BTCHW"},
    "levels, frames first": {"dtype": torch.uint8, "layout": "BTCHW"},
    "clips per video": {"clips_per_video": 3, "global_batch_size": 9, "dtype": torch.uint8},
    "masked": {"last": "mask", "global_batch_size": 11, "dtype": torch.uint8},
    "views": {**STILL, "views": fastvid.Views(3, 3), "shuffle": False},
    "ten crops": {**STILL, "views": fastvid.Views(2, 10), "dtype": torch.uint8, "layout": "BTCHW"},
    "processes": {"workers": "process", "num_threads": 2},
    "views in processes": {**STILL, "views": fastvid.Views(3, 3), "shuffle": False, "workers": "process"},
}
FLOWS: Mapping[str, dict[str, Any]] = {
    "flow": {"streams": "flow"},
    "flow, stacked": {"streams": "flow", "flow_stack": 4, "layout": "BTCHW"},
    "rgb and flow": {"streams": ("rgb", "flow"), "flow_stack": 2},
    "rgb and flow in processes": {"streams": ("rgb", "flow"), "flow_stack": 2, "workers": "process"},
}


def contents(data: Any, **options: Any) -> str:
    """Return the digest of everything that two epochs deliver."""
    standard: dict[str, Any] = {
        "frames": fastvid.Segments(3), "spatial": CROP, "global_batch_size": 8, "seed": 5, "decoder": "pyav",
        "num_threads": 2, "rank": 0, "world_size": 1, "fields": ("place",),
    }  # fmt: skip
    made = clip_loader(data, **standard | options)
    got = Sha()
    for batch in (batch for _ in range(2) for batch in made):
        got.add(batch.position, batch.sample, batch.label, batch.valid, batch.frame_index)
        got.say(f"{' '.join(batch.key)} {dict(batch.fields)}")
        if "flow" in batch:
            # Rows that are masked, and flow itself, are numbers already.
            got.add(batch.flow.double().round())
        if batch.video is not batch.get("flow"):
            got.add(_greys(batch, frames_first=options.get("layout") == "BTCHW"))
    return str(got)


def _greys(batch: fastvid.Batch, *, frames_first: bool) -> torch.Tensor:
    levels = batch.video.double()
    if batch.video.dtype.is_floating_point:
        shape = (3, 1, 1) if frames_first else (3, 1, 1, 1)
        mean, std = (torch.tensor(three, dtype=torch.float64).view(shape) for three in (MEAN, STD))
        levels = (levels * std + mean) * 255
        levels[~batch.valid] = 0
    return (levels / GREY_LEVELS).round()


def cases(folder: Path) -> Mapping[str, Callable[[], Any]]:
    """Return a function for each digest by name."""
    films = [film(1 + 4 * n, 48, 32, seed=n, kind="grey") for n in range(8)]
    flows = [film(1 + 4 * n, 48, 64, seed=50 + n, kind="grey") for n in range(8)]
    samples = [(f"c{n:02d}", films[n % 8], n % 2) for n in range(20)]
    place: list[object] = list(range(20))
    data = pack(folder / "rgb", [samples[:9], samples[9:]], ("a", "b"), place=place)
    both = pack_flow(folder / "both", [(f"c{n:02d}", films[n], flows[n]) for n in range(8)])
    return {
        **{name: lambda form=form: contents(data, **form) for name, form in FORMS.items()},
        **{name: lambda form=form: contents(both, fields=(), **form) for name, form in FLOWS.items()},
    }
