"""Options of a loader that are rarely changed: the form of its tensors, its workers, what to do with damaged clips."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, cast, get_args

import torch

from fastvid.decode.backends import Backend
from fastvid.decode.colours import IMAGENET_MEAN, IMAGENET_STD, Layout, Pixels
from fastvid.errors import UsageError
from fastvid.runtime.names import meant
from fastvid.runtime.values import (
    check_channels,
    check_choice,
    check_integer,
    check_integers,
    check_kind,
    check_seconds,
    check_share,
    check_switches,
)

Kind = Literal["thread", "process"]

Channels = tuple[float, float, float]
"""A number for each of R, G and B."""

_MOST: Final = 2.0  # larger means and deviations are of levels 0 to 255, not of pixels 0 to 1
Collate = Literal["stack", "pad", "list"]
Resize = Literal["exact", "fast"]


@dataclass(frozen=True)
class Output:
    """The form of a loader's video tensors.

    Args:
        layout: "BCTHW" or "BTCHW".
        dtype: A floating type for normalised values, or torch.uint8 for levels 0 to 255; or its name, "uint8".
        mean: Mean of R, G, B in 0 to 1, or one number for all; not used for torch.uint8.
        std: Standard deviation of R, G, B in 0 to 1, positive, or one number for all; not used for torch.uint8.
        channels_last: Whether the channels of a pixel are neighbours in memory, as models in torch's channels-last
            memory format expect: "BCTHW" is then `torch.channels_last_3d`. Values and shapes are the same.
        collate: How clips become `Batch.video`: "stack" needs one shape; "pad" adds zeros after the last frame, row and
            column, up to the largest clip of the global batch; "list" keeps one tensor per clip.
        flow_stack: Optical flow fields stacked for each frame, L: half from before the frame and half from after it.
        resize: How the CPU resizes: "exact", or "fast", which takes two thirds of the time and is off by 0.9 of 255
            levels on average.

    Raises:
        UsageError: If an argument is invalid.
    """

    layout: Layout = "BCTHW"
    dtype: torch.dtype = torch.float32
    mean: Channels | float = IMAGENET_MEAN
    std: Channels | float = IMAGENET_STD
    channels_last: bool = False
    collate: Collate = "stack"
    flow_stack: int = 1
    resize: Resize = "exact"

    def __post_init__(self) -> None:
        dtype = getattr(torch, self.dtype, None) if isinstance(self.dtype, str) else self.dtype
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"dtype is {self.dtype!r}", hint="use torch.uint8, torch.float16 or another type of torch")
        object.__setattr__(self, "dtype", dtype)
        for name in ("mean", "std"):
            object.__setattr__(self, name, check_channels(name, getattr(self, name), _MOST))
        check_switches(channels_last=self.channels_last)
        _ = self.pixels  # raises an error if std is zero, or dtype or layout is invalid
        check_choice("collate", self.collate, get_args(Collate))
        check_choice("resize", self.resize, get_args(Resize))
        check_integer("flow_stack", self.flow_stack, 1)

    @property
    def pixels(self) -> Pixels:
        """How values are normalised; with dtype float32 if the output keeps uint8 levels."""
        dtype = torch.float32 if self.dtype is torch.uint8 else self.dtype
        mean, std = cast("tuple[Channels, Channels]", (self.mean, self.std))
        return Pixels(mean, std, dtype, self.layout, self.channels_last)


@dataclass(frozen=True)
class Skip:
    """Mask damaged clips and count them, instead of raising their error. A clip is never replaced by another.

    A store or disk that fails or denies access is no damaged clip: `UnavailableError` is always raised.

    Args:
        max_rate: Share of this rank's clips that may be skipped, besides five, before the loader raises, 0 to 1.

    Raises:
        UsageError: If the rate is out of range.
    """

    max_rate: float = 0.01

    def __post_init__(self) -> None:
        check_share("max_rate", self.max_rate)


OnError = Literal["raise"] | Skip


@dataclass(frozen=True)
class Workers:
    """How a loader's clips are decoded: by threads or processes, with which decoder, and how far ahead.

    Args:
        kind: "thread" decodes in threads of this process. "process" starts as many processes of about 100 MB each,
            which leave the GIL to the training step and write batches into memory shared with forked children. A
            process that crashes or hangs in native code is killed; its clip is named and treated as `on_error` says.
        num_threads: Decode threads or processes; by default the cores this rank may use.
        prefetch: Batches to prefetch. At most prefetch + 1 batches of this rank are in memory, besides those you keep.
            From the second epoch on, threads also prefetch batches of the next epoch, and keep them between epochs.
        num_fetchers: Threads that read packets ahead of decoding. By default none for local disks, where each decode
            thread or process reads its own, and for remote storage its number of concurrent requests, at most 32.
        device_lanes: Decoders that a back-end on a GPU runs at the same time; by default as many as it recommends.
        timeout: Seconds a batch may take before WorkerError names the clips in progress and ends the iteration.
        clip_timeout: Seconds that reading or decoding one clip may take in a worker process before it counts as hung.
        decoder: Name of a back-end, ``module:name`` of one's own, several joined by "+" that share one queue
            ("pyav+dali-gpu"), a `Backend`, or "auto": "nvdec" for H.264, HEVC, VP9 and AV1 on a GPU where it is
            available, else "pyav".
        on_error: What to do with a damaged clip: "raise", or `Skip(max_rate)` to mask and count it.
        show_stats: Show on stderr where the time goes: in place on a terminal, elsewhere as a line every 15 s.
        stats_file: JSON Lines file for the same statistics, one line per batch; appended to if it exists.

    Raises:
        UsageError: If an argument is out of range.
    """

    kind: Kind = "thread"
    num_threads: int | None = None
    prefetch: int = 2
    num_fetchers: int | None = None
    device_lanes: int | None = None
    timeout: float = 600.0
    clip_timeout: float = 60.0
    decoder: str | Backend = "auto"
    on_error: OnError = "raise"
    show_stats: bool = False
    stats_file: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(Kind))
        check_integer("prefetch", self.prefetch, 1)
        check_integers(1, num_threads=self.num_threads, device_lanes=self.device_lanes)
        check_integers(0, num_fetchers=self.num_fetchers)
        check_kind("decoder", self.decoder, str, Backend, use="'auto', 'pyav' or another name")
        check_switches(show_stats=self.show_stats)
        if self.stats_file is not None:
            check_kind("stats_file", self.stats_file, str, os.PathLike, use="the path of a file")
        check_seconds(timeout=self.timeout, clip_timeout=self.clip_timeout)
        if self.on_error != "raise" and not isinstance(self.on_error, Skip):
            raise UsageError(f"on_error is {self.on_error!r}", hint="use 'raise' or Skip(max_rate)")


_WORDS: Final = {  # hints for arguments of torch's DataLoader and datasets
    "num_workers": "use workers=Workers(num_threads=n)",
    "batch_size": "use global_batch_size=n, the clips of a step over all ranks",
    "transform": "use spatial=[...] for the crop and the flip, and after=[...] for transforms of the pixels",
    "collate_fn": "use output=Output(collate=...)",
    "drop_last": "use order=Order(last='drop')",
    "sampler": "leave it out: use order=Order(shuffle=...); ranks share each batch by themselves",
    "pin_memory": "leave it out: batches are on the device already",
    "prefetch_factor": "use workers=Workers(prefetch=n)",
    "frames_per_clip": "use frames=Dense(n, stride=...) or Segments(n)",
    "num_frames": "use frames=Segments(n), Dense(n, stride) or another sampler",
    "delta_timestamps": "use frames=Deltas([...]) and signals={'action': Deltas([...])}",
}


_OF_DATALOADERS: Final = ("batch_size", "shuffle", "num_workers", "drop_last", "collate_fn", "sampler", "pin_memory")


_EXAMPLES: Final = {
    "order": "Order(shuffle=False)",
    "extras": 'Extras(text=Text("caption"))',
    "output": 'Output(dtype="uint8")',
    "workers": "Workers(num_threads=4)",
}


def with_moved(whose: str, groups: Mapping[str, Any], moved: Mapping[str, Any]) -> list[Any]:
    """Return the groups of options, updated with fields given directly as keyword arguments, as in version 0.2."""
    for group, options in groups.items():
        kind = group.capitalize()
        if kind not in (one.__name__ for one in type(options).__mro__):
            raise UsageError(f"{group} is {options!r}, expected {kind}", hint=f"use {_EXAMPLES[group]}")
    places = {field.name: group for group, options in groups.items() for field in fields(options)}
    for name in moved:
        if name not in places:
            known = ", ".join(f"{group}.{field}" for field, group in places.items())
            if whose == "ClipDataset" and name in _OF_DATALOADERS:
                raise UsageError(f"a ClipDataset has no {name!r}", hint="give it to the DataLoader of the dataset")
            hint = _WORDS.get(name) or f"{meant(name, places) or ''} its options are {known}".lstrip()
            raise UsageError(f"{whose} has no argument {name!r}", hint=hint)
    return [
        replace(options, **{name: value for name, value in moved.items() if places[name] == group})
        for group, options in groups.items()
    ]
