"""How replicas agree: one folder a strategy, chosen by ``sync=``. The training loop does not know which one runs.

What a strategy decides, and when the loop asks:

    prepare         once, after a resume: make the replicas alike
    rounds          what this rank trains on next, until the run is over
    accumulate      around forward and backward of each micro-batch
    loss_scale      what a rank's weighted loss is multiplied by
    agree           before each step: what this rank wishes, told to the others when they next talk
    maybe_sync      after each step of the optimiser
    total           numbers summed over the replicas, now
    settle          before a checkpoint or an evaluation: one model that all ranks hold
    scored          after an evaluation
    numbers         further columns of a line of metrics
    lineage         for a checkpoint: the samples trained on, where the strategy keeps the books
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from torch import Tensor

from fastvid.errors import UsageError

if TYPE_CHECKING:
    from fastvid.load.batch.batch import Batch
    from fastvid.train.parts.evaluate import Score
    from fastvid.train.parts.loader_protocol import Loader
    from fastvid.train.parts.replica import Replica
    from fastvid.train.ranks.elastic import Member

STRATEGIES: Final = {
    "asgd": "fastvid.train.strategies.asgd.strategy:Asgd",
    "ddp": "fastvid.train.strategies.ddp.strategy:Ddp",
    "kavg": "fastvid.train.strategies.kavg.strategy:Kavg",
}
"""Name to import string."""

APART: Final = ("asgd",)
"""Strategies whose ranks share no batch: each trains on whole global batches of its own."""

SHARING: Final = ("ddp", "kavg")
"""Strategies whose ranks share each global batch; they take the options of
`fastvid.train.strategies.adaptive_batch.strategy.AdaptiveBatch`, whose names begin with ``batch``, as well."""


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


class Strategy(Protocol):
    """How replicas agree. One object a process. Where replicas share each batch, every method is called on every rank
    at the same place of the run; where they do not, each goes at its own pace."""

    def prepare(self, replica: Replica) -> None:
        """Makes the replicas alike, and may wrap `replica.forward` or replace `replica.optimizer`. Called once, after a
        checkpoint was loaded on every rank."""
        ...

    def rounds(self, replica: Replica, loader: Loader, epochs: int) -> Generator[Round, None, None]:
        """What this rank trains on until the run is over, from where the loader stands. Closed when it ends early."""
        ...

    def accumulate(self, replica: Replica, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch; `last` ends the step's batch."""
        ...

    def loss_scale(self, weight: Tensor) -> Tensor | float:
        """Factor of this rank's loss.

        Args:
            weight: Sum of the weights of this rank's clips, on the device; over all ranks they add up to one at most.
        """
        ...

    def agree(self, wishes: Tensor) -> Callable[[], Tensor | None]:
        """Starts to tell the others what this rank wishes, before a step, without blocking.

        Args:
            wishes: int64 on the CPU, 0 where nothing is wished. A wish is told again before every step until it is
                granted, so a strategy may forget it.

        Returns:
            A function to call after the step. It gives the sum of all wishes, the same on every rank; or None where
            the ranks do not talk in this step.
        """
        ...

    def maybe_sync(self, replica: Replica, sums: Tensor) -> None:
        """After a step of the optimiser: replicas that step by themselves may agree here.

        Args:
            replica: What stepped; its `samples` are those before the step.
            sums: Numbers of this rank's share of the step, float64 [4] on the device, see
                `fastvid.train.parts.evaluate.count`.
        """
        ...

    def total(self, values: Tensor) -> Callable[[], Tensor]:
        """Starts to sum `values`, a CPU tensor, over the replicas, without blocking. Called only where they talk: after
        a step in which they agreed, in an evaluation, and when they have settled.

        Returns:
            A function that waits for the sum. Where replicas share no batches, it gives this rank's own values.
        """
        ...

    def settle(self, replica: Replica) -> bool:
        """Brings all ranks to the one model that a checkpoint holds and an evaluation scores.

        Returns:
            False where that cannot be now; then the loop asks again after the next step.
        """
        ...

    def scored(self, replica: Replica, score: Score) -> None:
        """After an evaluation, with what it found."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the strategy; the same on every rank."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a state over, before `prepare`."""
        ...

    def on_membership_change(self, before: int, now: int) -> None:
        """The run goes on with `now` ranks instead of `before`; called after `load_state_dict`."""
        ...

    def lineage(self) -> list[dict[str, int | str]] | None:
        """The samples that the settled model has been trained on, by all replicas, as
        `fastvid.train.parts.loader_protocol.Lineage.state_dict` gives it; None where the loop knows, because replicas
        share batches."""
        ...

    def numbers(self) -> dict[str, float]:
        """Further columns of a line of metrics, units in their names."""
        ...


def build_strategy(name: str, member: Member, options: Mapping[str, Any]) -> Strategy:
    """The strategy of that name.

    Args:
        name: A name of STRATEGIES, or ``module:class`` of a Strategy of one's own.
        member: This process.
        options: Keyword arguments of the strategy.

    Raises:
        UsageError: The name or an option is not known.
    """
    if name not in STRATEGIES and ":" not in name:
        names = ", ".join(sorted([*STRATEGIES, "relay"]))
        raise UsageError(f"sync is {name!r}", hint=f"known are {names}; or module:class of your own")
    try:
        kind = _load(STRATEGIES.get(name, name))
    except (ImportError, AttributeError) as error:
        raise UsageError(f"sync {name!r} does not load: {error}") from error
    known = _options(kind)
    growing = _load(_ADAPTIVE) if name in SHARING and any(option.startswith("batch") for option in options) else None
    policy = _options(growing) if growing else []
    unknown = sorted(options.keys() - {*known, *policy})
    if unknown:
        raise UsageError(
            f"sync {name!r} has no option {', '.join(map(repr, unknown))}",
            hint=f"its options are {', '.join([*known, *policy])}" if known or policy else "it has none",
        )
    strategy: Strategy = kind(member, **{option: value for option, value in options.items() if option in known})
    if growing is None:
        return strategy
    if "batch" not in options:
        raise UsageError("options of a batch policy are given without sync_options.batch")
    grown: Strategy = growing(
        strategy, member, **{option: value for option, value in options.items() if option in policy}
    )
    return grown


_ADAPTIVE: Final = "fastvid.train.strategies.adaptive_batch.strategy:AdaptiveBatch"


def _load(where: str) -> Any:
    module, _, attribute = where.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _options(kind: Any) -> list[str]:
    return [option for option in inspect.signature(kind).parameters if option not in ("inner", "member")]
