"""K-step averaging: each rank takes K local steps on its shares, then all average their models.

The algorithm is K-AVG of Zhou and Cong 2018. Options add the outer optimizer of DiLoCo (`OuterMomentum`) and post-local
SGD: gradients are averaged in every step at first.

    every rank                 starts with the same model w
    K times                    a step on this rank's share of the next global batch, with the gradient scaled as in ddp
    one all-reduce             mean of parameters and norm statistics, and two numbers (requests to stop, to save)
    every rank                 w = the mean, or an outer step towards it

Samples per step, learning rate and loader position are the same as in ddp: ranks share the same global batches, and
samples are counted over all ranks. Only how often ranks communicate differs.

Rounds: models are averaged after local steps K, 2K, ... of an epoch, and at its end, where an evaluation and a
checkpoint need one model. A round never extends into the next epoch: if K exceeds the steps of an epoch, a round is one
epoch. Ranks do not communicate between averages, so a request to save or stop takes effect at the next average:
averaging on request would make the weights depend on the clock. A signal to stop therefore takes up to K steps to act,
and torchrun kills the processes 30 s after its signal.

Checkpoints contain the mean of the models. A run can resume from one with any number of ranks: with the same samples in
the same order at the same learning rate, only in shares of a different size. All ranks start from the checkpoint's
single set of moments. A run resumed with the same number of ranks repeats the original run bit for bit.

Exact, and tested:
    K = 1 with SGD, momentum and weight decay is SGD on the whole batch, up to rounding, even if shares are uneven.
    For a quadratic objective with additive noise, the weights after every average are those of SGD on the whole batch,
    for any K, because the gradient is linear in the weights.
Not exact:
    For any other objective, K > 1 is a different algorithm, whose weights depend on the number of ranks. So is Adam,
    even at K = 1: each rank's second moment includes the noise of its own small share, so steps are smaller and the
    learning rate must be tuned again. Clipping by norm and the loss scaling of fp16 are local to each rank.
    Norm statistics are the mean of the ranks' running statistics, each over the rank's own batches, as with ddp.

Moments (momentum buffers, Adam's m and v) stay local: averaging them gained nothing for twice or three times the bytes.
They are averaged only at the end of an epoch and for a checkpoint, which needs one set. The time of a checkpoint thus
affects the weights, by as much as moments differ between ranks.

Option ``compress`` sends differences to the last common model in 8 or 4 bits, with error feedback, see
`fastvid.train.strategies.average`. An average at the end of an epoch or for a checkpoint is sent in full precision,
together with what compression had withheld. The time of a checkpoint within an epoch thus affects the weights, and a
resumed run repeats the original run bit for bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from fastvid.errors import StateError, UsageError
from fastvid.load.batch.batch import Batch
from fastvid.runtime.values import check_choice, check_integer, check_least
from fastvid.train.loop.strategy import Round, Strategy
from fastvid.train.parts.replica import Loader, Replica
from fastvid.train.ranks import Member
from fastvid.train.strategies.average import BITS, Averager, Integers, NoiseMeter, moments, statistics
from fastvid.train.strategies.ddp import Ddp
from fastvid.train.tasks.task import Sums

log = logging.getLogger(__name__)

# DiLoCo (Douillard et al. 2023, arXiv 2311.08105), section 3.
_MOMENTUM: Final = 0.9
_LR: Final = 0.7


class OuterMomentum:
    """Momentum for the step from one common model to the next: the outer optimizer of DiLoCo (Douillard et al. 2023).

    It is torch's SGD with Nesterov momentum on the pseudo-gradient w - m. With anchor w, mean m of the ranks' models,
    momentum u and rate e::

        v = u v + (m - w)
        w = w + e (m - w + u v)

    Momentum 0 and rate 1 result in the mean itself, up to rounding.

    `velocity`: v; None before the first step.
    """

    def __init__(self, momentum: float = _MOMENTUM, lr: float = _LR) -> None:
        if not 0 <= momentum < 1:
            raise UsageError(f"sync option outer_momentum is {momentum}, expected 0 <= momentum < 1")
        if not 0 < lr < math.inf:
            raise UsageError(f"sync option outer_lr is {lr}, expected more than 0")
        self._momentum, self._lr = momentum, lr
        self.velocity: Tensor | None = None

    @torch.no_grad()
    def step(self, anchor: Tensor, mean: Tensor) -> None:
        """Replace the mean with the next common model.

        `anchor`: [n], the common model before the round. `mean`: [n], the mean of the ranks' models after the
        round; overwritten.
        """
        if self.velocity is None:
            self.velocity = torch.zeros_like(mean)
        moved = mean.sub_(anchor)
        self.velocity.mul_(self._momentum).add_(moved)
        moved.add_(self.velocity, alpha=self._momentum)
        torch.add(anchor, moved, alpha=self._lr, out=mean)


class Kavg(Strategy):
    """The strategy ``sync=kavg``.

    Args:
        member: This process.
        period: K, local steps per round.
        outer: Momentum over rounds: "none" or "nesterov".
        outer_momentum: Coefficient of the outer momentum; None is 0.9.
        outer_lr: Learning rate of the outer step; 1 moves to the mean. None is 0.7.
        local_after: Epochs of ddp before the first local step (post-local SGD).
        compress: "int8" or "int4" sends parameters as differences from the last common model; "none" sends parameters
            in float32, or float64 if any parameter is. Norm statistics are never compressed; with compression they are
            sent in a separate message.

    Attributes:
        local_steps: Local steps of the current round so far.
        meter: Measures the gradient noise, if a batch policy needs it.

    Raises:
        UsageError: If an option is out of range, or conflicts with another.
    """

    def __init__(
        self,
        member: Member,
        *,
        period: int = 8,
        outer: str = "none",
        outer_momentum: float | None = None,
        outer_lr: float | None = None,
        local_after: float = 0.0,
        compress: str = "none",
    ) -> None:
        check_choice("sync option outer", outer, ("none", "nesterov"))
        check_choice("sync option compress", compress, ("none", *BITS))
        check_least(0, **{"sync option local_after": local_after})
        given = {"momentum": outer_momentum, "lr": outer_lr}
        chosen = {name: value for name, value in given.items() if value is not None}
        if outer == "none" and chosen:
            raise UsageError(
                "sync options outer_momentum and outer_lr have no effect with outer=none",
                hint="set sync_options.outer=nesterov",
            )
        super().__init__(member)
        self._period = check_integer("sync option period", period, 1)
        self._outer = OuterMomentum(**chosen) if outer == "nesterov" else None
        self._codec = None if compress == "none" else Integers(BITS[compress])
        self._local_after = local_after
        self.meter: NoiseMeter | None = None
        self._ddp = Ddp(member)
        self._synchronous = False  # whether gradients are averaged in every step
        self._averager = Averager([], [], self.world_size)
        self._anchor: Tensor | None = None  # parameters of the last common model, if an option needs them
        self._samples_per_epoch = 1
        self.local_steps = 0
        self._apart = False  # whether the ranks' models may differ
        self._clips = 0  # clips of the round, over all ranks
        self._share = torch.zeros((), dtype=torch.float64, device=member.device)  # sum of this rank's shares in a round
        self._requests = torch.zeros(2, dtype=torch.int64)
        self._agreed: Tensor | None = None

    def measure(self, meter: NoiseMeter) -> None:
        """Start measuring the spread of the ranks' models at each average.

        Raises:
            UsageError: If averages are rounded by compression, which the measurement would take for noise.
        """
        if self._codec is not None:
            raise UsageError("batch=noise does not support compression to integers", hint="use batch=schedule")
        self.meter = meter

    def prepare(self, replica: Replica) -> None:
        super().prepare(replica)
        if self._outer or self._codec or self.meter:
            self._anchor = self._collected(replica).parameters.clone()

    def rounds(self, replica: Replica, loader: Loader, epochs: int) -> Generator[Round, None, None]:
        self._samples_per_epoch = max(1, replica.schedule.total // epochs)
        self._synchronous = self._starts_with_ddp(replica)
        if self._synchronous:
            self._ddp.prepare(replica)
        while (epoch := loader.epoch) < epochs:
            yield Round(replica, self._batches(replica, loader), epoch)

    def _starts_with_ddp(self, replica: Replica) -> bool:
        return replica.samples / self._samples_per_epoch < self._local_after

    def _batches(self, replica: Replica, loader: Loader) -> Iterator[Batch]:
        for batch in loader:
            if self._synchronous and not self._starts_with_ddp(replica):
                self._start_local_steps(replica)
            if self.local_steps == 0:
                self._clips = 0
                self._share.zero_()
            self._clips += batch.stop - batch.start
            yield batch

    def _start_local_steps(self, replica: Replica) -> None:
        """Switch from averaging gradients to local steps."""
        log.info("local steps begin after %d clips", replica.samples)
        self._ddp.settle(replica)
        replica.forward, self._synchronous = replica.model, False
        if self._anchor is not None:
            self._anchor.copy_(self._collected(replica).parameters)

    def loss_scale(self, weight: Tensor) -> float:
        if self.meter is not None:
            self._share += weight
        # Makes the plain mean over ranks equal to the step on the whole batch, even if shares are uneven.
        return float(self.world_size)

    def agree(self, requests: Tensor) -> Callable[[], Tensor | None]:
        if self._synchronous:
            return self._ddp.agree(requests)
        self._requests, self._agreed = requests, None
        return lambda: self._agreed

    def maybe_sync(self, replica: Replica, sums: Sums) -> None:  # noqa: ARG002
        if self._synchronous:
            return
        self.local_steps += 1
        self._apart = True
        if self.local_steps >= self._period:
            self._average(replica)

    def has_one_model(self) -> bool:
        return not self._apart

    def settle(self, replica: Replica) -> bool:
        if self._synchronous:
            return self._ddp.settle(replica)
        if self._apart:
            self._average(replica, whole=True)
        else:
            self._release(replica)
        if self.world_size > 1 and (kept := moments(replica.optimizer)):
            Averager([], kept, self.world_size).average()
        return True

    @torch.no_grad()
    def _average(self, replica: Replica, *, whole: bool = False) -> None:
        """End the round: move all ranks to the next common model.

        `whole`: whether to send it in full precision, together with what compression has withheld.
        """
        averager, anchor = self._collected(replica), self._anchor
        own = averager.parameters.clone() if self.meter is not None else None
        averager.reduce(anchor, whole=whole)
        mean = averager.parameters
        if anchor is not None:
            if self.meter is not None and own is not None:
                self._measure(self.meter, own - anchor, mean - anchor, replica.lr)
            if self._outer is not None:
                self._outer.step(anchor, mean)
            anchor.copy_(mean)
        averager.spread()
        self._agreed = (averager.words * self.world_size).round().to("cpu", torch.int64)
        self.local_steps, self._apart = 0, False

    def _measure(self, meter: NoiseMeter, own: Tensor, mean: Tensor, lr: float) -> None:
        """Measure how far this rank and the mean have moved in the round."""
        # Per step and unit of the learning rate, so that rounds of any length and rate can be summed.
        unit = (self.local_steps * lr) ** 2 or 1.0
        far, mean_far = (moved.double().square().sum() / unit for moved in (own, mean))
        meter.add(far, mean_far, self._share / self.local_steps, self._clips)

    def _release(self, replica: Replica) -> None:
        """Send what compression withheld on the ranks, and add its mean to the common model."""
        if self._codec is None or self._anchor is None or self.world_size == 1:
            return
        rest = Averager([torch.zeros_like(self._anchor)], [], self.world_size)
        if self._codec.drain(rest.buffer):
            rest.reduce()
            self._anchor.add_(rest.parameters)
            averager = self._collected(replica)
            averager.parameters.copy_(self._anchor)
            averager.spread()

    def _collected(self, replica: Replica) -> Averager:
        """Return the averager, filled with this rank's model."""
        parameters, others = list(replica.model.parameters()), statistics(replica.model)
        if not self._averager.consists_of([*parameters, *others]):
            words = len(self._requests)
            self._averager = Averager(parameters, others, self.world_size, words=words, codec=self._codec)
        self._averager.collect()
        self._averager.words.copy_(self._requests)
        return self._averager

    def state_dict(self) -> dict[str, Any]:
        return {"outer": [{"velocity": None if self._outer is None else self._outer.velocity}]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        outer = state["outer"]
        if len(outer) != 1:
            raise StateError(
                f"checkpoint was written with {len(outer)} fragments, which are gone", hint="use another run.out"
            )
        if self._outer is not None:
            velocity = outer[0]["velocity"]
            self._outer.velocity = None if velocity is None else velocity.to(self.member.device)
