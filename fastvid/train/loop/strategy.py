"""The base class of synchronization strategies, which the training loop calls at fixed points.

The loop treats all strategies alike. It calls these methods:

    prepare         once, after a checkpoint is loaded: make the replicas equal
    rounds          yields the batches that this rank trains on next, until the run is finished
    loss_scale      factor of a rank's weighted loss
    agree           before each step: send this rank's requests to stop or save to the other ranks
    maybe_sync      after each optimizer step
    has_one_model   after maybe_sync: whether the moving average of the weights is updated from the model now
    total           sum numbers over the ranks
    settle          before a checkpoint or an evaluation: give all ranks the same model
    scored          after an evaluation
    numbers         further columns of a row of metrics
    lineage         for a checkpoint: the samples trained on, if the strategy records them itself

`Strategy` has a default for each. `fastvid.train.strategies` lists the strategies that come with fastvid; a
user-defined strategy is named by ``sync=module:class`` and uses the same methods.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor

from fastvid.errors import UsageError
from fastvid.runtime.names import import_name
from fastvid.runtime.processes import World
from fastvid.runtime.values import check_hint
from fastvid.train.ranks import Member, broadcast_tensors
from fastvid.train.tasks.task import find_class

if TYPE_CHECKING:
    from fastvid.load.batch.batch import Batch
    from fastvid.train.config.config import Config
    from fastvid.train.parts.replica import Loader, Replica
    from fastvid.train.tasks.task import Sums


@dataclass(frozen=True, slots=True)
class Round:
    """A replica and the batches that it trains on next, up to the end of an epoch.

    Attributes:
        replica: The replica to train.
        batches: Batches of clips.
        epoch: The epoch that ends with this round, counted from 0.
        kept: Whether this rank saves and evaluates the replica; if replicas share no batches, only one rank does.
    """

    replica: Replica
    batches: Iterable[Batch]
    epoch: int
    kept: bool = True


class Strategy:
    """Base class of all strategies; one object per process. Override what differs.

    If ranks share batches, each method is called on every rank at the same point of the run, so collective operations
    in it match. If they do not, each rank runs at its own pace, and collective operations are safe only in `prepare`
    and in `rounds` before its first yield.

    Options of a strategy are keyword arguments of its class.

    Args:
        member: This process.

    Attributes:
        shares_batches: Whether each global batch is divided among the ranks. If False, every rank's loader delivers
            whole global batches at every position of the epoch, unless `rounds` selects positions with `Loader.go`.
        steps_alike: Whether all ranks have the same parameters after every step.
        record: Name of the file in the run's folder that says how it ended, as JSON; it is printed at the end.
    """

    record: ClassVar[str] = "summary.json"
    shares_batches: ClassVar[bool] = True
    steps_alike: ClassVar[bool] = False

    def __init__(self, member: Member) -> None:
        self.member = member
        self.world_size = member.world.size

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise a UsageError for settings that the strategy does not support; called before data is read."""
        split_options(config.sync, cls, config.sync_options)

    @classmethod
    def rehearse(cls, configs: Sequence[Config], world_size: int) -> None:
        """Raise the errors that a run would raise because of this strategy before its first step; write nothing.

        Called by a dry run, after `check`. By default it builds the strategy for the one model. A strategy that
        overrides `start` does here what `start` does before the first step.

        Args:
            configs: One per model.
            world_size: Number of ranks that the run will have.
        """
        config = _only(configs)
        build_strategy(config.sync, Member(World(0, world_size), torch.device("cpu")), config.sync_options)

    @classmethod
    def start(cls, configs: Sequence[Config], train: Callable[[Config], int]) -> int:
        """Train the models of a recipe in this process and return its exit code.

        Args:
            configs: One per model.
            train: Trains one model from start to finish in the training loop.

        Raises:
            UsageError: If there are several models and this strategy trains one.
        """
        return train(_only(configs))

    @property
    def reader(self) -> Member:
        """The rank and world size that determine the share of each batch that this process reads."""
        return self.member if self.shares_batches else Member(World(), self.member.device)

    def prepare(self, replica: Replica) -> None:
        """Make the replicas equal; may wrap `replica.forward` or replace `replica.optimizer`.

        Called once, after a checkpoint was loaded on every rank. By default, rank 0 broadcasts its model.
        """
        if self.world_size > 1:
            broadcast_tensors([*replica.model.parameters(), *replica.model.buffers()])

    def rounds(self, replica: Replica, loader: Loader, epochs: int) -> Generator[Round, None, None]:
        """Yield what this rank trains on, from the loader's position until the run is finished.

        The generator is closed if the run ends early. By default it yields one round per epoch of the loader.
        """
        while (epoch := loader.epoch) < epochs:
            yield Round(replica, loader, epoch, kept=self.shares_batches or self.member.leads)

    def loss_scale(self, weight: Tensor) -> Tensor | float:  # noqa: ARG002
        """Return the factor of this rank's loss.

        With the default factor, the mean of the losses over the ranks is the mean over the global batch, even if the
        ranks have shares of different sizes.

        Args:
            weight: Sum of the weights of this rank's clips, on the device; the sum over all ranks is at most one.
        """
        return float(self.world_size) if self.shares_batches else 1.0

    def agree(self, requests: Tensor) -> Callable[[], Tensor | None]:
        """Start sending this rank's requests to the other ranks, before a step, without blocking.

        Args:
            requests: int64 [2] on the CPU: whether to stop, whether to save; 1 or 0. The loop repeats a request before
                every step until the ranks act on it, so a strategy may drop it.

        Returns:
            A function to call after the step. It returns the sum of all requests, the same on every rank; or None if
            the ranks do not communicate in this step.
        """
        return self.total(requests)

    def maybe_sync(self, replica: Replica, sums: Sums) -> None:
        """Synchronize replicas that step independently, after an optimizer step.

        Args:
            replica: The replica that stepped; `replica.samples` does not include this step yet.
            sums: Sums over the scored clips of this rank's share of the step, by name, on the device: ``loss``,
                ``clips`` and those of the task.
        """

    def has_one_model(self) -> bool:
        """Return whether all ranks have the same parameters now, after `maybe_sync`.

        The moving average of ``optim.ema_decay`` is updated at these points, and after `settle`.
        """
        return self.steps_alike or self.world_size == 1

    def total(self, values: Tensor) -> Callable[[], Tensor]:
        """Start summing `values`, a CPU tensor, over the ranks, without blocking.

        Called only where replicas communicate: after a step for which `agree` returned a sum, in an evaluation, and
        after `settle`.

        Returns:
            A function that waits for the sum and returns it. If ranks share no batches, it returns this rank's own
            values.
        """
        if self.world_size == 1 or not self.shares_batches:
            return lambda: values
        work = dist.all_reduce(values, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return values

        return wait

    def settle(self, replica: Replica) -> bool:  # noqa: ARG002
        """Give all ranks the same model, which a checkpoint then stores or an evaluation scores.

        Returns:
            False if that is impossible now; the loop then retries after the next step.
        """
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the strategy's part of a checkpoint; called on the rank that writes it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the strategy's part of a checkpoint; called on every rank, before `prepare`."""

    def lineage(self) -> list[dict[str, int | str]] | None:
        """Return the samples that the model was trained on by all ranks, after `settle`.

        The format is that of `fastvid.train.parts.replica.Lineage.state_dict`. With None, the loop counts the samples
        of the ranks' batches itself.
        """
        return None

    def numbers(self) -> dict[str, float]:
        """Return further columns of a row of metrics, with units in their names."""
        return {}


_START: Final = Strategy.start.__func__  # type: ignore[attr-defined]


def _only(configs: Sequence[Config]) -> Config:
    if len(configs) > 1:
        several = (name for name in sorted(_strategies().BUILT_IN) if find_strategy(name).start.__func__ is not _START)  # type: ignore[attr-defined]
        raise UsageError(
            f"recipe has {len(configs)} models, but sync={configs[0].sync} trains one",
            hint=f"set sync={' or '.join(several)} to train all of them",
        )
    return configs[0]


def find_strategy(name: str) -> type[Strategy]:
    """Return the class of a strategy, given its name or ``module:class``."""
    return find_class("sync", name, _strategies().BUILT_IN, Strategy)


def strategy_of(config: Config) -> type[Strategy]:
    """Return the class of a configuration's strategy, after checking that it supports the configuration."""
    kind = find_strategy(config.sync)
    kind.check(config)
    if config.optim.ema_decay is not None and not (kind.shares_batches or kind.steps_alike):
        raise UsageError(
            f"sync={config.sync} does not support optim.ema_decay: its ranks step independently and have the same "
            "model only at checkpoints, so the average would depend on when checkpoints are written",
            hint="set optim.ema_decay=none",
        )
    return kind


def build_strategy(
    name: str, member: Member, options: Mapping[str, Any], *, timeout_s: float | None = None
) -> Strategy:
    """Build a strategy, with a batch policy if the options name one.

    `timeout_s`: default of the strategy's option ``timeout_s``, if it has one: seconds to wait for another rank.
    """
    kind = find_strategy(name)
    own, policy = split_options(name, kind, options)
    if timeout_s is not None and "timeout_s" in _parameters(kind):
        own = {"timeout_s": timeout_s, **own}
    if policy:
        kind = type(kind.__name__, (_batch_policy(), kind), {})
    return kind(member, **own, **policy)


def split_options(name: str, kind: type[Strategy], options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split `options` into those of the strategy itself and those of a batch policy; raise if one is unknown."""
    known = _parameters(kind)
    policies = kind.shares_batches and any(option.startswith("batch") for option in options.keys() - known.keys())
    policy = _parameters(_batch_policy()) if policies else {}
    if unknown := sorted(options.keys() - {*known, *policy}):
        raise UsageError(
            f"sync {name!r} has no option {', '.join(map(repr, unknown))}",
            hint=f"use one of {', '.join([*known, *policy])}" if known or policy else "remove it: there are no options",
        )
    # The command line turns the text "none" into None; turn it back where "none" is the option's default.
    own = {
        option: "none" if value is None and known[option] == "none" else value
        for option, value in options.items()
        if option in known
    }
    others = {option: value for option, value in options.items() if option not in known}
    hints = {} if not policy else get_type_hints(_batch_policy().__init__)
    with contextlib.suppress(NameError):  # of types that a user's module imports for type checkers alone
        hints |= get_type_hints(kind.__init__)
    for option, value in (own | others).items():
        check_hint(f"sync option {option}", value, hints.get(option, object))
    if others and "batch" not in others:
        raise UsageError(
            f"sync options {', '.join(sorted(others))} need a batch policy",
            hint="set sync_options.batch to schedule or noise",
        )
    return own, others


def _strategies() -> Any:
    """Import and return the package of the strategies; not at the top, because the strategies import this module."""
    return importlib.import_module("fastvid.train.strategies")


def _batch_policy() -> Any:
    return import_name("sync", _strategies().BATCH_POLICY)


def _parameters(kind: Any) -> dict[str, Any]:
    """Return the defaults of a strategy's options by their names."""
    parameters = inspect.signature(kind).parameters.items()
    return {name: one.default for name, one in parameters if name != "member" and one.kind is not one.VAR_KEYWORD}
