"""The client side of asynchronous SGD: each step pushes its gradient and fetches the newest weights.

With ``overlap``, the transfers of a step run while the next step computes, with two buffers each for gradients and
weights: one is used by the loop and one by the transfer, and they are swapped only between transfers. A gradient is
then one step staler.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from fastvid.train.strategies.asgd.client import LeaseProgress, ParameterClient, Versions
from fastvid.train.strategies.asgd.lease import Lease


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
