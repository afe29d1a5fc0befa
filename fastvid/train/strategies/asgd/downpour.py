"""The client side of Downpour SGD (Dean et al. 2012): when to push, when to fetch, local steps.

Between two fetches a client updates its weights with its own gradients. With ``overlap``, the transfers of a step run
while the next step computes, with two buffers each for gradients and weights: one is used by the loop and one by the
transfer, and they are swapped only between transfers. A gradient is then one step staler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from fastvid.errors import UsageError
from fastvid.train.strategies.asgd.client import LeaseProgress, ParameterClient, Versions
from fastvid.train.strategies.asgd.lease import Lease
from fastvid.train.strategies.asgd.weight_shard import WeightRange


class Downpour:
    """Pushes every `n_push` steps and fetches every `n_fetch` steps.

    Args:
        client: A client that has joined.
        weights: [size] on the CPU, from which gradients are computed; changed in place, by `step` only.
        n_push: Steps whose gradients are summed in one push, at the rate of the last of them.
        n_fetch: Steps from one fetch to the next.
        overlap: Whether to transfer while the next step computes.
        sections: Rate multipliers for local steps, and the averaged sections, of which a push contains the client's
            latest values instead of a sum of gradients.

    Attributes:
        staleness: Number of pushes of this client by staleness.
    """

    def __init__(
        self,
        client: ParameterClient,
        weights: Tensor,
        *,
        n_push: int = 1,
        n_fetch: int = 1,
        overlap: bool = False,
        sections: Sequence[WeightRange] | None = None,
    ) -> None:
        if min(n_push, n_fetch) < 1:
            raise UsageError(f"n_push is {n_push} and n_fetch is {n_fetch}", hint="set both to at least 1")
        self.client, self.weights = client, weights
        self.n_push, self.n_fetch, self.overlap = n_push, n_fetch, overlap
        self.staleness: Counter[int] = Counter()
        self._sections = sections or [WeightRange(0, weights.numel())]
        self._sum = torch.zeros_like(weights)
        # Buffers of the transfer in flight.
        self._sent = torch.zeros_like(weights) if overlap else self._sum
        self._fetched = torch.empty_like(weights) if overlap else weights
        self._steps = self._since_fetch = 0
        self._versions = client.versions  # of the current weights
        self._oldest = self._versions  # of the first gradient in the sum
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="asgd-transfer")
        self._under_way: Future[Versions | None] | None = None

    @torch.no_grad()
    def step(self, gradient: Tensor, rate: float, progress: LeaseProgress | None = None, *, last: bool = False) -> None:
        """Process the gradient computed at `weights`, and update `weights` for the next one.

        Args:
            gradient: [size]; may be reused afterwards.
            rate: Learning rate.
            progress: Progress of the lease including this step; sent with the next push.
            last: Whether to push now, as at the end of a lease.
        """
        if self._steps == 0:
            self._oldest = self._versions
        self._sum += gradient
        for section in self._sections:
            if section.averaged:
                part = slice(section.start, section.stop)
                self._sum[part] = gradient[part]
        self._steps += 1
        self._since_fetch += 1
        push, fetch = self._steps >= self.n_push or last, self._since_fetch >= self.n_fetch
        adopted = self.settle() if push or fetch else False
        if not adopted and (self.overlap or not fetch):
            for section in self._sections:
                part = slice(section.start, section.stop)
                if not section.averaged:
                    self.weights[part].add_(gradient[part], alpha=-rate * section.lr_mult)
        if push or fetch:
            self._begin(rate, progress, push=push, fetch=fetch)
            if not self.overlap:
                self.settle()

    def lease(self) -> Lease | None:
        """Return the next samples; the previous lease must have ended with a `last` step."""
        self.settle()
        return self.client.lease()

    def settle(self) -> bool:
        """Wait for the transfer in flight, and return whether it replaced `weights`."""
        if self._under_way is None:
            return False
        versions, self._under_way = self._under_way.result(), None
        if versions is None:
            return False
        if self.overlap:
            self.weights.copy_(self._fetched)
        self._versions = versions
        return True

    def adopt(self, weights: Tensor, versions: Versions) -> None:
        """Continue from these weights as if they had been fetched; keeps gradients that are not pushed yet."""
        self.settle()
        self.weights.copy_(weights)
        self._versions, self._since_fetch = versions, 0

    def close(self) -> None:
        """Wait for the transfer in flight, and leave the server."""
        self.settle()
        self._thread.shutdown()
        self.client.leave()

    def _begin(self, rate: float, progress: LeaseProgress | None, *, push: bool, fetch: bool) -> None:
        steps, since = self._steps, self._oldest
        outgoing = self._sum
        if push:
            self._steps = 0
            self._sum, self._sent = self._sent, self._sum
        if fetch:
            self._since_fetch = 0

        def transfer() -> Versions | None:
            if push:
                self.staleness[self.client.push(outgoing, rate, since, steps=steps, progress=progress)] += 1
                outgoing.zero_()
            return self.client.fetch(self._fetched) if fetch else None

        self._under_way = self._thread.submit(transfer)
