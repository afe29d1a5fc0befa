"""Serve the weights of a model: one thread accepts clients, and one thread per client waits for its messages.

One lock protects the records of clients and samples. It is held during each update of the weights, so that the records
match the order of updates. Everything else that takes time is done without the lock: receiving, sending, checksums and
the check for values that are not finite.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Any

import torch
from torch import Tensor

from fastvid.errors import FastvidError, WorkerError
from fastvid.train.strategies.asgd.client import DONE, NOT_FINITE, REFUSED
from fastvid.train.strategies.asgd.lease import Lease, Leases
from fastvid.train.strategies.asgd.weights import Weights
from fastvid.train.strategies.link import Found, Link, Listener, Message, token_of_job

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Server:
    """Serves weights until it is closed. Attributes may be read from any thread.

    `leases`: assigns samples to clients. `warm_up`: number of updates by the first client before others are admitted.
    `port`: port to listen on; 0 for any free one. `timeout_s`: seconds of silence after which a client is considered
    dead. `state`: result of `state_dict` in an earlier run. `staleness`: number of pushes by staleness. `clients`: the
    numbers of the clients that have joined and are connected.
    """

    weights: Weights
    leases: Leases
    _: KW_ONLY
    warm_up: int = 0
    token: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    timeout_s: float = 60.0
    state: InitVar[Mapping[str, Any] | None] = None

    def __post_init__(self, state: Mapping[str, Any] | None) -> None:
        self.staleness: Counter[int] = Counter()
        self.clients: set[int] = set()
        self.lost = 0
        self._first: int | None = None  # the client that initializes the weights
        self._changed = threading.Condition()
        self._closed = False
        if state is not None:
            self.weights.load_state_dict(state["shard"])
            self.leases.load_state_dict(state["leases"])
            self.staleness.update({int(key): int(count) for key, count in state["staleness"].items()})
            self.lost = int(state["lost"])
        token = self.token or token_of_job()
        self._listener = Listener(self._session, self.timeout_s, token=token, host=self.host, port=self.port)
        self.address = self._listener.address
        # Started only now, because sessions use the attributes above.
        self._listener.start()

    def close(self, patience_s: float | None = None) -> None:
        """Accept no more clients, and wait for the connected ones to leave.

        `patience_s`: seconds to wait for each; None waits `timeout_s`.
        """
        self._listener.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._listener.join(self.timeout_s if patience_s is None else patience_s)

    def state_dict(self) -> dict[str, Any]:
        """Return weights, leases and counts."""
        with self._changed:
            return {
                "shard": self.weights.state_dict(),
                "leases": self.leases.state_dict(),
                "staleness": dict(self.staleness),
                "lost": self.lost,
            }

    def counts(self) -> Counter[int]:
        """Return a consistent copy of `staleness`."""
        with self._changed:
            return Counter(self.staleness)

    def _session(self, link: Link) -> None:
        """Serve one client, in its own thread."""
        left = False
        buffer = self.weights.buffer()  # receives the payload of a push
        try:
            while not left:
                asked = link.receive(buffer)
                self._handle(link, asked, buffer)
                left = asked.kind == "leave"
        except FastvidError as error:
            log.warning("lost client %d: %s", link.number, error)
        finally:
            with self._changed:
                self.clients.discard(link.number)
                self.lost += not left
                if self._first == link.number and not self.weights.initialized:
                    self._first = None
                if returned := self.leases.give_back(link.number):
                    log.warning("%d samples of client %d go to other clients", returned, link.number)
                self._changed.notify_all()

    def _handle(self, link: Link, asked: Message, buffer: Tensor) -> None:
        """Reply to a message, whose payload, if any, is in `buffer`."""
        match asked.kind:
            case "join":
                self._join(link)
            case "init" if self._first == link.number:
                if self._finite(link, asked, buffer):
                    self.weights.initialize(buffer)
                    link.send(DONE)
            case "leave":
                link.send(DONE)
            case _ if not self.weights.initialized or link.number not in self.clients:
                # Other messages are rejected until the client has joined and the weights are initialized.
                link.send(REFUSED)
            case "fetch":
                with self.weights.reading() as snapshot:
                    link.send(DONE, {"version": snapshot.version}, snapshot.values, snapshot.checksum)
            case "push" if asked["version"] <= self.weights.version:
                if self._finite(link, asked, buffer):
                    self._step(link, asked, buffer)
            case "lease":
                self._lend(link)
            case _:
                link.send(REFUSED)
        with self._changed:
            self._changed.notify_all()

    def _reply(self, link: Link, **values: Any) -> None:
        link.send(DONE, {"samples": self.leases.acknowledged, **values})

    def _join(self, link: Link) -> None:
        def admitted() -> str | None:
            if not self.weights.initialized:
                if self._first is not None:
                    return None
                self._first = link.number
                return "first"
            return None if self._first in self.clients and self.weights.version < self.warm_up else "later"

        fresh = self._wait(link, admitted) == "first"
        with self._changed:
            self.clients.add(link.number)
        self._reply(link, fresh=fresh)

    def _step(self, link: Link, asked: Message, gradient: Tensor) -> None:
        """Record a push, acknowledge its samples, and apply its gradient to the weights."""
        with self._changed:
            staleness = self.weights.version - asked["version"]
            self.staleness[staleness] += 1
            if asked["progress"] is not None:
                self.leases.acknowledge(link.number, *asked["progress"])
            self.weights.step(gradient, asked["rate"], 1 / len(self.clients))
        self._reply(link, staleness=staleness)

    def _finite(self, link: Link, asked: Message, values: Tensor) -> bool:
        """Return whether rate and values are finite; if not, refuse the message: one NaN would reach every client."""
        rate = asked.values.get("rate", 0.0)
        # If any value is NaN or infinite, so is the minimum or maximum; many times faster than `isfinite` (torch 2.13).
        extremes = torch.stack(torch.aminmax(values))
        if math.isfinite(rate) and bool(extremes.isfinite().all()):
            return True
        wrong = values.numel() - int(values.isfinite().sum())
        log.warning(
            "refused %s of client %d: %d of %d values are not finite, rate %g",
            asked.kind, link.number, wrong, values.numel(), rate,
        )  # fmt: skip
        link.send(NOT_FINITE)
        return False

    def _lend(self, link: Link) -> None:
        def lent() -> tuple[Lease | None] | None:
            lease = self.leases.take(link.number)
            return (lease,) if lease is not None or self.leases.over else None

        # While all samples are leased but not all are done, wait: a client may die and its samples be leased again.
        (lease,) = self._wait(link, lent)
        self._reply(link, lease=lease)

    def _wait(self, link: Link, reached: Callable[[], Found | None]) -> Found:
        """Wait until `reached` returns a true value and return it; send heartbeats, which also detect a dead client."""

        def unless_closed() -> Found | None:
            found = reached()
            if not found and self._closed:
                raise WorkerError("the server was closed while a client waited")
            return found

        return link.wait(self._changed, unless_closed)
