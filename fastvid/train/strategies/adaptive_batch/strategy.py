"""A strategy whose global batch grows during the run: any of those that share batches, with a batch policy around it.

Samples, positions and lineage stay exact: a batch size may change at any position of the epoch's order, and an epoch
delivers what it would have delivered at the first size. Where a large batch does not fit into what is left of an epoch,
a smaller multiple of the first takes it.

The learning rate, option ``batch_lr``:
    linear   the schedule's rate times the growth of the batch, so that rate over batch follows the schedule's path:
             with batches that double where the rate is halved, the rate stays as it was. Default of "schedule".
    keep     the schedule's rate; rate over batch falls with each growth. Default of "noise" and "plateau".

A run goes on from a checkpoint in any world with the sizes that were decided. Measurements of the noise that another
number of ranks made are left out, so the next decision may come later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fastvid.errors import UsageError
from fastvid.load.batch.batch import Batch
from fastvid.train.loop.strategy import Round, Strategy
from fastvid.train.parts.evaluate import Score
from fastvid.train.parts.loader_protocol import Loader
from fastvid.train.parts.replica import Replica
from fastvid.train.ranks.elastic import Member
from fastvid.train.strategies.adaptive_batch.policy import BatchPolicy, Noise, Scheduled, make_policy
from fastvid.train.strategies.shared.noise import GradientNorms, NoiseMeter

LrRule = Literal["linear", "keep"]


@runtime_checkable
class Measuring(Protocol):
    """A strategy that measures the gradient's noise itself; else it is read off the buckets of torch's DDP."""

    def measure(self, meter: NoiseMeter) -> None:
        """Add measurements to a meter from now on."""
        ...


class AdaptiveBatch(Strategy):
    """The options ``batch...`` of every strategy whose ranks share batches.

    Args:
        inner: How replicas agree.
        member: This process.
        batch: Policy: "schedule", "noise" or "plateau", see `fastvid.train.strategies.adaptive_batch.policy`.
        batch_growth: Factor of one growth, a whole number of at least 2.
        batch_max: Largest global batch; None for no limit.
        batch_lr: "linear" or "keep"; None is the policy's default.
        batch_at: Of "schedule": epochs, such as "30,60"; None takes the milestones of the learning rate.
        batch_threshold: Of "noise": noise scale over batch above which it grows, 1 by default. Of "plateau": relative
            improvement that counts, 0.01 by default.
        batch_patience: Of "plateau": evaluations to wait, 2 by default.
        batch_window: Of "noise": measurements between two decisions; ddp measures in each step, kavg at each average.

    Raises:
        UsageError: An option is out of range or does not go with another.
    """

    def __init__(
        self,
        inner: Strategy,
        member: Member,
        *,
        batch: str,
        batch_growth: int = 2,
        batch_max: int | None = None,
        batch_lr: str | None = None,
        batch_at: str | float | None = None,
        batch_threshold: float | None = None,
        batch_patience: int | None = None,
        batch_window: int = 50,
    ) -> None:
        if batch_lr not in (None, *get_args(LrRule)):
            raise UsageError(f"sync option batch_lr is {batch_lr!r}", hint=f"known are {', '.join(get_args(LrRule))}")
        if batch_window < 1:
            raise UsageError(f"sync option batch_window is {batch_window}, expected at least 1 measurement")
        super().__init__(member)
        self.inner = inner
        self.policy: BatchPolicy = make_policy(
            batch,
            growth=batch_growth,
            largest=batch_max,
            at=batch_at,
            threshold=batch_threshold,
            patience=batch_patience,
        )
        self.meter: NoiseMeter | None = None
        self._linear = isinstance(self.policy, Scheduled) if batch_lr is None else batch_lr == "linear"
        self._window = batch_window
        self._norms: GradientNorms | None = None
        self._share = torch.zeros((), dtype=torch.float64, device=member.device)
        self._clips = 0
        if isinstance(self.policy, Noise):
            self.meter = NoiseMeter(member.world.size, member.device, inner.total)
            if isinstance(inner, Measuring):
                inner.measure(self.meter)

    def prepare(self, replica: Replica) -> None:
        self.inner.prepare(replica)
        measured = isinstance(self.inner, Measuring) or isinstance(replica.forward, DistributedDataParallel)
        if self.meter is not None and self.world_size > 1 and not measured:
            raise UsageError(
                f"batch=noise does not go with {type(self.inner).__name__}: nothing measures the gradient's noise",
                hint="give it a method measure(meter), or use batch=schedule or batch=plateau",
            )

    def rounds(self, replica: Replica, loader: Loader, epochs: int) -> Generator[Round, None, None]:
        schedule = replica.schedule
        self.policy.begin(loader.global_batch_size, max(1, schedule.total // epochs), schedule.milestones)
        feed = ResizingLoader(
            loader, lambda: self.policy.size(replica.samples), lambda batch: self._see(replica, batch)
        )
        yield from self.inner.rounds(replica, feed, epochs)

    def _see(self, replica: Replica, batch: Batch) -> None:
        """Before a step."""
        self._clips = batch.stop - batch.start
        if self._linear:
            replica.lr_scale = self.policy.size(replica.samples) / self.policy.first
        wrapped = replica.forward
        if self.meter is not None and isinstance(wrapped, DistributedDataParallel):
            if self._norms is None or self._norms.wrapped is not wrapped:
                self._norms = GradientNorms(wrapped, self.member.device)
        else:
            self._norms = None

    def accumulate(self, replica: Replica, *, last: bool) -> contextlib.AbstractContextManager[None]:
        return self.inner.accumulate(replica, last=last)

    def loss_scale(self, weight: Tensor) -> Tensor | float:
        self._share = weight
        return self.inner.loss_scale(weight)

    def agree(self, wishes: Tensor) -> Callable[[], Tensor | None]:
        return self.inner.agree(wishes)

    def maybe_sync(self, replica: Replica, sums: Tensor) -> None:
        self.inner.maybe_sync(replica, sums)
        if self.meter is not None:
            if self._norms is not None:
                self.meter.add(*self._norms.take(), self._share, self._clips)
            self._decide(self.meter, replica)

    def _decide(self, meter: NoiseMeter, replica: Replica) -> None:
        if meter.count >= self._window:
            self.policy.observe_noise(meter.scale(), replica.samples)
            meter.clear()

    def total(self, values: Tensor) -> Callable[[], Tensor]:
        return self.inner.total(values)

    def settle(self, replica: Replica) -> bool:
        if not self.inner.settle(replica):
            return False
        if self.meter is not None:
            self._decide(self.meter, replica)
            self.meter.gather()
        return True

    def scored(self, replica: Replica, score: Score) -> None:
        self.inner.scored(replica, score)
        self.policy.observe_loss(score.loss, replica.samples)

    def state_dict(self) -> dict[str, Any]:
        meter = None if self.meter is None else self.meter.state_dict()
        return {**self.inner.state_dict(), "batch": {"policy": self.policy.state_dict(), "meter": meter}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a state over; one that was written without a batch policy begins with the first size."""
        self.inner.load_state_dict(state)
        own = state.get("batch")
        if own is not None:
            self.policy.load_state_dict(own["policy"])
            if self.meter is not None and own["meter"] is not None:
                self.meter.load_state_dict(own["meter"])

    def on_membership_change(self, before: int, now: int) -> None:
        self.inner.on_membership_change(before, now)

    def lineage(self) -> list[dict[str, int | str]] | None:
        return self.inner.lineage()

    def numbers(self) -> dict[str, float]:
        return self.inner.numbers()


class ResizingLoader:
    """A loader whose global batch size may be another before each batch.

    Args:
        loader: Gives the batches; at the first size when this is made.
        size: Size of the next batch: a multiple of the first.
        see: Is shown each batch before it is given.
    """

    def __init__(self, loader: Loader, size: Callable[[], int], see: Callable[[Batch], None]) -> None:
        self._loader, self._size, self._see = loader, size, see
        self._first = loader.global_batch_size

    @property
    def epoch(self) -> int:
        """See `fastvid.train.parts.loader_protocol.Loader`."""
        return self._loader.epoch

    @property
    def global_batch_size(self) -> int:
        """See `fastvid.train.parts.loader_protocol.Loader`."""
        return self._loader.global_batch_size

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self._loader.set_batch_size(self._first)
            fit = len(self._loader)  # batches of the first size that are left
            if fit == 0:
                break
            size = self._size()
            self._loader.set_batch_size(min(size, fit * self._first))
            left = len(self._loader)
            for batch in self._loader:
                self._see(batch)
                yield batch
                left -= 1
                if left == 0 or self._size() != size:
                    break
        # Nothing is left: this ends the epoch.
        for _ in self._loader:
            raise AssertionError

    def __len__(self) -> int:
        return len(self._loader)

    def set_batch_size(self, global_batch_size: int) -> None:
        """See `fastvid.train.parts.loader_protocol.Loader`."""
        self._loader.set_batch_size(global_batch_size)

    def state_dict(self) -> dict[str, Any]:
        """See `fastvid.train.parts.loader_protocol.Loader`."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `fastvid.train.parts.loader_protocol.Loader`."""
        self._loader.load_state_dict(state)

    def go(self, epoch: int, start: int, stop: int) -> None:
        """See `fastvid.train.parts.loader_protocol.Loader`."""
        self._loader.go(epoch, start, stop)
