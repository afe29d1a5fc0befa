"""A sweep of `bench.strategies.local_steps`' task by travelling models, under the real hub and stages.

Each rank keeps the clips whose number leaves its rank as a remainder; rank 0 is the hub as well. The models differ in
their learning rate.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from bench.strategies.local_steps import CLASSES, CLIPS, TIMEOUT_S, Job, Task, computing, mlp, optim_of, received
from bench.strategies.slow_network import Slow

RATES: Final = (0.5, 1.0, 1.5, 2.0)
"""Of the models, times the job's."""
EPOCHS: Final = 2


def travel(job: Job, member: Any) -> dict[str, Any]:
    """Trains all models for the job's steps each. Gives seconds, messages, and the held-out losses."""
    import torch.distributed as dist

    from fastvid.train.strategies.relay.hub import Hub
    from fastvid.train.strategies.relay.scheduler import Scheduler
    from fastvid.train.strategies.relay.stage import serve
    from fastvid.train.strategies.relay.state_store import Shelf
    from fastvid.train.strategies.shared.link import shared_store

    world, store = member.world, shared_store(member, TIMEOUT_S)
    workshop = Workshop(job, member)
    scheduler = Scheduler(len(RATES), world.size, EPOCHS)
    hub = Hub(scheduler, store, Shelf(len(RATES)), timeout_s=TIMEOUT_S) if world.rank == 0 else None
    dist.barrier()
    before, began = received(), time.perf_counter()
    with Slow(job.link, world.size, far=world.rank > 0) as slow:
        thread = None if hub is None else threading.Thread(target=hub.run)
        if thread is not None:
            thread.start()
        serve(store, workshop, TIMEOUT_S)
        if thread is not None:
            thread.join()
    seconds = time.perf_counter() - began
    visits = [] if hub is None else hub.record.visits
    return {
        "steps": job.steps * len(RATES),
        "seconds": seconds,
        "messages": slow.messages,
        "message_bytes": slow.bytes,
        "received_bytes": received() - before,
        "losses": [
            next((-visit["score"] for visit in reversed(visits) if visit["model"] == model and "score" in visit), None)
            for model in range(len(RATES))
        ],
    }


class Workshop:
    """What a stage does."""

    def __init__(self, job: Job, member: Any) -> None:
        self.job, self.member = job, member
        self._task = Task(job.seed)

    def own(self, partitions: tuple[int, ...]) -> dict[str, Any]:  # noqa: ARG002
        """All clips are in memory already."""
        return {}

    def visit(self, unit: Any, token: bytes | None) -> tuple[bytes, dict[str, Any]]:
        """Trains a unit."""
        from fastvid.train.strategies.relay.visit import train_visit

        data, report = train_visit(self._trainee(unit.model), unit, token, self.member.device)
        return data, report

    def _trainee(self, model: int) -> Any:
        import torch

        from fastvid.load.clips.augment import CenterCrop
        from fastvid.load.clips.sampling import Segments
        from fastvid.train.config.config import Config, DataConfig, ModelConfig, RunConfig
        from fastvid.train.parts.evaluate import Score
        from fastvid.train.parts.optim import make_optimizer
        from fastvid.train.parts.replica import Replica
        from fastvid.train.parts.schedule import Schedule
        from fastvid.train.strategies.relay.visit import Trainee

        job = self.job
        optim = optim_of(job)
        optim = replace(optim, base_lr=optim.base_lr * RATES[model])
        config = Config(
            data=DataConfig(
                path="", frames=Segments(1), eval_frames=Segments(1), spatial=(CenterCrop(4),),
                eval_spatial=(CenterCrop(4),), global_batch_size=job.batch,
            ),
            model=ModelConfig(name="student", num_classes=CLASSES), optim=optim,
            run=RunConfig(out="", epochs=EPOCHS, seed=job.seed), sync="relay",
        )  # fmt: skip

        def replica() -> Any:
            torch.manual_seed(job.seed)
            made = mlp(job.hidden)
            made.register_forward_pre_hook(computing(job, self.member.world))
            schedule = Schedule.of(
                optim, epochs=EPOCHS, samples_per_epoch=job.steps * job.batch // EPOCHS, global_batch_size=job.batch
            )
            return Replica(made, make_optimizer(made, optim), schedule)

        def score(trained: Any) -> Any:
            loss = self._task.held_out_loss(trained.model)
            # Higher is better.
            return Score(loss, -loss, 0.0, 1, 1)

        return Trainee(config, replica, self._batches, score)

    @contextlib.contextmanager
    def _batches(self, unit: Any) -> Iterator[Any]:
        yield self._draw(unit)

    def _draw(self, unit: Any) -> Iterator[Any]:
        import torch

        from fastvid.load.batch.batch import Batch

        size, world = self.job.batch, self.member.world
        steps = self.job.steps // (EPOCHS * world.size)
        draw = torch.Generator().manual_seed(1000 * self.job.seed + 10 * unit.epoch + unit.partition)
        own = torch.randperm(CLIPS // world.size, generator=draw)[: steps * size] * world.size + unit.partition
        valid = torch.ones(size, dtype=torch.bool)
        for start in range(0, steps * size, size):
            samples = own[start : start + size]
            yield Batch(
                video=self._task.video[samples], label=self._task.label[samples], valid=valid,
                weight=valid.float() / size, key=tuple(map(str, samples.tolist())),
                frame_index=torch.zeros(size, 1, dtype=torch.int64), sample=samples,
                position=torch.arange(start, start + size), epoch=unit.epoch, start=start, stop=start + size,
            )  # fmt: skip
