"""The strategy ``sync=asgd``: clients of a parameter server in threads of rank 0, which never wait for each other.

    rank 0                      serves weights, optimizer and norm statistics, and records which positions are done
    every rank, independently   leases positions (ranges of the epoch's order), and trains on their global batches

Ranks share no batch: each trains on whole global batches at positions that no other rank has. This is GPU A-SGD (Paine
et al. 2013): a client computes the gradient of each batch at its current weights, pushes it and fetches the newest
weights; the server applies every gradient at once, with the run's optimizer. P ranks make as many weight updates as one
rank would, and each gradient is computed from weights that are about P - 1 updates old. The learning rate or the
momentum may have to be lower, because asynchrony acts like momentum. One client trains exactly like ddp.

Rate and weight decay follow the run's schedule at the number of samples acknowledged by all clients.

Norm statistics: each client normalizes by its own batches, and pushes its running statistics too. The server keeps
their running average: each pushed value enters it with a weight of one over the number of clients. Checkpoints and
evaluations use this average; a client starts from it when it joins.

Accounting: a position is acknowledged by the push of the gradient computed from it, so every position is acknowledged
once. If a client dies or leaves, the rest of its lease goes to other clients, and ``returned`` counts these positions.
The lineage in a checkpoint records the acknowledged samples; at the end of an epoch it equals that of ddp.

A checkpoint contains the server's state: weights, optimizer, statistics, leases. Samples that were leased but not
acknowledged are leased again. If a server dies, the run resumes from its newest checkpoint.

Failures: each client has a separate connection, so the death of one affects no other process; the server continues with
the others. torchrun, however, stops all processes of a job when one dies, and restarts them from the checkpoint. To add
and remove clients during a run, start them as separate jobs:

    export FASTVID_TOKEN=$(openssl rand -hex 32)      the same for every job
    torchrun ... -m fastvid.train RECIPE sync=asgd sync_options.port=29600
    torchrun ... -m fastvid.train RECIPE sync=asgd sync_options.server=HOST:29600 run.out=ANOTHER      any number

The second kind of job uses the same recipe and options, starts from the server's weights, writes no checkpoints, and
exits when the run ends.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from fastvid.errors import FastvidError, StateError, UsageError
from fastvid.load.batch.batch import Batch
from fastvid.runtime.values import check_choice, check_least
from fastvid.train.config.config import Config
from fastvid.train.loop.strategy import Round, Strategy
from fastvid.train.parts.replica import Lineage, Loader, Replica
from fastvid.train.ranks import Member, broadcast_bytes
from fastvid.train.strategies.asgd.client import LeaseProgress, ParameterClient
from fastvid.train.strategies.asgd.lease import Lease, Leases
from fastvid.train.strategies.asgd.server import Server
from fastvid.train.strategies.asgd.weights import OptimizerFactory, Vector, Weights
from fastvid.train.strategies.average import statistics
from fastvid.train.strategies.link import Address, host_of_job, server_elsewhere

_ELEMENTWISE: Final = ("sgd", "adam", "adamw", "adagrad")
"""Names of element-wise optimizers, which can step the flat vector of all weights, or a part of it."""


# On early exit, seconds that the server waits for each client: clients of other jobs are not told, and torchrun kills
# the server after 30 s.
_PATIENCE_S: Final = 5.0


class Asgd(Strategy):
    """A parameter server and clients that never wait for each other.

    Args:
        member: This process.
        push: What clients push: "gradients", the only choice; the option remains for recipes written for 0.2.
        warm_up: Updates by the first client before others are admitted.
        lease_batches: Number of global batches per lease. The first batch of each lease is not prefetched.
        server: ``host:port`` of a server in another job; None for rank 0 of this one.
        host: Name or address of rank 0's machine that the server listens on, as clients reach it; None is torchrun's
            ``MASTER_ADDR``, and without torchrun 127.0.0.1.
        port: Port of the server in this job, for clients of other jobs; 0 for any free one.
        timeout_s: Seconds of silence after which a client or server is considered dead, by default `run.timeout_s` in a
            run. A client waits a minute at most for a server to answer for the first time.

    Attributes:
        server: The server in this process; None on other ranks, and before it starts.

    Raises:
        UsageError: If an option is out of range or conflicts with another.
    """

    shares_batches = False

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        optim = config.optim
        for wrong, what in (
            (optim.name not in _ELEMENTWISE, f"optim.name={optim.name}, which is not element-wise"),
            # The loss scaler skips steps that overflow, so the server would never receive their gradients.
            (config.run.amp == "fp16", "run.amp=fp16"),
            # The server's optimizer would move frozen weights by their momentum and weight decay.
            (optim.freeze, "optim.freeze"),
        ):
            if wrong:
                raise UsageError(f"sync=asgd does not support {what}", hint="change it, or use sync=kavg or sync=ddp")

    def __init__(
        self,
        member: Member,
        *,
        push: str = "gradients",
        warm_up: int = 0,
        lease_batches: int = 8,
        server: str | None = None,
        host: str | None = None,
        port: int = 0,
        timeout_s: float = 60.0,
    ) -> None:
        check_choice("sync option push", push, ("gradients",))
        check_least(1, **{"sync option lease_batches": lease_batches, "sync option timeout_s": timeout_s})
        super().__init__(member)
        self._warm_up, self._lease_batches = warm_up, lease_batches
        self._elsewhere = server_elsewhere("server", server, port)
        self._host, self._port, self._timeout_s = host or host_of_job(), port, timeout_s
        self._serves = member.leads and server is None
        self.server: Server | None = None
        self._state: dict[str, Any] | None = None  # the server's state, for and from a checkpoint
        self._client: ParameterClient | None = None
        self._lease: Lease | None = None
        self._progress: LeaseProgress | None = None
        self._own_statistics: list[Tensor] | None = None  # this rank's, while the model has the server's
        self._reported: Counter[int] = Counter()  # staleness up to the last row of metrics

    def prepare(self, replica: Replica) -> None:
        super().prepare(replica)
        self._vector = Vector(replica.optimizer, replica.model)
        self._rule = optimizer_factory(replica.optimizer)
        self._gradient = self._vector.buffer()
        replica.optimizer = PushOptimizer(replica.optimizer, lambda: self._push_gradient(replica))

    def rounds(self, replica: Replica, loader: Loader, epochs: int) -> Generator[Round, None, None]:
        with contextlib.ExitStack() as ends:
            samples, size = replica.schedule.total // epochs, self._lease_batches * loader.global_batch_size
            if self._serves:
                self.server = server = Server(
                    Weights(self._vector.size, self._rule, self._vector.groups, dtype=self._vector.dtype),
                    Leases(samples, epochs, size),
                    warm_up=self._warm_up,
                    host=self._host,
                    port=self._port,
                    timeout_s=self._timeout_s,
                    state=self._state,
                )
                self._reported = server.counts()
                ends.push(lambda kind, *_: server.close(_PATIENCE_S if kind else None))
            client = ParameterClient(self._address(), timeout_s=self._timeout_s)
            ends.push(lambda kind, *_: self._leave(client, early=kind is not None))
            client.join(self._vector.collect(self._vector.buffer()))
            self._vector.spread(client.weights)
            self._client = client
            self._lease = client.lease()
            replica.samples = max(replica.samples, client.samples)
            first = epochs if self._lease is None else self._lease.epoch
            if self._serves and 0 < replica.samples == first * samples:
                first -= 1  # its checkpoint was saved after the epoch's last batch, and the epoch is still evaluated
            for epoch in range(first, epochs):
                # A rank without a lease in this epoch yields no batch.
                yield Round(replica, self._batches(replica, loader, client, epoch), epoch, kept=self._serves)

    def _batches(self, replica: Replica, loader: Loader, client: ParameterClient, epoch: int) -> Iterator[Batch]:
        while (lease := self._lease) is not None and lease.epoch <= epoch:
            loader.go(lease.epoch, lease.start, lease.stop)
            seen = Lineage()
            for batch in loader:
                seen.add(lease.epoch, *Lineage.of(batch))
                ((_, digest),) = seen.rows()
                self._progress = LeaseProgress(lease.number, batch.stop, digest)
                # `client.samples` does not include this rank's unpushed samples.
                replica.samples = max(replica.samples, client.samples)
                self._restore(replica)
                yield batch
            self._lease = client.lease()

    def settle(self, replica: Replica) -> bool:
        """Load the server's weights and statistics into the model of the rank that serves; other ranks keep theirs."""
        if self.server is None or self._client is None:
            return True
        if self._own_statistics is None:
            self._own_statistics = [value.clone() for value in statistics(replica.model)]
        self._state = self.server.state_dict()
        replica.samples = int(self._state["leases"]["acknowledged"])
        central = self._state["shard"]["values"]
        self._client.adopt(central, int(self._state["shard"]["version"]))
        self._vector.spread(central)
        return True

    def _restore(self, replica: Replica) -> None:
        """Restore this rank's norm statistics, which `settle` replaced; its weights remain those of the server."""
        for value, own in zip(statistics(replica.model), self._own_statistics or (), strict=False):
            value.copy_(own)
        self._own_statistics = None

    def state_dict(self) -> dict[str, Any]:
        return {"push": "gradients", "servers": None if self._state is None else [self._state]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self._serves:
            return
        if (before := state.get("push")) != "gradients":
            raise StateError(
                f"checkpoint was written with push={before or 'gradients of an earlier version'}, which is unknown",
                hint="use another run.out",
            )
        servers = state["servers"] or [None]
        if len(servers) > 1:
            raise StateError(
                f"checkpoint was written with {len(servers)} server shards, which are gone", hint="use another run.out"
            )
        (self._state,) = servers

    def lineage(self) -> list[dict[str, int | str]] | None:
        if self._state is None:
            return None
        kept: list[dict[str, int | str]] = self._state["leases"]["lineage"]
        return kept

    def numbers(self) -> dict[str, float]:
        """Return ``staleness_mean`` and ``staleness_max`` of the pushes since the last row, in updates.

        On the serving rank these cover all clients, and there are the further columns ``clients`` (connected),
        ``updates``, ``lost`` (clients) and ``returned`` (samples).
        """
        row: dict[str, float] = {}
        counts = self._client.staleness if self._client is not None else Counter[int]()
        if (server := self.server) is not None:
            counts = server.counts()
            row |= {"clients": len(server.clients), "updates": server.weights.version}
            row |= {"lost": server.lost, "returned": server.leases.returned}
        new, self._reported = counts - self._reported, Counter(counts)
        if pushes := new.total():
            row["staleness_mean"] = sum(staleness * times for staleness, times in new.items()) / pushes
            row["staleness_max"] = max(new)
        return row

    def _push_gradient(self, replica: Replica) -> None:
        assert self._client is not None
        self._vector.gradients(self._gradient)
        self._client.step(self._gradient, replica.lr, self._progress)
        self._vector.spread(self._client.weights, statistics=False)

    def _address(self) -> Address:
        """Return the server's address, which rank 0 broadcasts if it is in this job."""
        if self._elsewhere is not None:
            return self._elsewhere
        own = None if self.server is None else self.server.address
        found = broadcast_bytes(None if own is None else own.encode(), self.member)
        assert found is not None
        return own or Address.decode(found)

    def _leave(self, client: ParameterClient, *, early: bool) -> None:
        """Leave the server, also when the run is stopped, so that the leased samples go to other clients."""
        # On early exit, ignore a dead server: it ended the run or no longer needs this client.
        with contextlib.suppress(FastvidError) if early else contextlib.nullcontext():
            client.leave()


class PushOptimizer(Optimizer):
    """Replaces a replica's optimizer: `step` pushes the gradient to the server. It has no optimizer state."""

    def __init__(self, inner: Optimizer, push: Callable[[], None]) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self._push = push

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        self._push()


def optimizer_factory(optimizer: Optimizer) -> OptimizerFactory:
    """Return a function that builds an optimizer of the same type and settings from other groups."""
    kind: Any = type(optimizer)
    known = inspect.signature(kind).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in known}
    return lambda groups: kind(groups, **settings)
