"""A small task whose training costs next to nothing: a student learns the labels of a random teacher network.

Clips are random, and one label in ten is wrong. Computation on a GPU is stood in for by time that is slept or counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from bench.strategies.ranks import TIMEOUT_S, RunSpec
from fastvid.load.batch.batch import Batch
from fastvid.load.clips.crops import CenterCrop
from fastvid.load.clips.sampling import Segments
from fastvid.load.order.draws import Permutation
from fastvid.load.order.epoch import Batches
from fastvid.train.config.config import Config, ModelConfig, OptimConfig, RunConfig
from fastvid.train.config.data import DataConfig
from fastvid.train.parts.optim import Schedule, make_optimizer
from fastvid.train.parts.replica import Replica

SHAPE: Final = (3, 1, 4, 8)  # shape of a clip
CLASSES: Final = 10
HELD_OUT: Final = 2048
WRONG: Final = 0.1  # share of wrong labels


def optim_of(spec: RunSpec) -> Any:
    """Return the optimiser's configuration of a run."""
    optim = OptimConfig(base_lr=0.1, base_batch_size=spec.batch, weight_decay=0.0, decay="constant")
    return replace(optim, **spec.optim)


def config_of(spec: RunSpec) -> Any:
    """Return the configuration of a run."""
    crop = (CenterCrop(4),)
    return Config(
        data=DataConfig(
            path="", frames=Segments(1), eval_frames=Segments(1), spatial=crop, eval_spatial=crop,
            global_batch_size=spec.batch,
        ),
        model=ModelConfig(name="student", num_classes=CLASSES),
        optim=optim_of(spec),
        run=RunConfig(
            out="", epochs=1, seed=spec.seed, log_every_steps=10**9, eval_every_epochs=10**9, timeout_s=TIMEOUT_S,
        ),
        sync=spec.sync,
        sync_options=dict(spec.options),
    )  # fmt: skip


class ToyTask:
    """Training and held-out clips with their labels."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        # The same teacher and clips for all seeds, which differ in the student and the order.
        generator = torch.Generator().manual_seed(2000)
        self._clips = spec.dataset_clips
        count = self._clips + HELD_OUT
        self.video = torch.randn(count, *SHAPE, generator=generator)
        flat = self.video.flatten(1)
        first = torch.randn(flat.shape[1], 32, generator=generator) / flat.shape[1] ** 0.5
        second = torch.randn(32, CLASSES, generator=generator)
        self.label = (torch.tanh(2 * flat @ first) @ second).argmax(1)
        wrong = torch.rand(count, generator=generator) < WRONG
        self.label[wrong] = torch.randint(0, CLASSES, (int(wrong.sum()),), generator=generator)

    def parts(self, reader: Any) -> tuple[Any, Any, Any]:
        """Return configuration, replica and loader of this rank."""
        spec = self.spec
        config = config_of(spec)
        model = self.model()
        schedule = Schedule(
            config.optim,
            epochs=1,
            samples_per_epoch=spec.clips // spec.batch * spec.batch,
            global_batch_size=spec.batch,
        )
        loader = _ToyLoader(self, reader.world, spec)
        return config, Replica(model, make_optimizer(model, config.optim), schedule), loader

    def model(self) -> Any:
        """Return the student, with the same weights on every rank."""
        torch.manual_seed(self.spec.seed)
        return mlp(self.spec.hidden)

    def held_out(self, model: Any) -> tuple[float, float]:
        """Return loss in nats and accuracy on the held-out clips."""
        return self._score(model, slice(self._clips, None))

    def trained(self, model: Any) -> tuple[float, float]:
        """Return loss in nats and accuracy on the training clips."""
        return self._score(model, slice(0, self._clips))

    def _score(self, model: Any, rows: slice) -> tuple[float, float]:
        with torch.no_grad():
            logits = model.eval()(self.video[rows])
        model.train()
        right = logits.argmax(1) == self.label[rows]
        return float(torch.nn.functional.cross_entropy(logits, self.label[rows])), float(right.double().mean())

    def batch(self, samples: Any, position: Any, *, share: int, **facts: int) -> Any:
        """Return a batch of these samples; `share` is the size of the global batch."""
        valid = torch.ones(len(samples), dtype=torch.bool)
        return Batch(
            video=self.video[samples], label=self.label[samples], valid=valid, weight=valid.float() / share,
            key=tuple(map(str, samples.tolist())), frame_index=torch.zeros(len(samples), 1, dtype=torch.int64),
            sample=samples, position=position, **facts,
        )  # fmt: skip


class _ToyLoader:
    """The task's clips, in the order and shares of a real loader."""

    def __init__(self, task: ToyTask, world: Any, spec: RunSpec) -> None:
        self._task, self._seed, self._clips = task, spec.seed, spec.dataset_clips
        self._batches = Batches(spec.clips, spec.batch, "drop", world)
        self.epoch = self._position = 0

    @property
    def global_batch_size(self) -> int:
        return self._batches.size

    @property
    def steps_left(self) -> int:
        return self._batches.count(self._position)

    def set_batch_size(self, global_batch_size: int) -> None:
        self._batches = replace(self._batches, size=global_batch_size)

    def __iter__(self) -> Iterator[Any]:
        order = Permutation(self._clips, self._seed, self.epoch)
        while self._batches.count(self._position):
            share = self._batches.share(self._position)
            samples = torch.from_numpy(order.ids(share.positions))
            self._position = share.stop
            yield self._task.batch(
                samples, torch.from_numpy(share.positions), share=share.stop - share.start, epoch=self.epoch,
                start=share.start, stop=share.stop,
            )  # fmt: skip
        self.epoch, self._position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self._position = state["epoch"], state["position"]

    def go(self, epoch: int, start: int, stop: int) -> None:
        self.epoch, self._position = epoch, start
        self._batches = replace(self._batches, num_samples=stop)


def mlp(hidden: int) -> Any:
    """Return the student model."""
    numbers = SHAPE[0] * SHAPE[1] * SHAPE[2] * SHAPE[3]
    return nn.Sequential(nn.Flatten(), nn.Linear(numbers, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                         nn.Linear(hidden, CLASSES))  # fmt: skip
