"""Run a learning-rate sweep on the task of `bench.strategies.local_steps` with relay's real hub and stages.

Each rank keeps the clips whose index modulo the world size is its rank; rank 0 is also the hub.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from bench.strategies.local_steps import CLASSES, CLIPS, TIMEOUT_S, RunSpec, ToyTask, computing, mlp, optim_of, received
from bench.strategies.slow_network import SlowNetwork

RATES: Final = (0.5, 1.0, 1.5, 2.0)
"""Learning rates of the models, relative to the run's."""
EPOCHS: Final = 2


def travel(spec: RunSpec, member: Any) -> dict[str, Any]:
    """Train each model for the run's number of steps; return seconds, messages and held-out losses."""
    import torch.distributed as dist

    from fastvid.train.ranks.elastic import broadcast_bytes
    from fastvid.train.strategies.relay.hub import Hub
    from fastvid.train.strategies.relay.scheduler import Scheduler
    from fastvid.train.strategies.relay.stage import serve
    from fastvid.train.strategies.relay.state_store import TokenStore
    from fastvid.train.strategies.shared.listener import Address, host_of_job

    world = member.world
    work = SweepStage(spec, member)
    scheduler = Scheduler(len(RATES), world.size, EPOCHS)
    hub = None
    if world.rank == 0:
        hub = Hub(scheduler, TokenStore(len(RATES)), timeout_s=TIMEOUT_S, host=host_of_job())
    address = Address.decode(broadcast_bytes(None if hub is None else hub.address.encode(), member) or b"")
    dist.barrier()
    before, began = received(), time.perf_counter()
    with SlowNetwork(spec.link, world.size, far=world.rank > 0) as slow:
        thread = None if hub is None else threading.Thread(target=hub.run)
        if thread is not None:
            thread.start()
        serve(address, lambda _: work, TIMEOUT_S)
        if thread is not None:
            thread.join()
    seconds = time.perf_counter() - began
    visits = [] if hub is None else hub.record.visits
    return {
        "steps": spec.steps * len(RATES),
        "seconds": seconds,
        "messages": slow.messages,
        "message_bytes": slow.bytes,
        "received_bytes": received() - before,
        "losses": [
            next((-visit["score"] for visit in reversed(visits) if visit["model"] == model and "score" in visit), None)
            for model in range(len(RATES))
        ],
    }


class SweepStage:
    """The work of one relay stage."""

    def __init__(self, spec: RunSpec, member: Any) -> None:
        self.spec, self.member = spec, member
        self._task = ToyTask(spec.seed)

    def assign(self, partitions: tuple[int, ...]) -> dict[str, Any]:  # noqa: ARG002
        """Do nothing: all clips are in memory already."""
        return {}

    def visit(self, unit: Any, token: bytes | None) -> tuple[bytes, dict[str, Any]]:
        """Train one unit of work."""
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
        from fastvid.train.strategies.relay.visit import SweepModel

        spec = self.spec
        optim = optim_of(spec)
        optim = replace(optim, base_lr=optim.base_lr * RATES[model])
        config = Config(
            data=DataConfig(
                path="", frames=Segments(1), eval_frames=Segments(1), spatial=(CenterCrop(4),),
                eval_spatial=(CenterCrop(4),), global_batch_size=spec.batch,
            ),
            model=ModelConfig(name="student", num_classes=CLASSES), optim=optim,
            run=RunConfig(out="", epochs=EPOCHS, seed=spec.seed), sync="relay",
        )  # fmt: skip

        def replica() -> Any:
            torch.manual_seed(spec.seed)
            made = mlp(spec.hidden)
            made.register_forward_pre_hook(computing(spec, self.member.world))
            schedule = Schedule.of(
                optim, epochs=EPOCHS, samples_per_epoch=spec.steps * spec.batch // EPOCHS, global_batch_size=spec.batch
            )
            return Replica(made, make_optimizer(made, optim), schedule)

        def score(trained: Any) -> Any:
            loss = self._task.held_out_loss(trained.model)
            # Higher is better.
            return Score({"loss": loss}, -loss, 1, 1)

        return SweepModel(config, replica, self._batches, score)

    @contextlib.contextmanager
    def _batches(self, unit: Any) -> Iterator[Any]:
        yield self._draw(unit)

    def _draw(self, unit: Any) -> Iterator[Any]:
        import torch

        from fastvid.load.batch.batch import Batch

        size, world = self.spec.batch, self.member.world
        steps = self.spec.steps // (EPOCHS * world.size)
        draw = torch.Generator().manual_seed(1000 * self.spec.seed + 10 * unit.epoch + unit.partition)
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
