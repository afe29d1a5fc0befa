"""A sweep without videos: random clips by sample number, float64 nets of several sizes, the real hub and stages.

Started as ``python -m tests.train.strategies.relay.relay_lab PORT SWEEP...`` for a stage.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore

from fastvid.load.batch.batch import Batch
from fastvid.runtime.processes import World
from fastvid.train.config.config import Config, OptimConfig
from fastvid.train.loop.loop import Stepper
from fastvid.train.parts.evaluate import Score
from fastvid.train.parts.optim import Schedule, make_optimizer
from fastvid.train.parts.replica import Replica
from fastvid.train.ranks import Member
from fastvid.train.strategies.ddp import Ddp
from fastvid.train.strategies.link import Address
from fastvid.train.strategies.relay.scheduler import Unit
from fastvid.train.strategies.relay.stage import SweepModel, serve, train_visit
from fastvid.train.tasks.classification import Classification
from tests.train import toy

MODELS, STAGES, EPOCHS = 5, 2, 3
PART = 40  # samples of a partition
CPU = torch.device("cpu")
TIMEOUT_S = 100.0
ROOT = Path(__file__).parents[4]

# Sizes, optimizers, rates, batch sizes and dropout all differ.
WIDTHS = (4, 7, 3, 6, 5)
BATCHES = (8, 5, 10, 4, 8)
OPTIMS: tuple[dict[str, Any], ...] = (
    {"name": "sgd", "groups": "tsm", "clip_norm": 1.0},
    {"name": "adam", "base_lr": 0.01, "decay": "cosine"},
    {"name": "sgd", "nesterov": True, "momentum": 0.8},
    {"name": "adamw", "base_lr": 0.003, "warmup_epochs": 1.5},
    {"name": "sgd", "momentum": 0.0, "decay": "step", "milestones": (1.0, 2.0)},
)


def net(model: int) -> nn.Module:
    torch.manual_seed(100 + model)
    width = WIDTHS[model]
    layers = [nn.Conv3d(3, width, (2, 3, 3)), nn.BatchNorm3d(width), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(4 * width, toy.CLASSES)).double()


def config(model: int) -> Config:
    base = toy.toy_config(Path(), epochs=EPOCHS, seed=model)
    optim = OptimConfig(**({"base_lr": 0.05, "base_batch_size": BATCHES[model]} | OPTIMS[model]))
    task = Classification(label_smoothing=0.1 * (model == 2))
    return replace(base, optim=optim, task=task, data=replace(base.data, global_batch_size=BATCHES[model]))


def sweep_model(model: int) -> SweepModel:
    made = config(model)

    def replica() -> Replica:
        module = net(model)
        schedule = Schedule(
            made.optim, epochs=EPOCHS, samples_per_epoch=STAGES * PART, global_batch_size=BATCHES[model]
        )
        return Replica(module, make_optimizer(module, made.optim), schedule)

    @contextlib.contextmanager
    def batches(unit: Unit) -> Iterator[Iterator[Batch]]:
        yield clips(unit, BATCHES[model])

    return SweepModel(made, replica, batches, score if model % 2 else None)


def clips(unit: Unit, size: int) -> Iterator[Batch]:
    """The samples of a partition, shuffled by model, epoch and partition."""
    draw = torch.Generator().manual_seed(1000 * unit.model + 10 * unit.epoch + unit.partition)
    samples = torch.randperm(PART, generator=draw) + unit.partition * PART
    for start in range(0, PART, size):
        rows = samples[start : start + size]
        valid = torch.ones(len(rows), dtype=torch.bool)
        yield Batch(
            video=torch.stack([toy.clip(int(sample)) for sample in rows]),
            label=rows % toy.CLASSES,
            weight=valid.float() / len(rows),
            valid=valid,
            key=tuple(f"s{sample}" for sample in rows.tolist()),
            frame_index=torch.zeros(len(rows), 2, dtype=torch.int64),
            sample=rows,
            position=torch.arange(start, start + len(rows)),
            epoch=unit.epoch,
            start=start,
            stop=start + len(rows),
        )


def score(replica: Replica) -> Score:
    """Score a model on one batch without changing its norm statistics."""
    replica.model.eval()
    held_out = torch.stack([toy.clip(sample) for sample in range(500, 520)])
    with torch.no_grad():
        hits = replica.model(held_out).argmax(1) == torch.arange(500, 520) % toy.CLASSES
    replica.model.train()
    percent = 100 * float(hits.double().mean())
    return Score({"loss": 0.0, "top1_percent": percent, "top5_percent": 100.0}, percent, 20, 20)


class Lab:
    """The stage worker of these tests."""

    def assign(self, partitions: tuple[int, ...]) -> dict[str, Any]:
        return {"bytes_moved": PART * len(partitions)}

    def visit(self, unit: Unit, token: bytes | None) -> tuple[bytes, dict[str, Any]]:
        return train_visit(sweep_model(unit.model), unit, token, CPU)


def alone(model: int, visits: list[int]) -> Replica:
    """Train the same model in a plain loop over the partitions in an order, without tokens and hub."""
    made, member = sweep_model(model), Member(World(), CPU)
    replica = made.replica()
    stepper = Stepper(made.config, member, Ddp(member))
    for number, partition in enumerate(visits):
        for batch in clips(Unit(model, number // STAGES, partition), BATCHES[model]):
            stepper.step(replica, batch)
            replica.samples += batch.num_rows
    return replica


def token_after(model: int, visits: list[int]) -> bytes | None:
    """Return the token of a model after these visits."""
    token = None
    for number, partition in enumerate(visits):
        unit = Unit(model, number // STAGES, partition, (number + 1) % STAGES == 0)
        token, _ = train_visit(sweep_model(model), unit, token, CPU)
    return token


def same(one: Any, other: Any) -> bool:
    """Return whether two states are equal bit by bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def start_stage(port: int, *sweeps: str, **environment: str) -> subprocess.Popen[bytes]:
    """Run a stage in several sweeps, one after the other."""
    command = [sys.executable, "-W", "error", "-m", "tests.train.strategies.relay.relay_lab", str(port), *sweeps]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment)


def main() -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", int(sys.argv[1]))
    for name in sys.argv[2:]:
        store.wait([name], timedelta(seconds=200))
        serve(Address.decode(store.get(name)), lambda _: Lab(), TIMEOUT_S)


if __name__ == "__main__":
    main()
