"""A small task to benchmark strategies with the real trainer, on any number of ranks started by one process.

A student model learns the labels that a random teacher network assigns to random clips, with one label in ten wrong.
A sleep proportional to a rank's clips can stand in for computation on a GPU, and messages can be delayed as by a slow
network. `Ranks` starts the processes (`bench.strategies.rank`) and sends them run specifications.
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
from bench.strategies.slow_network import SlowLink, SlowNetwork

ROOT: Final = Path(__file__).parents[2]
SHAPE: Final = (3, 1, 4, 8)  # shape of a clip
CLASSES: Final = 10
CLIPS: Final = 32768
HELD_OUT: Final = 2048
WRONG: Final = 0.1  # share of wrong labels
TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class RunSpec:
    """Specification of a run.

    Attributes:
        sync: Strategy, or "relay", see `bench.strategies.relay_steps`.
        options: Options of the strategy.
        optim: Overrides of the optimiser's configuration.
        steps: Maximum number of steps.
        target: Held-out loss at which the run may end; None runs all steps.
        look_every: Minimum number of steps between two measurements of the held-out loss.
        batch: Global batch size.
        hidden: Hidden width of the student.
        step_s: Seconds to sleep in a step on a rank's share of a batch.
        straggler: Factor by which the last rank computes more slowly.
        link: Simulated cost of messages.
        seed: Seed of the student, the order and the task.
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
    link: SlowLink = field(default_factory=SlowLink)
    seed: int = 0


class Ranks:
    """Processes of one process group, reused between runs because they take seconds to start.

    Args:
        size: Number of ranks.
        prefixes: Command prefix of each rank, for example to enter a network namespace.
        environment: Additional environment variables.
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

    def run(self, spec: RunSpec) -> list[dict[str, Any]]:
        """Execute a run; return the result of each rank.

        Raises:
            RuntimeError: If a rank exits.
        """
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(spec)) + "\n")
            process.stdin.flush()
        answers = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"rank {rank} exited with code {process.wait()}")
            answers.append(json.loads(line))
        return answers

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._stack.close()


def run(spec: RunSpec, member: Any) -> dict[str, Any]:
    """Execute a run on this rank; return its result."""
    return _RankRun(spec, member).result()


class _RankRun:
    """One rank of a run."""

    def __init__(self, spec: RunSpec, member: Any) -> None:
        import torch

        from fastvid.load.clips.augment import CenterCrop
        from fastvid.load.clips.sampling import Segments
        from fastvid.train.config.config import Config, DataConfig, ModelConfig, RunConfig
        from fastvid.train.loop.loop import Trainer
        from fastvid.train.loop.strategy import build_strategy
        from fastvid.train.parts.optim import make_optimizer
        from fastvid.train.parts.replica import Replica
        from fastvid.train.parts.schedule import Schedule

        self.spec, self.member = spec, member
        self._task = ToyTask(spec.seed)
        optim = optim_of(spec)
        # Whether ranks share each global batch. Otherwise each counts its own steps and trains until all are done.
        self.strategy = strategy = build_strategy(spec.sync, member, spec.options)
        self.shares = strategy.shares_batches
        per_epoch = CLIPS // spec.batch if self.shares else spec.steps
        config = Config(
            data=DataConfig(
                path="", frames=Segments(1), eval_frames=Segments(1), spatial=(CenterCrop(4),),
                eval_spatial=(CenterCrop(4),), global_batch_size=spec.batch,
            ),
            model=ModelConfig(name="student", num_classes=CLASSES),
            optim=optim,
            run=RunConfig(
                out="", epochs=-(-spec.steps // per_epoch), seed=spec.seed, log_every_steps=10**9,
                eval_every_epochs=10**9, timeout_s=TIMEOUT_S,
            ),
            sync=spec.sync,
            sync_options=dict(spec.options),
        )  # fmt: skip
        torch.manual_seed(spec.seed)
        self.model = mlp(spec.hidden)
        self.model.register_forward_pre_hook(computing(spec, member.world))
        schedule = Schedule.of(
            optim, epochs=config.run.epochs, samples_per_epoch=per_epoch * spec.batch, global_batch_size=spec.batch
        )
        self.replica = Replica(self.model, make_optimizer(self.model, optim), schedule)
        world = strategy.reader.world
        self.trainer = Trainer(config, member, self.replica, _TaskLoader(self._task, world, spec), strategy, stop=self)
        self.requested = False  # the trainer reads this and `received` as of a StopSignal
        self.received = None
        self.steps = self.looked = 0
        self._seen: list[tuple[int, float, dict[str, Any]]] = []
        self.looking_s = 0.0
        self.curve: list[tuple[int, float, float]] = []
        self.reached: tuple[int, float] | None = None
        self._waiter = ThreadPoolExecutor(1)

    def result(self) -> dict[str, Any]:
        """Train; return steps, seconds, messages and the curve of the held-out loss."""
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
        with SlowNetwork(self.spec.link, self.member.world.size, far=self.member.world.rank > 0) as slow:
            self._began = time.perf_counter()
            self.trainer.fit()
            seconds = time.perf_counter() - self._began - self.looking_s
        self._waiter.shutdown()
        self._look_back()
        return {
            "steps": self.steps,
            "updates": self.steps if self.shares else self.spec.steps,
            "staleness": {str(key): count for key, count in self._staleness().items()},
            "seconds": seconds,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "messages": slow.messages,
            "message_bytes": slow.bytes,
            "received_bytes": received() - before,
            "reached": self.reached,
            "curve": self.curve,
            "accuracy": self._task.accuracy(self.model),
            "held_out_loss": self._task.held_out_loss(self.model),
            "train_loss": self._task.train_loss(self.model),
        }

    def _average(self, bucket: Any) -> Any:
        """Average a gradient bucket by the slowed all-reduce without blocking the backward pass."""
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
        """Compute the held-out losses of the server's saved weights; doing so during the run would stop one client."""
        for step, elapsed, weights in self._seen:
            self.model.load_state_dict(weights)
            loss = self._task.held_out_loss(self.model)
            self.curve.append((step, round(elapsed, 4), round(loss, 5)))
            if self.spec.target is not None and loss <= self.spec.target and self.reached is None:
                self.reached = (step, elapsed)

    def _look(self) -> None:
        """Measure the held-out loss when all ranks have the same model, so that all decide alike whether to stop."""
        if not self.shares:
            servers = getattr(self.strategy, "servers", [])
            updates = servers[0].shard.snapshot.version if servers else 0
            if servers and (updates - self.looked >= self.spec.look_every or updates >= self.spec.steps):
                self.looked = updates
                weights = {name: value.clone() for name, value in self.model.state_dict().items()}
                self._seen.append((updates, time.perf_counter() - self._began, weights))
            return
        common = getattr(self.strategy, "local_steps", 0) == 0
        last = self.steps >= self.spec.steps
        # The trainer reads a stop request before a step and stops after it.
        self.requested = self.requested or self.steps >= self.spec.steps - 1
        if not common or (self.steps - self.looked < self.spec.look_every and not last) or self.reached:
            return
        began = time.perf_counter()
        self.looked = self.steps
        loss = self._task.held_out_loss(self.model)
        elapsed = began - self._began - self.looking_s
        self.curve.append((self.steps, round(elapsed, 4), round(loss, 5)))
        if self.spec.target is not None and loss <= self.spec.target:
            self.reached = (self.steps, elapsed)
            self.requested = True
        self.looking_s += time.perf_counter() - began


def optim_of(spec: RunSpec) -> Any:
    """Return the optimiser's configuration of a run."""
    from fastvid.train.config.config import OptimConfig

    optim = OptimConfig(base_lr=0.1, base_batch_size=spec.batch, weight_decay=0.0, decay="constant")
    return replace(optim, **spec.optim)


def computing(spec: RunSpec, world: Any) -> Callable[..., None]:
    """Return a forward hook that sleeps in training to simulate the computation time of a rank."""
    slower = spec.straggler if world.rank == world.size - 1 else 1.0
    clip_s = slower * spec.step_s * world.size / spec.batch

    def compute(model: Any, inputs: tuple[Any, ...]) -> None:
        if model.training and clip_s:
            time.sleep(clip_s * len(inputs[0]))

    return compute


class ToyTask:
    """Training and held-out clips with their labels."""

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


class _TaskLoader:
    """The task's clips, in the order and shares of a real loader."""

    def __init__(self, task: ToyTask, world: Any, spec: RunSpec) -> None:
        from fastvid.load.order.batches import Batches

        self._task, self._seed = task, spec.seed
        self._batches = Batches(CLIPS, spec.batch, "drop", world)
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
    """Return the student model."""
    from torch import nn

    numbers = SHAPE[0] * SHAPE[1] * SHAPE[2] * SHAPE[3]
    return nn.Sequential(nn.Flatten(), nn.Linear(numbers, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                         nn.Linear(hidden, CLASSES))  # fmt: skip


def received() -> int:
    """Return the bytes that this process' network namespace has received, except over loopback."""
    devices = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(counts.split()[0]) for name, counts in devices if name.strip() != "lo")
