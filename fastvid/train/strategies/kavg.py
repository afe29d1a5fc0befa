"""K-step averaging: each rank takes K local steps on its shares, then all average their models.

The algorithm is K-AVG of Zhou and Cong 2018. Options add Hier-AVG (groups of ranks average more often), block momentum
and SlowMo (`OuterMomentum`), post-local SGD (gradients are averaged in every step at first) and rounds of scheduled or
adaptive length (`Period`).

    every rank                 starts with the same model w
    K times                    a step on this rank's share of the next global batch, with the gradient scaled as in ddp
    one all-reduce             mean of parameters, norm statistics, optionally moments, and two words (stop, save)
    every rank                 w = the mean, or an outer step towards it

Samples per step, learning rate and loader position are those of ddp: ranks share the same global batches, and samples
are counted over all ranks. Only the time of communication differs.

Rounds: models are averaged after local steps K, 2K, ... of an epoch, and at its end, where an evaluation and a
checkpoint need one model. A round never extends into the next epoch: a K above the steps of an epoch means one epoch.
Ranks do not communicate between averages, so a request to save or stop takes effect at the next average: averaging on
request would make the weights depend on the clock. A signal to stop therefore takes up to K steps; torchrun kills after
30 s.

Checkpoints contain the mean, do not depend on the world size, and a run can resume from one with any number of ranks:
with the same samples in the same order at the same learning rate, in shares of a different size. All ranks start from
its single set of moments. A run resumed with the same number of ranks repeats the original run bit for bit.

Exact, and tested:
    K = 1 with SGD, momentum and weight decay is SGD on the whole batch, up to rounding, even if shares are uneven.
    For a quadratic objective with additive noise, the weights after every average are those of SGD on the whole batch,
    for any K, because the gradient is linear in the weights.
    Groups that average no more often than all ranks, and groups of one rank, change nothing.
Not exact:
    Any other objective with K > 1 is a different algorithm, whose weights depend on the number of ranks. So is Adam,
    even at K = 1: each rank's second moment includes the noise of its own small share, so steps are smaller and the
    learning rate must be tuned again. Clipping by norm and the loss scaling of fp16 are local to each rank.
    Norm statistics: the mean of the ranks' running statistics is that of their batches, as with ddp.

Moments (momentum buffers, Adam's m and v), option ``moments``:
    local     each rank keeps its own; they are averaged only at the end of an epoch and for a checkpoint, which needs
              one set. The time of a checkpoint thus affects the weights, by as much as moments differ between ranks.
    average   they are averaged with the parameters: twice the bytes for SGD with momentum, three times for Adam.
    reset     they are set to zero after each average.

Moments stay local by default: of Adam's, averaging them gained nothing for three times the bytes.

Less traffic, options ``outer`` and ``compress``:
    outer="nesterov"   the outer optimizer of DiLoCo, `OuterMomentum`.
    compress           differences to the last common model in 16, 8 or 4 bits, with error feedback,
                       `fastvid.train.strategies.average`.
With compression, an average at the end of an epoch or for a checkpoint is sent in full precision, together with what
compression had withheld. The time of a checkpoint within an epoch thus affects the weights, and a resumed run repeats
the original run bit for bit.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Final, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from fastvid.errors import StateError, UsageError
from fastvid.load.batch.batch import Batch
from fastvid.runtime.values import check_choice, check_least
from fastvid.train.loop.strategy import Round, Strategy
from fastvid.train.parts.replica import Loader, Replica
from fastvid.train.ranks import Member
from fastvid.train.strategies.average import (
    CODECS,
    Averager,
    NoiseMeter,
    RankSums,
    Traffic,
    moments,
    reset_moments,
    statistics,
)
from fastvid.train.strategies.ddp import Ddp
from fastvid.train.tasks.task import CLIPS, LOSS, Sums

NODE: Final = "node"
INTEGERS: Final = ("int8", "int4")
"""Compressions whose rounding a measurement of the gradient noise, or averages of groups, would notice."""


def ranks_per_group(size: int | str, world_size: int) -> int:
    """Return the ranks per group."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if size == NODE else size
    if not isinstance(ranks, int) or ranks < 1 or world_size % ranks:
        divisors = [str(number) for number in range(1, world_size + 1) if world_size % number == 0]
        raise UsageError(
            f"sync option group_size is {size!r}, which does not divide the world size {world_size}",
            hint=f"use {', '.join(divisors)}, or {NODE!r}",
        )
    return ranks


Kind = Literal["none", "block", "slowmo", "nesterov"]

# DiLoCo (Douillard et al. 2023, arXiv 2311.08105), section 3.
_NESTEROV: Final = (0.9, 0.7)


class OuterMomentum:
    """Momentum for the step from one common model to the next.

    With anchor w, mean m of the ranks' models, momentum u and rate e::

        v = u v + (m - w)
        w = w + e v

    This is "block", as in BMUF (Chen and Huo 2016) and Cong and Liu 2021. "slowmo" (Wang et al. 2019) keeps the
    momentum in units of the gradient, so v is rescaled whenever the learning rate changes; with a constant rate they
    are the same. "nesterov" is the outer optimizer of DiLoCo (Douillard et al. 2023): torch's SGD with Nesterov
    momentum, on the pseudo-gradient w - m::

        v = u v + (m - w)
        w = w + e (m - w + u v)

    Momentum 0 and rate 1 result in the mean itself, up to rounding.
    """

    def __init__(self, kind: str, momentum: float | None = None, lr: float | None = None) -> None:
        check_choice("sync option outer", kind, get_args(Kind))
        usual = _NESTEROV if kind == "nesterov" else (0.0, 1.0)
        momentum, lr = usual[0] if momentum is None else momentum, usual[1] if lr is None else lr
        if not 0 <= momentum < 1:
            raise UsageError(f"sync option outer_momentum is {momentum}, expected 0 <= momentum < 1")
        if not 0 < lr < math.inf:
            raise UsageError(f"sync option outer_lr is {lr}, expected more than 0")
        if kind == "none" and (momentum, lr) != (0.0, 1.0):
            raise UsageError(
                "sync options outer_momentum and outer_lr have no effect with outer=none",
                hint="set sync_options.outer to nesterov, block or slowmo",
            )
        self.active = kind != "none"
        self._slowmo, self._nesterov = kind == "slowmo", kind == "nesterov"
        self._momentum, self._lr = momentum, lr
        self._velocity: Tensor | None = None
        self._inner_lr = 0.0

    @torch.no_grad()
    def step(self, anchor: Tensor, mean: Tensor, inner_lr: float) -> None:
        """Replace the mean with the next common model.

        `anchor`: [n], the common model before the round. `mean`: [n], the mean of the ranks' models after the
        round; overwritten.
        """
        if self._velocity is None:
            self._velocity = torch.zeros_like(mean)
        velocity = self._velocity
        scale = inner_lr / self._inner_lr if self._slowmo and self._inner_lr > 0 else 1.0
        moved = mean.sub_(anchor)
        velocity.mul_(self._momentum * scale).add_(moved)
        if self._nesterov:
            velocity = moved.add_(velocity, alpha=self._momentum)
        torch.add(anchor, velocity, alpha=self._lr, out=mean)
        self._inner_lr = inner_lr

    def state_dict(self) -> dict[str, Any]:
        """Return the velocity (None before the first step) and the learning rate of its last step."""
        return {"velocity": self._velocity, "inner_lr": self._inner_lr}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Restore a state."""
        velocity = state["velocity"]
        self._velocity = None if velocity is None else velocity.to(device)
        self._inner_lr = float(state["inner_lr"])


Adapt = Literal["none", "loss"]

_SHAPE: Final = "use a whole number of steps, or STEPS@EPOCH,... such as 1@0,8@5,32@20.5"


class Period:
    """K as a function of the samples seen and, if adaptive, of the training loss.

    With ``adapt="loss"`` K is multiplied by ``sqrt(F / F0)`` and rounded up, where F is the mean training loss of the
    last `adapt_epochs` epochs and F0 that of the first; the factor never increases. Ranks thus communicate rarely while
    the loss decreases fast and the noise of single ranks does not matter, and often at the end. This is the rule of
    AdaComm (Wang and Joshi 2018), without its additional halving when the rule does not shorten a round.

    `table`: K, or ``K@EPOCH,...`` with ascending epochs from 0.
    """

    def __init__(self, table: int | str, adapt: str = "none", adapt_epochs: float = 1.0) -> None:
        check_choice("sync option adapt", adapt, get_args(Adapt))
        if not adapt_epochs > 0:
            raise UsageError(f"sync option adapt_epochs is {adapt_epochs}, expected more than 0")
        self.table = parse(table)
        self.adaptive = adapt == "loss"
        self._every = adapt_epochs
        self._first: float | None = None
        self._factor = 1.0
        self._looked = 0.0

    def steps(self, epochs: float) -> int:
        """Return K for the round that starts after `epochs` epochs."""
        steps = [steps for steps, epoch in self.table if epoch <= epochs][-1]
        return max(1, math.ceil(steps * self._factor))

    def due(self, epochs: float) -> bool:
        """Return whether the loss is to be observed now."""
        return self.adaptive and epochs >= self._looked + self._every

    def observe(self, loss: float, epochs: float) -> None:
        """Handle the mean training loss over all ranks since the last observation.

        It must be the same on every rank. A loss that is not finite and positive is ignored.
        """
        self._looked = epochs
        if not 0 < loss < math.inf:
            return
        if self._first is None:
            self._first = loss
        self._factor = min(self._factor, math.sqrt(loss / self._first))

    def state_dict(self) -> dict[str, Any]:
        """Return the observations so far."""
        return {"first": self._first, "factor": self._factor, "looked": self._looked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self._first, self._factor, self._looked = state["first"], float(state["factor"]), float(state["looked"])


def parse(table: int | str) -> tuple[tuple[int, float], ...]:
    """Parse a table into (steps, first epoch) pairs, ascending by epoch."""
    entries = []
    for part in str(table).split(","):
        steps, at, epoch = part.partition("@")
        try:
            entries.append((int(steps), float(epoch) if at else 0.0))
        except ValueError:
            raise UsageError(f"sync option period is {table!r}", hint=_SHAPE) from None
    epochs = [epoch for _, epoch in entries]
    if min(steps for steps, _ in entries) < 1 or epochs[0] != 0 or epochs != sorted(set(epochs)):
        raise UsageError(
            f"sync option period is {table!r}, expected at least 1 step, and ascending epochs from 0", hint=_SHAPE
        )
    return tuple(entries)


log = logging.getLogger(__name__)

Moments = Literal["local", "average", "reset"]
_MESH: Final = ("across", "within")


class Kavg(Strategy):
    """The strategy ``sync=kavg``.

    Args:
        member: This process.
        period: K, local steps per round; or a schedule, for example "1@0,8@5", see
            `fastvid.train.strategies.kavg`.
        adapt: "none", or "loss": rounds get shorter as the training loss decreases.
        adapt_epochs: Epochs between two observations of the loss.
        group_size: Ranks per group that averages more often, a divisor of the world size; groups consist of consecutive
            ranks. "node" uses torchrun's LOCAL_WORLD_SIZE, 1 disables groups.
        group_period: Local steps between two averages of a group, counted from the start of a round.
        moments: Treatment of the optimizer's moments: "local", "average" or "reset".
        outer: Momentum over rounds: "none", "block", "slowmo" or "nesterov".
        outer_momentum: Coefficient of the outer momentum; None is 0.9 for "nesterov", else 0.
        outer_lr: Learning rate of the outer step; 1 moves to the mean. None is 0.7 for "nesterov", else 1.
        local_after: Epochs of ddp before the first local step (post-local SGD).
        compress: "fp16", "bf16", "int8" or "int4" sends parameters as differences to the last common model; "none"
            sends parameters in float32, or float64 if any parameter is. Statistics and moments are never compressed,
            and are then sent in a separate message.

    Attributes:
        traffic: Traffic of this rank: "average" (all ranks), "group", "settle" (moments and what compression withheld,
            before a checkpoint), "control" (metrics and scores), and with compression "average_rest".
        local_steps: Steps of the round so far.
        meter: Measures the gradient noise if a batch policy requests it.

    Raises:
        UsageError: If an option is out of range, or conflicts with another or with the world size.
    """

    def __init__(
        self,
        member: Member,
        *,
        period: int | str = 8,
        adapt: str = "none",
        adapt_epochs: float = 1.0,
        group_size: int | str = 1,
        group_period: int = 1,
        moments: str = "local",
        outer: str = "none",
        outer_momentum: float | None = None,
        outer_lr: float | None = None,
        local_after: float = 0.0,
        compress: str = "none",
    ) -> None:
        check_choice("sync option moments", moments, get_args(Moments))
        check_choice("sync option compress", compress, ("none", *CODECS))
        check_least(1, **{"sync option group_period": group_period})
        check_least(0, **{"sync option local_after": local_after})
        super().__init__(member)
        self.period = Period(period, adapt, adapt_epochs)
        self._outer = OuterMomentum(outer, outer_momentum, outer_lr)
        self.traffic = Traffic()
        self.meter: NoiseMeter | None = None
        self._moments, self._compress = moments, compress
        self._codec = None if compress == "none" else CODECS[compress]()
        self._local_after = local_after
        self._group_size = ranks_per_group(group_size, self.world_size)
        self._group_period = group_period
        self._group: dist.ProcessGroup | None = None
        if self._group_size > 1 and compress in INTEGERS:
            raise UsageError(
                "sync option group_size cannot be combined with compression to integers",
                hint="remove it, or use compress=none",
            )
        self._ddp = Ddp(member)
        self._synchronous = False  # whether gradients are averaged in every step
        self._averager = Averager([], [])
        self._anchor: Tensor | None = None  # the last common model, if it is needed
        self._loss = RankSums(2, member.device, self.total)
        self._samples_per_epoch = 1
        self.local_steps, self._steps = 0, 1  # done and to do in the round
        self._apart = False  # whether the ranks' models may differ
        self._clips = 0  # of the round, over all ranks
        self._share = torch.zeros((), dtype=torch.float64, device=member.device)  # of the round, this rank's
        self._requests = torch.zeros(2, dtype=torch.int64)
        self._agreed: Tensor | None = None

    def measure(self, meter: NoiseMeter) -> None:
        """Start measuring the spread of the ranks' models at each average.

        Raises:
            UsageError: If there are groups, whose averages would hide the noise, or rounded averages.
        """
        if self._group_size > 1 or self._compress in INTEGERS:
            raise UsageError(
                "batch=noise does not support group_size or compression to integers",
                hint="use batch=schedule or batch=plateau",
            )
        self.meter = meter

    def prepare(self, replica: Replica) -> None:
        super().prepare(replica)
        if self._outer.active or self._compress != "none" or self.meter:
            self._anchor = self._collected(replica).parameters.clone()
        # A group of all ranks is the default group.
        if 1 < self._group_size < self.world_size:
            shape = (self.world_size // self._group_size, self._group_size)
            mesh = init_device_mesh(self.member.device.type, shape, mesh_dim_names=_MESH)
            self._group = mesh.get_group(_MESH[1])

    def rounds(self, replica: Replica, loader: Loader, epochs: int) -> Generator[Round, None, None]:
        self._samples_per_epoch = max(1, replica.schedule.total // epochs)
        self._synchronous = self._epochs(replica) < self._local_after
        if self._synchronous:
            self._ddp.prepare(replica)
        while (epoch := loader.epoch) < epochs:
            yield Round(replica, self._batches(replica, loader), epoch)

    def _batches(self, replica: Replica, loader: Loader) -> Iterator[Batch]:
        for batch in loader:
            if self._synchronous and self._epochs(replica) >= self._local_after:
                self._start_local_steps(replica)
            if self.local_steps == 0:
                self._begin(replica)
            self._clips += batch.stop - batch.start
            yield batch

    def _start_local_steps(self, replica: Replica) -> None:
        """Switch from averaging gradients to local steps."""
        log.info("local steps begin after %d clips", replica.samples)
        self._ddp.settle(replica)
        replica.forward, self._synchronous = replica.model, False
        if self._anchor is not None:
            self._anchor.copy_(self._collected(replica).parameters)

    def _begin(self, replica: Replica) -> None:
        """Begin a round, in which all ranks start with the same model."""
        epochs = self._epochs(replica)
        self._look(epochs)
        self._steps = self.period.steps(epochs)
        self._clips = 0
        self._share.zero_()

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

    def maybe_sync(self, replica: Replica, sums: Sums) -> None:
        if self.period.adaptive:
            self._loss.add(sums.select(LOSS, CLIPS))
        if self._synchronous:
            return
        self.local_steps += 1
        self._apart = True
        if self.local_steps >= self._steps:
            self._average(replica)
        elif self._group_size > 1 and self.local_steps % self._group_period == 0:
            self._collected(replica).reduce(self._group_size, self._group, "group", self._anchor)
            self._spread(replica)

    def has_one_model(self) -> bool:
        return not self._apart

    def total(self, values: Tensor) -> Callable[[], Tensor]:
        if self.world_size > 1:
            self.traffic.count("control", values)
        return super().total(values)

    def settle(self, replica: Replica) -> bool:
        if self.period.adaptive:
            self._loss.gather()
        if self._synchronous:
            return self._ddp.settle(replica)
        if self._apart:
            self._average(replica, whole=True)
        else:
            self._release(replica)
        if self._moments == "local" and self.world_size > 1 and (kept := moments(replica.optimizer)):
            averager = Averager([], kept, traffic=self.traffic)
            averager.collect()
            averager.reduce(self.world_size, None, "settle")
            averager.spread()
        return True

    @torch.no_grad()
    def _average(self, replica: Replica, *, whole: bool = False) -> None:
        """End the round: move all ranks to the next common model.

        `whole`: whether to send it in full precision, together with what compression has withheld.
        """
        averager, anchor = self._collected(replica), self._anchor
        own = averager.parameters.clone() if self.meter is not None else None
        averager.reduce(self.world_size, None, "average", anchor, whole=whole)
        mean = averager.parameters
        if anchor is not None:
            if self.meter is not None and own is not None:
                self._measure(self.meter, own - anchor, mean - anchor, replica.lr)
            if self._outer.active:
                self._outer.step(anchor, mean, replica.lr)
            anchor.copy_(mean)
        self._spread(replica)
        self._agreed = (averager.words * self.world_size).round().to("cpu", torch.int64)
        self.local_steps, self._apart = 0, False

    def _measure(self, meter: NoiseMeter, own: Tensor, mean: Tensor, lr: float) -> None:
        """Measure how far this rank and the mean have moved in the round."""
        # Per step and unit of the learning rate, so that rounds of any length and rate can be summed.
        unit = (self.local_steps * lr) ** 2 or 1.0
        far, mean_far = (moved.double().square().sum() / unit for moved in (own, mean))
        meter.add(far, mean_far, self._share / self.local_steps, self._clips)

    def _release(self, replica: Replica) -> None:
        """Add what compression withheld on any rank to the model, which all ranks have alike."""
        if self._codec is None or self._anchor is None or self.world_size == 1:
            return
        rest = Averager([torch.zeros_like(self._anchor)], [], traffic=self.traffic)
        if self._codec.drain(rest.buffer):
            rest.reduce(self.world_size, None, "settle")
            self._anchor.add_(rest.parameters)
            averager = self._collected(replica)
            averager.parameters.copy_(self._anchor)
            averager.spread()

    def _collected(self, replica: Replica) -> Averager:
        """Return the averager, filled with this rank's model."""
        parameters, others = list(replica.model.parameters()), statistics(replica.model)
        if self._moments == "average":
            others += moments(replica.optimizer)
        if not self._averager.consists_of([*parameters, *others]):
            words = len(self._requests)
            self._averager = Averager(parameters, others, words=words, codec=self._codec, traffic=self.traffic)
        self._averager.collect()
        self._averager.words.copy_(self._requests)
        return self._averager

    def _spread(self, replica: Replica) -> None:
        """Copy the values in the averager into this rank's replica."""
        self._averager.spread()
        if self._moments == "reset":
            reset_moments(replica.optimizer)

    def _look(self, epochs: float) -> None:
        """Pass the training loss to the period, if due."""
        if self.period.due(epochs):
            loss, clips = self._loss.gather()
            self.period.observe(loss / max(1.0, clips), epochs)
            self._loss.clear()

    def _epochs(self, replica: Replica) -> float:
        return replica.samples / self._samples_per_epoch

    def state_dict(self) -> dict[str, Any]:
        return {
            "period": self.period.state_dict(),
            "loss": self._loss.state_dict(),
            "outer": [self._outer.state_dict()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.period.load_state_dict(state["period"])
        self._loss.load_state_dict(state["loss"])
        outer = state["outer"] if isinstance(state["outer"], list) else [state["outer"]]  # fastvid 0.1 had no list
        if len(outer) != 1:
            raise StateError(
                f"checkpoint was written with {len(outer)} fragments, which are gone", hint="use another run.out"
            )
        self._outer.load_state_dict(outer[0], self.member.device)
