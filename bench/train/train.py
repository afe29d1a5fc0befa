"""Measure the trainer's overhead over a bare PyTorch loop: same model, optimiser and batches, already in memory.

The bare loop is a tutorial's: forward, loss, backward, clip, step. The trainer also seeds dropout, weights and counts
clips, records the lineage, sets the learning rate, logs every 20 steps and checks for signals. Both run one block of
steps per round, in alternating order; a ratio is the median over rounds. Both must end with the same weights before
they are timed.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from bench.common.harness import Record, options
from bench.common.rounds import in_turn, ratios, spread, timed
from fastvid.load.batch.batch import Batch
from fastvid.load.clips.crops import CenterCrop
from fastvid.load.clips.sampling import Segments, clip_length
from fastvid.models import zoo
from fastvid.runtime.processes import World
from fastvid.train.config.config import Config, ModelConfig, OptimConfig, RunConfig
from fastvid.train.config.data import DataConfig
from fastvid.train.loop.loop import Trainer
from fastvid.train.loop.strategy import build_strategy
from fastvid.train.parts.optim import Schedule, make_optimizer
from fastvid.train.parts.replica import Replica
from fastvid.train.ranks import Member
from fastvid.train.records.records import METRICS_FILE, Recorder

SCHEMA: Final = "fastvid-bench-train/1"
CLASSES: Final = 10
LIMIT: Final = 1.02
_CHECKED: Final = 4  # steps after which weights are compared


class MemoryLoader:
    """A loader of random batches that are already in memory."""

    def __init__(self, config: Config, steps: int, side: int) -> None:
        self.epoch, self.position, self.steps = 0, 0, steps
        size, frames = config.data.global_batch_size, clip_length(config.data.frames)
        generator = torch.Generator().manual_seed(0)
        self.video = [torch.randn(size, 3, frames, side, side, generator=generator) for _ in range(4)]
        self.label = torch.arange(size) % CLASSES
        self.global_batch_size = size

    def __iter__(self) -> Iterator[Batch]:
        while self.position < self.steps:
            start = self.position * self.global_batch_size
            self.position += 1
            yield self.batch(self.position - 1, start)
        self.epoch, self.position = self.epoch + 1, 0

    def batch(self, step: int, start: int) -> Batch:
        size = self.global_batch_size
        return Batch(
            video=self.video[step % len(self.video)],
            label=self.label,
            weight=torch.full((size,), 1 / size),
            valid=torch.ones(size, dtype=torch.bool),
            key=tuple(f"clip{row}" for row in range(size)),
            frame_index=torch.zeros(size, 1, dtype=torch.int64),
            sample=torch.arange(size),
            position=torch.arange(start, start + size),
            epoch=self.epoch,
            start=start,
            stop=start + size,
        )

    def __len__(self) -> int:
        return self.steps

    def set_batch_size(self, global_batch_size: int) -> None:
        self.global_batch_size = global_batch_size

    def state_dict(self) -> dict[str, Any]:
        return {"version": 1, "fingerprint": {}, "seed": 0, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


add_arguments = options(
    "batch",
    model=("tsm-r18", "name in the model zoo"),
    width=(16, "channels of its stem"),
    side=(64, "height and width in pixels"),
    steps=(10, "steps per block"),
    rounds=15,
    json="train.json",
)


def run(args: argparse.Namespace) -> int:
    """Check and measure; exit code 1 if weights differ or the trainer's overhead exceeds 2 %."""
    logging.getLogger("fastvid").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        record = Record(SCHEMA, args, **measure(args, Path(folder)))
    record.finish()
    return 0 if record["ratio"]["cpu"]["median"] <= LIMIT and record["difference"] == 0 else 1


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Compare the weights, time both loops and return what was found."""
    config = _config(args, folder)
    difference = _difference(args, config)
    loops: dict[str, Any] = {"trainer": _TrainerLoop(config, args), "bare": _BareLoop(config, args)}
    found = in_turn(tuple(loops), args.rounds, lambda name, _: timed(loops[name].block), warm_up=1)
    spent = {
        kind: {name: [cost[place] for cost in costs] for name, costs in found.items()}
        for place, kind in enumerate(("cpu", "wall"))
    }
    times = {kind: ratios(one["trainer"], one["bare"]) for kind, one in spent.items()}
    return {
        "model": f"{args.model} width {args.width}, {args.batch} clips of 8x{args.side}x{args.side}, 1 thread",
        "steps_a_block": args.steps,
        "rounds": args.rounds,
        "difference": difference,
        "bare_step_ms": {kind: 1e3 * statistics.median(one["bare"]) / args.steps for kind, one in spent.items()},
        "ratio": {kind: spread(one, "low", "high") | {"rounds": one} for kind, one in times.items()},
        "limit": LIMIT,
    }


class _TrainerLoop:
    def __init__(self, config: Config, args: argparse.Namespace) -> None:
        self.config, self.args, self.epochs = config, args, 0
        member = Member(World(), torch.device("cpu"))
        self.model = _model(args)
        self.loader = MemoryLoader(config, args.steps, args.side)
        samples = args.steps * args.batch
        schedule = Schedule(config.optim, epochs=1000, samples_per_epoch=samples, global_batch_size=args.batch)
        recorder = Recorder(Path(config.run.out) / METRICS_FILE)
        replica = Replica(self.model, make_optimizer(self.model, config.optim), schedule)
        self.trainer = Trainer(
            config, member, replica, self.loader, build_strategy("ddp", member, {}), recorder=recorder
        )
        self._rounds = self.trainer.strategy.rounds

    def block(self) -> None:
        """Run one epoch of the loader through the trainer's loop."""
        self.epochs += 1
        self.trainer.strategy.rounds = lambda replica, loader, _: self._rounds(replica, loader, self.epochs)  # type: ignore[method-assign]
        self.trainer.fit()


class _BareLoop:
    def __init__(self, config: Config, args: argparse.Namespace) -> None:
        self.config, self.model = config, _model(args)
        self.loader = MemoryLoader(config, args.steps, args.side)
        self.optimizer = make_optimizer(self.model, config.optim)

    def block(self) -> None:
        for batch in self.loader:
            self.optimizer.zero_grad(set_to_none=True)
            loss = functional.cross_entropy(self.model(batch.video), batch.label)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.model.parameters(), 20.0)
            self.optimizer.step()


def _difference(args: argparse.Namespace, config: Config) -> float:
    """Return the largest weight difference after a few steps, in float64 and rounded to 9 digits, because one loop's
    loss is a weighted sum and the other's a mean."""
    short = argparse.Namespace(**{**vars(args), "steps": _CHECKED})
    ours, theirs = _TrainerLoop(config, short), _BareLoop(config, short)
    for one in (ours, theirs):
        one.model.double()
        one.loader.video = [video.double() for video in one.loader.video]
        one.block()
    pairs = zip(ours.model.state_dict().values(), theirs.model.state_dict().values(), strict=True)
    return round(max(float((a.double() - b.double()).abs().max()) for a, b in pairs), 9)


def _model(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return zoo.build(args.model, CLASSES, 8, width=args.width, dropout=0.0)


def _config(args: argparse.Namespace, folder: Path) -> Config:
    crop = (CenterCrop(args.side),)
    return Config(
        data=DataConfig(
            path="", frames=Segments(8), eval_frames=Segments(8), spatial=crop, eval_spatial=crop,
            global_batch_size=args.batch,
        ),
        model=ModelConfig(name=args.model),
        optim=OptimConfig(base_lr=0.01, base_batch_size=args.batch, decay="constant", clip_norm=20.0),
        run=RunConfig(out=str(folder), epochs=1000, log_every_steps=20),
    )  # fmt: skip
