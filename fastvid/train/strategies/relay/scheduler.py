"""Decide which stage keeps which partitions, and which model visits which partition next. Pure logic without I/O.

A stage is a process that trains; a visit is one model trained on one partition of the dataset in one epoch. The orders:

ring      every model visits partitions 0, 1, ... S-1 in this order in every epoch, first come first served
          (Chen et al. 2015). If each visit takes the time t, M >= S models and E epochs take (M E + S - 1) t.
hopper    a free stage takes any idle model that still needs its partition in this epoch (model hopper parallelism,
          Cerebro, VLDB 2020), preferring the model with the most remaining work at its measured speed, because the
          longest chain of visits bounds the total time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from fastvid.errors import StateError
from fastvid.runtime.values import check_choice, check_least

Order = Literal["ring", "hopper"]
Status = Literal["training", "waiting", "failed", "over"]


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    """One visit of a model to a partition."""

    model: int
    epoch: int  # epoch, counted from 0
    partition: int
    ends_epoch: bool = False


@dataclass
class ModelProgress:
    """The progress of one model in a sweep."""

    model: int
    visits: list[int] = field(default_factory=list)  # partitions visited, over all epochs
    scores: list[float] = field(default_factory=list)  # by epoch; higher is better
    seconds: float = 0.0  # time of the visits
    status: Status = "waiting"
    reason: str | None = None  # why it failed
    arrived: int = 0  # position in the queue of waiting models; the lowest is first


class Scheduler:
    """Assigns units to free stages."""

    def __init__(self, num_models: int, num_partitions: int, epochs: int, *, order: Order = "hopper") -> None:
        check_least(1, models=num_models, partitions=num_partitions, epochs=epochs)
        check_choice("order", order, get_args(Order))
        self.num_partitions, self.epochs, self.order = num_partitions, epochs, order
        self.models = [ModelProgress(model, arrived=model) for model in range(num_models)]
        self._running: dict[int, Unit] = {}
        self._ticks = num_models

    @property
    def finished(self) -> bool:
        """Whether no model is running or waiting."""
        return not self._running and all(model.status != "waiting" for model in self.models)

    def take(self, partitions: Collection[int]) -> Unit | None:
        """Return the next unit for a free stage that has these partitions; None if no waiting model needs them now."""
        able = [
            (self._urgency(model), model, min(needs))
            for model in self.models
            if model.status == "waiting" and (needs := self._needs(model) & set(partitions))
        ]
        if not able:
            return None
        _, model, partition = min(able, key=lambda candidate: candidate[0])
        done = len(model.visits)
        epoch, inside = divmod(done, self.num_partitions)
        unit = Unit(model.model, epoch, partition, ends_epoch=inside + 1 == self.num_partitions)
        model.status = "training"
        self._running[model.model] = unit
        return unit

    def done(self, unit: Unit, *, seconds: float = 0.0, score: float = 0.0) -> None:
        """Report that a unit was trained, in `seconds`; `score`, used if it ends an epoch, is better if higher."""
        assert self._running.pop(unit.model) == unit
        self._advance(self.models[unit.model], unit.partition, seconds, score)

    def lost(self, unit: Unit) -> None:
        """Report that a unit's stage died; its model waits again, at its previous position in the queue."""
        assert self._running.pop(unit.model) == unit
        self.models[unit.model].status = "waiting"

    def fail(self, unit: Unit, reason: str) -> None:
        """Report that a unit cannot be trained; its model fails, and the others continue."""
        assert self._running.pop(unit.model) == unit
        self.models[unit.model].status = "failed"
        self.models[unit.model].reason = reason

    def restore(self, visits: Sequence[Sequence[int]], scores: Sequence[Sequence[float]]) -> None:
        """Restore the state of an earlier run; call it before the first `take`.

        `visits`: partitions visited by each model, over all epochs. `scores`: scores of each model, by epoch.
        """
        stages = self.num_partitions
        for epoch in range(self.epochs):
            for model in self.models:
                for partition in visits[model.model][epoch * stages : (epoch + 1) * stages]:
                    if partition not in self._needs(model):
                        raise StateError(
                            f"model {model.model} visited partition {partition} in epoch {epoch}, out of order",
                            hint="use the number of partitions and the order of that run, or another run.out",
                        )
                    ends = (len(model.visits) + 1) % stages == 0
                    self._advance(model, partition, 0.0, scores[model.model][epoch] if ends else 0.0)

    def _needs(self, model: ModelProgress) -> set[int]:
        """Return the partitions that a model may visit next."""
        done = len(model.visits)
        if self.order == "ring":
            return {done % self.num_partitions}
        seen = model.visits[done - done % self.num_partitions :]
        return set(range(self.num_partitions)) - set(seen)

    def _urgency(self, model: ModelProgress) -> tuple[float, int]:
        """Return the sort key of a waiting model; the model with the lowest key visits next."""
        if self.order == "ring":
            return 0.0, model.arrived
        left = self.epochs * self.num_partitions - len(model.visits)
        speed = model.seconds / len(model.visits) if model.visits else math.inf
        return -left * speed, model.arrived

    def _advance(self, model: ModelProgress, partition: int, seconds: float, score: float) -> None:
        model.visits.append(partition)
        model.seconds += seconds
        model.status = "waiting"
        self._ticks += 1
        model.arrived = self._ticks
        epochs, inside = divmod(len(model.visits), self.num_partitions)
        if not inside:
            model.scores.append(score)
            if epochs == self.epochs:
                model.status = "over"


class Ownership:
    """Which stage has which partitions; a partition without a stage waits. Times are seconds since the hub started.

    A new stage takes the lowest waiting partition; if none waits, the highest partition of the stage with the most
    partitions, if that stage has several. A partition that has waited long enough goes to the stage with the fewest.

    `start_s`: seconds that partitions wait for a new stage at the start. `adopt_s`: seconds that the partitions of a
    dead stage wait for a new one.
    """

    def __init__(self, num_partitions: int, *, start_s: float, adopt_s: float) -> None:
        self.adopt_s = adopt_s
        self.stages: dict[int, set[int]] = {}
        self._waiting = dict.fromkeys(range(num_partitions), start_s)

    def of(self, stage: int) -> tuple[int, ...]:
        """Return the partitions of a stage, ascending."""
        return tuple(sorted(self.stages[stage]))

    def join(self, stage: int) -> None:
        """Add a stage, and assign it one partition, or none if every other stage has only one."""
        self.stages[stage] = set()
        if self._waiting:
            partition = min(self._waiting)
            del self._waiting[partition]
        else:
            _, richest = max((len(kept), -other) for other, kept in self.stages.items())
            kept = self.stages[-richest]
            if len(kept) < 2:
                return
            partition = max(kept)
            kept.remove(partition)
        self.stages[stage].add(partition)

    def leave(self, stage: int, now: float) -> None:
        """Remove a stage; its partitions wait."""
        for partition in self.stages.pop(stage):
            self._waiting[partition] = now + self.adopt_s

    def adopt(self, now: float) -> bool:
        """Assign the partitions that have waited long enough, and return whether there were any."""
        due = sorted(partition for partition, until in self._waiting.items() if now >= until) if self.stages else []
        for partition in due:
            _, poorest = min((len(kept), stage) for stage, kept in self.stages.items())
            self.stages[poorest].add(partition)
            del self._waiting[partition]
        return bool(due)
