"""A source is rejected as one that crashes workers only if it does so by itself, and again."""

from __future__ import annotations

import pytest

from fastvid.media.timing import Reason
from fastvid.sharding.job.run import retry_alone
from fastvid.sharding.work.tasks import EncodedSample, Outcome, SourceTask

TASK = SourceTask(3, "a.mp4", "/a.mp4", "a", size=1)
KILLED = Outcome(3, reason=Reason.CRASHED, message="killed", transient=True)
PACKED = Outcome(3, (EncodedSample("a", {"num_frames": 1}, {"rgb": b""}),))
BROKEN = Outcome(3, reason=Reason.BROKEN_CONTAINER, message="broken")
SLOW = Outcome(3, reason=Reason.TIMEOUT, message="slow", transient=True)


class Answers:
    """An engine that gives prepared outcomes, one task at a time."""

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes = list(outcomes)

    def run(self, tasks):
        (task,) = tasks
        assert task.index == TASK.index
        yield self.outcomes.pop(0)

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("outcomes", "reason", "left"),
    [
        ((PACKED, KILLED), None, 1),
        ((KILLED, PACKED), None, 0),  # something else killed the worker just then
        ((KILLED, KILLED, PACKED), Reason.CRASHED, 1),
        ((KILLED, BROKEN), Reason.BROKEN_CONTAINER, 0),
        ((SLOW, PACKED), Reason.TIMEOUT, 1),
    ],
)
def test_a_source_whose_worker_dies_in_its_retry_is_tried_once_more(outcomes, reason, left):
    engine = Answers(*outcomes)
    outcome = retry_alone(engine, TASK)
    assert outcome.reason is reason
    assert len(engine.outcomes) == left
    assert not outcome.transient
