"""Workers that crash, hang or send garbage cost only their own source, and leave no process running."""

import os
import re
import sys
import time
from contextlib import closing
from dataclasses import replace

import pytest

from fastvid.errors import FormatError, UsageError, WorkerError
from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.media.reasons import Reason
from fastvid.runtime.processes import pack
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.engines.local import LocalEngine
from fastvid.sharding.job.run import How, retry_alone
from fastvid.sharding.work.tasks import EncodedSample, Outcome, SourceTask
from tests import forks
from tests.sharding import shardtools
from tests.sharding.shardtools import make, stub

SMALL = PROFILES["compact"].changed(short_side=96)


def settings(path="", limits=None):
    return shardtools.settings(SMALL, build=replace(find_ffmpeg(), path=path) if path else None, limits=limits)


def tasks(folder, *names):
    return [SourceTask(number, name, str(folder / name), name) for number, name in enumerate(names)]


def gone(pid):
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def folder(tmp_path):
    for name in ("a.mp4", "b.mp4", "c.mp4"):
        make(tmp_path / name, frames=3)
    (tmp_path / "bad.mp4").write_bytes(b"no video")
    return tmp_path


def test_every_task_gets_one_outcome_and_workers_are_reused(folder):
    with closing(LocalEngine(settings(), workers=2)) as engine:
        todo = tasks(folder, "a.mp4", "bad.mp4", "b.mp4", "c.mp4")
        outcomes = {outcome.index: outcome for outcome in engine.run(todo)}
        assert {index: outcome.reason for index, outcome in outcomes.items()} == {
            0: None, 1: Reason.NOT_VIDEO, 2: None, 3: None,
        }  # fmt: skip
        assert [sample.key for sample in outcomes[2].samples] == ["b.mp4"]
        before = {worker._process.pid for worker in engine._pool}
        assert [outcome.reason for outcome in engine.run(tasks(folder, "a.mp4"))] == [None]
        assert {worker._process.pid for worker in engine._pool} == before
    assert all(gone(pid) for pid in before)


def test_crashed_worker_reports_exit_status_and_error(folder):
    (task,) = tasks(folder, "a.mp4")
    with closing(LocalEngine(settings(), workers=1)) as engine:
        (outcome,) = engine.run([replace(task, path="a\0b")])
    assert (outcome.reason, outcome.transient) == (Reason.CRASHED, True)
    said = r"the worker exited with 1 in phase \w+: ValueError: embedded null byte \(\w+\.py:\d+\)"
    assert re.fullmatch(said, outcome.message)


def test_killed_worker_loses_only_its_task_and_is_replaced(folder):
    # This "ffmpeg" kills the worker that runs it, once.
    armed = folder / "armed"
    armed.touch()
    body = f'if [ -e {armed} ]; then rm {armed}; kill -9 $PPID; fi; exec {find_ffmpeg().path} "$@"'
    with closing(LocalEngine(settings(stub(folder / "ffmpeg", body)), workers=1)) as engine:
        outcomes = list(engine.run(tasks(folder, "a.mp4", "b.mp4", "c.mp4")))
    first, *others = sorted(outcomes, key=lambda outcome: outcome.index)
    assert (first.reason, first.transient) == (Reason.CRASHED, True)
    assert "SIGKILL in phase encode" in first.message
    assert [outcome.reason for outcome in others] == [None, None]


def test_stuck_worker_is_killed_with_its_ffmpeg(folder):
    # The worker is stopped, so that the engine's time limit expires before the worker's limit on ffmpeg.
    body = f"echo $$ > {folder}/pid; kill -STOP $PPID; exec sleep 600"
    limits = Limits(seconds=1.0, seconds_per_frame=0)
    with closing(LocalEngine(settings(stub(folder / "ffmpeg", body), limits), workers=1)) as engine:
        (outcome,) = engine.run(tasks(folder, "a.mp4"))
    assert (outcome.reason, outcome.transient) == (Reason.TIMEOUT, True)
    assert "phase encode" in outcome.message
    assert gone(int((folder / "pid").read_text()))


def test_killed_job_kills_its_workers_and_their_ffmpeg(folder):
    program = stub(folder / "ffmpeg", f"echo $$ > {folder}/pid; echo $PPID > {folder}/parent; exec sleep 600")
    job = forks.start("-c", JOB, program, folder / "a.mp4")
    try:
        deadline = time.monotonic() + 200
        while not (folder / "parent").exists() or not (folder / "parent").read_text().strip():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        job.kill()
        forks.wait(job)
    assert gone(int((folder / "pid").read_text()))
    assert gone(int((folder / "parent").read_text()))


JOB = """
import sys
from dataclasses import replace
from fastvid.sharding.engines.local import LocalEngine
from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.sharding.encode.profiles import PROFILES, Settings
from fastvid.sharding.work.tasks import SourceTask
build = replace(find_ffmpeg(), path=sys.argv[1])
engine = LocalEngine(Settings(PROFILES["compact"], build, Limits(), 600.0), workers=1)
list(engine.run([SourceTask(0, "a", sys.argv[2], "a")]))
"""


def test_workers_that_cannot_start_raise(folder, monkeypatch):
    monkeypatch.setattr(sys, "executable", stub(folder / "python", "echo no such luck >&2; exit 1"))
    with closing(LocalEngine(settings(), workers=1)) as engine, pytest.raises(WorkerError, match="no such luck"):
        list(engine.run(tasks(folder, *["a.mp4"] * 10)))


@pytest.mark.usefixtures("own_interpreters")
def test_worker_memory_is_limited(folder):
    # Far less than libavcodec and x264 need: the source is rejected with a reason, and the next one is still tried.
    with closing(LocalEngine(settings(limits=Limits(memory_bytes=2 << 20)), workers=1)) as engine:
        outcomes = list(engine.run(tasks(folder, "a.mp4", "bad.mp4")))
    assert len(outcomes) == 2
    by_index = {outcome.index: outcome.reason for outcome in outcomes}
    assert by_index[0] in (Reason.MEMORY, Reason.CRASHED, Reason.ENCODE_FAILED, Reason.NO_FRAMES)
    assert by_index[1] is Reason.NOT_VIDEO


def test_unknown_engine_and_useless_address_raise():
    with pytest.raises(UsageError, match=r"unknown engine 'slurm'[\s\S]*use one of local, ray"):
        How("slurm").open_engine(settings())
    with pytest.raises(UsageError, match="local engine has no address"):
        How("local", ray_address="127.0.0.1:6379").open_engine(settings())


def test_a_changed_or_cut_answer_of_a_worker_is_never_taken_for_another():
    data = PACKED.to_bytes()
    assert Outcome.from_bytes(data) == PACKED
    for position in range(len(data)):
        changed = data[:position] + bytes([data[position] ^ 1 << position % 8]) + data[position + 1 :]
        for piece in (changed, data[:position], pack({"phase": "probe"})):
            with pytest.raises(FormatError):
                Outcome.from_bytes(piece)


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
