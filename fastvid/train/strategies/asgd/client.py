"""A client of a parameter server, and how it pushes each step's gradient and fetches the newest weights.

What a client asks for is the kind of a message, and the server answers with "done", "refused" or "not finite":

    join      begin; the answer says whether this client initializes the weights
    init      the initial weights
    fetch     the newest weights
    push      a gradient, and the part of a lease that it completes
    lease     the next samples
    leave     the end
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fastvid.errors import FastvidError, UsageError, WorkerError
from fastvid.train.strategies.asgd.lease import Lease
from fastvid.train.strategies.link import Address, Message, open_link

DONE: Final = "done"
REFUSED: Final = "refused"
NOT_FINITE: Final = "not finite"


@dataclass(frozen=True, slots=True)
class LeaseProgress:
    """How much of a lease is done, as acknowledged by a push."""

    lease: int
    position: int
    digest: int = 0  # digest of all samples trained on in the lease, see `Leases.acknowledge`


class ParameterClient:
    """A client of a parameter server.

    `timeout_s`: seconds of silence after which the server is considered dead. `weights`: [size] on the CPU, from which
    gradients are computed, once it has joined; changed in place, by `fetch`, `step` and `adopt` only.
    """

    def __init__(self, address: Address, *, timeout_s: float = 60.0) -> None:
        self.version = 0
        self.samples = 0
        self.staleness: Counter[int] = Counter()
        self._link = open_link(address, timeout_s)
        self.number = self._link.number

    def join(self, weights: Tensor) -> None:
        """Join. The first client initializes the server's weights; the others fetch them.

        `weights`: [size], on the CPU, contiguous; overwritten unless this is the first client.
        """
        self.weights = weights
        if self._ask("join")["fresh"]:
            self._ask("init", send=weights)
        else:
            self.fetch()

    def fetch(self) -> None:
        """Fetch the newest weights, which are one committed version."""
        self.version = int(self._ask("fetch", into=self.weights)["version"])

    def push(
        self,
        gradient: Tensor,
        rate: float,
        since: int | None = None,
        *,
        clips: int = 1,
        progress: LeaseProgress | None = None,
    ) -> int:
        """Push a gradient, which the server applies at once, and return its staleness in versions.

        `gradient`: [size], on the CPU, contiguous. `since`: version that it was computed at; None is that of `weights`.
        """
        answer = self._ask(
            "push",
            {
                "version": self.version if since is None else since,
                "rate": rate,
                "clips": clips,
                "progress": None if progress is None else astuple(progress),
            },
            send=gradient,
        )
        return int(answer["staleness"])

    @torch.no_grad()
    def step(self, gradient: Tensor, rate: float, clips: int = 1, progress: LeaseProgress | None = None) -> None:
        """Push the gradient computed at `weights`, and update `weights` for the next one."""
        self.staleness[self.push(gradient, rate, clips=clips, progress=progress)] += 1
        self.fetch()

    def adopt(self, weights: Tensor, version: int) -> None:
        """Continue from these weights as if they had been fetched."""
        self.weights.copy_(weights)
        self.version = version

    def lease(self) -> Lease | None:
        """Return the next samples, None if all are done. Waits while others may return some.

        The previous lease must be acknowledged.
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
