"""The strategy ``sync=asgd``: every rank is a client of a parameter server, which rank 0 holds too, in threads.

    rank 0 serves            weights, optimiser, norm statistics, and which positions of the epochs are done
    every rank, on its own   takes a lease of positions, and for each of their global batches
                             computes the gradient from the weights in hand, pushes it, fetches the newest weights

Ranks share no batch: each trains on whole global batches at positions that nobody else has. So P ranks make as many
updates of the weights as one rank would, and each gradient is computed from weights that are about P - 1 updates old;
the rate may have to be lower, or the momentum, because asynchrony acts like momentum. Rate and weight decay are those
of the run's schedule at the samples that all clients have had acknowledged; the run's optimiser steps on the server,
whatever it is. With an elasticity each rank's own optimiser steps instead, and weights are exchanged (EASGD).

Norm statistics: in training each client normalises by its own batches and keeps its own running statistics. With each
push it sends them, and the server keeps their running average over the clients: each value that comes counts as one of
the P that are there. Checkpoints and evaluations take the server's; a client takes them over only when it joins.

Accounting. A position is acknowledged with the push that its gradient is in, so every position is acknowledged once,
and is in the weights at least once. A client that dies or leaves loses what it has not pushed; the rest of its lease
goes to others, and ``returned`` counts such positions: those of them whose push was under way may be in the weights
twice. The lineage in a checkpoint is that of the acknowledged samples, and equals ddp's at the end of an epoch.

A checkpoint holds the server: weights, optimiser, statistics, leases. What was lent and not acknowledged is lent again.
The head's state is taken first: what it has not acknowledged may be in the other shards already, and what it has
acknowledged is never missing there. A server that dies takes the run back to its newest checkpoint.

Who dies. Each client has a process group of two with each shard, so its death ends nothing else; the server drops it
and goes on. But torchrun ends all processes of its job when one dies, and starts them again, from the checkpoint.
Clients that are to come and go are jobs of their own:

    torchrun ... -m fastvid.train RECIPE sync=asgd sync_options.port=29600
    torchrun ... -m fastvid.train RECIPE sync=asgd sync_options.server=HOST:29600 run.out=ANOTHER      any number

They have the same recipe and options, begin with the server's weights, write no checkpoint, and end with the run.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from fastvid.errors import FastvidError, StateError, UsageError
from fastvid.load.batch.batch import Batch
from fastvid.train.loop.strategy import Round, Strategy
from fastvid.train.parts.loader_protocol import Lineage, Loader
from fastvid.train.parts.replica import Replica
from fastvid.train.ranks.elastic import Member, broadcast_bytes
from fastvid.train.strategies.asgd.client import Client, Progress, find
from fastvid.train.strategies.asgd.downpour import Downpour
from fastvid.train.strategies.asgd.elastic_averaging import ElasticAveraging
from fastvid.train.strategies.asgd.lease import Lease, Leases
from fastvid.train.strategies.asgd.server import Server
from fastvid.train.strategies.asgd.staleness import Policy
from fastvid.train.strategies.asgd.vector import Vector
from fastvid.train.strategies.asgd.weight_shard import Rule, Shard, ranges

# How long a server that ends early waits for clients of other jobs, which do not know of it. torchrun kills after 30 s.
_PATIENCE_S: Final = 5.0


class Asgd(Strategy):
    """Asynchronous SGD.

    Args:
        member: This process.
        n_push: Steps whose gradients go to the server in one sum; with an elasticity, steps between two exchanges.
        n_fetch: Steps from one fetch to the next; between them a client moves by its own gradients.
        overlap: Transfer while the next step computes, whose gradient is then one update staler.
        staleness_aware: See `Policy`.
        bound: See `Policy`.
        elasticity: See `Policy`.
        warm_up: Updates by the first client before others are let in.
        shards: Of the server; each has its own lock, threads and links.
        lease_batches: Global batches that a client is lent at once. A lease's first batch is not read ahead.
        server: ``host:port`` of a server in another job; None for rank 0 of this one.
        port: Of the server in this job, for clients of other jobs; 0 for any that is free.
        timeout_s: A client or server that is silent for so long counts as dead.

    Attributes:
        servers: The shards that this process serves, the head first.

    Raises:
        UsageError: An option is out of range, or does not go with another.
    """

    shares_batches = False

    def __init__(
        self,
        member: Member,
        *,
        n_push: int = 1,
        n_fetch: int = 1,
        overlap: bool = False,
        staleness_aware: bool = False,
        bound: int | None = None,
        elasticity: float | None = None,
        warm_up: int = 0,
        shards: int = 1,
        lease_batches: int = 8,
        server: str | None = None,
        port: int = 0,
        timeout_s: float = 60.0,
    ) -> None:
        for name, value in (("n_push", n_push), ("n_fetch", n_fetch), ("lease_batches", lease_batches)):
            if value < 1:
                raise UsageError(f"sync option {name} is {value}, expected at least 1")
        if elasticity is not None and (overlap or n_fetch != 1):
            raise UsageError(
                "sync options overlap and n_fetch do not go with elasticity", hint="an exchange is both, and waits"
            )
        super().__init__(member)
        self.policy = Policy(staleness_aware=staleness_aware, bound=bound, elasticity=elasticity)
        self._n_push, self._n_fetch, self._overlap = n_push, n_fetch, overlap
        self._warm_up, self._shards, self._lease_batches = warm_up, shards, lease_batches
        self._elsewhere = None if server is None else _address(server)
        self._port, self._timeout_s = port, timeout_s
        self._serves = member.leads and server is None
        self.servers: list[Server] = []
        self._states: list[Any] | None = None
        self._pusher: Downpour | None = None
        self._spring: ElasticAveraging | None = None
        self._lease: Lease | None = None
        self._progress: Progress | None = None
        self._last = False  # whether the step under way ends a lease
        self._aside: Tensor | None = None  # this rank's own numbers while its model is the server's
        self._told: Counter[int] = Counter()  # staleness up to the last line of metrics

    def prepare(self, replica: Replica) -> None:
        self._rule = rule_of(replica.optimizer)
        if self.policy.elasticity is None:
            _refuse(replica)
        self._vector = Vector(replica.optimizer, replica.model)
        self._gradient = torch.zeros_like(self._vector.values)
        if self.policy.elasticity is None:
            replica.optimizer = Pushing(replica.optimizer, lambda: self._push(replica))

    def rounds(self, replica: Replica, loader: Loader, epochs: int) -> Generator[Round, None, None]:
        with contextlib.ExitStack() as ends:
            if self._serves:
                self._serve(replica.schedule.total // epochs, epochs, self._lease_batches * loader.global_batch_size)
                ends.push(lambda kind, *_: self._close(early=kind is not None))
            client = Client(self._addresses(), self._vector.size, timeout_s=self._timeout_s)
            ends.push(lambda kind, *_: self._leave(client, early=kind is not None))
            weights = self._vector.collect()
            client.join(weights)
            self._vector.spread()
            if self.policy.elasticity is None:
                sections = self._vector.sections
                self._pusher = Downpour(
                    client, weights, n_push=self._n_push, n_fetch=self._n_fetch, overlap=self._overlap,
                    sections=sections,
                )  # fmt: skip
            else:
                self._spring = ElasticAveraging(client, weights, every=self._n_push)
            self._lease = client.lease()
            replica.samples = max(replica.samples, client.samples)
            first = epochs if self._lease is None else self._lease.epoch
            for epoch in range(first, epochs):
                # A rank that was lent nothing of an epoch has no batch in it.
                yield Round(replica, self._batches(replica, loader, client, epoch), epoch, kept=self._serves)

    def _batches(self, replica: Replica, loader: Loader, client: Client, epoch: int) -> Iterator[Batch]:
        while (lease := self._lease) is not None and lease.epoch <= epoch:
            loader.go(lease.epoch, lease.start, lease.stop)
            seen = Lineage()
            for batch in loader:
                seen.add(lease.epoch, *Lineage.of(batch))
                ((_, digest),) = seen.rows()
                self._progress = Progress(lease.number, batch.stop, digest)
                self._last = batch.stop == lease.stop
                # Not below what this rank has done itself and not pushed yet.
                replica.samples = max(replica.samples, client.samples)
                self._restore()
                yield batch
            self._lease = client.lease() if self._pusher is None else self._pusher.lease()

    def maybe_sync(self, replica: Replica, sums: Tensor) -> None:  # noqa: ARG002
        if self._spring is not None:
            self._vector.collect()
            if self._spring.stepped(self._progress, last=self._last):
                self._vector.spread(statistics=False)

    def settle(self, replica: Replica) -> bool:
        """Gives the rank that serves the server's model. The others keep theirs."""
        if not self._serves:
            return True
        if self._pusher is not None:
            self._pusher.settle()
        if self._aside is None:
            self._aside = self._vector.collect().clone()
        self._states = [server.state_dict() for server in self.servers]
        replica.samples = int(self._states[0]["leases"]["acknowledged"])
        central = torch.cat([state["shard"]["values"] for state in self._states])
        if self._pusher is not None:
            self._pusher.adopt(central, tuple(int(state["shard"]["version"]) for state in self._states))
            self._vector.parameters_of(self._aside).copy_(self._vector.parameters_of(central))
        self._vector.values.copy_(central)
        self._vector.spread()
        return True

    def _restore(self) -> None:
        """Puts this rank's own statistics, and where it has them its own weights, back into its model."""
        if self._aside is not None:
            self._vector.values.copy_(self._aside)
            self._vector.spread()
            self._aside = None

    def state_dict(self) -> dict[str, Any]:
        return {"servers": self._states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._serves:
            self._states = state["servers"]

    def lineage(self) -> list[dict[str, int | str]] | None:
        if self._states is None:
            return None
        kept: list[dict[str, int | str]] = self._states[0]["leases"]["lineage"]
        return kept

    def numbers(self) -> dict[str, float]:
        """``staleness_mean`` and ``staleness_max`` of the pushes since the last line, in updates. Where the server is,
        of all clients; with ``clients`` that are there, ``updates``, clients ``lost`` and samples ``returned``."""
        row: dict[str, float] = {}
        counts = self._pusher.staleness if self._pusher is not None else Counter[int]()
        if self.servers:
            head = self.servers[0]
            counts = head.counts()
            row |= {"clients": head.present, "updates": head.shard.snapshot.version, "lost": head.lost}
            row |= {} if head.leases is None else {"returned": head.leases.returned}
        new, self._told = counts - self._told, Counter(counts)
        if pushes := new.total():
            row["staleness_mean"] = sum(staleness * times for staleness, times in new.items()) / pushes
            row["staleness_max"] = max(new)
        return row

    def _push(self, replica: Replica) -> None:
        assert self._pusher is not None
        self._vector.gradients(self._gradient)
        self._pusher.step(self._gradient, replica.lr, self._progress, last=self._last)
        self._vector.spread(statistics=False)

    def _serve(self, samples_per_epoch: int, epochs: int, lease: int) -> None:
        if self._states is not None and len(self._states) != self._shards:
            raise StateError(
                f"checkpoint holds {len(self._states)} shards of the server, this run has {self._shards}",
                hint=f"set sync_options.shards={len(self._states)}",
            )
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")  # torchrun's name for the machine of rank 0
        for index, (start, stop) in enumerate(ranges(self._vector.size, self._shards)):
            head = index == 0
            self.servers.append(
                Server(
                    Shard(start, stop, self._rule, self._vector.sections, dtype=self._vector.values.dtype),
                    self.policy,
                    Leases(samples_per_epoch, epochs, lease) if head else None,
                    head=head,
                    warm_up=self._warm_up if head else 0,
                    host=host,
                    port=self._port if head else 0,
                    timeout_s=self._timeout_s,
                    state=None if self._states is None else self._states[index],
                )
            )
        self._told = self.servers[0].counts()
        self.servers[0].tell([server.address[1] for server in self.servers])

    def _addresses(self) -> list[tuple[str, int]]:
        head = self._elsewhere
        if head is None:
            own = json.dumps(self.servers[0].address).encode() if self._serves else None
            host, port = json.loads(broadcast_bytes(own, self.member) or b"null")
            head = str(host), int(port)
        return find(*head, self._timeout_s)

    def _leave(self, client: Client, *, early: bool) -> None:
        """This client goes, also when the run is stopped: what it was lent goes to others."""
        # Early, a server that is gone is what ended the run, or will not miss this client.
        with contextlib.suppress(FastvidError) if early else contextlib.nullcontext():
            if self._pusher is None:
                client.leave()
            else:
                self._pusher.close()

    def _close(self, *, early: bool) -> None:
        for server in self.servers:
            server.close(_PATIENCE_S if early else None)


class Pushing(Optimizer):
    """Stands in the place of a replica's optimiser: a step gives the gradient to the server. It has no state.

    Args:
        inner: Whose groups are shown.
        push: Called for a step.
    """

    def __init__(self, inner: Optimizer, push: Callable[[], None]) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self._push = push

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        self._push()


_ELEMENTWISE: Final = (SGD, Adam, AdamW, Adagrad)
"""Optimisers that treat each number by itself, so that they may step a vector of all, or a part of it."""


def _refuse(replica: Replica) -> None:
    """Passes when a server can do what the run's optimiser is to do.

    Raises:
        UsageError: It cannot; says what.
    """
    kind = type(replica.optimizer)
    for wrong, what in (
        (kind not in _ELEMENTWISE, f"{kind.__name__}, which looks at whole layers,"),
        # The scaler leaves steps out, and the server would not hear of the batch.
        (replica.scaler.is_enabled(), "run.amp=fp16"),
        (replica.freezer is not None, "optim.freeze"),
    ):
        if wrong:
            raise UsageError(f"{what} does not go with sync=asgd", hint="leave it out, or set sync_options.elasticity")


def rule_of(optimizer: Optimizer) -> Rule:
    """Makes optimisers of the same kind and settings, for other groups."""
    kind: Any = type(optimizer)
    known = inspect.signature(kind).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in known}
    return lambda groups: kind(groups, **settings)


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit():
        raise UsageError(f"sync option server is {text!r}, expected host:port")
    return host, int(port)
