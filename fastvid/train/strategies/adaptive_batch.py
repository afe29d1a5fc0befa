"""Policies that increase the global batch size: by schedule or by gradient noise.

The 2018 system of Cong et al. has an adaptive batch size whose rule is not published; these policies do not
reproduce it.

    schedule   grows where the learning rate would decay, or at given epochs: AdaBatch (Devarakonda et al. 2017), Smith
               et al. 2018
    noise      grows while the gradient noise scale (`fastvid.train.strategies.average`) exceeds the batch size:
               McCandlish et al. 2018

A policy's inputs are the same on every rank, so its batch sizes are too. Sizes never decrease; each is the first size
times a power of the growth factor.

`AdaptiveBatch` adds a policy to a strategy whose ranks share batches.

Samples, positions and lineage stay exact: the batch size may change at any position of the epoch's order, and an epoch
delivers the same samples as with the first size. If a batch would exceed the rest of an epoch, the rest is delivered
as a smaller batch, a multiple of the first size.

The learning rate, option ``batch_lr``:
    linear   the schedule's rate times the growth of the batch, so that the ratio of rate to batch size follows the
             schedule: if batches double where the rate is halved, the rate stays constant. Default of "schedule".
    keep     the schedule's rate; the ratio decreases with each growth. Default of "noise".

A run resumes from a checkpoint with any world size and the batch sizes decided so far. Noise measurements made with a
different world size are discarded, so the next decision may come later.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fastvid.errors import UsageError
from fastvid.load.batch.batch import Batch
from fastvid.runtime.values import check_choice, check_least
from fastvid.train.loop.strategy import Round, Strategy
from fastvid.train.parts.replica import Loader, Replica
from fastvid.train.ranks import Member
from fastvid.train.strategies.average import GradientNorms, NoiseMeter
from fastvid.train.tasks.task import Sums

log = logging.getLogger(__name__)


class BatchPolicy:
    """Decides the size of the global batch. Every method is called on every rank with the same arguments.

    `growth`: growth factor, a whole number of at least 2, so that every size is a multiple of the first. `largest`:
    maximum size in clips; None for no maximum. `growths`: how often the batch has grown.
    """

    def __init__(self, growth: int = 2, largest: int | None = None) -> None:
        if not isinstance(growth, int) or growth < 2:
            raise UsageError(f"sync option batch_growth is {growth}, expected a whole number of at least 2")
        self.growth, self.largest = growth, largest
        self.first = 1
        self.growths = 0

    def begin(self, first: int, samples_per_epoch: int, milestones: Sequence[int]) -> None:  # noqa: ARG002
        """Prepare the policy before the first batch of a new or resumed run.

        `first`: size of the first batch, in clips. `milestones`: numbers of samples after which the learning rate
        decays.
        """
        if self.largest is not None and self.largest < first:
            raise UsageError(
                f"sync option batch_max is {self.largest}, less than the first batch of {first} clips",
                hint="raise sync_options.batch_max or lower data.global_batch_size",
            )
        self.first = first

    def size(self, samples: int) -> int:  # noqa: ARG002
        """Return the size in clips of the batch that starts after `samples` samples of the run."""
        return self.grown(self.growths)

    def observe_noise(self, scale: float, samples: int) -> None:
        """Handle a measurement of the gradient noise scale, in clips; it may be infinite or nan."""

    def grown(self, times: int) -> int:
        """Return the size after growing `times` times, but no more than `largest`."""
        size = self.first
        for _ in range(times):
            if self.largest is not None and size * self.growth > self.largest:
                break
            size *= self.growth
        return size

    def _grow(self, samples: int, why: str) -> None:
        before, after = self.grown(self.growths), self.grown(self.growths + 1)
        if after > before:
            self.growths += 1
            log.info("batch of %d clips grows to %d after %d clips: %s", before, after, samples, why)

    def state_dict(self) -> dict[str, Any]:
        """Return the decisions so far."""
        return {"growths": self.growths}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self.growths = int(state["growths"])


class Scheduled(BatchPolicy):
    """Grows once at each milestone, a number of samples; the size is a pure function of the samples seen."""

    def __init__(self, growth: int = 2, largest: int | None = None, at: str | float | None = None) -> None:
        super().__init__(growth, largest)
        self._at = None if at is None else epochs_of(at)
        self.milestones: tuple[int, ...] = ()

    def begin(self, first: int, samples_per_epoch: int, milestones: Sequence[int]) -> None:
        super().begin(first, samples_per_epoch, milestones)
        if self._at is not None:
            milestones = [round(epoch * samples_per_epoch) for epoch in self._at]
        elif not milestones:
            raise UsageError(
                "batch=schedule has no epochs to grow at: the learning rate has no milestones",
                hint="set sync_options.batch_at to epochs, or optim.decay=step and optim.milestones",
            )
        self.milestones = tuple(milestones)

    def size(self, samples: int) -> int:
        return self.grown(sum(samples >= milestone for milestone in self.milestones))


class Noise(BatchPolicy):
    """Grows once per measurement in which the noise scale exceeds `threshold` times the batch size."""

    def __init__(self, growth: int = 2, largest: int | None = None, threshold: float = 1.0) -> None:
        super().__init__(growth, largest)
        self.threshold = _positive("batch_threshold", threshold)

    def observe_noise(self, scale: float, samples: int) -> None:
        if scale > self.threshold * self.size(samples):
            self._grow(samples, f"gradient noise scale is {scale:.3g}")


def make_policy(name: str, **options: Any) -> BatchPolicy:
    """Build the policy of that name; an option that is None keeps the policy's default."""
    kinds: dict[str, type[BatchPolicy]] = {"schedule": Scheduled, "noise": Noise}
    check_choice("sync option batch", name, kinds)
    given = {option: value for option, value in options.items() if value is not None}
    if unknown := given.keys() - inspect.signature(kinds[name]).parameters.keys():
        raise UsageError(f"batch={name} has no option batch_{min(unknown)}", hint="remove it, or use another policy")
    return kinds[name](**given)


def epochs_of(text: str | float) -> tuple[float, ...]:
    """Parse the epochs of an option, for example "30,60,80.5": ascending, above 0."""
    try:
        epochs = tuple(float(part) for part in str(text).split(","))
    except ValueError:
        epochs = ()
    if not epochs or epochs[0] <= 0 or list(epochs) != sorted(set(epochs)):
        raise UsageError(f"sync option batch_at is {text!r}, expected ascending epochs above 0, such as 30,60,80.5")
    return epochs


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise UsageError(f"sync option {name} is {value}, expected more than 0")
    return value


class AdaptiveBatch(Strategy):
    """Adds the options ``batch...`` to a strategy whose ranks share batches.

    `build_strategy` derives a class from this one and the strategy's class, in this order. `options`: options of the
    strategy. The gradient noise is measured in DDP's buckets, or by the strategy itself if it has a method
    ``measure(meter)``.
    """

    def __init__(
        self,
        member: Member,
        *,
        batch: str,
        batch_growth: int = 2,
        batch_max: int | None = None,
        batch_lr: str | None = None,
        batch_at: str | float | None = None,
        batch_threshold: float | None = None,
        batch_window: int = 50,
        **options: Any,
    ) -> None:
        check_choice("sync option batch_lr", batch_lr, ("linear", "keep", None))
        check_least(1, **{"sync option batch_window": batch_window})
        super().__init__(member, **options)
        self.batch_policy = make_policy(
            batch, growth=batch_growth, largest=batch_max, at=batch_at, threshold=batch_threshold
        )
        self.meter: NoiseMeter | None = None
        self._batch_linear = isinstance(self.batch_policy, Scheduled) if batch_lr is None else batch_lr == "linear"
        self._batch_window = batch_window
        self._batch_norms: GradientNorms | None = None
        self._batch_share: Tensor | float = 0.0
        self._batch_clips = 0
        self._measure_itself: Any = getattr(self, "measure", None)
        if isinstance(self.batch_policy, Noise):
            self.meter = NoiseMeter(member.world.size, member.device, self.total)
            if self._measure_itself is not None:
                self._measure_itself(self.meter)

    def prepare(self, replica: Replica) -> None:
        super().prepare(replica)
        measured = self._measure_itself is not None or isinstance(replica.forward, DistributedDataParallel)
        if self.meter is not None and self.world_size > 1 and not measured:
            raise UsageError(
                f"batch=noise does not support {type(self).__name__}, which does not measure the gradient noise",
                hint="add a method measure(meter) to it, or use batch=schedule",
            )

    def rounds(self, replica: Replica, loader: Loader, epochs: int) -> Generator[Round, None, None]:
        schedule, policy = replica.schedule, self.batch_policy
        policy.begin(loader.global_batch_size, max(1, schedule.total // epochs), schedule.milestones)
        resizing = ResizingLoader(
            loader, lambda: policy.size(replica.samples), lambda batch: self._before_step(replica, batch)
        )
        yield from super().rounds(replica, cast("Loader", resizing), epochs)

    def _before_step(self, replica: Replica, batch: Batch) -> None:
        """Scale the learning rate for the next step, and attach the noise measurement to DDP if it is used."""
        self._batch_clips = batch.stop - batch.start
        if self._batch_linear:
            replica.lr_scale = self.batch_policy.size(replica.samples) / self.batch_policy.first
        wrapped = replica.forward
        if self.meter is not None and isinstance(wrapped, DistributedDataParallel):
            if self._batch_norms is None or self._batch_norms.wrapped is not wrapped:
                self._batch_norms = GradientNorms(wrapped, self.member.device)
        else:
            self._batch_norms = None

    def loss_scale(self, weight: Tensor) -> Tensor | float:
        self._batch_share = weight
        return super().loss_scale(weight)

    def maybe_sync(self, replica: Replica, sums: Sums) -> None:
        super().maybe_sync(replica, sums)
        if self.meter is not None:
            if self._batch_norms is not None:
                self.meter.add(*self._batch_norms.take(), torch.as_tensor(self._batch_share), self._batch_clips)
            self._decide(self.meter, replica)

    def _decide(self, meter: NoiseMeter, replica: Replica) -> None:
        if meter.count >= self._batch_window:
            self.batch_policy.observe_noise(meter.scale(), replica.samples)
            meter.clear()

    def settle(self, replica: Replica) -> bool:
        if not super().settle(replica):
            return False
        if self.meter is not None:
            self._decide(self.meter, replica)
            self.meter.gather()
        return True

    def state_dict(self) -> dict[str, Any]:
        meter = None if self.meter is None else self.meter.state_dict()
        return {**super().state_dict(), "batch": {"policy": self.batch_policy.state_dict(), "meter": meter}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; one written without a batch policy starts at the first size."""
        super().load_state_dict(state)
        own = state.get("batch")
        if own is not None:
            self.batch_policy.load_state_dict(own["policy"])
            if self.meter is not None and own["meter"] is not None:
                self.meter.load_state_dict(own["meter"])


class ResizingLoader:
    """A loader whose global batch size may change before each batch."""

    def __init__(self, loader: Loader, size: Callable[[], int], on_batch: Callable[[Batch], None]) -> None:
        self._loader, self._size, self._on_batch = loader, size, on_batch
        self._first = loader.global_batch_size

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the loader."""
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Batch]:
        epoch = self._loader.epoch
        self._loader.set_batch_size(self._first)
        fit = self._loader.steps_left  # remaining batches of the first size
        while fit > 0:
            size = self._size()
            many = min(size // self._first, fit)
            self._loader.set_batch_size(many * self._first)
            left = self._loader.steps_left
            for batch in self._loader:
                self._on_batch(batch)
                yield batch
                fit, left = fit - many, left - 1
                if left == 0 or self._size() != size:
                    break
        if self._loader.epoch == epoch:  # no batches remain: iterating ends the epoch
            for _ in self._loader:
                raise AssertionError
