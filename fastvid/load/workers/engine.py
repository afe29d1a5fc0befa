"""The threads of an iteration: they plan, fetch, decode and finish batches in order, with bounded prefetch.

One planner thread turns positions into clips, at most `prefetch` batches before the consumer needs them. Decode threads
take clips in order, each with its own decoder or worker process, so that a slow clip delays no other. For storage with
high latency, fetch threads read the planned clips before the decode threads take them. Batches are delivered in order.
For CUDA a finish thread queues the copy and conversion of the next batch on the loader's stream while the consumer uses
the last one. On a CPU the consumer finishes each batch, because it would wait for that anyway; on any device it does so
if a transform uses the global random generators, which belong to the consumer.
The threads belong to one iteration and end with it, for whatever reason: the last batch, an error, `break`, Ctrl-C or
interpreter exit. Between iterations no thread runs, so a process may fork then, but not during an iteration.
A pipeline runs from epoch to epoch. Where its consumer has followed it from one to the next, it prefetches from the one
after that; what was prefetched waits between the iterations, and the threads of the next iteration continue from there.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import torch

from fastvid.decode.request import EncodedClip
from fastvid.errors import FastvidError, WorkerError
from fastvid.load.batch.batch import Batch
from fastvid.load.batch.canvas import BatchSound, Canvas, SoundMemory
from fastvid.load.clips.clip import BatchRow, Clip, clips_to_decode
from fastvid.load.clips.plan import BatchPlan, add_location
from fastvid.load.workers.clip_worker import (
    ClipResult,
    ClipTask,
    Lane,
    are_near,
    fetch_clip,
    fetch_sounds,
    fetch_together,
)
from fastvid.load.workers.lanes import Decoders
from fastvid.load.workers.stats import Counters
from fastvid.runtime.arrays import IntArray


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch in progress."""

    plan: BatchPlan  # its samples and clips
    canvas: Canvas
    pending: int
    errors: dict[int, Exception]  # errors by row
    frames: dict[int, IntArray]  # frames shown by each row, filled as clips are planned
    sound: BatchSound | None = None
    counters: Counters = field(default_factory=Counters)
    finished: tuple[Batch, torch.cuda.Event | None] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class QueuedClip(ClipTask):
    """A clip that is queued or being processed; its target is a canvas. `number` counts all clips in order."""

    number: int
    clip: BatchRow
    work: PendingBatch


_log = logging.getLogger(__name__)

_TOGETHER: Final = 32
"""Most clips that one thread reads together."""

_JOIN_SECONDS: Final = 10.0
"""How long closing waits for clips that are being decoded; normally milliseconds."""


class BatchPipeline:
    """The batches of a loader from a position on, and the threads that make them during each iteration.

    `epochs`: the plans of the rest of an epoch, then of each of the following ones, all computed lazily.
    """

    def __init__(
        self,
        epochs: Iterator[Iterator[BatchPlan]],
        decoders: Decoders,
        *,
        prefetch: int,
        sounds: SoundMemory | None = None,
        num_fetchers: int = 0,
    ) -> None:
        self._decoders, self._stream, self._prefetch = decoders, decoders.finisher.stream, prefetch
        self._sounds, self._lanes = sounds, decoders.lanes
        self._finishes_ahead = self._stream.is_asynchronous and not decoders.assembler.uses_global_generators
        # None where an epoch ends.
        self._plans = itertools.chain.from_iterable(itertools.chain(plans, (None,)) for plans in epochs)
        self._next_plan: BatchPlan | None = None
        self._follows = False
        self._numbers = itertools.count()
        self._batches: deque[PendingBatch | None] = deque()
        self._tasks: deque[QueuedClip] = deque()
        self._fetched: deque[QueuedClip] = deque()
        self._ahead = self._fetching = num_fetchers
        self._failure: BaseException | None = None
        self._planned, self._stopped = False, True
        self._pid = os.getpid()
        self._active: dict[int, Sequence[QueuedClip]] = {}
        self._threads: list[threading.Thread] = []
        # Reentrant, because the garbage collector may close an abandoned iteration from inside any thread.
        self._lock = threading.RLock()
        self._room, self._work, self._ready, self._arrived, self._complete = (
            threading.Condition(self._lock) for _ in range(5)
        )

    def start(self) -> None:
        """Start the threads, which continue with what was prefetched before."""
        # A child of a fork between two iterations continues by itself: no thread was running.
        self._pid, self._stopped, self._planned = os.getpid(), False, False
        self._fetching, self._active = self._ahead, {}
        # Clips that threads had taken and not finished are behind those that nobody had taken.
        self._tasks = deque(sorted(self._tasks, key=lambda task: task.number))
        self._fetched = deque(sorted(self._fetched, key=lambda task: task.number))
        runs: list[tuple[str, Callable[..., None], tuple[int, ...]]] = [("plan", self._plan, ())]
        runs += [(f"decode-{number}", self._decode, (number,)) for number in range(len(self._lanes))]
        runs += [(f"fetch-{number}", self._fetch_ahead, (number,)) for number in range(self._ahead)]
        runs += [("finish", self._finish_ahead, ())] if self._finishes_ahead else []
        self._threads = [
            # Daemon threads, because the interpreter joins all others before it runs the exit handler that ends them.
            threading.Thread(target=self._guard, args=(run, *arguments), name=f"fastvid-{name}", daemon=True)
            for name, run, arguments in runs
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    @property
    def ready(self) -> int:
        """Number of complete batches that wait for the consumer."""
        with self._lock:
            return sum(work is not None and not work.pending for work in self._batches)

    @property
    def queued(self) -> int:
        """Number of clips that wait for a thread."""
        return len(self._tasks)

    def next(self, timeout: float) -> PendingBatch | None:
        """Return the next batch, complete and if possible finished, or None after the last of the epoch."""
        if os.getpid() != self._pid:
            raise WorkerError(
                f"process {self._pid} began the iteration; process {os.getpid()} has none of its threads",
                hint="begin the iteration in the process that uses it, or start processes by 'spawn'",
            )
        deadline = time.monotonic() + timeout
        with self._lock:
            while True:
                if self._failure is not None:
                    raise self._failure
                if self._batches and self._is_ready(self._batches[0]):
                    self._room.notify()
                    work = self._batches.popleft()
                    self._complete.notify()
                    return work
                if not self._ready.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise self._late(timeout)

    def take(self, work: PendingBatch) -> Batch:
        """Return a batch for the calling thread's current stream. Called once for each that `next` returned."""
        if work.finished is None:
            self._finish_one(work)
        assert work.finished is not None
        # A thread that waits for its next clip still refers to the last one and its batch.
        (batch, done), work.finished = work.finished, None
        self._stream.hand_over(batch.device_tensors, done)
        return batch

    def pause(self, *, follow: bool) -> bool:
        """Stop all threads at the end of an epoch and wait for them; return whether `start` may follow.

        `follow`: whether to prefetch from the epoch after the next one.
        """
        self._stop()
        self._follows = follow
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Stop all threads, wait for them, and release what was prefetched. Idempotent; any thread may call it."""
        if os.getpid() != self._pid:
            return
        self._stop()
        with self._lock:
            self._tasks.clear()
            self._fetched.clear()
            self._batches.clear()

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            for condition in (self._room, self._work, self._ready, self._arrived, self._complete):
                condition.notify_all()
        atexit.unregister(self.close)
        if threading.current_thread() in self._threads:
            return
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _log.warning("thread %s did not end within %.0f s and is abandoned", thread.name, _JOIN_SECONDS)

    def _guard(self, run: Callable[..., None], *arguments: object) -> None:
        try:
            self._stream.enter_thread()
            run(*arguments)
        except BaseException as error:  # noqa: BLE001 - whatever ends a thread must reach the consumer
            with self._lock:
                self._failure = self._failure or error
                self._ready.notify_all()

    def _plan(self) -> None:
        is_over = False
        while not is_over or self._follows:
            # Planned before there is room for it, and kept if the iteration ends meanwhile.
            plan = self._next_plan = self._next_plan or next(self._plans)
            is_over = plan is None
            with self._lock:
                while not is_over and sum(map(bool, self._batches)) >= self._prefetch and not self._stopped:
                    self._room.wait()
                if self._stopped and not is_over:
                    return
            self._next_plan = None
            if plan is None:
                with self._lock:
                    self._batches.append(None)
                    self._announce()
            else:
                self._queue(plan)
        with self._lock:
            self._planned = True
            self._work.notify_all()
            self._announce()

    def _queue(self, plan: BatchPlan) -> None:
        """Allocate the memory of a batch and queue its clips."""
        rows = clips_to_decode(plan.clips)
        frames = {clip.row: clip.frames for clip in plan.clips if isinstance(clip, Clip)}
        canvas, sound = self._decoders.finisher.open(plan.clips, plan.share.shape), None
        if self._sounds is not None:
            sound = self._sounds.open(plan.clips, len(plan.samples), plan.sound_samples)
        work = PendingBatch(plan, canvas, len(rows), dict(plan.errors), frames, sound)
        sounds = {} if sound is None else sound.tasks
        with self._lock:
            self._batches.append(work)
            self._tasks.extend(
                QueuedClip(row.row, row, canvas, next(self._numbers), row, work, sounds=sounds.get(row.row, ()))
                for row in rows
            )
            self._work.notify(len(rows))
            self._announce()

    def _finish_ahead(self) -> None:
        while work := self._take_complete():
            self._finish_one(work)
            with self._lock:
                self._ready.notify()
            # While it waits, this thread must not keep the batch alive.
            del work

    def _finish_one(self, work: PendingBatch) -> None:
        begun = time.perf_counter()
        work.finished = self._decoders.assembler.make(work.plan, work.canvas, work.frames, work.errors, work.sound)
        work.counters.finish_seconds += time.perf_counter() - begun

    def _take_complete(self) -> PendingBatch | None:
        """Return the next batch once all its clips are decoded; None when the iteration ends."""
        with self._lock:
            while not self._stopped:
                work = next((one for one in self._batches if one is not None), None)
                if work is not None and not work.pending and work.finished is None:
                    return work
                if self._planned and work is None:
                    return None
                self._complete.wait()
            return None

    def _is_ready(self, work: PendingBatch | None) -> bool:
        return work is None or (work.finished is not None if self._finishes_ahead else not work.pending)

    def _decode(self, number: int) -> None:
        lane = self._lanes[number].take()
        while tasks := self._take_fetched(number, lane) if self._ahead else self._take(number, lane):
            left = dict(enumerate(tasks))
            planner = tasks[0].work.plan.planner
            for made in lane.make(tasks, partial(self._at, number, tasks), planner):
                self._done(left.pop(made.number), made)
            if left:  # the iteration has ended
                with self._lock:
                    (self._fetched if self._ahead else self._tasks).extend(left.values())
        self._lanes[number].give(lane)

    def _at(self, number: int, tasks: Sequence[QueuedClip], which: Sequence[int]) -> bool:
        # For the message of a timeout. The key exists already, so no lock is needed.
        self._active[number] = [tasks[one] for one in which]
        return not self._stopped

    def _take(self, number: int, lane: Lane | None) -> Sequence[QueuedClip]:
        with self._lock:
            self._active.pop(number, None)
            while not self._tasks and not self._planned and not self._stopped:
                self._work.wait()
            if self._stopped or not self._tasks:
                return ()
            # Leave enough clips for the other threads.
            most = 1 if lane is None else max(lane.max_clips, min(lane.at_once, len(self._tasks) // len(self._lanes)))
            # Of one epoch at once, because epochs have planners of their own.
            planner, tasks = self._tasks[0].work.plan.planner, list[QueuedClip]()
            while len(tasks) < most and self._tasks and self._tasks[0].work.plan.planner is planner:
                tasks.append(self._tasks.popleft())
            self._active[number] = tasks
            return tasks

    def _take_fetched(self, number: int, lane: Lane) -> Sequence[QueuedClip]:
        with self._lock:
            self._active.pop(number, None)
            while not self._fetched and self._fetching and not self._stopped:
                self._arrived.wait()
            if self._stopped:
                return ()
            tasks = [self._fetched.popleft() for _ in range(min(lane.max_clips, len(self._fetched)))]
            self._active[number] = tasks
            return tasks

    def _take_near(self, number: int) -> Sequence[QueuedClip]:
        """Take the next clip and, of those that wait, the ones that are better read together with it."""
        tasks = list(self._take(-1 - number, None))
        if tasks and isinstance(first := tasks[0].clip, Clip):
            with self._lock:
                rest = deque[QueuedClip]()
                for task in self._tasks:
                    is_near = len(tasks) < _TOGETHER and isinstance(task.clip, Clip) and are_near(first, task.clip)
                    (tasks if is_near else rest).append(task)
                self._tasks = rest
                self._active[-1 - number] = tasks
        return tasks

    def _fetch_ahead(self, number: int) -> None:
        while tasks := self._take_near(number):
            clips = [task.clip for task in tasks if isinstance(task.clip, Clip)]
            assert len(clips) == len(tasks)
            begun, together = time.perf_counter(), list[tuple[EncodedClip, Counters]]()
            if len(tasks) > 1:
                # Whatever fails is found out clip by clip.
                with contextlib.suppress(FastvidError):
                    together = fetch_together(clips)
            for place, (task, clip) in enumerate(zip(tasks, clips, strict=True)):
                try:
                    encoded, counters = together[place] if together else fetch_clip(clip)
                    sounds = fetch_sounds(task.sounds, counters)
                except Exception as error:  # noqa: BLE001 - belongs to this clip; the consumer handles it
                    self._done(task, ClipResult(0, error, None, None))
                    continue
                counters.fetch_seconds = time.perf_counter() - begun
                begun = time.perf_counter()
                with self._lock:
                    task.work.counters.add(counters)
                    self._fetched.append(replace(task, source=encoded, sounds=sounds))
                    self._arrived.notify()
        with self._lock:
            self._fetching -= 1
            if not self._fetching:
                self._arrived.notify_all()

    def _done(self, task: QueuedClip, made: ClipResult) -> None:
        clip, work, error = task.clip, task.work, made.error
        begun = time.perf_counter()
        work.canvas.done(clip.row, good=error is None)
        spent = time.perf_counter() - begun
        if error is not None:
            add_location(error, clip.shard.stem, clip.key)
        with self._lock:
            work.counters.finish_seconds += spent
            if made.counters is not None:
                work.counters.add(made.counters)
            if made.frames is not None:
                work.frames[clip.row] = made.frames
            if error is not None:
                work.errors.update(dict.fromkeys(clip.failing, error))
            work.pending -= 1
            if not work.pending:
                self._announce()

    def _announce(self) -> None:
        """Wake the threads that wait for a complete batch, or for the last one."""
        self._ready.notify()
        self._complete.notify()

    def _late(self, timeout: float) -> WorkerError:
        now = [f"{task.clip.key} of {task.clip.shard.stem}" for tasks in self._active.values() for task in tasks]
        return WorkerError(
            f"no batch within {timeout:.0f} s; being fetched or decoded: {', '.join(sorted(now)) or 'nothing'}",
            hint="exclude a clip that hangs with where=; raise the timeout of Workers for slow storage",
        )
