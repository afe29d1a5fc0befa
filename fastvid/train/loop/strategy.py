"""How replicas agree. The training loop asks its strategy at fixed places and does not know which one it has.

When the loop asks:

    prepare         once, after a resume: make the replicas alike
    rounds          what this rank trains on next, until the run is over
    accumulate      around forward and backward of each micro-batch
    loss_scale      what a rank's weighted loss is multiplied by
    agree           before each step: tell the other ranks what this rank requests
    maybe_sync      after each step of the optimiser
    total           sum numbers over the replicas
    settle          before a checkpoint or an evaluation: bring all ranks to one model
    scored          after an evaluation
    numbers         further columns of a row of metrics
    lineage         for a checkpoint: the samples trained on, where the strategy keeps that record

`Strategy` has a default for each. Those that come with fastvid are listed in `fastvid.train.strategies`; one of
your own is ``sync=module:class`` and can do all that they can.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch.distributed as dist
from torch import Tensor

from fastvid.errors import UsageError
from fastvid.runtime.world import World
from fastvid.train.ranks.elastic import Member, broadcast_tensors

if TYPE_CHECKING:
    from fastvid.load.batch.batch import Batch
    from fastvid.train.config.config import Config
    from fastvid.train.parts.evaluate import Score
    from fastvid.train.parts.loader_protocol import Loader
    from fastvid.train.parts.replica import Replica

# Imported by name: the strategies are built on the loop, so it cannot import them.
_STRATEGIES: Final = "fastvid.train.strategies"


@dataclass(frozen=True, slots=True)
class Round:
    """What a rank trains on next.

    Attributes:
        replica: The model that learns from it.
        batches: Batches of clips.
        epoch: The epoch that ends with it, counted from 0.
        kept: Whether this rank saves and evaluates it; of replicas that share no batches only one is.
    """

    replica: Replica
    batches: Iterable[Batch]
    epoch: int
    kept: bool = True


class Strategy:
    """Base class of all strategies; one object a process. Override what differs.

    Where ranks share batches, each method is called on every rank at the same place of the run, so collective
    operations in them match. Where they do not, each rank goes at its own pace, and only `prepare` and the first part
    of `rounds` are reached by all.

    Options of a strategy are keyword arguments of its class.

    Args:
        member: This process.

    Attributes:
        shares_batches: Whether each global batch is divided among the ranks. Else every rank's loader delivers whole
            global batches and visits every position itself, unless `rounds` sends it elsewhere with `Loader.go`.
        steps_alike: Whether all ranks have the same parameters after every step, as ``optim.ema_decay`` requires.
    """

    shares_batches: ClassVar[bool] = True
    steps_alike: ClassVar[bool] = False

    def __init__(self, member: Member) -> None:
        self.member = member
        self.world_size = member.world.size

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise a UsageError for settings that the strategy cannot train with; called before data are read."""
        split_options(config.sync, cls, config.sync_options)

    @classmethod
    def start(cls, configs: Sequence[Config], train: Callable[[Config], int]) -> int:
        """Train the models of a recipe in this process and return its exit code.

        Args:
            configs: One for each model.
            train: Trains one model from beginning to end in the training loop.

        Raises:
            UsageError: There are several models, and this strategy trains one.
        """
        if len(configs) > 1:
            several = (name for name, where in sorted(_built_in().items()) if _load(where).start.__func__ is not _START)
            raise UsageError(
                f"recipe has {len(configs)} models, sync={configs[0].sync} trains one",
                hint=f"train all of them with sync={' or '.join(several)}",
            )
        return train(configs[0])

    @property
    def reader(self) -> Member:
        """The place in the world whose share of each batch this process reads, for training and evaluation."""
        return self.member if self.shares_batches else Member(World(), self.member.device)

    def prepare(self, replica: Replica) -> None:
        """Make the replicas alike, and maybe wrap `replica.forward` or replace `replica.optimizer`.

        Called once, after a checkpoint was loaded on every rank. By default all ranks take the model of rank 0.
        """
        if self.world_size > 1:
            broadcast_tensors([*replica.model.parameters(), *replica.model.buffers()])

    def rounds(self, replica: Replica, loader: Loader, epochs: int) -> Generator[Round, None, None]:
        """Yield what this rank trains on until the run is over, from where the loader stands.

        Closed when the run ends early. By default one round for each epoch of the loader.
        """
        while (epoch := loader.epoch) < epochs:
            yield Round(replica, loader, epoch, kept=self.shares_batches or self.member.leads)

    def accumulate(
        self,
        replica: Replica,  # noqa: ARG002
        *,
        last: bool,  # noqa: ARG002
    ) -> contextlib.AbstractContextManager[None]:
        """Return what surrounds forward and backward of a micro-batch; `last` ends the step's batch."""
        return contextlib.nullcontext()

    def loss_scale(self, weight: Tensor) -> Tensor | float:  # noqa: ARG002
        """Return the factor of this rank's loss.

        By default the mean over the ranks is that of the global batch, also where shares differ in size.

        Args:
            weight: Sum of the weights of this rank's clips, on the device; over all ranks they add up to one at most.
        """
        return float(self.world_size) if self.shares_batches else 1.0

    def agree(self, wishes: Tensor) -> Callable[[], Tensor | None]:
        """Start to tell the other ranks what this rank requests, before a step, without blocking.

        Args:
            wishes: int64 on the CPU, 0 for no request. A request is repeated before every step until it is granted, so
                a strategy may forget it.

        Returns:
            A function to call after the step. It returns the sum of all requests, the same on every rank; or None if
            the ranks do not communicate in this step.
        """
        return self.total(wishes)

    def maybe_sync(self, replica: Replica, sums: Tensor) -> None:
        """Let replicas that step by themselves agree, after a step of the optimiser.

        Args:
            replica: What stepped; its `samples` are those before the step.
            sums: Numbers of this rank's share of the step, float64 [4] on the device, see
                `fastvid.train.parts.evaluate.count`.
        """

    def total(self, values: Tensor) -> Callable[[], Tensor]:
        """Start to sum `values`, a CPU tensor, over the replicas, without blocking.

        Called only where they communicate: after a step in which they agreed, in an evaluation, and after `settle`.

        Returns:
            A function that waits for the sum. Where replicas share no batches, it returns this rank's own values.
        """
        if self.world_size == 1 or not self.shares_batches:
            return lambda: values
        work = dist.all_reduce(values, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return values

        return wait

    def settle(self, replica: Replica) -> bool:  # noqa: ARG002
        """Bring all ranks to the one model that a checkpoint stores and an evaluation scores.

        Returns:
            False if that is impossible now; then the loop asks again after the next step.
        """
        return True

    def scored(self, replica: Replica, score: Score) -> None:
        """Take notice of an evaluation."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores of the strategy; of rank 0, which writes it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state on every rank, before `prepare`."""

    def on_membership_change(self, before: int, now: int) -> None:
        """Continue a run of `before` ranks with `now`; called after `load_state_dict`."""

    def lineage(self) -> list[dict[str, int | str]] | None:
        """Return the samples that the settled model was trained on, by all replicas.

        In the form of `fastvid.train.parts.loader_protocol.Lineage.state_dict`; None where the loop adds up what ranks
        that share batches were given.
        """
        return None

    def numbers(self) -> dict[str, float]:
        """Return further columns of a row of metrics, units in their names."""
        return {}


_START: Final = Strategy.start.__func__  # type: ignore[attr-defined]


def find_strategy(name: str) -> type[Strategy]:
    """Return the class of a strategy.

    Args:
        name: One that comes with fastvid, or ``module:class``.

    Raises:
        UsageError: The name is unknown, or what it names is no strategy.
    """
    known = _built_in()
    if name not in known and ":" not in name:
        raise UsageError(f"sync is {name!r}", hint=f"known are {', '.join(sorted(known))}; or module:class of your own")
    try:
        kind = _load(known.get(name, name))
    except (ImportError, AttributeError) as error:
        raise UsageError(f"sync {name!r} does not load: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Strategy)):
        raise UsageError(f"sync {name!r} is no strategy", hint=f"derive a class from {__name__}.Strategy")
    return kind


def strategy_of(config: Config) -> type[Strategy]:
    """Return the class of a configuration's strategy.

    Raises:
        UsageError: There is none, or it cannot train with these settings.
    """
    kind = find_strategy(config.sync)
    if config.optim.ema_decay is not None and not kind.steps_alike:
        raise UsageError(f"optim.ema_decay does not go with sync={config.sync}", hint="set optim.ema_decay=none")
    kind.check(config)
    return kind


def build_strategy(name: str, member: Member, options: Mapping[str, Any]) -> Strategy:
    """Build a strategy.

    Args:
        name: As in `find_strategy`.
        member: This process.
        options: Keyword arguments of the strategy; where ranks share batches also those of a batch policy, see
            `fastvid.train.strategies.BATCH_POLICY`.

    Raises:
        UsageError: The name or an option is unknown, or an option is out of range.
    """
    kind = find_strategy(name)
    own, policy = split_options(name, kind, options)
    strategy = kind(member, **own)
    if not policy:
        return strategy
    grown: Strategy = _batch_policy()(strategy, member, **policy)
    return grown


def split_options(name: str, kind: type[Strategy], options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options that a strategy takes itself, and those of a batch policy.

    Raises:
        UsageError: One is unknown.
    """
    known = _parameters(kind)
    policies = kind.shares_batches and any(option.startswith("batch") for option in options.keys() - set(known))
    policy = _parameters(_batch_policy()) if policies else []
    if unknown := sorted(options.keys() - {*known, *policy}):
        raise UsageError(
            f"sync {name!r} has no option {', '.join(map(repr, unknown))}",
            hint=f"its options are {', '.join([*known, *policy])}" if known or policy else "it has none",
        )
    own = {option: value for option, value in options.items() if option in known}
    others = {option: value for option, value in options.items() if option not in known}
    if others and "batch" not in others:
        raise UsageError("options of a batch policy are given without sync_options.batch")
    return own, others


def _built_in() -> Mapping[str, str]:
    found: Mapping[str, str] = importlib.import_module(_STRATEGIES).BUILT_IN
    return found


def _batch_policy() -> Any:
    return _load(importlib.import_module(_STRATEGIES).BATCH_POLICY)


def _load(where: str) -> Any:
    module, _, attribute = where.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _parameters(kind: Any) -> list[str]:
    return [name for name in inspect.signature(kind).parameters if name not in ("inner", "member")]
