"""Successive halving: at some epochs only the best models continue (Jamieson & Talwalkar 2016)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from fastvid.errors import UsageError


@dataclass(frozen=True, slots=True)
class Halving:
    """When models are compared, and how many continue."""

    rungs: tuple[int, ...]  # numbers of finished epochs at which models are compared, ascending, at least 1 each
    keep: float = 0.5

    def __post_init__(self) -> None:
        if list(self.rungs) != sorted(set(self.rungs)) or any(rung < 1 for rung in self.rungs):
            raise UsageError(f"rungs are {self.rungs}, expected ascending epochs from 1")
        if not 0 < self.keep <= 1:
            raise UsageError(f"keep is {self.keep}, expected 0 < keep <= 1")

    def contenders(self, num_models: int) -> list[int]:
        """Return the number of models that reach each rung, and last the number that reach the end."""
        counts = [num_models]
        for _ in self.rungs:
            counts.append(math.ceil(self.keep * counts[-1]))
        return counts


class Contest:
    """The comparisons of one sweep.

    A model continues or is dropped as soon as no pending score can change that. The decisions are thus the same as
    after waiting for all scores, and each of the last k reports releases one of the k survivors, so stages stay busy.
    """

    def __init__(self, rule: Halving, num_models: int) -> None:
        self.rule = rule
        self._counts = rule.contenders(num_models)
        self._scores: list[dict[int, float]] = [{} for _ in rule.rungs]
        self._decided: set[tuple[int, int]] = set()

    def compares(self, epochs_done: int) -> bool:
        """Return whether models are compared after that many epochs."""
        return epochs_done in self.rule.rungs

    def report(self, model: int, epochs_done: int, score: float) -> Iterator[tuple[int, bool]]:
        """Report that a model has reached a rung.

        Yields every model that this report decides about, and whether it continues.
        """
        rung = self.rule.rungs.index(epochs_done)
        self._scores[rung][model] = -math.inf if math.isnan(score) else score
        yield from self._decide(rung)

    def withdraw(self, model: int) -> Iterator[tuple[int, bool]]:
        """Rank a failed model last, from its next rung on. Yields decisions as `report` does."""
        for rung, scores in enumerate(self._scores):
            if model not in scores:
                scores[model] = -math.inf
                for other, goes_on in self._decide(rung):
                    if other != model:
                        yield other, goes_on
                if (rung, model) not in self._decided or not self._survives(rung, model):
                    return

    def _survives(self, rung: int, model: int) -> bool:
        return self._better(rung, model) < self._counts[rung + 1]

    def _better(self, rung: int, model: int) -> int:
        scores = self._scores[rung]
        own = (-scores[model], model)
        return sum((-score, other) < own for other, score in scores.items())

    def _decide(self, rung: int) -> Iterator[tuple[int, bool]]:
        unknown, keep = self._counts[rung] - len(self._scores[rung]), self._counts[rung + 1]
        for model in sorted(self._scores[rung]):
            if (rung, model) in self._decided:
                continue
            better = self._better(rung, model)
            if better >= keep or better + unknown < keep:
                self._decided.add((rung, model))
                yield model, better < keep
