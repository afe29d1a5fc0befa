"""One rank of ``python -m bench scale`` under torchrun: time each part of training separately and together.

All ranks time each part at the same time; rank 0 also times those marked * while the others are idle:

    load *          the loader without training; its counters split the time into fetch, decode and finish
    step *          a step on a batch in memory, without synchronisation
    all-reduce      the model's gradient buckets, and two sizes that separate latency from bandwidth
    cached          steps on the batch in memory, synchronised by the strategy
    train *         complete training: loader, step and strategy

All use the recipe's loader, model, optimiser and strategies. A barrier precedes each part.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.distributed as dist

from bench.scaling.model import Gradients, SyncSpec
from fastvid.load.batch.batch import Batch
from fastvid.runtime.processes import World, available_cores
from fastvid.train.config.config import Config
from fastvid.train.loop.loop import Stepper
from fastvid.train.loop.strategy import build_strategy
from fastvid.train.parts.replica import Loader, Replica
from fastvid.train.ranks import Member, gather_bytes, join
from fastvid.train.run import assemble
from fastvid.train.run.assemble import open_datasets

# Two sizes in addition to the model's buckets: one dominated by latency, one by bandwidth.
_PROBES: Final = (64 * 2**10, 8 * 2**20)


_WARMUP: Final = 4


def measure(config: Config, clips: int, steps: int, strategies: Sequence[SyncSpec]) -> dict[str, Any] | None:
    """Measure all parts on this rank, `steps` of `clips` each.

    Returns on rank 0 a JSON object with the results of all ranks; None on the others.
    """
    with join(config.run.timeout_s) as member:
        found = _Rank(config, clips, steps, member).run(strategies)
        everyone = [json.loads(one) for one in gather_bytes(json.dumps(found).encode(), member)]
    if not member.leads:
        return None
    shared = {key: everyone[0].pop(key) for key in ("parameters", "bucket_bytes", "alone")}
    for other in everyone[1:]:
        for key in shared:
            other.pop(key)
    return {"world_size": member.world.size, "clips_per_rank": clips, "device": member.device.type, **shared,
            "ranks": everyone}  # fmt: skip


class _Rank:
    def __init__(self, config: Config, clips: int, steps: int, member: Member) -> None:
        self.clips, self.steps, self.member = clips, steps, member
        self.local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.lone = Member(World(), member.device)
        threads = config.data.num_threads or available_cores()
        data = replace(config.data, num_threads=threads, eval_split=None)
        config, self.dataset, _ = open_datasets(replace(config, data=data), None, member)
        self.config = config
        self.torch_threads = torch.get_num_threads()

    def run(self, strategies: Sequence[SyncSpec]) -> dict[str, Any]:
        """Measure all parts, in the order of this file's docstring."""
        batch = self._first_batch()
        replica = self._replica(self.lone)
        parameters = sum(parameter.numel() for parameter in replica.model.parameters())
        buckets = Gradients(parameters).buckets()
        alone = self._alone(batch)
        found: dict[str, Any] = {
            "rank": self.member.world.rank,
            "host": socket.gethostname(),
            "local_world_size": self.local,
            "torch_threads": self.torch_threads,
            "decode_threads": self.config.data.num_threads,
            "parameters": parameters,
            "bucket_bytes": buckets,
            "alone": alone,
            "load": self._together(lambda: self._load(self.member)),
            "step_seconds": self._together(lambda: self._steps(self.lone, SyncSpec("ddp"), itertools.repeat(batch))),
            "all_reduces": [
                {"bytes": size, "seconds": self._together(lambda size=size: self._all_reduce(size))}
                for size in sorted({*_PROBES, *buckets})
            ]
            if self.member.world.size > 1
            else [],
            "strategies": {},
        }
        for strategy in strategies:
            found["strategies"][str(strategy)] = {
                "cached_seconds": self._together(
                    lambda strategy=strategy: self._steps(self.member, strategy, itertools.repeat(batch))
                ),
                "train_seconds": self._together(lambda strategy=strategy: self._train(self.member, strategy)),
            }
        return found

    def _alone(self, batch: Batch) -> dict[str, Any] | None:
        """Measure rank 0's parts while the others wait."""
        found = None
        if self.member.leads:
            found = {
                "load": self._load(self.lone),
                "step_seconds": self._steps(self.lone, SyncSpec("ddp"), itertools.repeat(batch)),
                "train_seconds": self._train(self.lone, SyncSpec("ddp")),
            }
        self._barrier()
        return found

    def _together(self, part: Callable[[], Any]) -> Any:
        self._barrier()
        return part()

    def _barrier(self) -> None:
        if self.member.world.size > 1:
            dist.barrier()

    def _loader(self, member: Member) -> Loader:
        size = self.clips * member.world.size
        data = replace(self.config.data, global_batch_size=size, last="drop")
        return assemble.make_loader(replace(self.config, data=data), self.dataset, member, train=True)

    def _first_batch(self) -> Batch:
        loader = self._loader(self.member)
        try:
            return next(iter(loader))
        finally:
            loader.clips.close()

    def _load(self, member: Member) -> dict[str, float]:
        """Measure the clips/s of this rank's loader, and the thread-seconds per clip of its stages."""
        loader = self._loader(member)
        try:
            batches = _forever(loader)
            for _ in range(_WARMUP):
                next(batches)
            before = loader.clips.stats.total.as_dict()
            began = time.perf_counter()
            for _ in range(self.steps):
                next(batches)
            seconds = time.perf_counter() - began
            after = loader.clips.stats.total.as_dict()
        finally:
            loader.clips.close()
        clips = after["clips"] - before["clips"]
        per_clip = {
            f"{stage}_seconds": (after[f"{stage}_seconds"] - before[f"{stage}_seconds"]) / clips
            for stage in ("fetch", "decode", "finish")
        }
        return {
            "clips_per_second": self.steps * self.clips / seconds,
            "bytes_per_clip": (after["bytes_read"] - before["bytes_read"]) / clips,
            **per_clip,
        }

    def _replica(self, member: Member) -> Replica:
        return assemble.make_replica(self.config, max(1, len(self.dataset)), member)

    def _steps(self, member: Member, strategy: SyncSpec, batches: Iterator[Batch]) -> list[float]:
        """Return the seconds of each step, or of the mean step of each round if there are K steps per round."""
        replica = self._replica(member)
        options = {"period": strategy.k} if strategy.name == "kavg" else {}
        agreed = build_strategy(strategy.name, member, options)
        agreed.prepare(replica)
        # As in the trainer, batches pass through the strategy, which starts its rounds.
        stepped = iter(next(agreed.rounds(replica, _EndlessLoader(batches), 1)).batches)
        stepper = Stepper(self.config, member, agreed)
        rounds = -(-self.steps // strategy.k)
        found = []
        warmup = -(-_WARMUP // strategy.k)
        for number in range(-warmup, rounds):
            began = time.perf_counter()
            for _ in range(strategy.k):
                batch = next(stepped)
                stepper.step(replica, batch)
                replica.samples += batch.stop - batch.start
            self._finished()
            if number >= 0:
                found.append((time.perf_counter() - began) / strategy.k)
        return found

    def _train(self, member: Member, strategy: SyncSpec) -> list[float]:
        loader = self._loader(member)
        try:
            return self._steps(member, strategy, _forever(loader))
        finally:
            loader.clips.close()

    def _all_reduce(self, size: int) -> list[float]:
        buffer = torch.zeros(size // 4, device=self.member.device)
        found = []
        for number in range(-2, max(3, self.steps // 3)):
            began = time.perf_counter()
            dist.all_reduce(buffer)
            self._finished()
            if number >= 0:
                found.append(time.perf_counter() - began)
        return found

    def _finished(self) -> None:
        if self.member.device.type == "cuda":
            torch.cuda.synchronize(self.member.device)


@dataclass
class _EndlessLoader:
    """A loader with one endless epoch."""

    batches: Iterator[Batch]
    epoch: int = 0

    def __iter__(self) -> Iterator[Batch]:
        return self.batches


def _forever(loader: Loader) -> Iterator[Batch]:
    while True:
        yield from loader


def analyse(found: dict[str, Any]) -> dict[str, Any]:
    """Combine the results of all ranks: rates, efficiency, the cost of each bottleneck, and the slowest rank.

    A step of a strategy is split into parts that add up:

        compute         step on one rank while the others are idle
        sharing         extra time of the average rank's step when all ranks work: shared cores, memory, power
        stragglers      extra time of the slowest rank's step over the average
        communication   extra time of synchronised steps on batches in memory over the slowest rank's local step
        data            extra time of training over synchronised steps on batches in memory

    Noise can make a part negative; it is reported as measured.
    """
    ranks: Sequence[dict[str, Any]] = found["ranks"]
    size, clips = found["world_size"], found["clips_per_rank"]
    steps = [statistics.median(rank["step_seconds"]) for rank in ranks]
    alone = {name: statistics.median(found["alone"][name]) for name in ("step_seconds", "train_seconds")}
    average, slowest = statistics.mean(steps), max(steps)
    slow = ranks[steps.index(slowest)]
    rows = []
    for name in ranks[0]["strategies"]:
        own = [rank["strategies"][name] for rank in ranks]
        cached, train = (
            max(statistics.median(rank[f"{part}_seconds"]) for rank in own) for part in ("cached", "train")
        )
        rows.append(
            {
                "strategy": name,
                "clips_per_second": size * clips / train,
                "step_seconds": train,
                "efficiency": alone["train_seconds"] / train,
                "parts_seconds": {
                    "compute": alone["step_seconds"],
                    "sharing": average - alone["step_seconds"],
                    "stragglers": slowest - average,
                    "communication": cached - slowest,
                    "data": train - cached,
                },
            }
        )
    return {
        "load_clips_per_second": sum(rank["load"]["clips_per_second"] for rank in ranks),
        "load_alone_clips_per_second": found["alone"]["load"]["clips_per_second"],
        "compute_clips_per_second": size * clips / slowest,
        "alone_clips_per_second": clips / alone["train_seconds"],
        "slowest": {
            "rank": slow["rank"], "host": slow["host"], "behind_the_average": slowest / average - 1,
        },
        "rows": rows,
    }  # fmt: skip
