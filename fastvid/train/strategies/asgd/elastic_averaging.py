"""Elastic averaging (EASGD): a client moves by its own optimiser and is tied to the server by a spring."""

from __future__ import annotations

import torch
from torch import Tensor

from fastvid.errors import UsageError
from fastvid.train.strategies.asgd.client import Client, Progress


class ElasticAveraging:
    """Exchanges weights every `every` steps.

    Args:
        client: Has joined a server whose policy has an elasticity.
        weights: [size] on the CPU: the client's own, changed in place.
        every: Steps from one exchange to the next.
    """

    def __init__(self, client: Client, weights: Tensor, *, every: int = 1) -> None:
        if every < 1:
            raise UsageError(f"every is {every}", hint="it is at least 1")
        self.client, self.weights, self.every = client, weights, every
        self._difference = torch.empty_like(weights)
        self._steps = 0

    def stepped(self, progress: Progress | None = None, *, last: bool = False) -> bool:
        """After a step of the client's optimiser.

        Args:
            progress: How far a lease is done with this step; told with the next exchange.
            last: Exchanges now, as at the end of a lease.

        Returns:
            Whether the weights were exchanged.
        """
        self._steps += 1
        if self._steps < self.every and not last:
            return False
        self.client.exchange(self.weights, self._difference, progress=progress)
        self._steps = 0
        return True
