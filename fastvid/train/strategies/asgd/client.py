"""A client of a parameter server, and how it pushes each step's gradient and fetches the newest weights.

A client has a link to each shard of the server, all at one address. What it asks for is the kind of a message, and the
server answers with "done", "refused" or "not finite":

    open      first on a link: which shard is meant; the answer says how many there are
    join      on the head, the first shard: begin; the answer says whether this client initializes the weights
    init      the initial weights
    fetch     the newest weights
    push      a gradient, and on the head the part of a lease that it completes
    lease     on the head: the next samples
    leave     the end

With ``overlap``, the transfers of a step run while the next step computes, with two buffers each for gradients and
weights: one is used by the loop and one by the transfer, and they are swapped only between transfers. A gradient is
then one step staler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fastvid.errors import FastvidError, UsageError, WorkerError
from fastvid.train.strategies.asgd.lease import Lease
from fastvid.train.strategies.asgd.weights import ranges
from fastvid.train.strategies.link import Address, Message, open_link

DONE: Final = "done"
REFUSED: Final = "refused"
NOT_FINITE: Final = "not finite"

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

    `timeout_s`: seconds of silence after which a server is considered dead. `overlap`: whether the transfers of a step
    run while the next one computes. `weights`: [size] on the CPU, from which gradients are computed; changed in place,
    by `step` and `adopt` only.
    """

    def __init__(self, address: Address, size: int, *, timeout_s: float = 60.0, overlap: bool = False) -> None:
        self.versions: Versions = ()  # as last fetched
        self.samples = 0
        self.staleness: Counter[int] = Counter()
        self._overlap = overlap
        self._in_flight: Future[Versions] | None = None
        self._transfers = ThreadPoolExecutor(1, thread_name_prefix="asgd-transfer")
        self._links = [open_link(address, timeout_s)]
        self.number = self._links[0].number
        shards = int(self._ask(0, "open", {"shard": 0})["shards"])
        self._ranges = ranges(size, shards)
        for index in range(1, shards):
            self._links.append(open_link(address, timeout_s))
            self._ask(index, "open", {"shard": index})
        # The other shards run in parallel; the head comes last, because its acknowledgement ends a lease.
        self._pool = ThreadPoolExecutor(max(1, shards - 1), thread_name_prefix="asgd-link")

    def join(self, weights: Tensor) -> Versions:
        """Join. The first client initializes the server's weights; the others fetch them.

        `weights`: [size], on the CPU, contiguous; overwritten unless this is the first client. Returns the
        versions to start from.
        """
        if not self._ask(0, "join")["fresh"]:
            self.fetch(weights)
        else:
            # The head is initialized last, because it admits other clients once it has weights.
            for index in reversed(range(len(self._links))):
                self._ask(index, "init", send=weights)
            self.versions = (0,) * len(self._links)
        self.weights, self._held = weights, self.versions
        # Buffers of the transfer in flight; without overlap, those of the caller.
        self._sent = torch.empty_like(weights) if self._overlap else None
        self._fetched = torch.empty_like(weights) if self._overlap else weights
        return self.versions

    def fetch(self, into: Tensor) -> Versions:
        """Fetch the newest weights into a tensor [size]; the range of each shard is one committed version."""
        self.versions = tuple(answer["version"] for answer in self._all("fetch", [{}] * len(self._links), into=into))
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
        values: list[dict[str, Any]] = [{"version": version, "rate": rate} for version in since]
        values[0] |= {"clips": clips, "progress": None if progress is None else astuple(progress)}
        head, *_ = self._all("push", values, send=gradient)
        return int(head["staleness"])

    @torch.no_grad()
    def step(self, gradient: Tensor, rate: float, clips: int = 1, progress: LeaseProgress | None = None) -> None:
        """Push the gradient computed at `weights`, and update `weights` for the next one.

        `gradient`: [size]; may be reused afterwards.
        """
        since, outgoing = self._held, gradient
        self.settle()
        if self._sent is not None:
            outgoing = self._sent.copy_(gradient)

        def transfer() -> Versions:
            self.staleness[self.push(outgoing, rate, since, clips=clips, progress=progress)] += 1
            return self.fetch(self._fetched)

        self._in_flight = self._transfers.submit(transfer)
        if not self._overlap:
            self.settle()

    def settle(self) -> None:
        """Wait for the transfer in flight, and adopt the weights that it fetched."""
        if self._in_flight is not None:
            versions, self._in_flight = self._in_flight.result(), None
            self.adopt(self._fetched, versions)

    def adopt(self, weights: Tensor, versions: Versions) -> None:
        """Continue from these weights as if they had been fetched."""
        self.settle()
        if weights is not self.weights:
            self.weights.copy_(weights)
        self._held = versions

    def lease(self) -> Lease | None:
        """Return the next samples, None if all are done. Waits while others may return some.

        The previous lease must be acknowledged.
        """
        self.settle()
        found = self._ask(0, "lease")["lease"]
        return None if found is None else Lease(*found)

    def leave(self) -> None:
        """Leave the training; leased samples that are not acknowledged go to other clients."""
        self.settle()
        self._transfers.shutdown()
        try:
            for index in range(len(self._links)):
                self._ask(index, "leave")
        finally:
            self._pool.shutdown()
            for link in self._links:
                link.close()

    def _all(
        self, kind: str, values: Sequence[Mapping[str, Any]], *, send: Tensor | None = None, into: Tensor | None = None
    ) -> list[Message]:
        """Ask every shard, each with its values."""
        others = [
            self._pool.submit(self._ask, index, kind, values[index], send=send, into=into)
            for index in range(1, len(self._links))
        ]
        answers = [other.result() for other in others]
        return [self._ask(0, kind, values[0], send=send, into=into), *answers]

    def _ask(
        self,
        index: int,
        kind: str,
        values: Mapping[str, Any] | None = None,
        *,
        send: Tensor | None = None,
        into: Tensor | None = None,
    ) -> Message:
        """Ask a shard; of a tensor [size] it gets, or fills, its range."""
        link, others = self._links[index], self._links[1:] if index == 0 else []

        def beaten() -> None:
            # While this client waits for the head, keep its links to the other shards alive.
            for other in others:
                other.beat()

        part = slice(*self._ranges[index]) if send is not None or into is not None else slice(0)
        link.send(kind, values, b"" if send is None else send[part])
        answer = link.receive(None if into is None else into[part], beaten)
        if "samples" in answer.values:  # from the head
            self.samples = max(self.samples, answer["samples"])
        if answer.kind == REFUSED:
            raise UsageError(
                f"the server rejected {kind!r}",
                hint="check that server and client have the same options, and that the client has joined",
            )
        if answer.kind == NOT_FINITE:
            raise FastvidError(
                f"the server refused {kind!r}: this client's values are not finite",
                hint="lower optim.base_lr, lengthen optim.warmup_epochs or set optim.clip_norm",
                client=self.number,
            )
        if answer.kind != DONE:
            raise WorkerError(f"the server replied {answer.kind!r} to {kind!r}")
        return answer
