"""A client of a sharded parameter server, and how it pushes each step's gradient and fetches the newest weights.

With ``overlap``, the transfers of a step run while the next step computes, with two buffers each for gradients and
weights: one is used by the loop and one by the transfer, and they are swapped only between transfers. A gradient is
then one step staler.
"""

from __future__ import annotations

import struct
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from fastvid.errors import FastvidError, UsageError, WorkerError
from fastvid.train.strategies.asgd.lease import Lease
from fastvid.train.strategies.asgd.weights import ranges
from fastvid.train.strategies.link import Address, Link, open_link


class ServerMessage(IntEnum):
    """Kind of message: a client's request (below 16) or the reply to it."""

    JOIN = 1
    INIT = 2
    FETCH = 3
    GRADIENT = 4
    LEASE = 6
    LEAVE = 7
    SHARDS = 8
    DONE = 16
    REFUSED = 17
    NOT_FINITE = 18


@dataclass(frozen=True, slots=True)
class MessageHeader:
    """The header of a message, all integers."""

    kind: ServerMessage
    version: int = 0
    staleness: int = 0
    clock: int = 0
    clips: int = 0
    rate: int = 0  # in GRADIENT, learning rate as the bits of a float64, see `float_bits`
    lease: int = -1
    epoch: int = 0
    start: int = 0
    stop: int = 0
    digest: int = 0  # in an acknowledgement, digest of the samples trained on in the lease, see `Leases.acknowledge`
    samples: int = 0
    fresh: int = 0

    @classmethod
    def of(cls, words: tuple[int, ...]) -> MessageHeader:
        """Return the header with these words."""
        kind, *values = words
        return cls(ServerMessage(kind), *values)


def float_bits(value: float) -> int:
    """Return a float64 as the integer with the same bits."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def bits_float(bits: int) -> float:
    """Return the float64 whose bits are an integer, the inverse of `float_bits`."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


Versions = tuple[int, ...]
"""The version of each shard."""


@dataclass(frozen=True, slots=True)
class LeaseProgress:
    """How much of a lease is done, as acknowledged by a push."""

    lease: int
    position: int
    digest: int = 0  # digest of all samples trained on in the lease, see `Leases.acknowledge`


class ParameterClient:
    """A client of all shards of a parameter server.

    `timeout_s`: seconds of silence after which a server is considered dead.
    """

    def __init__(self, head: Address, size: int, *, timeout_s: float = 60.0) -> None:
        self.versions: Versions = ()
        self.samples = 0
        self._clock = 0
        self._links = [open_link(head, timeout_s)]
        self.number = self._links[0].number
        self._links[0].send(astuple(MessageHeader(ServerMessage.SHARDS)))
        ports = self._links[0].receive()[1]
        assert ports is not None
        addresses = [replace(head, port=port) for port in ports.view(torch.int64).tolist()]
        self._ranges = ranges(size, len(addresses))
        self._links += [open_link(address, timeout_s) for address in addresses[1:]]
        # The other shards run in parallel; the head comes last, because its acknowledgement ends a lease.
        self._pool = ThreadPoolExecutor(max(1, len(addresses) - 1), thread_name_prefix="asgd-link")

    def join(self, weights: Tensor) -> Versions:
        """Join. The first client initializes the server's weights; the others fetch them.

        `weights`: [size], on the CPU, contiguous; overwritten unless this is the first client. Returns the
        versions to start from.
        """
        welcome = self._ask(self._links[0], MessageHeader(ServerMessage.JOIN))
        self._clock = welcome.clock
        for link in self._links[1:]:
            self._ask(link, MessageHeader(ServerMessage.JOIN))
        if welcome.fresh:
            # The head is initialized last, because it admits other clients once it has weights.
            for index in reversed(range(len(self._links))):
                self._ask(self._links[index], MessageHeader(ServerMessage.INIT), send=self._part(weights, index))
            self.versions = (0,) * len(self._links)
            return self.versions
        return self.fetch(weights)

    def fetch(self, into: Tensor) -> Versions:
        """Fetch the newest weights into a tensor [size]; the range of each shard is one committed version."""
        answers = self._all(MessageHeader(ServerMessage.FETCH), into=into)
        self.versions = tuple(answer.version for answer in answers)
        return self.versions

    def push(
        self,
        gradient: Tensor,
        rate: float,
        since: Versions | None = None,
        *,
        clips: int = 1,
        progress: LeaseProgress | None = None,
    ) -> int:
        """Push a gradient, which the server applies at once.

        `gradient`: [size], on the CPU, contiguous; must not change until this returns. Returns the staleness at
        the head, in versions.
        """
        since = self.versions if since is None else since
        header = MessageHeader(ServerMessage.GRADIENT, clock=self._clock, clips=clips, rate=float_bits(rate))
        answers = self._all(header, send=gradient, since=since, progress=progress)
        self._clock = answers[0].clock
        return answers[0].staleness

    def lease(self) -> Lease | None:
        """Return the next samples, None if all are done. Waits while others may return some."""
        answer = self._ask(self._links[0], MessageHeader(ServerMessage.LEASE))
        return None if answer.lease < 0 else Lease(answer.lease, answer.epoch, answer.start, answer.stop)

    def leave(self) -> None:
        """Leave the training; leased samples that are not acknowledged go to other clients."""
        try:
            for link in self._links:
                self._ask(link, MessageHeader(ServerMessage.LEAVE))
        finally:
            self._pool.shutdown()
            for link in self._links:
                link.close()

    def _part(self, values: Tensor, index: int) -> Tensor:
        start, stop = self._ranges[index]
        return values[start:stop]

    def _all(
        self,
        header: MessageHeader,
        *,
        send: Tensor | None = None,
        into: Tensor | None = None,
        since: Versions | None = None,
        progress: LeaseProgress | None = None,
    ) -> list[MessageHeader]:
        def one(index: int) -> MessageHeader:
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

    def _ask(
        self, link: Link, header: MessageHeader, *, send: Tensor | None = None, into: Tensor | None = None
    ) -> MessageHeader:
        head, *others = self._links

        def beaten() -> None:
            # While this client waits for the head, keep its links to the other shards alive.
            for other in others if link is head else ():
                other.beat()

        link.send(astuple(header), send)
        answer = MessageHeader.of(link.receive(into, beaten)[0])
        if link is head:
            self.samples = max(self.samples, answer.samples)
        if answer.kind is ServerMessage.REFUSED:
            raise UsageError(
                f"the server rejected {header.kind.name}",
                hint="check that server and client have the same options, and that the client has joined",
            )
        if answer.kind is ServerMessage.NOT_FINITE:
            raise FastvidError(
                f"the server refused {header.kind.name}: this client's values are not finite",
                hint="lower optim.base_lr, lengthen optim.warmup_epochs or set optim.clip_norm",
                client=self.number,
            )
        if answer.kind is not ServerMessage.DONE:
            raise WorkerError(f"the server replied {answer.kind.name} to {header.kind.name}")
        return answer


class GradientPusher:
    """Pushes a gradient and fetches weights in every step.

    `weights`: [size] on the CPU, from which gradients are computed; changed in place, by `step` only.
    """

    def __init__(self, client: ParameterClient, weights: Tensor, *, overlap: bool = False) -> None:
        self.client, self.weights, self.overlap = client, weights, overlap
        self.staleness: Counter[int] = Counter()
        # Buffers of the transfer in flight; without overlap, those of the caller.
        self._sent = torch.empty_like(weights) if overlap else None
        self._fetched = torch.empty_like(weights) if overlap else weights
        self._versions = client.versions  # of the current weights
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="asgd-transfer")
        self._in_flight: Future[Versions] | None = None

    @torch.no_grad()
    def step(self, gradient: Tensor, rate: float, clips: int = 1, progress: LeaseProgress | None = None) -> None:
        """Push the gradient computed at `weights`, and update `weights` for the next one.

        `gradient`: [size]; may be reused afterwards.
        """
        since, outgoing = self._versions, gradient
        self.settle()
        if self._sent is not None:
            outgoing = self._sent.copy_(gradient)

        def transfer() -> Versions:
            self.staleness[self.client.push(outgoing, rate, since, clips=clips, progress=progress)] += 1
            return self.client.fetch(self._fetched)

        self._in_flight = self._thread.submit(transfer)
        if not self.overlap:
            self.settle()

    def lease(self) -> Lease | None:
        """Return the next samples; the previous lease must be acknowledged."""
        self.settle()
        return self.client.lease()

    def settle(self) -> None:
        """Wait for the transfer in flight, and adopt the weights that it fetched."""
        if self._in_flight is None:
            return
        versions, self._in_flight = self._in_flight.result(), None
        if self.overlap:
            self.weights.copy_(self._fetched)
        self._versions = versions

    def adopt(self, weights: Tensor, versions: Versions) -> None:
        """Continue from these weights as if they had been fetched."""
        self.settle()
        self.weights.copy_(weights)
        self._versions = versions

    def leave(self) -> None:
        """Wait for the transfer in flight, and leave the server."""
        self.settle()
        self._thread.shutdown()
        self.client.leave()
