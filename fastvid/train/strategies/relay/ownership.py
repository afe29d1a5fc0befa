"""Which stage keeps which partitions, while stages come and go."""

from __future__ import annotations


class Ownership:
    """Every partition has one stage, or waits for one. Times are seconds since the hub began.

    A stage that comes takes the lowest partition that waits; where none does, the highest one of the stage that has
    most, if that has several. A partition that has waited long enough goes to the stage that has fewest.

    Args:
        num_partitions: S.
        start_s: How long partitions wait at the beginning.
        adopt_s: How long those of a stage that died wait.
    """

    def __init__(self, num_partitions: int, *, start_s: float, adopt_s: float) -> None:
        self.adopt_s = adopt_s
        self.stages: dict[int, set[int]] = {}
        self._waiting = dict.fromkeys(range(num_partitions), start_s)

    def of(self, stage: int) -> tuple[int, ...]:
        """A stage's partitions, ascending."""
        return tuple(sorted(self.stages[stage]))

    def join(self, stage: int) -> None:
        """A stage comes."""
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
        """A stage goes."""
        for partition in self.stages.pop(stage):
            self._waiting[partition] = now + self.adopt_s

    def adopt(self, now: float) -> bool:
        """Gives away partitions that have waited long enough. Returns whether any were."""
        due = sorted(partition for partition, until in self._waiting.items() if now >= until) if self.stages else []
        for partition in due:
            _, poorest = min((len(kept), stage) for stage, kept in self.stages.items())
            self.stages[poorest].add(partition)
            del self._waiting[partition]
        return bool(due)
