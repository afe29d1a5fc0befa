"""A small run without videos: random clips by sample number, a float64 net, the real trainer.

Started as ``python -m tests.train.toy FOLDER SCENARIO...`` on every rank; each scenario leaves FOLDER/SCENARIO.pt.
"""

import contextlib
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from bench.common.ports import reserved_port
from fastvid.errors import FastvidError, UsageError
from fastvid.load.batch.batch import Batch
from fastvid.load.batch.labels import IGNORED_LABEL
from fastvid.load.clips.crops import CenterCrop
from fastvid.load.clips.sampling import Segments
from fastvid.load.order.draws import Permutation
from fastvid.load.order.epoch import Batches
from fastvid.runtime.processes import World
from fastvid.train.config.config import Config, DataConfig, ModelConfig, OptimConfig, RunConfig
from fastvid.train.loop.loop import Trainer
from fastvid.train.loop.strategy import build_strategy
from fastvid.train.parts.evaluate import evaluate
from fastvid.train.parts.optim import Schedule, make_optimizer
from fastvid.train.parts.replica import Freezer, Replica
from fastvid.train.ranks import Member, StopSignal, join
from fastvid.train.records.checkpoint import Checkpoints, decode
from fastvid.train.records.records import METRICS_FILE, Recorder
from fastvid.train.run.assemble import read_state
from fastvid.train.strategies.ddp import Ddp
from fastvid.train.tasks.classification import Classification
from tests import forks

CLASSES = 5
NUM_SAMPLES = 90
BATCH = 8  # in worlds of 2 and 3: shares of 4 and 4, and of 2, 3 and 3
EPOCHS = 5  # of 11 steps each
ROOT = Path(__file__).parents[2]
ALONE = Member(World(), torch.device("cpu"))


class ToyLoader:
    """Clips drawn from the sample's number, in the order and the shares of a real loader."""

    def __init__(self, world, *, size=BATCH, last="drop", bad=(), group=1):
        self.batches = Batches(NUM_SAMPLES, size, last, world, group)
        self.epoch = self.position = self._origin = 0
        self.bad = bad

    def __iter__(self):
        order = Permutation(NUM_SAMPLES, 0, self.epoch)
        self._origin = self.position
        while self.batches.count(self.position):
            share = self.batches.share(self.position)
            present = share.positions >= 0
            samples = np.where(present, order.ids(np.where(present, share.positions, 0)), -1)
            valid = torch.from_numpy(present & ~np.isin(samples, self.bad))
            self.position = share.stop
            yield Batch(
                video=torch.stack([clip(int(sample)) for sample in samples]),
                label=torch.from_numpy(samples % CLASSES).where(valid, IGNORED_LABEL),
                weight=valid.float() / (share.stop - share.start),
                valid=valid,
                key=tuple(f"s{sample}" if sample >= 0 else "" for sample in samples),
                frame_index=torch.where(valid[:, None], 0, -1).expand(-1, 2),
                sample=torch.from_numpy(samples),
                position=torch.from_numpy(share.positions),
                epoch=self.epoch,
                start=share.start,
                stop=share.stop,
            )
        self.epoch, self.position, self._origin = self.epoch + 1, 0, 0

    @property
    def num_samples(self):
        return self.batches.num_samples

    @property
    def global_batch_size(self):
        return self.batches.size

    @property
    def steps_left(self):
        return self.batches.count(self._origin)

    def set_batch_size(self, global_batch_size):
        self.batches, self._origin = replace(self.batches, size=global_batch_size), self.position

    def close(self):
        pass

    def state_dict(self):
        return {"version": 1, "fingerprint": {}, "seed": 0, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]
        self._origin = self.position

    def go(self, epoch, start, stop):
        self.load_state_dict({"epoch": epoch, "position": start})
        self.batches = replace(self.batches, num_samples=stop)


def clip(sample):
    generator = torch.Generator().manual_seed(sample + 1)
    return torch.randn(3, 2, 4, 4, generator=generator, dtype=torch.float64)


def net(*, norm=False):
    torch.manual_seed(0)
    middle = [nn.BatchNorm3d(4)] if norm else []
    layers = [nn.Conv3d(3, 4, (2, 3, 3)), *middle, nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES)]
    return nn.Sequential(*layers).double()


def toy_config(folder, **run):
    values = {
        "out": str(folder), "epochs": EPOCHS, "log_every_steps": 1, "eval_every_epochs": EPOCHS, "keep_checkpoints": 2,
        "timeout_s": 60.0,
    } | run  # fmt: skip
    return Config(
        data=DataConfig(
            path="", frames=Segments(2), eval_frames=Segments(2),
            spatial=(CenterCrop(4),), eval_spatial=(CenterCrop(4),), global_batch_size=BATCH,
        ),
        model=ModelConfig(name="toy", num_classes=CLASSES),
        optim=OptimConfig(
            base_lr=0.05, base_batch_size=BATCH, groups="tsm", warmup_epochs=1.5, decay="step", milestones=(3.0,),
            clip_norm=1.0,
        ),
        task=Classification(label_smoothing=0.1),
        run=RunConfig(**values),
    )  # fmt: skip


def trainer(config, member, *, model=None, norm=False, stop=None, kind=ToyLoader, saves=True, **data):
    """Return a trainer of the toy net or another model; `data` are arguments of its loader."""
    model, size = net(norm=norm) if model is None else model, config.data.global_batch_size
    strategy = build_strategy(config.sync, member, config.sync_options)
    world, optim = strategy.reader.world, config.optim
    loader = kind(world, size=size, **data)
    per_epoch = loader.batches.count(0) * size if loader.batches.last == "drop" else NUM_SAMPLES
    schedule = Schedule(optim, epochs=config.run.epochs, samples_per_epoch=per_epoch, global_batch_size=size)
    freezer = Freezer(model, optim.freeze, per_epoch) if optim.freeze else None
    folder = Path(config.run.out)
    return Trainer(
        config,
        member,
        Replica(
            model, make_optimizer(model, optim), schedule, ema_decay=optim.ema_decay, ema_clips=optim.base_batch_size,
            freezer=freezer,
        ),
        loader,
        strategy,
        eval_data=kind(world, size=7, last="keep"),
        checkpoints=Checkpoints(str(folder / "checkpoints"), config.run.keep_checkpoints) if saves else None,
        recorder=Recorder(folder / METRICS_FILE if member.leads and saves else None),
        stop=stop or StopSignal(),
    )  # fmt: skip


def newest(folder):
    """Return the contents of a run's newest checkpoint."""
    found = Checkpoints(str(folder / "checkpoints")).newest()
    assert found is not None
    return decode(found.data, found.name)


def difference(a, b):
    """Return the largest difference of the final weights of two outcomes."""
    return max(float((a["weights"][name] - b["weights"][name]).abs().max()) for name in a["weights"])


@contextlib.contextmanager
def refused(message, hint="", kind=UsageError):
    """Check that the block raises an error with a message and a hint."""
    with pytest.raises(kind) as error:
        yield
    assert message in str(error.value)
    assert hint in (error.value.hint or "")


def outcome(made, *, over):
    return {
        "over": over,
        "weights": {name: value.clone() for name, value in made.replica.model.state_dict().items()},
        "samples": made.replica.samples,
        "lineage": made.lineage.state_dict(),
        "score": None if made.score is None else made.score.as_row(),
    }


def fit(made, member):
    """Goes on from the newest checkpoint where there is one, and trains to the end."""
    assert made.checkpoints is not None
    _, state = read_state(made.checkpoints, member)
    if state is not None:
        made.load_state_dict(state)
    made.recorder.write("start", samples=made.replica.samples, world_size=member.world.size)
    with contextlib.closing(made.recorder):
        over = made.fit()
    return outcome(made, over=over)


class LocalMean(Ddp):
    """What is often written: each rank takes the mean over its own share, and DDP averages the ranks."""

    def loss_scale(self, weight):
        return 1 / weight


class StopAfter(StopSignal):
    """A signal that comes after some steps."""

    def __init__(self, steps):
        super().__init__()
        self.left = steps

    @property
    def requested(self):
        self.left -= 1
        return self.left < 0


# By name: changes of the run, and arguments of the trainer.
SCENARIOS = {
    "micro": ({"micro_batch_size": 3}, {}),
    "masked": ({}, {"last": "mask", "bad": (3, 40, 41)}),
    "norm": ({}, {"norm": True}),
    "resumed": ({"checkpoint_every_s": 0.0}, {}),
    "poisoned": ({"log_every_steps": 1000}, {}),  # no row of metrics is due
    **dict.fromkeys(("plain", "naive", "stopped"), ({}, {})),
}


def scenario(name, folder, member):
    if name == "score":
        return {"score": score(member, bad=()).as_row(), "some": score(member, bad=(7, 8)).as_row()}
    run, options = SCENARIOS[name]
    # Only the last rank receives the signal, or has a loss that is NaN.
    last = member.world.rank == member.world.size - 1
    stop = StopAfter(6) if name == "stopped" and last else None
    made = trainer(toy_config(folder / name, **run), member, stop=stop, **options)
    if name == "naive":
        made.strategy = LocalMean(member)
    if name != "poisoned":
        return fit(made, member)
    if last:
        made.strategy.maybe_sync = lambda _replica, sums: sums.vector.fill_(math.nan)
    with pytest.raises(FastvidError) as error:
        fit(made, member)
    return {"error": str(error.value)}


def score(member, *, bad):
    strategy = build_strategy("ddp", member, {})
    loader = ToyLoader(member.world, size=7, last="keep", bad=bad)
    return evaluate(toy_config(ROOT), net(), loader, member.device, lambda values: strategy.total(values)())


def spawn(world, folder, *scenarios, module=__name__, **environment):
    """Runs scenarios of a module on `world` processes. Returns their exit codes."""
    with reserved_port() as port:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)} | environment
        ranks = [forks.start(module, folder, *scenarios, RANK=str(rank), **shared) for rank in range(world)]
        return [forks.wait(rank) for rank in ranks]


def main():
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    with join(60.0) as member:
        for name in sys.argv[2:]:
            result = scenario(name, folder, member)
            torch.save(result, folder / f"{name}-{member.world.rank}.pt")
    # A gloo thread that still runs may abort the process during interpreter exit.
    tasks = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert not [task for task in tasks if "gloo" in task], tasks


if __name__ == "__main__":
    main()
