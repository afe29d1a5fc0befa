"""Section `step`: the trainer's own step on the device, by memory format and kernels; then fed by the loader."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from bench.gpu.measuring import crop_of, endless, make_loader, synchronize, timed
from bench.gpu.settings import NUM_FRAMES, Notes, Settings
from fastvid.decode.backends import Backend
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

# Each adds one thing to the variant before it; the last one is what the trainer does by default, and `compile` what a
# recipe may choose.
_VARIANTS: dict[str, dict[str, Any]] = {
    "nchw": {"channels_last": False, "benchmark": False, "fused": False, "compile": False},
    "channels_last": {"channels_last": True, "benchmark": False, "fused": False, "compile": False},
    "cudnn_benchmark": {"channels_last": True, "benchmark": True, "fused": False, "compile": False},
    "fused_optimizer": {"channels_last": True, "benchmark": True, "fused": True, "compile": False},
    "compiled": {"channels_last": True, "benchmark": True, "fused": True, "compile": True},
}


class Steps:
    """The trainer's step of one variant.

    `side`: side of the crop in pixels.
    """

    def __init__(
        self,
        settings: Settings,
        side: int,
        *,
        amp: Amp | None = None,
        channels_last: bool = True,
        benchmark: bool = True,
        fused: bool = True,
        compile: bool = False,  # noqa: A002 - the recipe's name
    ) -> None:
        config = _config(settings, side, amp or settings.amp, channels_last=channels_last, compiled=compile)
        member = Member(World(), settings.device)
        strategy = build_strategy(config.sync, member, config.sync_options)
        self.replica = make_replica(config, 10_000, member)
        strategy.prepare(self.replica)
        torch.backends.cudnn.benchmark = benchmark
        if not fused:
            for group in self.replica.optimizer.param_groups:
                group |= {"fused": False, "foreach": False}
        self._stepper = Stepper(config, member, strategy)

    def __call__(self, batch: Any) -> Any:
        """Train on a batch and return the sums of the task, one vector."""
        sums, _ = self._stepper.step(self.replica, batch)
        self.replica.samples += len(batch)
        return sums.vector


def _config(settings: Settings, side: int, amp: Amp, *, channels_last: bool, compiled: bool) -> Config:
    crop, frames = (CenterCrop(side),), Segments(NUM_FRAMES)
    return Config(
        data=DataConfig(
            path="", frames=frames, eval_frames=frames, spatial=crop, eval_spatial=crop,
            global_batch_size=settings.batch,
        ),
        model=ModelConfig(
            name=settings.model, num_classes=_CLASSES, channels_last=channels_last, compile=compiled,
            options=settings.model_options,
        ),
        optim=OptimConfig(base_lr=0.001, base_batch_size=settings.batch, clip_norm=20.0),
        run=RunConfig(out="", epochs=1, amp=amp),
    )  # fmt: skip


def measure(settings: Settings, notes: Notes) -> None:
    """Time the variants on one cached batch, then the best one beside the loader; count host synchronisations."""
    name, dataset = settings.smallest()
    cached = {channels_last: _cached(settings, dataset, channels_last=channels_last) for channels_last in (False, True)}
    side, finite = crop_of(dataset), True
    notes.put(dataset=name, model=settings.model, batch=settings.batch)
    times: dict[str, float] = {}
    for variant, chosen in _VARIANTS.items():
        if settings.fake and chosen["compile"]:
            continue  # compiling takes longer than the whole rehearsal
        steps, batch = Steps(settings, side, **chosen), cached[chosen["channels_last"]]
        times[variant] = 1e3 * timed(lambda steps=steps, batch=batch: steps(batch), settings)  # type: ignore[misc]
        finite = finite and bool(torch.isfinite(steps(batch)).all())
        notes.put(cached_ms={name: round(value, 2) for name, value in times.items()}, finite=int(finite))
    notes.put(channels_last_speedup=round(times["nchw"] / times["channels_last"], 3))
    best = min(times, key=times.__getitem__)
    notes.put(best=best)
    channels_last = _VARIANTS[best]["channels_last"]
    steps = Steps(settings, side, **_VARIANTS[best])
    _with_loader(settings, dataset, notes, steps, cached[channels_last], channels_last=channels_last)


def _cached(settings: Settings, dataset: VideoDataset, *, channels_last: bool) -> Any:
    loader = make_loader(settings, dataset, "pyav", dtype=torch.float32, channels_last=channels_last)
    with contextlib.closing(loader):
        return next(endless(loader))


def _with_loader(
    settings: Settings, dataset: VideoDataset, notes: Notes, steps: Steps, cached: Any, *, channels_last: bool
) -> None:
    """Measure steps fed by each decoder's loader against steps on the cached batch, in the same minute."""
    runs, _ = settings.on_device()
    decoders: list[str | Backend] = ["pyav", *runs]
    for decoder in decoders:
        name = decoder if isinstance(decoder, str) else decoder.name
        try:
            loader = make_loader(settings, dataset, decoder, dtype=torch.float32, channels_last=channels_last)
        except FastvidError as error:
            notes.row("loaders", decoder=name, failed=error.message)
            continue
        try:
            batches = endless(loader)
            alone = timed(lambda: steps(cached), settings)
            fed = timed(lambda batches=batches: steps(next(batches)), settings)  # type: ignore[misc]
            syncs = host_syncs(settings, steps, batches)
        except FastvidError as error:
            notes.row("loaders", decoder=name, failed=error.message)
            continue
        finally:
            loader.close()
        row = {"decoder": name, "ms": round(1e3 * fed, 2), "of_cached": round(alone / fed, 4), "host_syncs": syncs}
        notes.row("loaders", **row)
        _best(notes, row)


def _best(notes: Notes, row: dict[str, Any]) -> None:
    """Take the fastest loader as the result; its syncs are judged."""
    if row["of_cached"] > notes.get("loader_of_cached", 0.0):
        notes.put(loader_of_cached=row["of_cached"], host_syncs=row["host_syncs"], loader=row["decoder"])


def host_syncs(settings: Settings, steps: Steps, batches: Iterator[Any]) -> float:
    """Return how often a step, taking its batch included, makes the host wait for the device; 0 on a CPU."""
    if settings.device.type != "cuda":
        for batch in itertools.islice(batches, 1):
            steps(batch)
        return 0.0
    synchronize(settings.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for batch in itertools.islice(batches, _SYNC_STEPS):
                steps(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in caught) / _SYNC_STEPS
