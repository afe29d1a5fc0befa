"""The clients' part of a training loop (Dean et al. 2012, "Downpour SGD"): when to push, when to fetch, local steps.

Between two fetches a client moves its own weights by its own gradients. With ``overlap`` the transfers of a step run
while the next step computes: there are two buffers of gradients and two of weights, one in the loop's hands and one in
the transfer's, and they change hands only between two transfers. A gradient is then one step staler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from fastvid.errors import UsageError
from fastvid.train.strategies.asgd.client import Client, Progress, Versions
from fastvid.train.strategies.asgd.lease import Lease
from fastvid.train.strategies.asgd.weight_shard import Section


class Downpour:
    """Pushes every `n_push` steps and fetches every `n_fetch`.

    Args:
        client: Has joined.
        weights: [size] on the CPU: what gradients are computed from; changed in place, by `step` only.
        n_push: Steps whose gradients are summed in one push. It goes with the rate of its last step.
        n_fetch: Steps from one fetch to the next.
        overlap: Transfer while the next step computes.
        sections: Factors of the rate, for local steps; and what is no gradient but a value of the client's own, which
            is sent as it was given last.

    Attributes:
        staleness: Pushes of this client by their staleness.
    """

    def __init__(
        self,
        client: Client,
        weights: Tensor,
        *,
        n_push: int = 1,
        n_fetch: int = 1,
        overlap: bool = False,
        sections: Sequence[Section] | None = None,
    ) -> None:
        if min(n_push, n_fetch) < 1:
            raise UsageError(f"n_push is {n_push} and n_fetch is {n_fetch}", hint="each is at least 1")
        self.client, self.weights = client, weights
        self.n_push, self.n_fetch, self.overlap = n_push, n_fetch, overlap
        self.staleness: Counter[int] = Counter()
        self._sections = sections or [Section(0, weights.numel())]
        self._sum = torch.zeros_like(weights)
        # In the hands of a transfer under way.
        self._sent = torch.zeros_like(weights) if overlap else self._sum
        self._fetched = torch.empty_like(weights) if overlap else weights
        self._steps = self._since_fetch = 0
        self._versions = client.versions  # of the weights in hand
        self._oldest = self._versions  # of the first gradient in the sum
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="asgd-transfer")
        self._under_way: Future[Versions | None] | None = None

    @torch.no_grad()
    def step(self, gradient: Tensor, rate: float, progress: Progress | None = None, *, last: bool = False) -> None:
        """Takes the gradient at `weights`, and changes `weights` to what the next one is computed from.

        Args:
            gradient: [size]; may be reused afterwards.
            rate: Learning rate.
            progress: How far a lease is done with this step; told with the next push.
            last: Pushes now, as at the end of a lease.
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
        """The next samples, see `Client.lease`; their predecessors' last step was `last`."""
        self.settle()
        return self.client.lease()

    def settle(self) -> bool:
        """Waits for the transfer under way. Returns whether `weights` are those it has fetched."""
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
        """Goes on from these weights, as if they had been fetched. A sum that was not pushed yet stays."""
        self.settle()
        self.weights.copy_(weights)
        self._versions, self._since_fetch = versions, 0

    def close(self) -> None:
        """Waits for the transfer under way, and leaves the server."""
        self.settle()
        self._thread.shutdown()
        self.client.leave()

    def _begin(self, rate: float, progress: Progress | None, *, push: bool, fetch: bool) -> None:
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
