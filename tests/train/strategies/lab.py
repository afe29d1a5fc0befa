"""Runs for the strategies: the toy of `tests.train.toy` and a quadratic objective, under the real trainer."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastvid.load.batch.batch import Batch
from fastvid.train.loop.loop import Trainer
from fastvid.train.loop.strategy import strategy_of
from fastvid.train.ranks import join
from fastvid.train.strategies.average import moments, statistics
from fastvid.train.tasks.classification import Classification
from tests.train import toy

DIMENSIONS = 6
START, RATE = 2.0, 0.05
STEPS = 11  # of an epoch
CURVATURE = torch.linspace(0.5, 3.0, DIMENSIONS, dtype=torch.float64)
# Beyond 40 nats softmax rounds to one in float64, so the cross-entropy of class 0 is the other logit, exactly, and its
# gradient is that logit's.
LIFT = 60.0


class Quadratic(nn.Module):
    """Logits whose cross-entropy for class 0 is ``LIFT + w A w / 2 + noise * x w``, x being the start of the clip."""

    def __init__(self, noise):
        super().__init__()
        self.noise = noise
        self.weight = nn.Parameter(torch.full((1, DIMENSIONS), START, dtype=torch.float64))

    def forward(self, video):
        w = self.weight[0]
        cost = LIFT + 0.5 * (CURVATURE * w * w).sum() + self.noise * video.flatten(1)[:, :DIMENSIONS] @ w
        return torch.stack([torch.zeros_like(cost), cost], dim=1)


class QuadraticLoader(toy.ToyLoader):
    """Every clip has class 0."""

    def __iter__(self):
        for batch in super().__iter__():
            yield Batch(batch, label=batch.label.clamp_max(0))


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        options: Of the strategy.
        sync: Its name.
        optim: Changes of the optimiser's configuration.
        run: Changes of the run's.
        noise: None trains the toy net; a number a quadratic with that noise.
        norm: Batch norm in the toy net.
        data: Arguments of the loader.
        setup: Called with the trainer before it runs.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    sync: str = "kavg"
    optim: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    noise: float | None = None
    norm: bool = False
    data: Mapping[str, Any] = field(default_factory=dict)
    setup: Callable[[Trainer], None] | None = None


PLAIN = {"momentum": 0.0, "weight_decay": 0.0}
CONSTANT = {"decay": "constant", "warmup_epochs": 0.0, "base_lr": RATE}


def config_of(case, folder):
    base = toy.toy_config(folder, **case.run)
    # No clipping, which each rank applies to its own gradient, so results would not be exact.
    changes = {"clip_norm": None, "groups": "plain", "weight_decay": 0.01}
    optim = replace(base.optim, **(changes | dict(case.optim)))
    return replace(base, optim=optim, task=Classification(), sync=case.sync, sync_options=dict(case.options))


def build(case, folder, member, stop=None):
    config = config_of(case, folder)
    strategy_of(config)
    model = None if case.noise is None else Quadratic(case.noise)
    kind = toy.ToyLoader if case.noise is None else QuadraticLoader
    return toy.trainer(config, member, model=model, norm=case.norm, stop=stop, kind=kind, **case.data)


@dataclass
class Trace:
    """The observations of a rank after each step."""

    weights: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    moments: list[Tensor] = field(default_factory=list)
    # Every all-reduce: steps done before it, number of elements, dtype.
    reduced: list[tuple[int, int, str]] = field(default_factory=list)
    # Bytes of every message with different parts for each rank.
    exchanged: list[int] = field(default_factory=list)


def flat(tensors):
    parts = [tensor.detach().reshape(-1).double() for tensor in tensors]
    return torch.cat([*parts, torch.empty(0).double()])


def watch(made):
    """Record the steps of a trainer by wrapping its methods."""
    trace, strategy, inner = Trace(), made.strategy, made.strategy.maybe_sync

    def spy(replica, sums):
        inner(replica, sums)
        model = replica.model
        trace.weights.append(flat(model.parameters()))
        trace.buffers.append(flat(statistics(model)))
        trace.moments.append(flat(moments(replica.optimizer)))
        trace.samples.append(replica.samples)
        trace.lr.append(replica.lr)

    strategy.maybe_sync = spy
    return trace


def run(case, folder, member, stop=None):
    """Train, from the newest checkpoint in the folder if there is one."""
    made = build(case, folder, member, stop)
    trace = watch(made)
    places = [parameter.data_ptr() for parameter in made.replica.model.parameters()]
    all_reduce, all_to_all = dist.all_reduce, dist.all_to_all_single

    def reduced(tensor, *args, **kwargs):
        trace.reduced.append((len(trace.weights), tensor.numel(), str(tensor.dtype)))
        return all_reduce(tensor, *args, **kwargs)

    def exchanged(output, sent, *args, **kwargs):
        trace.exchanged.append(sent.nbytes)
        return all_to_all(output, sent, *args, **kwargs)

    if case.setup is not None:
        case.setup(made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", reduced)
        patch.setattr(dist, "all_to_all_single", exchanged)
        result = toy.fit(made, member)
    meter = getattr(made.strategy, "meter", None)
    return {
        **result,
        "trace": vars(trace),
        "noise_scale": None if meter is None else meter.scale(),
        "moved": places != [parameter.data_ptr() for parameter in made.replica.model.parameters()],
    }


def main(scenarios):
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    with join(60.0) as member:
        for name in sys.argv[2:]:
            result = scenarios[name](folder / name, member)
            torch.save(result, folder / f"{name}-{member.world.rank}.pt")


def results(folder, name, world):
    """Return the results of the ranks of a spawned scenario."""
    return [torch.load(folder / f"{name}-{rank}.pt") for rank in range(world)]
