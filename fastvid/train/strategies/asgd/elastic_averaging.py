"""Elastic averaging (EASGD): a client steps by itself and exchanges weights with the server."""

from __future__ import annotations

import torch
from torch import Tensor

from fastvid.errors import UsageError
from fastvid.train.strategies.asgd.client import LeaseProgress, ParameterClient


class ElasticAveraging:
    """Exchanges weights every `every` steps.

    Args:
        client: A client that has joined a server whose policy has an elasticity.
        weights: [size] on the CPU, the client's weights; changed in place.
        every: Steps from one exchange to the next.
    """

    def __init__(self, client: ParameterClient, weights: Tensor, *, every: int = 1) -> None:
        if every < 1:
            raise UsageError(f"every is {every}", hint="set it to at least 1")
        self.client, self.weights, self.every = client, weights, every
        self._difference = torch.empty_like(weights)
        self._steps = 0

    def stepped(self, progress: LeaseProgress | None = None, *, last: bool = False) -> bool:
        """Count a step of the client's optimizer, and exchange weights if due.

        Args:
            progress: Progress of the lease including this step; sent with the next exchange.
            last: Whether to exchange now, as at the end of a lease.

        Returns:
            Whether the weights were exchanged.
        """
        self._steps += 1
        if self._steps < self.every and not last:
            return False
        self.client.exchange(self.weights, self._difference, progress=progress)
        self._steps = 0
        return True
