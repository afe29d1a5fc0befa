"""One rank of `bench.strategies.ranks.Ranks`, started with torchrun's environment variables.

One rank of a run: the real trainer and strategy, over a simulated network, looked at every so many clips.

All contenders are looked at after the same numbers of clips. Ranks that share batches may have different weights then:
the mean of their models is measured, computed off the clock. A parameter server's weights are copied during the run and
measured after it. What is measured never stops a run, so all contenders train on the same clips.

A sweep over learning rates on the toy: models that travel (relay), or data that do (task-parallel training).

    travel    relay's real hub and stages; each stage reads its part of the data once, over the wire. Rank 0 is also
              the hub; every other stage sends and receives each token over the wire.
    migrate   each rank trains its own models and reads the whole dataset for each epoch of each model over the wire,
              at most two batches ahead while it computes. With ``cached`` it keeps what it has read, which needs
              memory for the whole dataset on every rank.

Both train each model on the same batches in the same order, so their weights are equal bit by bit.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.strategies.ranks import TIMEOUT_S, RunSpec
from bench.strategies.slow_network import Clock, CountedClock, SlowLink, SlowNetwork, WallClock
from bench.strategies.toy_task import CLIP_BYTES, ToyTask, config_of
from fastvid.runtime.arrays import FloatArray
from fastvid.train.loop.loop import Trainer
from fastvid.train.loop.strategy import build_strategy
from fastvid.train.parts.optim import Schedule, make_optimizer
from fastvid.train.parts.replica import Replica
from fastvid.train.ranks import broadcast_bytes, join
from fastvid.train.strategies.asgd.weights import Vector
from fastvid.train.strategies.link import Address, host_of_job
from fastvid.train.strategies.relay.hub import Hub
from fastvid.train.strategies.relay.scheduler import Scheduler, Unit
from fastvid.train.strategies.relay.stage import SweepModel, serve, train_visit
from fastvid.train.strategies.relay.state import TokenStore, read_weights

RATES: Final = (0.5, 1.0, 1.5, 2.0)
"""Learning rates of the models, relative to the run's."""
AHEAD: Final = 2  # batches


def travel(spec: RunSpec, member: Any) -> dict[str, Any]:
    """Train all models by relay; return seconds, bytes, and on rank 0 the models' losses and digests."""
    world = member.world
    work = _Sweep(spec, member)
    tokens = TokenStore(len(RATES))
    hub = None
    if world.rank == 0:
        scheduler = Scheduler(len(RATES), world.size, spec.epochs, order="ring")
        hub = Hub(scheduler, tokens, timeout_s=TIMEOUT_S, host=host_of_job())
    address = Address.decode(broadcast_bytes(None if hub is None else hub.address.encode(), member) or b"")
    dist.barrier()
    began = time.perf_counter()
    with SlowNetwork(spec.links, WallClock(), far=world.rank > 0) as slow:
        thread = None if hub is None else threading.Thread(target=hub.run)
        if thread is not None:
            thread.start()
        serve(address, lambda _: work, TIMEOUT_S)
        if thread is not None:
            thread.join()
    seconds = time.perf_counter() - began
    found = {} if hub is None else work.results([tokens.get(model) or b"" for model in range(len(RATES))])
    return {"seconds": seconds, "data_bytes": work.data_bytes, "state_wire_bytes": slow.wire_bytes, **found}


def migrate(spec: RunSpec, member: Any) -> dict[str, Any]:
    """Train this rank's models, one after the other; return what `travel` returns."""
    world = member.world
    work = _Sweep(spec, member)
    own: dict[int, bytes] = {}
    dist.barrier()
    began = time.perf_counter()
    for model in range(world.rank, len(RATES), world.size):
        token: bytes | None = None
        for epoch in range(spec.epochs):
            for partition in range(world.size):
                if not spec.cached:
                    work.kept.clear()
                token, _ = work.visit(Unit(model, epoch, partition, partition == world.size - 1), token)
        own[model] = token or b""
    dist.barrier()
    seconds = time.perf_counter() - began
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, own)
    tokens = {model: token for part in every for model, token in part.items()}
    found = work.results([tokens[model] for model in range(len(RATES))]) if world.rank == 0 else {}
    return {"seconds": seconds, "data_bytes": work.data_bytes, "state_wire_bytes": 0, **found}


class _Sweep:
    """Trains a unit of a sweep, reading its batches over the wire unless they are kept: the work of a relay stage.

    `data_bytes`: bytes of the dataset read over the wire.
    """

    def __init__(self, spec: RunSpec, member: Any) -> None:
        self.spec, self.member = spec, member
        self._task = ToyTask(spec)
        self.data_bytes = 0
        self.kept: set[int] = set()

    def assign(self, partitions: tuple[int, ...]) -> dict[str, Any]:
        """Read a stage's partitions."""
        for partition in partitions:
            if partition not in self.kept:
                size = CLIP_BYTES * (self.spec.clips // self.member.world.size)
                self._read(size)
                self.kept.add(partition)
        return {"bytes_moved": 0}

    def visit(self, unit: Any, token: bytes | None) -> tuple[bytes, dict[str, Any]]:
        """Train one unit of work."""
        return train_visit(self._model(unit.model), unit, token, self.member.device)

    def results(self, tokens: list[bytes]) -> dict[str, Any]:
        """Return held-out loss, digest of the weights and bytes of each model's token."""
        losses, digests = [], []
        for token in tokens:
            weights = read_weights(token)
            model = self._task.model()
            model.load_state_dict(weights)
            losses.append(self._task.held_out(model)[0])
            digests.append(hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights.values())).hexdigest()[:16])
        return {"losses": losses, "digests": digests, "state_bytes": max(map(len, tokens))}

    def _read(self, size: int) -> None:
        self.data_bytes += size
        time.sleep(self.spec.links[0].message_s(size))

    def _model(self, model: int) -> Any:
        spec = self.spec
        config = config_of(spec, epochs=spec.epochs)
        optim = replace(config.optim, base_lr=config.optim.base_lr * RATES[model])
        config = replace(config, optim=optim, sync="relay")

        def replica() -> Any:
            made = self._task.model()
            made.register_forward_pre_hook(self._compute)
            schedule = Schedule(optim, epochs=spec.epochs, samples_per_epoch=spec.clips, global_batch_size=spec.batch)
            return Replica(made, make_optimizer(made, optim), schedule)

        return SweepModel(config, replica, self._batches)

    def _compute(self, model: Any, inputs: tuple[Any, ...]) -> None:
        if model.training:
            time.sleep(self.spec.clip_s * len(inputs[0]))

    @contextlib.contextmanager
    def _batches(self, unit: Any) -> Iterator[Any]:
        if unit.partition in self.kept:
            yield self._draw(unit)
            return
        arrived: queue.Queue[Any] = queue.Queue(AHEAD)

        def fetch() -> None:
            for batch in self._draw(unit):
                self._read(CLIP_BYTES * len(batch["label"]))
                arrived.put(batch)
            arrived.put(None)

        thread = threading.Thread(target=fetch, daemon=True)
        thread.start()
        yield iter(arrived.get, None)
        thread.join()
        self.kept.add(unit.partition)

    def _draw(self, unit: Any) -> Iterator[Any]:
        size, parts = self.spec.batch, self.member.world.size
        clips = self.spec.clips // parts
        draw = torch.Generator().manual_seed(1000 * self.spec.seed + 10 * unit.epoch + unit.partition)
        own = torch.randperm(clips, generator=draw) * parts + unit.partition
        for start in range(0, clips - size + 1, size):
            yield self._task.batch(
                own[start : start + size], torch.arange(start, start + size), share=size, epoch=unit.epoch,
                start=start, stop=start + size,
            )  # fmt: skip


FORWARD: Final = 1 / 3
"""Share of a step's time before the backward pass, during which ddp may communicate already."""


def run(spec: RunSpec, member: Any) -> dict[str, Any]:
    """Execute a run on this rank; return its result."""
    return _RankRun(spec, member).result()


class _RankRun:
    """One rank of a run."""

    def __init__(self, spec: RunSpec, member: Any) -> None:
        self.spec, self.member = spec, member
        self._task = ToyTask(spec)
        self.strategy = strategy = build_strategy(spec.sync, member, spec.options)
        self.config, self.replica, loader = self._task.parts(member, strategy.reader)
        self._looked = copy.deepcopy(self.replica.model)
        self.clock: Clock = CountedClock(len(spec.links)) if spec.counted else WallClock()
        slower = spec.straggler if member.world.rank == member.world.size - 1 else 1.0
        self._compute = _Compute(self.clock, slower * spec.clip_s, self.replica)
        self.replica.model.register_forward_pre_hook(self._compute.forward)
        self._counting = _Counting(loader)
        self.trainer = Trainer(self.config, member, self.replica, self._counting, strategy)
        self.steps = self.clips = self._due = 0
        self.batches: list[int] = []
        self._seen: list[tuple[int, FloatArray, Any]] = []
        self.looking_s: FloatArray = np.zeros(1)
        self.curve: list[tuple[int, list[float], float, float]] = []
        self.counts: list[dict[str, float]] = []
        self._waiter = ThreadPoolExecutor(1)

    def result(self) -> dict[str, Any]:
        """Train; return steps, seconds, messages and the curve on held-out clips."""
        self._watch()
        before, cpu = received(), time.process_time()
        with SlowNetwork(self.spec.links, self.clock, far=self.member.world.rank > 0) as slow:
            self._slow = slow
            self._began = self.clock.now()
            self.trainer.fit()
            self._compute.finish()
            seconds = self._elapsed()
            self._look_at_server(last=True)
        self._waiter.shutdown()
        for clips, elapsed, values in self._seen:
            self._vector.spread(values)
            self._measure(clips, elapsed)
        return {
            "steps": self.steps,
            "clips": self.clips,
            "largest_batch": max(self.batches, default=0),
            "seconds": seconds.tolist(),
            "cpu_s": time.process_time() - cpu,
            "staleness": {str(key): count for key, count in self._staleness().items()},
            "parameters": sum(parameter.numel() for parameter in self.replica.model.parameters()),
            "messages": slow.messages,
            "message_bytes": slow.bytes,
            "wire_bytes": slow.wire_bytes,
            "received_bytes": received() - before,
            "curve": self.curve,
            "counts": self.counts,
            "trained": self._task.trained(self.replica.model),
        }

    def _watch(self) -> None:
        """Let the run see the strategy's calls of each step."""
        inner, agree = self.strategy.maybe_sync, self.strategy.agree
        hooked: list[Any] = []

        def told(wishes: Any) -> Any:
            # The strategy wraps the model only in the trainer.
            forward = self.replica.forward
            if isinstance(forward, DistributedDataParallel) and not hooked:
                forward.register_comm_hook(None, lambda _, bucket: self._average(bucket))
                hooked.append(forward)
            return agree(wishes)

        def spy(replica: Any, sums: Any) -> None:
            inner(replica, sums)
            self.steps += 1
            self.clips += self._counting.clips
            self.batches.append(self._counting.clips)
            self._look()

        self.strategy.agree, self.strategy.maybe_sync = told, spy
        if not self.strategy.shares_batches and self.member.leads:
            self._vector = Vector(make_optimizer(self._looked, self.config.optim), self._looked)

    def _average(self, bucket: Any) -> Any:
        """Average a gradient bucket by the slowed all-reduce without blocking the backward pass."""
        buffer = bucket.buffer()
        buffer.div_(self.member.world.size)
        work = dist.all_reduce(buffer, async_op=True)
        done: Any = torch.futures.Future()

        def finish() -> None:
            work.wait()
            self._compute.finish()
            done.set_result(buffer)

        self._waiter.submit(finish)
        return done

    def _staleness(self) -> Mapping[int, int]:
        server = getattr(self.strategy, "server", None)
        return server.counts() if server else {}

    def _elapsed(self) -> FloatArray:
        return self.clock.now() - self._began - self.looking_s

    def _look(self) -> None:
        """Measure what the ranks have learnt, if due."""
        if not self.strategy.shares_batches:
            self._look_at_server()
        elif self.clips >= self._due + self.spec.look_clips:
            self._compute.finish()
            elapsed, began = self._elapsed(), self.clock.now()
            messages, wire = self._slow.messages, self._slow.wire_bytes
            self._due = self.clips // self.spec.look_clips * self.spec.look_clips
            self._mean()
            if self.member.leads:
                self._measure(self.clips, elapsed)
                self.counts.append({"steps": self.steps, "messages": messages, "wire_bytes": wire})
            self.looking_s = self.looking_s + self.clock.now() - began

    def _look_at_server(self, *, last: bool = False) -> None:
        server = getattr(self.strategy, "server", None)
        if not server:
            return
        clips = server.leases.acknowledged
        if clips >= self._due + self.spec.look_clips or (last and clips > self._due):
            self._due = clips // self.spec.look_clips * self.spec.look_clips
            with server.weights.reading() as snapshot:
                self._seen.append((clips, self._elapsed(), snapshot.values.clone()))

    def _mean(self) -> None:
        """Load the mean of the ranks' models into the model that is looked at; nobody waits for a network."""
        own, looked = self.replica.model.state_dict(), self._looked.state_dict()
        names = [name for name, value in own.items() if value.is_floating_point()]
        flat = torch.cat([own[name].detach().reshape(-1).double() for name in names])
        if self.member.world.size > 1:
            dist.distributed_c10d.all_reduce(flat)
        flat /= self.member.world.size
        for name, part in zip(names, flat.split([own[name].numel() for name in names]), strict=True):
            looked[name].copy_(part.view_as(looked[name]))

    def _measure(self, clips: int, elapsed: FloatArray) -> None:
        loss, accuracy = self._task.held_out(self._looked)
        self.curve.append((clips, elapsed.round(4).tolist(), round(loss, 5), round(accuracy, 5)))


class _Compute:
    """The time that a rank computes: a sleep, or counted.

    Under ddp gradients may travel from the start of the backward pass on, which is more than any overlap can gain.
    """

    def __init__(self, clock: Clock, clip_s: float, replica: Any) -> None:
        self._clock, self._clip_s, self._replica = clock, clip_s, replica
        self._until: FloatArray = np.zeros(1)

    def forward(self, model: Any, inputs: tuple[Any, ...]) -> None:
        """Let the time of a step pass, or under ddp that before the backward pass."""
        if not model.training or not self._clip_s:
            return
        self.finish()
        now, step = self._clock.now(), self._clip_s * len(inputs[0])
        overlaps = isinstance(self._replica.forward, DistributedDataParallel)
        self._clock.wait_until(now + step * (FORWARD if overlaps else 1.0))
        self._until = now + step

    def finish(self) -> None:
        """Let the time of the backward pass pass."""
        self._clock.wait_until(self._until)


class _Counting:
    """A loader that remembers the clips of the global batch of the current step."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.clips = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self.clips = batch.stop - batch.start
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def received() -> int:
    """Return the bytes that this process' network namespace has received, except over loopback."""
    devices = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(counts.split()[0]) for name, counts in devices if name.strip() != "lo")


_SWEEPS = {"relay": travel, "migrate": migrate}


def main() -> None:
    """Read run specifications from stdin, one JSON line each, and write one JSON result line for each."""
    torch.set_num_threads(1)
    with join(TIMEOUT_S) as member:
        for line in sys.stdin:
            values = json.loads(line)
            spec = RunSpec(**{**values, "links": [SlowLink(**link) for link in values["links"]]})
            print(json.dumps(_SWEEPS.get(spec.sync, run)(spec, member)), flush=True)


if __name__ == "__main__":
    main()
