"""Serves the shards of a model: one thread accepts clients, and one thread per link blocks on its messages.

The first shard is the head: there the client that initializes the weights is chosen, clients that are too far ahead are
delayed, and samples are leased.

One lock protects the records, and is held for a step of the head, so that records match the order of steps; each other
shard has a lock of its own. What else costs time is outside of them: receiving, sending, checksums and the search for
values that are not finite.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from fastvid.errors import FastvidError, UsageError, WorkerError
from fastvid.train.strategies.asgd.client import DONE, NOT_FINITE, REFUSED
from fastvid.train.strategies.asgd.lease import Lease, Leases
from fastvid.train.strategies.asgd.weights import WeightShard
from fastvid.train.strategies.link import Found, Link, Listener, Message, token_of_job


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
    """Serves shards, the head first, until it is closed. Attributes may be read from any thread.

    `leases`: samples to lease. `warm_up`: updates by the first client before others are admitted. `port`: port to
    listen on; 0 for any free one. `timeout_s`: seconds of silence after which a client is considered dead. `states`: of
    an earlier run, from `state_dicts`.
    """

    def __init__(
        self,
        shards: Sequence[WeightShard],
        policy: Policy | None = None,
        leases: Leases | None = None,
        *,
        warm_up: int = 0,
        token: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float = 60.0,
        states: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.shards, self.head = shards, shards[0]
        self.policy, self.leases = policy or Policy(), leases
        self.staleness: Counter[int] = Counter()
        self.clients: dict[int, ClientRecord] = {}
        self.lost = self.largest_lead = self.not_finite = 0
        self._warm_up, self._timeout_s = warm_up, timeout_s
        self._first: int | None = None  # the client that initializes the weights
        self._changed = threading.Condition()
        self._steps: list[AbstractContextManager[Any]] = [self._changed, *(threading.Lock() for _ in shards[1:])]
        self._closed = False
        if states is not None:
            self._load(states)
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

    def state_dicts(self) -> list[dict[str, Any]]:
        """Return the state of each shard, the head's first and with the leases and the client records."""
        with self._changed:
            head = {
                "shard": self.head.state_dict(),
                "leases": None if self.leases is None else self.leases.state_dict(),
                "staleness": dict(self.staleness),
                "lost": self.lost,
                "clients": {
                    number: {name: getattr(record, name) for name in ("clock", "pushes", "clips")}
                    for number, record in self.clients.items()
                },
            }
        return [head, *({"shard": shard.state_dict()} for shard in self.shards[1:])]

    def _load(self, states: Sequence[Mapping[str, Any]]) -> None:
        for shard, state in zip(self.shards, states, strict=True):
            shard.load_state_dict(state["shard"])
        head = states[0]
        if self.leases is not None and head["leases"] is not None:
            self.leases.load_state_dict(head["leases"])
        self.staleness.update({int(key): int(count) for key, count in head["staleness"].items()})
        self.lost = int(head["lost"])
        self.clients = {
            int(number): ClientRecord(record["clock"], record["pushes"], record["clips"], active=False)
            for number, record in head["clients"].items()
        }

    def counts(self) -> Counter[int]:
        """Return a consistent copy of `staleness`."""
        with self._changed:
            return Counter(self.staleness)

    @property
    def present(self) -> int:
        """Number of connected clients."""
        return sum(record.active for record in list(self.clients.values()))

    def _session(self, link: Link) -> None:
        """Serve one link, in its own thread."""
        left, index = False, 0
        try:
            index = int(link.receive()["shard"])
            link.send(DONE, {"shards": len(self.shards)})
            # Receives the payload of a push.
            buffer = torch.empty(self.shards[index].numel, dtype=self.head.dtype)
            while not left:
                asked = link.receive(buffer)
                self._handle(link, index, asked, buffer)
                left = asked.kind == "leave"
        except FastvidError as error:
            log.warning("lost client %d: %s", link.number, error)
        finally:
            if index == 0:
                self._disconnect(link.number, lost=not left)

    def _disconnect(self, number: int, *, lost: bool) -> None:
        with self._changed:
            if number in self.clients:
                self.clients[number].active = False
            self.lost += lost
            if self._first == number and not self.head.initialized:
                self._first = None
            if self.leases is not None and (returned := self.leases.give_back(number)):
                log.warning("%d samples of client %d go to other clients", returned, number)
            self._changed.notify_all()

    def _handle(self, link: Link, index: int, asked: Message, buffer: Tensor) -> None:
        """Handle a message, whose payload is in the buffer."""
        shard, head = self.shards[index], index == 0
        match asked.kind:
            case "join" if head:
                self._join(link)
            case "init" if not head or self._first == link.number:
                if self._finite(link, asked, buffer):
                    shard.initialize(buffer)
                    link.send(DONE)
            case "leave":
                link.send(DONE)
            case _ if not shard.initialized or (head and link.number not in self.clients):
                # Reject everything else until the client has joined and there are weights.
                link.send(REFUSED)
            case "fetch":
                with shard.reading() as snapshot:
                    link.send(DONE, {"version": snapshot.version}, snapshot.values, snapshot.checksum)
            case "push" if asked["version"] <= shard.version:
                if self._finite(link, asked, buffer):
                    self._step(link, index, asked, buffer)
            case "lease" if head and self.leases is not None:
                self._lend(link, self.leases)
            case _:
                link.send(REFUSED)
        with self._changed:
            self._changed.notify_all()

    def _reply(self, link: Link, **values: Any) -> None:
        """Reply on a link to the head."""
        link.send(DONE, {"samples": 0 if self.leases is None else self.leases.acknowledged, **values})

    def _join(self, link: Link) -> None:
        def admitted() -> str | None:
            if not self.head.initialized:
                if self._first is not None:
                    return None
                self._first = link.number
                return "first"
            pioneer = self.clients.get(-1 if self._first is None else self._first)
            warming = pioneer is not None and pioneer.active and self.head.version < self._warm_up
            return None if warming else "later"

        fresh = self._wait(link, admitted) == "first"
        with self._changed:
            self.clients[link.number] = record = ClientRecord()
            record.clock = self._slowest(record)
        self._reply(link, fresh=fresh)

    def _step(self, link: Link, index: int, asked: Message, gradient: Tensor) -> None:
        """Apply a gradient at once."""
        shard = self.shards[index]
        with self._steps[index]:
            staleness = shard.version - asked["version"]
            record = self._book(link.number, asked, staleness) if index == 0 else None
            shard.step(gradient, self.policy.rate(asked["rate"], staleness), 1 / max(1, self.present))
            if record is not None:
                self._changed.notify_all()
        if record is None:
            link.send(DONE)
            return
        # Wait while the client is too far ahead of the others.
        self._wait(link, lambda: self.policy.may_continue(record.clock, self._slowest(record)))
        self._reply(link, staleness=staleness)

    def _book(self, number: int, asked: Message, staleness: int) -> ClientRecord:
        """Record a push and what it acknowledges."""
        record = self.clients[number]
        record.clock, record.pushes, record.clips = record.clock + 1, record.pushes + 1, record.clips + asked["clips"]
        self.staleness[staleness] += 1
        self.largest_lead = max(self.largest_lead, record.clock - self._slowest(record))
        if self.leases is not None and asked["progress"] is not None:
            self.leases.acknowledge(number, *asked["progress"])
        return record

    def _finite(self, link: Link, asked: Message, values: Tensor) -> bool:
        """Return whether rate and values are finite. If not, refuse them: one NaN would reach every client."""
        rate = asked.values.get("rate", 0.0)
        # NaN and infinity both reach an extreme; this is many times as fast as `isfinite` (torch 2.13).
        extremes = torch.stack(torch.aminmax(values))
        if math.isfinite(rate) and bool(extremes.isfinite().all()):
            return True
        with self._changed:
            self.not_finite += 1
        wrong = values.numel() - int(values.isfinite().sum())
        log.warning(
            "refused %s of client %d: %d of %d values are not finite, rate %g",
            asked.kind, link.number, wrong, values.numel(), rate,
        )  # fmt: skip
        link.send(NOT_FINITE)
        return False

    def _slowest(self, client: ClientRecord) -> int:
        """Return the lowest clock of the other active, non-idle clients; the client's own if there are none."""
        working = [one.clock for one in self.clients.values() if one is not client and one.active and not one.idle]
        return min(working, default=client.clock)

    def _lend(self, link: Link, leases: Leases) -> None:
        record = self.clients[link.number]

        def lent() -> tuple[Lease | None] | None:
            lease = leases.take(link.number)
            if lease is not None and record.idle:
                record.idle, record.clock = False, max(record.clock, self._slowest(record))
            elif lease is None and not record.idle:
                # Notify only once: two idle clients would otherwise wake each other in an endless loop.
                record.idle = True
                self._changed.notify_all()
            return (lease,) if lease is not None or leases.over else None

        # If all samples are leased but not all are done, some may be returned.
        (lease,) = self._wait(link, lent)
        self._reply(link, lease=None if lease is None else astuple(lease))

    def _wait(self, link: Link, reached: Callable[[], Found | None]) -> Found:
        """Wait for a condition, sending heartbeats, which also detect a dead client."""

        def unless_closed() -> Found | None:
            found = reached()
            if not found and self._closed:
                raise WorkerError("the server was closed while a client waited")
            return found

        return link.wait(self._changed, unless_closed)
