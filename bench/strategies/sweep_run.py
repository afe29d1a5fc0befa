"""A sweep over learning rates on the toy: models that travel (relay), or data that do (task-parallel training).

    travel    relay's real hub and stages; each stage reads its part of the data once, over the wire. Rank 0 is also
              the hub; every other stage sends and receives each token over the wire.
    migrate   each rank trains its own models and reads the whole dataset for each epoch of each model over the wire,
              at most two batches ahead while it computes. With ``cached`` it keeps what it has read, which needs
              memory for the whole dataset on every rank.

Both train each model on the same batches in the same order, so their weights are equal bit by bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from bench.strategies.ranks import TIMEOUT_S, RunSpec
from bench.strategies.slow_network import SlowNetwork, WallClock
from bench.strategies.toy_task import CLIP_BYTES, ToyTask, config_of

RATES: Final = (0.5, 1.0, 1.5, 2.0)
"""Learning rates of the models, relative to the run's."""
AHEAD: Final = 2  # batches


def travel(spec: RunSpec, member: Any) -> dict[str, Any]:
    """Train all models by relay; return seconds, bytes, and on rank 0 the models' losses and digests."""
    import torch.distributed as dist

    from fastvid.train.ranks import broadcast_bytes
    from fastvid.train.strategies.link import Address, host_of_job
    from fastvid.train.strategies.relay.hub import Hub
    from fastvid.train.strategies.relay.scheduler import Scheduler
    from fastvid.train.strategies.relay.stage import serve
    from fastvid.train.strategies.relay.state import TokenStore

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
    import torch.distributed as dist

    from fastvid.train.strategies.relay.scheduler import Unit

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
        return {}

    def visit(self, unit: Any, token: bytes | None) -> tuple[bytes, dict[str, Any]]:
        """Train one unit of work."""
        from fastvid.train.strategies.relay.stage import train_visit

        return train_visit(self._model(unit.model), unit, token, self.member.device)

    def results(self, tokens: list[bytes]) -> dict[str, Any]:
        """Return held-out loss, digest of the weights and bytes of each model's token."""
        from fastvid.train.strategies.relay.stage import read_weights

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
        from fastvid.train.parts.optim import Schedule, make_optimizer
        from fastvid.train.parts.replica import Replica
        from fastvid.train.strategies.relay.stage import SweepModel

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
        import torch

        size, parts = self.spec.batch, self.member.world.size
        clips = self.spec.clips // parts
        draw = torch.Generator().manual_seed(1000 * self.spec.seed + 10 * unit.epoch + unit.partition)
        own = torch.randperm(clips, generator=draw) * parts + unit.partition
        for start in range(0, clips - size + 1, size):
            yield self._task.batch(
                own[start : start + size], torch.arange(start, start + size), share=size, epoch=unit.epoch,
                start=start, stop=start + size,
            )  # fmt: skip
