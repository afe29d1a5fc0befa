"""The client side of merged local steps: a replica trains alone and pushes how far it went every few steps.

A client never waits for a merge. Its weights are those of the newest merge that it has seen, minus its own progress
that this merge does not contain:

    a push is merged at once    it continues with the merged weights
    the quorum is not there     it continues with its own weights; after its next push, if there was a merge in between,
                                it moves to the merged weights, minus its deltas that are still pending

So every delta is in the weights once, for the client at once and for all others after the merge.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from fastvid.train.strategies.asgd.client import LeaseProgress, ParameterClient
from fastvid.train.strategies.asgd.vector import Vector


class DeltaPusher:
    """Pushes the difference that a number of local steps made, and adopts merged weights."""

    def __init__(self, client: ParameterClient, vector: Vector, period: int) -> None:
        self.client, self.vector, self.period = client, vector, period
        self.staleness: Counter[int] = Counter()
        self.steps = self._clips = self._pushes = 0
        self._base = vector.collect(vector.buffer())  # the weights that the next delta counts from
        self._now, self._sent = vector.buffer(), vector.buffer()
        self._pending: Tensor | None = None  # deltas that were pushed and not merged
        self._any_pending = False

    def stepped(self, clips: int, progress: LeaseProgress | None = None, *, last: bool = False) -> bool:
        """Count a step of the replica's optimizer, and push if due.

        Returns whether it pushed.
        """
        self.steps, self._clips = self.steps + 1, self._clips + clips
        if self.steps < self.period and not last:
            return False
        self._push(progress)
        self.steps = self._clips = 0
        return True

    @torch.no_grad()
    def _push(self, progress: LeaseProgress | None) -> None:
        vector = self.vector
        vector.collect(self._now)
        torch.sub(self._base, self._now, out=self._sent)
        vector.statistics_of(self._sent).copy_(vector.statistics_of(self._now))
        answer = self.client.push_delta(self._sent, self._clips, progress=progress)
        self.staleness[answer.staleness] += 1
        self._pushes += 1
        self._note()
        # Without a merge, the next delta counts from the weights that this one led to.
        self._base, self._now = self._now, self._base
        if (answer.version,) != self.client.versions:
            self.client.fetch(self._base)
            if self.client.merged == self._pushes:
                self._any_pending = False
            if self._any_pending:
                assert self._pending is not None
                vector.parameters_of(self._base).sub_(vector.parameters_of(self._pending))
            vector.spread(self._base)

    def _note(self) -> None:
        """Update what is pending after a push. A merge takes all that was pushed before it."""
        waiting = self._pushes - self.client.merged
        if waiting and self._pending is None:
            self._pending = torch.zeros_like(self._sent)
        if waiting == 1:
            assert self._pending is not None
            self._pending.copy_(self._sent)
        elif waiting:
            assert self._pending is not None
            self._pending += self._sent
        self._any_pending = waiting > 0
