"""Section `step`: the trainer's own step on the device, by memory format and kernels; then fed by the loader."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from bench.gpu.measuring import batches, synchronize, timed
from bench.gpu.settings import NUM_FRAMES, Notes, Settings
from fastvid.errors import FastvidError
from fastvid.load.clips.crops import CenterCrop
from fastvid.load.clips.sampling import Segments
from fastvid.runtime.processes import World
from fastvid.train.config.config import Amp, Config, ModelConfig, OptimConfig, RunConfig
from fastvid.train.config.data import DataConfig
from fastvid.train.loop.loop import Stepper
from fastvid.train.loop.strategy import build_strategy
from fastvid.train.ranks import Member
from fastvid.train.run.assemble import make_replica
from fastvid.videos.dataset import VideoDataset

_SYNC_STEPS = 8
_CLASSES = 400

# Each variant adds one to the variant before it; all but the last are the trainer's default on a GPU, and the last is
# what a recipe may choose.
_KERNELS = ("channels_last", "cudnn_benchmark", "fused_optimizer", "compiled")
_VARIANTS = {name: _KERNELS[:number] for number, name in enumerate(("nchw", *_KERNELS))}


class Steps:
    """The trainer's step of one variant.

    `side`: side of the crop in pixels.
    """

    def __init__(self, settings: Settings, side: int, kernels: Sequence[str] = _KERNELS[:-1], amp: Amp | None = None):
        config = _config(settings, side, amp or settings.amp, kernels)
        member = Member(World(), settings.device)
        strategy = build_strategy(config.sync, member, config.sync_options)
        self.replica = make_replica(config, 10_000, member)
        strategy.prepare(self.replica)
        self.channels_last = "channels_last" in kernels
        torch.backends.cudnn.benchmark = "cudnn_benchmark" in kernels
        if "fused_optimizer" not in kernels:
            for group in self.replica.optimizer.param_groups:
                group |= {"fused": False, "foreach": False}
        self._stepper = Stepper(config, member, strategy)

    def __call__(self, batch: Any) -> Any:
        """Train on a batch and return the sums of the task, one vector."""
        sums, _ = self._stepper.step(self.replica, batch)
        self.replica.samples += len(batch)
        return sums.vector


def _config(settings: Settings, side: int, amp: Amp, kernels: Sequence[str]) -> Config:
    crop, frames = (CenterCrop(side),), Segments(NUM_FRAMES)
    return Config(
        data=DataConfig(
            path="", frames=frames, eval_frames=frames, spatial=crop, eval_spatial=crop,
            global_batch_size=settings.batch,
        ),
        model=ModelConfig(
            name=settings.model, num_classes=_CLASSES, options=settings.model_options,
            channels_last="channels_last" in kernels, compile="compiled" in kernels,
        ),
        optim=OptimConfig(base_lr=0.001, base_batch_size=settings.batch, clip_norm=20.0),
        run=RunConfig(out="", epochs=1, amp=amp),
    )  # fmt: skip


def measure(settings: Settings, notes: Notes) -> None:
    """Time the variants on one cached batch, then the best one beside the loader; count host synchronisations."""
    name, dataset = settings.smallest()
    cached: dict[bool, Any] = {}
    for channels_last in (False, True):
        with batches(settings, dataset, "pyav", dtype=torch.float32, channels_last=channels_last) as stream:
            cached[channels_last] = next(stream)
    side, finite, times = settings.crop(dataset), True, dict[str, float]()
    notes.put(dataset=name, model=settings.model, batch=settings.batch)
    for variant, kernels in _VARIANTS.items():
        if settings.fake and "compiled" in kernels:
            continue  # compiling takes longer than the whole rehearsal
        work = partial(Steps(settings, side, kernels), cached["channels_last" in kernels])
        times[variant] = 1e3 * timed(work, settings)
        finite = finite and bool(torch.isfinite(work()).all())
        notes.put(cached_ms={name: round(value, 2) for name, value in times.items()}, finite=int(finite))
    best = min(times, key=times.__getitem__)
    notes.put(channels_last_speedup=round(times["nchw"] / times["channels_last"], 3), best=best)
    steps = Steps(settings, side, _VARIANTS[best])
    decoders: list[Any] = ["pyav", *settings.on_device()[0]]
    for decoder in decoders:
        row = {"decoder": decoder if isinstance(decoder, str) else decoder.name}
        try:
            row |= _fed(settings, dataset, decoder, steps, cached[steps.channels_last])
        except FastvidError as error:
            row |= {"failed": error.message}
        notes.row("loaders", **row)
        if row.get("of_cached", 0) > notes.get("loader_of_cached", 0):
            notes.put(loader_of_cached=row["of_cached"], host_syncs=row["host_syncs"], loader=row["decoder"])


def _fed(settings: Settings, dataset: VideoDataset, decoder: Any, steps: Steps, cached: Any) -> dict[str, Any]:
    """Measure steps fed by a decoder's loader against steps on the cached batch, in the same minute."""
    output = {"dtype": torch.float32, "channels_last": steps.channels_last}
    with batches(settings, dataset, decoder, **output) as stream:
        alone = timed(partial(steps, cached), settings)
        fed = timed(lambda: steps(next(stream)), settings)
        syncs = host_syncs(settings, steps, stream)
    return {"ms": round(1e3 * fed, 2), "of_cached": round(alone / fed, 4), "host_syncs": syncs}


def host_syncs(settings: Settings, steps: Steps, stream: Iterator[Any]) -> float:
    """Return how often a step, taking its batch included, makes the host wait for the device; 0 on a CPU."""
    if settings.device.type != "cuda":
        for batch in itertools.islice(stream, 1):
            steps(batch)
        return 0.0
    synchronize(settings.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for batch in itertools.islice(stream, _SYNC_STEPS):
                steps(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in caught) / _SYNC_STEPS
