"""Measures the gradient noise scale from gradients that the ranks compute anyway, at no extra cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fastvid.train.strategies.shared.rank_sums import RankSums

_EMPTY = 1e-12  # a share below this contains no clip: nonempty shares are at least one over the global batch size


class NoiseMeter:
    """Estimates the gradient noise scale of McCandlish et al. 2018 (appendix A.1).

    It is S / G2, the variance of one clip's gradient over the squared gradient, in units of a batch size: at that
    batch size, noise and signal of a step are equal.

    The estimate compares gradients of two batch sizes: each rank's and their mean. With x_p the gradient of rank p's
    b_p clips, and x the mean over the B clips of all P ranks::

        E|x_p|^2 = G2 + S / b_p      S  = sum_p b_p (|x_p|^2 - |x|^2) / (P - 1)
        E|x|^2   = G2 + S / B        G2 = |x|^2 - S / B

    Both are unbiased, even if shares are uneven, and the result is the ratio of their means over many steps. With local
    steps, x_p is the distance that rank p has moved in a round, per step and unit of the learning rate, and b_p the
    clips of all its steps; this is accurate if the gradient hardly changes within a round. Momentum makes the estimate
    too small unless a round is longer than 1 / (1 - momentum) steps; with Adam, it is in Adam's metric.

    `world_size`: P, at least 2; with one rank nothing is measured.
    """

    def __init__(self, world_size: int, device: torch.device, total: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        self.world_size = world_size
        self.count = 0
        self._window = RankSums(4, device, total)

    def add(self, own: Tensor, mean: Tensor, share: Tensor, clips: int) -> None:
        """Add a measurement."""
        if self.world_size < 2:
            return
        # A rank without clips contributes 0, because b_p |x_p|^2 is 0.
        single = own / (self.world_size * share.clamp_min(_EMPTY)).square()
        values = torch.stack([share * clips * single, share * clips * mean, share * single, share * mean])
        # A step that overflowed in fp16 is skipped on every rank, because the mean over all ranks is not finite either.
        finite = torch.isfinite(mean)
        self._window.add(torch.where(finite & torch.isfinite(values), values, 0.0))
        self.count += 1

    def scale(self) -> float:
        """Return S / G2 since `clear`, in clips; infinite without signal, nan without noise too.

        The result is the same on every rank. Every rank must call it at the same point.
        """
        own, mean, own_share, mean_share = self._window.gather()
        others = max(1, self.world_size - 1)
        noise = (own - mean) / others
        signal = mean_share - (own_share - mean_share) / others
        if noise <= 0:
            return math.nan if signal <= 0 else 0.0
        return math.inf if signal <= 0 else noise / signal

    def clear(self) -> None:
        """Discard all measurements."""
        self._window.clear()
        self.count = 0

    def gather(self) -> None:
        """Sum the measurements over the ranks, before a checkpoint."""
        self._window.gather()

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements as last gathered, and the world size."""
        return {"window": self._window.state_dict(), "count": self.count, "world_size": self.world_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; measurements made with a different world size cannot be combined and are discarded."""
        self.clear()
        if state["world_size"] == self.world_size:
            self._window.load_state_dict(state["window"])
            self.count = int(state["count"])


class GradientNorms:
    """Measures the squared norms of this rank's gradient and of the mean, in DDP's all-reduce."""

    def __init__(self, wrapped: DistributedDataParallel, device: torch.device) -> None:
        self.wrapped = wrapped
        self._norms = torch.zeros(2, dtype=torch.float64, device=device)
        # A lambda without annotations, because torch versions differ in the annotations that they accept.
        wrapped.register_comm_hook(None, lambda _, bucket: self._average(bucket))

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the squared norms of this rank's gradient and of the mean since the last call."""
        own, mean = self._norms.clone()
        self._norms.zero_()
        return own, mean

    def _average(self, bucket: Any) -> torch.futures.Future[Tensor]:
        message = bucket.buffer()
        self._norms[0] += message.double().square().sum()
        work: Any = dist.all_reduce(message.div_(dist.get_world_size()), async_op=True)

        def done(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            mean = future.value()[0]
            self._norms[1] += mean.double().square().sum()
            return mean

        averaged: torch.futures.Future[Tensor] = work.get_future().then(done)
        return averaged
