"""A small task for the strategies, under the real trainer, on any number of ranks that one process starts.

A student net learns the classes that a random teacher net gives to random clips, one in ten of them wrong. The
computation of a step may be padded by a sleep, as a CPU sees a step on a GPU, in proportion to a rank's clips; and
messages may be slowed down as by a network. `Ranks` starts the processes, see
`bench.strategies.rank`, and hands them jobs.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from bench.common.ports import reserved_port
from bench.strategies.slow_network import Link, Slow

ROOT: Final = Path(__file__).parents[2]
SHAPE: Final = (3, 1, 4, 8)  # of a clip: 96 numbers
CLASSES: Final = 10
CLIPS: Final = 32768
HELD_OUT: Final = 2048
WRONG: Final = 0.1
TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class Job:
    """A run.

    Attributes:
        sync: Strategy; or "relay", see `bench.strategies.relay_steps`.
        options: Of the strategy.
        optim: Changes of the optimiser's configuration.
        steps: Most steps.
        target: Held-out loss at which the run may end; None runs all steps.
        look_every: Least steps between two looks at the held-out loss.
        batch: Global batch.
        hidden: Width of the student, which sets its size.
        step_s: Sleep in a step on a rank's share of a batch.
        straggler: How many times as long the last rank computes.
        link: What messages cost.
        seed: Of the student, the order and the task.
    """

    sync: str
    options: Mapping[str, Any] = field(default_factory=dict)
    optim: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 300
    target: float | None = None
    look_every: int = 8
    batch: int = 32
    hidden: int = 256
    step_s: float = 0.0
    straggler: float = 1.0
    link: Link = field(default_factory=Link)
    seed: int = 0


class Ranks:
    """Processes of one group, kept between jobs because each takes seconds to start.

    Args:
        size: How many.
        prefixes: Command before each rank's own, such as one that enters a network namespace.
        environment: Further variables.
    """

    def __init__(
        self, size: int, prefixes: Sequence[Sequence[str]] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self._stack = contextlib.ExitStack()
        port = self._stack.enter_context(reserved_port())
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
        shared |= dict(environment or {})
        self._processes = [
            subprocess.Popen(
                [*(prefixes[rank] if prefixes else ()), sys.executable, "-m", "bench.strategies.rank"],
                cwd=ROOT,
                env=os.environ | shared | {"RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]

    def run(self, job: Job) -> list[dict[str, Any]]:
        """Does a job; gives what each rank found.

        Raises:
            RuntimeError: A rank ended.
        """
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(job)) + "\n")
            process.stdin.flush()
        answers = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"rank {rank} ended with code {process.wait()}")
            answers.append(json.loads(line))
        return answers

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._stack.close()


def run(job: Job, member: Any) -> dict[str, Any]:
    """Does a job on this rank; gives what it found."""
    return _Run(job, member).result()


class _Run:
    """A job on this rank."""

    def __init__(self, job: Job, member: Any) -> None:
        import torch

        from fastvid.load.clips.augment import CenterCrop
        from fastvid.load.clips.sampling import Segments
        from fastvid.train.config.config import Config, DataConfig, ModelConfig, RunConfig
        from fastvid.train.loop.loop import Trainer
        from fastvid.train.loop.strategy import build_strategy
        from fastvid.train.parts.optim import make_optimizer
        from fastvid.train.parts.replica import Replica
        from fastvid.train.parts.schedule import Schedule

        self.job, self.member = job, member
        self._task = Task(job.seed)
        optim = optim_of(job)
        # Whether ranks step together; else each sees its own steps only, and trains until all batches are done.
        self.strategy = strategy = build_strategy(job.sync, member, job.options)
        self.shares = strategy.shares_batches
        per_epoch = CLIPS // job.batch if self.shares else job.steps
        config = Config(
            data=DataConfig(
                path="", frames=Segments(1), eval_frames=Segments(1), spatial=(CenterCrop(4),),
                eval_spatial=(CenterCrop(4),), global_batch_size=job.batch,
            ),
            model=ModelConfig(name="student", num_classes=CLASSES),
            optim=optim,
            run=RunConfig(
                out="", epochs=-(-job.steps // per_epoch), seed=job.seed, log_every_steps=10**9,
                eval_every_epochs=10**9, timeout_s=TIMEOUT_S,
            ),
            sync=job.sync,
            sync_options=dict(job.options),
        )  # fmt: skip
        torch.manual_seed(job.seed)
        self.model = mlp(job.hidden)
        self.model.register_forward_pre_hook(computing(job, member.world))
        schedule = Schedule.of(
            optim, epochs=config.run.epochs, samples_per_epoch=per_epoch * job.batch, global_batch_size=job.batch
        )
        self.replica = Replica(self.model, make_optimizer(self.model, optim), schedule)
        self.trainer = Trainer(
            config, member, self.replica, _Loader(self._task, strategy.reader.world, job), strategy, stop=self
        )
        self.requested = False  # what the trainer asks of a StopSignal
        self.received = None
        self.steps = self.looked = 0
        self._seen: list[tuple[int, float, dict[str, Any]]] = []
        self.looking_s = 0.0
        self.curve: list[tuple[int, float, float]] = []
        self.reached: tuple[int, float] | None = None
        self._waiter = ThreadPoolExecutor(1)

    def result(self) -> dict[str, Any]:
        """Trains; gives steps, seconds, messages and the curve of the held-out loss."""
        from torch.nn.parallel import DistributedDataParallel

        inner, agree = self.strategy.maybe_sync, self.strategy.agree

        def told(wishes: Any) -> Any:
            if isinstance(self.replica.forward, DistributedDataParallel) and self.steps == 0:
                self.replica.forward.register_comm_hook(None, lambda _, bucket: self._average(bucket))
            return agree(wishes)

        def spy(replica: Any, sums: Any) -> None:
            inner(replica, sums)
            self.steps += 1
            self._look()

        self.strategy.agree, self.strategy.maybe_sync = told, spy  # type: ignore[method-assign]
        before = received()
        with Slow(self.job.link, self.member.world.size, far=self.member.world.rank > 0) as slow:
            self._began = time.perf_counter()
            self.trainer.fit()
            seconds = time.perf_counter() - self._began - self.looking_s
        self._waiter.shutdown()
        self._look_back()
        return {
            "steps": self.steps,
            "updates": self.steps if self.shares else self.job.steps,
            "staleness": {str(key): count for key, count in self._staleness().items()},
            "seconds": seconds,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "messages": slow.messages,
            "message_bytes": slow.bytes,
            "received_bytes": received() - before,
            "reached": self.reached,
            "curve": self.curve,
            "accuracy": self._task.accuracy(self.model),
            "train_loss": self._task.train_loss(self.model),
        }

    def _average(self, bucket: Any) -> Any:
        """Averages a bucket of gradients through the slowed all-reduce, without stopping the backward pass."""
        import torch
        import torch.distributed as dist

        buffer = bucket.buffer()
        buffer.div_(self.member.world.size)
        work = dist.all_reduce(buffer, async_op=True)
        done: Any = torch.futures.Future()

        def finish() -> None:
            work.wait()
            done.set_result(buffer)

        self._waiter.submit(finish)
        return done

    def _staleness(self) -> Mapping[int, int]:
        servers = getattr(self.strategy, "servers", [])
        return servers[0].counts() if servers else {}

    def _look_back(self) -> None:
        """The held-out loss of what the server held during the run: looking at once would stop one client only."""
        for step, elapsed, weights in self._seen:
            self.model.load_state_dict(weights)
            loss = self._task.held_out_loss(self.model)
            self.curve.append((step, round(elapsed, 4), round(loss, 5)))
            if self.job.target is not None and loss <= self.job.target and self.reached is None:
                self.reached = (step, elapsed)

    def _look(self) -> None:
        """The held-out loss where all ranks hold one model. Every rank sees the same, so all wish to stop alike."""
        if not self.shares:
            servers = getattr(self.strategy, "servers", [])
            updates = servers[0].shard.snapshot.version if servers else 0
            if servers and (updates - self.looked >= self.job.look_every or updates >= self.job.steps):
                self.looked = updates
                weights = {name: value.clone() for name, value in self.model.state_dict().items()}
                self._seen.append((updates, time.perf_counter() - self._began, weights))
            return
        common = getattr(self.strategy, "local_steps", 0) == 0
        last = self.steps >= self.job.steps
        # A wish is told before a step and granted after it.
        self.requested = self.requested or self.steps >= self.job.steps - 1
        if not common or (self.steps - self.looked < self.job.look_every and not last) or self.reached:
            return
        began = time.perf_counter()
        self.looked = self.steps
        loss = self._task.held_out_loss(self.model)
        elapsed = began - self._began - self.looking_s
        self.curve.append((self.steps, round(elapsed, 4), round(loss, 5)))
        if self.job.target is not None and loss <= self.job.target:
            self.reached = (self.steps, elapsed)
            self.requested = True
        self.looking_s += time.perf_counter() - began


def optim_of(job: Job) -> Any:
    """The optimiser's configuration of a job."""
    from fastvid.train.config.config import OptimConfig

    optim = OptimConfig(base_lr=0.1, base_batch_size=job.batch, weight_decay=0.0, decay="constant")
    return replace(optim, **job.optim)


def computing(job: Job, world: Any) -> Callable[..., None]:
    """A hook that sleeps in each forward pass of training as long as a rank computes."""
    slower = job.straggler if world.rank == world.size - 1 else 1.0
    clip_s = slower * job.step_s * world.size / job.batch

    def compute(model: Any, inputs: tuple[Any, ...]) -> None:
        if model.training and clip_s:
            time.sleep(clip_s * len(inputs[0]))

    return compute


class Task:
    """Clips, their labels, and held-out ones."""

    def __init__(self, seed: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(1000 + seed)
        count = CLIPS + HELD_OUT
        self.video = torch.randn(count, *SHAPE, generator=generator)
        flat = self.video.flatten(1)
        first = torch.randn(flat.shape[1], 32, generator=generator) / flat.shape[1] ** 0.5
        second = torch.randn(32, CLASSES, generator=generator)
        self.label = (torch.tanh(2 * flat @ first) @ second).argmax(1)
        wrong = torch.rand(count, generator=generator) < WRONG
        self.label[wrong] = torch.randint(0, CLASSES, (int(wrong.sum()),), generator=generator)

    def held_out_loss(self, model: Any) -> float:
        return self._loss(model, slice(CLIPS, None))

    def train_loss(self, model: Any) -> float:
        return self._loss(model, slice(0, CLIPS))

    def accuracy(self, model: Any) -> float:
        import torch

        with torch.no_grad():
            model.eval()
            right = model(self.video[CLIPS:]).argmax(1) == self.label[CLIPS:]
            model.train()
        return float(right.double().mean())

    def _loss(self, model: Any, rows: slice) -> float:
        import torch

        with torch.no_grad():
            model.eval()
            loss = torch.nn.functional.cross_entropy(model(self.video[rows]), self.label[rows])
            model.train()
        return float(loss)


class _Loader:
    """The task's clips in the order and the shares of a real loader."""

    def __init__(self, task: Task, world: Any, job: Job) -> None:
        from fastvid.load.order.batches import Batches

        self._task, self._seed = task, job.seed
        self._batches = Batches(CLIPS, job.batch, "drop", world)
        self.epoch = self._position = 0

    @property
    def global_batch_size(self) -> int:
        return self._batches.size

    def __len__(self) -> int:
        return self._batches.count(self._position)

    def set_batch_size(self, global_batch_size: int) -> None:
        self._batches = replace(self._batches, size=global_batch_size)

    def __iter__(self) -> Iterator[Any]:
        import torch

        from fastvid.load.batch.batch import Batch
        from fastvid.load.order.permutation import Order

        order = Order(CLIPS, self._seed, self.epoch)
        while self._batches.count(self._position):
            share = self._batches.share(self._position)
            samples = torch.from_numpy(order.ids(share.positions))
            self._position = share.stop
            valid = torch.ones(len(samples), dtype=torch.bool)
            yield Batch(
                video=self._task.video[samples], label=self._task.label[samples], valid=valid,
                weight=valid.float() / (share.stop - share.start), key=tuple(map(str, samples.tolist())),
                frame_index=torch.zeros(len(samples), 1, dtype=torch.int64), sample=samples,
                position=torch.from_numpy(share.positions), epoch=self.epoch, start=share.start, stop=share.stop,
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
    """The student."""
    from torch import nn

    numbers = SHAPE[0] * SHAPE[1] * SHAPE[2] * SHAPE[3]
    return nn.Sequential(nn.Flatten(), nn.Linear(numbers, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                         nn.Linear(hidden, CLASSES))  # fmt: skip


def received() -> int:
    """Bytes that this process' network namespace has received from others."""
    devices = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(counts.split()[0]) for name, counts in devices if name.strip() != "lo")
