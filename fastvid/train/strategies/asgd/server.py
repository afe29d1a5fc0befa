"""Serves one shard: one thread accepts clients, and one thread per client blocks on its messages.

The first shard of a server is its head: it chooses the client that initializes the weights, delays clients that are too
far ahead, and leases samples.

One lock protects the records, and is held for a step of the optimizer, so that records match the order of steps. What
else costs time is outside of it: receiving, sending, checksums and the search for values that are not finite.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from fastvid.errors import FastvidError, UsageError, WorkerError
from fastvid.train.strategies.asgd.client import MessageHeader, ServerMessage, bits_float
from fastvid.train.strategies.asgd.lease import Leases
from fastvid.train.strategies.asgd.weights import WeightShard
from fastvid.train.strategies.link import Link, Listener, token_of_job


@dataclass(slots=True)
class ClientRecord:
    """A server's record of a client."""

    clock: int = 0
    pushes: int = 0
    clips: int = 0
    active: bool = True
    # whether it waits for samples. An idle client delays no other, because others may have to push before samples
    # become available.
    idle: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """Options of a server; the defaults are plain asynchronous SGD."""

    staleness_aware: bool = False
    # maximum number of pushes by which a client may be ahead of the slowest, at least 1: stale synchronous
    # parallel (Ho et al. 2013). The reply to a client at the bound is delayed until the slowest has caught up.
    # With P clients, a gradient pushed in the step after its fetch is then stale by at most (2 bound - 1) (P - 1)
    # versions.
    bound: int | None = None

    def __post_init__(self) -> None:
        if self.bound is not None and self.bound < 1:
            raise UsageError(f"bound is {self.bound}", hint="set it to at least 1")

    def rate(self, rate: float, staleness: int) -> float:
        """Return the learning rate for a push of that staleness."""
        return rate / max(1, staleness) if self.staleness_aware else rate

    def may_continue(self, clock: int, slowest: int) -> bool:
        """Return whether a client with `clock` pushes may compute the next if the slowest has `slowest`."""
        return self.bound is None or clock - slowest < self.bound


log = logging.getLogger(__name__)


class Server:
    """Serves a shard until it is closed. Attributes may be read from any thread.

    `leases`: samples to lease; on the head only. `port`: port to listen on; 0 for any free one. `timeout_s`:
    seconds of silence after which a client is considered dead.
    """

    def __init__(
        self,
        shard: WeightShard,
        policy: Policy | None = None,
        leases: Leases | None = None,
        *,
        head: bool = True,
        warm_up: int = 0,
        token: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float = 60.0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.shard, self.policy, self.leases = shard, policy or Policy(), leases
        self.staleness: Counter[int] = Counter()
        self.clients: dict[int, ClientRecord] = {}
        self.lost = self.largest_lead = self.not_finite = 0
        self._head, self._warm_up, self._timeout_s = head, warm_up, timeout_s
        self._first: int | None = None  # the client that initializes the weights
        self._ports: list[int] | None = None  # of all shards
        self._changed = threading.Condition()
        self._closed = False
        if state is not None:
            self._load(state)
        first = 1 + max(self.clients, default=0)
        self._listener = Listener(
            self._session, timeout_s, token=token or token_of_job(), host=host, port=port, first=first
        )
        self.address = self._listener.address
        # Started only after the attribute is set, because sessions use it.
        self._listener.start()

    def close(self, patience_s: float | None = None) -> None:
        """Accept no more clients, and wait for the connected ones to leave.

        `patience_s`: seconds to wait for each; None waits `timeout_s`.
        """
        patience_s = self._timeout_s if patience_s is None else patience_s
        self._listener.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._listener.join(patience_s)

    def publish_ports(self, ports: list[int]) -> None:
        """Tell clients of this shard, the head, the ports of all shards, its own first."""
        with self._changed:
            self._ports = ports
            self._changed.notify_all()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the shard, the leases and the client records."""
        with self._changed:
            return {
                "shard": self.shard.state_dict(),
                "leases": None if self.leases is None else self.leases.state_dict(),
                "staleness": dict(self.staleness),
                "lost": self.lost,
                "clients": {
                    number: {name: getattr(record, name) for name in ("clock", "pushes", "clips")}
                    for number, record in self.clients.items()
                },
            }

    def _load(self, state: Mapping[str, Any]) -> None:
        self.shard.load_state_dict(state["shard"])
        if self.leases is not None and state["leases"] is not None:
            self.leases.load_state_dict(state["leases"])
        self.staleness.update({int(key): int(count) for key, count in state["staleness"].items()})
        self.lost = int(state["lost"])
        self.clients = {
            int(number): ClientRecord(record["clock"], record["pushes"], record["clips"], active=False)
            for number, record in state["clients"].items()
        }

    def _session(self, link: Link) -> None:
        left, number = False, link.number
        try:
            # Receives the payload of a push.
            buffer = torch.empty(self.shard.numel, dtype=self.shard.dtype)
            while not left:
                asked = MessageHeader.of(link.receive(buffer)[0])
                self._handle(link, number, asked, buffer)
                left = asked.kind is ServerMessage.LEAVE
        except FastvidError as error:
            log.warning("lost client %d: %s", number, error)
        finally:
            self._disconnect(number, lost=not left)

    def _disconnect(self, number: int, *, lost: bool) -> None:
        with self._changed:
            if number in self.clients:
                self.clients[number].active = False
            self.lost += lost
            if self._first == number and not self.shard.initialized:
                self._first = None
            if self.leases is not None and (returned := self.leases.give_back(number)):
                log.warning("%d samples of client %d go to other clients", returned, number)
            self._changed.notify_all()

    def _handle(self, link: Link, number: int, asked: MessageHeader, buffer: Tensor) -> None:
        """Handle a message, whose payload is in the buffer."""
        match asked.kind:
            case ServerMessage.JOIN:
                self._join(link, number)
            case ServerMessage.SHARDS:
                self._wait(link, lambda: self._ports is not None)
                link.send(astuple(MessageHeader(ServerMessage.DONE)), torch.tensor(self._ports))
            case ServerMessage.INIT if not self._head or self._first == number:
                if self._finite(link, number, asked, buffer):
                    self.shard.initialize(buffer)
                    self._reply(link, ServerMessage.DONE)
            case ServerMessage.LEAVE:
                self._reply(link, ServerMessage.DONE)
            case _ if number not in self.clients or not self.shard.initialized:
                # Reject everything else until the client has joined and there are weights.
                self._reply(link, ServerMessage.REFUSED)
            case ServerMessage.FETCH:
                self._send_weights(link)
            case ServerMessage.GRADIENT if asked.version <= self.shard.version:
                if self._finite(link, number, asked, buffer):
                    self._step(link, number, asked, buffer)
            case ServerMessage.LEASE:
                self._lend(link, number)
            case _:
                self._reply(link, ServerMessage.REFUSED)
        with self._changed:
            self._changed.notify_all()

    def _reply(self, link: Link, kind: ServerMessage, **fields: int) -> None:
        link.send(astuple(MessageHeader(kind, version=max(0, self.shard.version), samples=self._samples, **fields)))

    @property
    def _samples(self) -> int:
        return 0 if self.leases is None else self.leases.acknowledged

    def counts(self) -> Counter[int]:
        """Return a consistent copy of `staleness`."""
        with self._changed:
            return Counter(self.staleness)

    @property
    def present(self) -> int:
        """Number of connected clients."""
        return sum(record.active for record in self.clients.values())

    def _join(self, link: Link, number: int) -> None:
        fresh = False
        if self._head:

            def admitted() -> bool:
                nonlocal fresh
                if not self.shard.initialized:
                    fresh = self._first is None
                    self._first = number if fresh else self._first
                    return fresh
                pioneer = self.clients.get(-1 if self._first is None else self._first)
                warming = pioneer is not None and pioneer.active and self.shard.version < self._warm_up
                return not warming

            self._wait(link, admitted)
        with self._changed:
            self.clients[number] = record = ClientRecord()
            record.clock = self._slowest(record)
        self._reply(link, ServerMessage.DONE, fresh=int(fresh), clock=record.clock)

    def _send_weights(self, link: Link) -> None:
        with self.shard.reading() as snapshot:
            answer = MessageHeader(ServerMessage.DONE, version=snapshot.version)
            link.send(astuple(answer), snapshot.values, snapshot.checksum)

    def _step(self, link: Link, number: int, asked: MessageHeader, gradient: Tensor) -> None:
        """Apply a gradient at once."""
        with self._changed:
            staleness = self.shard.version - asked.version
            rate = self.policy.rate(bits_float(asked.rate), staleness)
            record = self._book(number, asked, staleness)
            version = self.shard.step(gradient, rate, 1 / self.present)
            self._changed.notify_all()
        if self._head:
            # Wait while the client is too far ahead of the others.
            self._wait(link, lambda: self.policy.may_continue(record.clock, self._slowest(record)))
        answer = MessageHeader(
            ServerMessage.DONE, version=version, staleness=staleness, clock=record.clock, samples=self._samples
        )
        link.send(astuple(answer))

    def _book(self, number: int, asked: MessageHeader, staleness: int) -> ClientRecord:
        """Record a push and what it acknowledges."""
        record = self.clients[number]
        record.clock, record.pushes, record.clips = record.clock + 1, record.pushes + 1, record.clips + asked.clips
        self.staleness[staleness] += 1
        self.largest_lead = max(self.largest_lead, record.clock - self._slowest(record))
        if self.leases is not None and asked.lease >= 0:
            self.leases.acknowledge(number, asked.lease, asked.start, asked.digest)
        return record

    def _finite(self, link: Link, number: int, asked: MessageHeader, values: Tensor) -> bool:
        """Return whether rate and values are finite. If not, refuse them: one NaN would reach every client."""
        rate = bits_float(asked.rate)
        # NaN and infinity both reach an extreme; this is many times as fast as `isfinite` (torch 2.13).
        extremes = torch.stack(torch.aminmax(values))
        if math.isfinite(rate) and bool(extremes.isfinite().all()):
            return True
        with self._changed:
            self.not_finite += 1
        wrong = values.numel() - int(values.isfinite().sum())
        log.warning(
            "refused %s of client %d: %d of %d values are not finite, rate %g",
            asked.kind.name, number, wrong, values.numel(), rate,
        )  # fmt: skip
        self._reply(link, ServerMessage.NOT_FINITE)
        return False

    def _slowest(self, client: ClientRecord) -> int:
        """Return the lowest clock of the other active, non-idle clients; the client's own if there are none."""
        working = [one.clock for one in self.clients.values() if one is not client and one.active and not one.idle]
        return min(working, default=client.clock)

    def _lend(self, link: Link, number: int) -> None:
        leases = self.leases
        if leases is None:
            self._reply(link, ServerMessage.REFUSED)
            return
        lease, record = None, self.clients[number]

        def lent() -> bool:
            nonlocal lease
            lease = leases.take(number)
            if lease is not None and record.idle:
                record.idle, record.clock = False, max(record.clock, self._slowest(record))
            elif lease is None and not record.idle:
                # Notify only once: two idle clients would otherwise wake each other in an endless loop.
                record.idle = True
                self._changed.notify_all()
            return lease is not None or leases.over

        # If all samples are leased but not all are done, some may be returned.
        self._wait(link, lent)
        if lease is None:
            self._reply(link, ServerMessage.DONE, lease=-1)
        else:
            self._reply(
                link, ServerMessage.DONE, lease=lease.number, epoch=lease.epoch, start=lease.start, stop=lease.stop
            )

    def _wait(self, link: Link, reached: Callable[[], bool]) -> None:
        """Block until a condition holds, sending heartbeats, which also detect a dead client."""
        met = False

        def over() -> bool:
            nonlocal met
            met = reached()
            return met or self._closed

        while True:
            with self._changed:
                if self._changed.wait_for(over, link.beat_s):
                    break
            link.beat()
        if not met:
            raise WorkerError("the server was closed while a client waited")
