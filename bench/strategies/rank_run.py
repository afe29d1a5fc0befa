"""One rank of `bench.strategies.ranks.Ranks`, started with torchrun's environment variables.

One rank of a run: the real trainer and strategy, over a simulated network, looked at every so many clips.

All contenders are looked at after the same numbers of clips. Ranks that share batches may have different weights then:
the mean of their models is measured, computed off the clock. A parameter server's weights are copied during the run and
measured after it. What is measured never stops a run, so all contenders train on the same clips.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.strategies.ranks import TIMEOUT_S, RunSpec
from bench.strategies.slow_network import Clock, CountedClock, SlowLink, SlowNetwork, WallClock
from bench.strategies.toy_task import ToyTask
from fastvid.runtime.arrays import FloatArray
from fastvid.train.loop.loop import Trainer
from fastvid.train.loop.strategy import build_strategy
from fastvid.train.parts.optim import make_optimizer
from fastvid.train.ranks import join
from fastvid.train.strategies.asgd.weights import Vector

FORWARD: Final = 1 / 3
"""Share of a step's time before the backward pass, during which ddp may communicate already."""


class _RankRun:
    """One rank of a run."""

    def __init__(self, spec: RunSpec, member: Any) -> None:
        self.spec, self.member = spec, member
        self._task = ToyTask(spec)
        self.strategy = strategy = build_strategy(spec.sync, member, spec.options)
        self.config, self.replica, loader = self._task.parts(strategy.reader)
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


def main() -> None:
    """Read run specifications from stdin, one JSON line each, and write one JSON result line for each."""
    torch.set_num_threads(1)
    with join(TIMEOUT_S) as member:
        for line in sys.stdin:
            values = json.loads(line)
            spec = RunSpec(**{**values, "links": [SlowLink(**link) for link in values["links"]]})
            print(json.dumps(_RankRun(spec, member).result()), flush=True)


if __name__ == "__main__":
    main()
