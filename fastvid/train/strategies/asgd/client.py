"""A client of a server of one or more shards. Every call blocks; it is used by one thread at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace

from torch import Tensor

from fastvid.errors import UsageError, WorkerError
from fastvid.train.strategies.asgd.lease import Lease
from fastvid.train.strategies.asgd.messages import PORTS, Header, Kind, float_bits
from fastvid.train.strategies.asgd.weight_shard import ranges
from fastvid.train.strategies.shared.link import Link, as_worker_error, connect, open_link

Versions = tuple[int, ...]
"""A version of each shard."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a lease is done with a push.

    Attributes:
        lease: Its number.
        position: The positions before it are done.
        digest: Of all samples trained on in the lease, see `Leases.acknowledge`.
    """

    lease: int
    position: int
    digest: int = 0


def find(host: str, port: int, timeout_s: float) -> list[tuple[str, int]]:
    """Return the addresses of all shards of the server whose head is at an address; they are on the same machine.

    Raises:
        WorkerError: No server answers there in time.
    """
    store = connect(host, port, timeout_s)
    with as_worker_error("a server does not tell its shards", address=f"{host}:{port}"):
        return [(host, int(shard)) for shard in json.loads(store.get(PORTS))]


class Client:
    """The other end of all shards.

    Args:
        addresses: Host and port of each shard, in their order; the first is the head.
        size: Numbers of the flat weights.
        timeout_s: How long a server may be silent.

    Attributes:
        number: Given by the head.
        versions: Of the weights that were fetched last.
        samples: Positions that all clients have acknowledged, as far as this one has heard.

    Raises:
        WorkerError: A server does not answer.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], size: int, *, timeout_s: float = 60.0) -> None:
        self._ranges = ranges(size, len(addresses))
        self._links = [open_link(connect(host, port, timeout_s), timeout_s) for host, port in addresses]
        # The other shards work at the same time; the head comes last, because its acknowledgement ends a lease.
        self._pool = ThreadPoolExecutor(max(1, len(addresses) - 1), thread_name_prefix="asgd-link")
        self.number = -1
        self.versions: Versions = ()
        self.samples = 0
        self._clock = 0

    def join(self, weights: Tensor) -> Versions:
        """Takes part. The first client's weights become the server's; every other client gets the server's.

        Args:
            weights: [size], on the CPU, contiguous; overwritten where this is not the first client.

        Returns:
            The versions that it starts from.
        """
        welcome = self._ask(self._links[0], Header(Kind.JOIN))
        self.number, self._clock = welcome.client, welcome.clock
        for link in self._links[1:]:
            self._ask(link, Header(Kind.JOIN))
        if welcome.fresh:
            # The head opens when it has weights, so that nobody meets a shard without.
            for index in reversed(range(len(self._links))):
                self._ask(self._links[index], Header(Kind.INIT), send=self._part(weights, index))
            self.versions = (0,) * len(self._links)
            return self.versions
        return self.fetch(weights)

    def fetch(self, into: Tensor) -> Versions:
        """Fetches the newest weights into [size]; each shard's range is one committed version of it.

        Raises:
            ChecksumError: A range is not the version that it is said to be.
        """
        answers = self._all(Header(Kind.FETCH), into=into)
        self.versions = tuple(answer.version for answer in answers)
        return self.versions

    def push(
        self,
        gradient: Tensor,
        rate: float,
        since: Versions | None = None,
        *,
        steps: int = 1,
        progress: Progress | None = None,
    ) -> int:
        """Pushes a gradient, or a sum of some.

        Args:
            gradient: [size], on the CPU, contiguous; not changed until this returns.
            rate: Learning rate.
            since: Versions that the oldest one was computed from; those fetched last by default.
            steps: Gradients in the sum.
            progress: What it ends of a lease.

        Returns:
            Its staleness at the head, in versions.
        """
        since = self.versions if since is None else since
        head = Header(Kind.PUSH, client=self.number, clock=self._clock, steps=steps, rate=float_bits(rate))
        answers = self._all(head, send=gradient, since=since, progress=progress)
        self._clock = answers[0].clock
        return answers[0].staleness

    def exchange(self, weights: Tensor, difference: Tensor, *, progress: Progress | None = None) -> None:
        """Elastic averaging: the server and [size] weights move towards each other.

        Args:
            weights: [size], on the CPU, contiguous.
            difference: [size], takes what was subtracted.
            progress: What it ends of a lease.
        """
        head = Header(Kind.EXCHANGE, client=self.number, clock=self._clock, steps=1)
        answers = self._all(head, send=weights, into=difference, progress=progress)
        self._clock = answers[0].clock
        weights -= difference

    def lease(self) -> Lease | None:
        """The next samples to train on; None when all are done. Waits while others may still give some back."""
        answer = self._ask(self._links[0], Header(Kind.LEASE, client=self.number))
        return None if answer.lease < 0 else Lease(answer.lease, answer.epoch, answer.start, answer.stop)

    def leave(self) -> None:
        """Ends it; what is leased and not acknowledged goes to others."""
        for link in self._links:
            self._ask(link, Header(Kind.LEAVE, client=self.number))
        self._pool.shutdown()

    def _part(self, values: Tensor, index: int) -> Tensor:
        start, stop = self._ranges[index]
        return values[start:stop]

    def _all(
        self,
        header: Header,
        *,
        send: Tensor | None = None,
        into: Tensor | None = None,
        since: Versions | None = None,
        progress: Progress | None = None,
    ) -> list[Header]:
        def one(index: int) -> Header:
            return self._ask(
                self._links[index],
                replace(
                    header,
                    version=0 if since is None else since[index],
                    lease=progress.lease if progress and index == 0 else -1,
                    start=progress.position if progress and index == 0 else 0,
                    digest=progress.digest if progress and index == 0 else 0,
                ),
                send=None if send is None else self._part(send, index),
                into=None if into is None else self._part(into, index),
            )

        others = [self._pool.submit(one, index) for index in range(1, len(self._links))]
        answers = [other.result() for other in others]
        return [one(0), *answers]

    def _ask(self, link: Link, header: Header, *, send: Tensor | None = None, into: Tensor | None = None) -> Header:
        head, *others = self._links

        def beaten() -> None:
            # The head lets this client wait; meanwhile the other shards must not take it for dead.
            for other in others if link is head else ():
                other.beat()

        link.send(astuple(header), send)
        answer = Header.of(link.receive(into, beaten)[0])
        if link is head:
            self.samples = max(self.samples, answer.samples)
        if answer.kind is Kind.REFUSED:
            raise UsageError(
                f"the server refuses {header.kind.name}",
                hint="have server and client the same options, and did the client join?",
            )
        if answer.kind is not Kind.DONE:
            raise WorkerError(f"the server answers {header.kind.name} with {answer.kind.name}")
        return answer
