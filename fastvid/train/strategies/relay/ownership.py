"""Assigns partitions to stages, while stages join and leave."""

from __future__ import annotations


class Ownership:
    """The stage of every partition, if any. Times are seconds since the hub started.

    A new stage takes the lowest waiting partition; if none waits, the highest one of the stage with the most
    partitions, if that has several. A partition that has waited long enough goes to the stage with the fewest.

    `start_s`: seconds that partitions wait at the start. `adopt_s`: seconds that the partitions of a dead stage
    wait.
    """

    def __init__(self, num_partitions: int, *, start_s: float, adopt_s: float) -> None:
        self.adopt_s = adopt_s
        self.stages: dict[int, set[int]] = {}
        self._waiting = dict.fromkeys(range(num_partitions), start_s)

    def of(self, stage: int) -> tuple[int, ...]:
        """Return the partitions of a stage, ascending."""
        return tuple(sorted(self.stages[stage]))

    def join(self, stage: int) -> None:
        """Add a stage, and assign it at most one partition."""
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
