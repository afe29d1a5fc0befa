"""The noise of the gradient, measured for nothing from what ranks compute anyway."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fastvid.train.strategies.shared.window import Window

_EMPTY = 1e-12  # a share below this holds no clip: shares are at least one over the global batch


class NoiseMeter:
    """The gradient noise scale of McCandlish et al. 2018 (appendix A.1): noise of one clip's gradient over the squared
    gradient, S / G2. It has the unit of a batch size: at that batch, noise and signal of a step are equal.

    It compares gradients of two batch sizes: each rank's and their mean. With x_p the gradient of rank p's b_p clips,
    x the mean over the B clips of all P ranks::

        E|x_p|^2 = G2 + S / b_p      S  = sum_p b_p (|x_p|^2 - |x|^2) / (P - 1)
        E|x|^2   = G2 + S / B        G2 = |x|^2 - S / B

    Both are unbiased, also where shares are uneven, and their means over many steps are divided. With local steps x_p
    is how far rank p has moved in a round, per step and unit of the learning rate, and b_p the clips of all its steps;
    that is exact where the gradient hardly changes within a round. Momentum makes the estimate too small until a round
    is longer than its memory, 1 / (1 - momentum) steps; Adam measures in its own metric.

    Args:
        world_size: P, at least 2; with one rank nothing is measured.
        device: Where gradients are.
        total: Sums a CPU tensor over the ranks.

    Attributes:
        count: Measurements since `clear`; the same on every rank.
    """

    def __init__(self, world_size: int, device: torch.device, total: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        self.world_size = world_size
        self.count = 0
        self._window = Window(4, device, total)

    def add(self, own: Tensor, mean: Tensor, share: Tensor, clips: int) -> None:
        """One measurement.

        Args:
            own: Squared norm of this rank's gradient, scaled as ddp scales it: of ``P b_p / B`` times x_p.
            mean: Squared norm of the mean over the ranks, x.
            share: b_p / B, this rank's part of the clips.
            clips: B.
        """
        if self.world_size < 2:
            return
        # A rank without a clip has nothing to say: b_p |x_p|^2 is 0.
        single = own / (self.world_size * share.clamp_min(_EMPTY)).square()
        values = torch.stack([share * clips * single, share * clips * mean, share * single, share * mean])
        # What an fp16 step overflowed is left out on every rank: the mean of all ranks is not finite either.
        finite = torch.isfinite(mean)
        self._window.add(torch.where(finite & torch.isfinite(values), values, 0.0))
        self.count += 1

    def scale(self) -> float:
        """S / G2 over the measurements since `clear`, the same on every rank, which must all call it here; in clips.
        Infinite where no signal is left of the noise; nan where there is neither."""
        own, mean, own_share, mean_share = self._window.gather()
        others = max(1, self.world_size - 1)
        noise = (own - mean) / others
        signal = mean_share - (own_share - mean_share) / others
        if noise <= 0:
            return math.nan if signal <= 0 else 0.0
        return math.inf if signal <= 0 else noise / signal

    def clear(self) -> None:
        """Forgets all measurements."""
        self._window.clear()
        self.count = 0

    def gather(self) -> None:
        """Brings the ranks' measurements together, before a checkpoint."""
        self._window.gather()

    def state_dict(self) -> dict[str, Any]:
        """The measurements as last gathered, and how many ranks made them."""
        return {"window": self._window.state_dict(), "count": self.count, "world_size": self.world_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a state over. Measurements of another number of ranks are left out: they cannot be added to these."""
        self.clear()
        if state["world_size"] == self.world_size:
            self._window.load_state_dict(state["window"])
            self.count = int(state["count"])


class GradientNorms:
    """Squared norms of the gradient of this rank and of the mean, taken while DistributedDataParallel averages.

    Args:
        wrapped: Its communication hook is replaced by one that averages in the same way.
        device: Where gradients are.
    """

    def __init__(self, wrapped: DistributedDataParallel, device: torch.device) -> None:
        self.wrapped = wrapped
        self._norms = torch.zeros(2, dtype=torch.float64, device=device)
        # Without annotations: what torch accepts as one differs between its versions.
        wrapped.register_comm_hook(None, lambda _, bucket: self._average(bucket))

    def take(self) -> tuple[Tensor, Tensor]:
        """Squared norms since the last time: of this rank's gradient, and of the mean."""
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
