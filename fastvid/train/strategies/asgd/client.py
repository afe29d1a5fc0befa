"""A client of a parameter server: it pushes each step's gradient and fetches the newest weights.

A client's message has one of these kinds; the server's reply has the kind "done", "refused" or "not finite":

    join      begin; the answer says whether this client initializes the weights
    init      the initial weights
    fetch     the newest weights
    push      a gradient, and how much of a lease is done with it
    lease     the next range of samples to train on
    leave     the end of this client
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fastvid.errors import FastvidError, UsageError, WorkerError
from fastvid.train.strategies.asgd.lease import Lease
from fastvid.train.strategies.link import Address, Message, open_link

DONE: Final = "done"
REFUSED: Final = "refused"
NOT_FINITE: Final = "not finite"


class LeaseProgress(NamedTuple):
    """How much of a lease (a range of positions to train on) is done, as acknowledged by a push."""

    lease: int  # its number
    position: int  # the lease's positions before this one are done
    digest: int = 0  # digest of all samples trained on in the lease, see `Leases.acknowledge`


class ParameterClient:
    """A client of a parameter server.

    `timeout_s`: seconds of silence after which the server is considered dead. `weights`: [size] on the CPU, set by
    `join`; gradients are computed at them. Only `fetch`, `step` and `adopt` change them, in place. `version`: version
    of these weights. `samples`: samples acknowledged by all clients, as far as known. `staleness`: number of pushes by
    staleness, the number of updates between the fetch of the weights and the push.
    """

    def __init__(self, address: Address, *, timeout_s: float = 60.0) -> None:
        self.version = 0
        self.samples = 0
        self.staleness: Counter[int] = Counter()
        self._link = open_link(address, timeout_s)
        self.number = self._link.number

    def join(self, weights: Tensor) -> None:
        """Join the training. The first client initializes the server's weights; the others fetch them.

        `weights`: [size], on the CPU, contiguous; overwritten unless this is the first client.
        """
        self.weights = weights
        if self._ask("join")["fresh"]:
            self._ask("init", send=weights)
        else:
            self.fetch()

    def fetch(self) -> None:
        """Fetch the newest weights, all of them from the same version."""
        self.version = int(self._ask("fetch", into=self.weights)["version"])

    def push(
        self,
        gradient: Tensor,
        rate: float,
        since: int | None = None,
        *,
        progress: LeaseProgress | None = None,
    ) -> int:
        """Push a gradient, which the server applies at once, and return its staleness in versions.

        `gradient`: [size], on the CPU, contiguous. `rate`: learning rate. `since`: version of the weights that it was
        computed at; None for the version of `weights`.
        """
        answer = self._ask(
            "push",
            {"version": self.version if since is None else since, "rate": rate, "progress": progress},
            send=gradient,
        )
        return int(answer["staleness"])

    @torch.no_grad()
    def step(self, gradient: Tensor, rate: float, progress: LeaseProgress | None = None) -> None:
        """Push the gradient computed at `weights`, and fetch the newest weights into `weights`."""
        self.staleness[self.push(gradient, rate, progress=progress)] += 1
        self.fetch()

    def adopt(self, weights: Tensor, version: int) -> None:
        """Continue from these weights as if they had been fetched."""
        self.weights.copy_(weights)
        self.version = version

    def lease(self) -> Lease | None:
        """Return the next lease, or None if all samples are done.

        If all are leased but not done, waits, because a client may die and its samples be leased again. The previous
        lease must be fully acknowledged.
        """
        found = self._ask("lease")["lease"]
        return None if found is None else Lease(*found)

    def leave(self) -> None:
        """Leave the training; leased samples that are not acknowledged go to other clients."""
        try:
            self._ask("leave")
        finally:
            self._link.close()

    def _ask(
        self,
        kind: str,
        values: Mapping[str, Any] | None = None,
        *,
        send: Tensor | bytes = b"",
        into: Tensor | None = None,
    ) -> Message:
        self._link.send(kind, values, send)
        answer = self._link.receive(into)
        self.samples = max(self.samples, answer.values.get("samples", 0))
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
