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
from functools import partial
from typing import Final, cast

from fastvid.decode.request import EncodedClip
from fastvid.errors import FastvidError, WorkerError
from fastvid.load.batch.batch import Batch
from fastvid.load.batch.canvas import Canvas
from fastvid.load.clips.plan import Plan
from fastvid.load.stats import Counters
from fastvid.load.workers.clip_worker import Lane, Row, are_near, fetch_clip, fetch_together
from fastvid.load.workers.lanes import Decoders

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
        epochs: Iterator[Iterator[Plan]],
        decoders: Decoders,
        *,
        prefetch: int,
        num_fetchers: int = 0,
    ) -> None:
        self._decoders, self._stream, self._prefetch = decoders, decoders.memory.stream, prefetch
        self._lanes = decoders.lanes
        self._finishes_ahead = self._stream.is_asynchronous and not decoders.assembler.uses_global_generators
        # None where an epoch ends.
        self._plans = itertools.chain.from_iterable(itertools.chain(plans, (None,)) for plans in epochs)
        self._next_plan: Plan | None = None
        self._follows = False
        self._numbers = itertools.count()
        self._batches: deque[Canvas | None] = deque()
        self._tasks: deque[Row] = deque()
        self._fetched: deque[Row] = deque()
        self._ahead = self._fetching = num_fetchers
        self._failure: BaseException | None = None
        self._planned, self._stopped = False, True
        self._pid = os.getpid()
        self._active: dict[int, Sequence[Row]] = {}
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

    def next(self, timeout: float) -> Canvas | None:
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

    def take(self, work: Canvas) -> Batch:
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

    def _queue(self, plan: Plan) -> None:
        """Allocate the memory of a batch and queue its rows."""
        work = self._decoders.memory.open(plan)
        with self._lock:
            self._batches.append(work)
            self._tasks.extend(Row(work, row, next(self._numbers)) for row in plan.reads)
            self._work.notify(len(plan.reads))
            self._announce()

    def _finish_ahead(self) -> None:
        while work := self._take_complete():
            self._finish_one(work)
            with self._lock:
                self._ready.notify()
            # While it waits, this thread must not keep the batch alive.
            del work

    def _finish_one(self, work: Canvas) -> None:
        begun = time.perf_counter()
        work.finished = self._decoders.assembler.make(work)
        work.counters.finish_seconds += time.perf_counter() - begun

    def _take_complete(self) -> Canvas | None:
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

    def _is_ready(self, work: Canvas | None) -> bool:
        return work is None or (work.finished is not None if self._finishes_ahead else not work.pending)

    def _decode(self, number: int) -> None:
        lane = self._lanes[number].take()
        while tasks := self._take_fetched(number, lane) if self._ahead else self._take(number, lane):
            left = {task.number: task for task in tasks}
            lane.make(tasks, partial(self._at, number), partial(self._done, left))
            if left:  # the iteration has ended
                with self._lock:
                    (self._fetched if self._ahead else self._tasks).extend(left.values())
        self._lanes[number].give(lane)

    def _at(self, number: int, tasks: Sequence[Row]) -> bool:
        # For the message of a timeout. The key exists already, so no lock is needed.
        self._active[number] = tasks
        return not self._stopped

    def _take(self, number: int, lane: Lane | None) -> Sequence[Row]:
        with self._lock:
            self._active.pop(number, None)
            while not self._tasks and not self._planned and not self._stopped:
                self._work.wait()
            if self._stopped or not self._tasks:
                return ()
            # Leave enough clips for the other threads.
            most = 1 if lane is None else max(lane.max_clips, min(lane.at_once, len(self._tasks) // len(self._lanes)))
            tasks = [self._tasks.popleft() for _ in range(min(most, len(self._tasks)))]
            self._active[number] = tasks
            return tasks

    def _take_fetched(self, number: int, lane: Lane) -> Sequence[Row]:
        with self._lock:
            self._active.pop(number, None)
            while not self._fetched and self._fetching and not self._stopped:
                self._arrived.wait()
            if self._stopped:
                return ()
            tasks = [self._fetched.popleft() for _ in range(min(lane.max_clips, len(self._fetched)))]
            self._active[number] = tasks
            return tasks

    def _take_near(self, number: int) -> Sequence[Row]:
        """Take the next clip and, of those that wait, the ones that are better read together with it."""
        tasks = list(self._take(-1 - number, None))
        if tasks:
            with self._lock:
                first, rest = tasks[0].target.place(tasks[0].row), deque[Row]()
                for task in self._tasks:
                    is_near = len(tasks) < _TOGETHER and are_near(first, task.target.place(task.row))
                    (tasks if is_near else rest).append(task)
                self._tasks = rest
                self._active[-1 - number] = tasks
        return tasks

    def _fetch_ahead(self, number: int) -> None:
        while tasks := self._take_near(number):
            begun, together = time.perf_counter(), list[tuple[EncodedClip, Counters]]()
            if len(tasks) > 1:
                # Whatever fails is found out clip by clip.
                with contextlib.suppress(FastvidError):
                    together = fetch_together(tasks)
            for place, task in enumerate(tasks):
                try:
                    packets, counters = together[place] if together else fetch_clip(task)
                except Exception as error:  # noqa: BLE001 - belongs to this clip; the consumer handles it
                    self._done({task.number: task}, task, error, None)
                    continue
                counters.fetch_seconds = time.perf_counter() - begun
                begun, task.target.packets[task.row] = time.perf_counter(), packets
                with self._lock:
                    cast(Canvas, task.target).counters.add(counters)
                    self._fetched.append(task)
                    self._arrived.notify()
        with self._lock:
            self._fetching -= 1
            if not self._fetching:
                self._arrived.notify_all()

    def _done(self, left: dict[int, Row], task: Row, error: Exception | None, counters: Counters | None) -> None:
        """Take over a clip that is made, or has failed; it is no longer one of those that are `left`."""
        work, begun = cast(Canvas, task.target), time.perf_counter()
        del left[task.number]
        if error is not None:
            work.place(task.row).locate(error)
        work.done(task.row, error)
        spent = time.perf_counter() - begun
        with self._lock:
            work.counters.finish_seconds += spent
            if counters is not None:
                work.counters.add(counters)
            work.pending -= 1
            if not work.pending:
                self._announce()

    def _announce(self) -> None:
        """Wake the threads that wait for a complete batch, or for the last one."""
        self._ready.notify()
        self._complete.notify()

    def _late(self, timeout: float) -> WorkerError:
        places = [task.target.place(task.row) for tasks in self._active.values() for task in tasks]
        now = [f"{place.key} of {place.shard.stem}" for place in places]
        return WorkerError(
            f"no batch within {timeout:.0f} s; being fetched or decoded: {', '.join(sorted(now)) or 'nothing'}",
            hint="exclude a clip that hangs with where=; raise the timeout of Workers for slow storage",
        )
