"""The threads of an iteration: they plan, fetch, decode and finish batches in order, with bounded prefetch.

One planner thread turns positions into clips, at most `prefetch` batches before the consumer needs them. Decode threads
take clips in order, each with its own decoder or worker process, so that a slow clip delays no other. For storage with
high latency, fetch threads read the planned clips before the decode threads take them. Batches are delivered in order.
For CUDA a finish thread queues the copy and conversion of the next batch on the loader's stream while the consumer uses
the last one. On a CPU the consumer finishes each batch, because it would have to wait for that anyway; on any device it
does so if a transform uses the global random generators, which belong to the consumer's thread.
The threads belong to one iteration and end with it, for whatever reason: the last batch, an error, `break`, Ctrl-C or
interpreter exit. Between iterations no thread runs, so a process may fork then, but not during an iteration.
A pipeline continues from epoch to epoch. From the second epoch on it prefetches batches of the next epoch at the end of
an epoch; they are kept between the iterations, and the threads of the next iteration continue from there.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, cast

from fastvid.errors import WorkerError
from fastvid.load.batch.batch import Batch
from fastvid.load.batch.canvas import Canvas
from fastvid.load.clips.plan import Plan
from fastvid.load.stats import Counters
from fastvid.load.workers.clip_worker import Lanes, Row, Watched, are_near, fetch_rows
from fastvid.load.workers.lanes import Decoders, Lane

_log = logging.getLogger(__name__)

_TOGETHER: Final = 32
"""Most clips that one fetch thread reads in one pass."""

_JOIN_SECONDS: Final = 10.0
"""How long closing waits for clips that are being decoded; normally milliseconds."""


class BatchPipeline:
    """The batches of a loader from one position on, and the threads that make them during each iteration.

    `epochs`: the plans of the rest of an epoch, then of each of the following ones, all computed lazily.
    """

    def __init__(
        self, epochs: Iterator[Iterator[Plan]], decoders: Decoders, *, prefetch: int, num_fetchers: int = 0
    ) -> None:
        self._decoders, self._stream, self._prefetch = decoders, decoders.memory.stream, prefetch
        self._lanes = decoders.lanes
        self._finishes_ahead = self._stream.is_asynchronous and not decoders.assembler.uses_global_generators
        # None marks the end of an epoch.
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
        self._watches: list[Watched] = []
        self._threads: list[threading.Thread] = []
        # Reentrant, because the garbage collector may close an abandoned iteration from inside any thread.
        self._lock = threading.RLock()
        # Who waits for each: the planner; threads that take planned clips; decode threads that take fetched clips; the
        # consumer and the thread that finishes batches.
        self._conditions = [threading.Condition(self._lock) for _ in range(4)]
        self._room, self._work, self._arrived, self._ready = self._conditions

    def start(self) -> None:
        """Start the threads, which continue with what was prefetched before."""
        # A child that was forked between two iterations may continue: no thread was running.
        self._pid, self._stopped, self._planned = os.getpid(), False, False
        self._fetching = self._ahead
        # Clips that a thread had taken but not finished were put back at the end of the queue.
        self._tasks = deque(sorted(self._tasks, key=lambda task: task.number))
        self._fetched = deque(sorted(self._fetched, key=lambda task: task.number))
        self._watches = [Watched() for _ in range(len(self._lanes) + self._ahead)]
        runs: dict[str, Callable[[], None]] = {}
        for number, (lanes, watch) in enumerate(zip(self._lanes, self._watches, strict=False)):
            runs[f"decode-{number}"] = partial(self._decode, lanes, watch)
        for number, watch in enumerate(self._watches[len(self._lanes) :]):
            runs[f"fetch-{number}"] = partial(self._fetch_ahead, watch)
        if self._finishes_ahead:
            runs["finish"] = self._finish_ahead
        runs["plan"] = self._plan
        self._threads = [
            # Daemon threads, because the interpreter joins all others before it runs the exit handler that ends them.
            threading.Thread(target=self._guard, args=(run,), name=f"fastvid-{name}", daemon=True)
            for name, run in runs.items()
        ]
        # Whoever has started waits for the lock, instead of slowing down the start of the others.
        with self._lock:
            for thread in self._threads:
                thread.start()
        atexit.register(self.close)

    @property
    def ready(self) -> int:
        """Number of complete batches that wait for the consumer."""
        # Without the lock: in a forked child, a thread that does not exist there may hold it forever.
        return sum(work is not None and not work.pending for work in tuple(self._batches))

    @property
    def queued(self) -> int:
        """Number of clips that wait for a thread."""
        return len(self._tasks)

    def next(self, timeout: float) -> Canvas | None:
        """Return the next batch, all its clips decoded, or None at the end of the epoch.

        On a GPU the batch is also finished, unless a transform uses the global random generators. `timeout`: seconds.
        """
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
                work = self._batches[0] if self._batches else None
                is_whole = work is not None and not work.pending
                if work is not None and self._finishes_ahead:
                    is_whole = work.finished is not None
                if is_whole or (self._batches and work is None):
                    self._room.notify()
                    self._ready.notify_all()
                    return self._batches.popleft()
                if not self._ready.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise self._late(timeout)

    def take(self, work: Canvas) -> Batch:
        """Return a batch, finished, for use on the calling thread's current stream; once for each batch of `next`."""
        if work.finished is None:
            self._finish_one(work)
        assert work.finished is not None
        # Cleared: a decode thread that waits still refers to its last clip, and through it to `work`.
        (batch, done), work.finished = work.finished, None
        if done is not None:
            self._stream.hand_over(batch.device_tensors, done)
        return batch

    def pause(self, *, follow: bool) -> bool:
        """Stop all threads at the end of an epoch and wait for them; return whether `start` may be called again.

        `follow`: whether the next iteration also prefetches from the epoch after its own.
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
            for watch in self._watches:
                watch.is_over = True
            for condition in self._conditions:
                condition.notify_all()
        atexit.unregister(self.close)
        if threading.current_thread() in self._threads:
            return
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _log.warning("thread %s did not end within %.0f s and is abandoned", thread.name, _JOIN_SECONDS)

    def _guard(self, run: Callable[[], None]) -> None:
        try:
            self._stream.enter_thread()
            run()
        except BaseException as error:  # noqa: BLE001 - whatever ends a thread must reach the consumer
            with self._lock:
                self._failure = self._failure or error
                self._ready.notify_all()

    def _plan(self) -> None:
        is_over = False
        while not is_over or self._follows:
            # Planned before there is room for it in the queue, and kept for the next iteration if this one ends.
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
                    self._ready.notify_all()
            else:
                self._queue(plan)
        with self._lock:
            self._planned = True
            self._work.notify_all()
            self._ready.notify_all()

    def _queue(self, plan: Plan) -> None:
        """Allocate the memory of a batch and queue its rows."""
        work = self._decoders.memory.open(plan)
        with self._lock:
            self._batches.append(work)
            self._tasks.extend(map(Row, itertools.repeat(work), plan.reads, self._numbers))
            self._work.notify(len(plan.reads))
            self._ready.notify_all()

    def _finish_ahead(self) -> None:
        while work := self._take_complete():
            self._finish_one(work)
            with self._lock:
                self._ready.notify_all()
            # While this thread waits, it must not keep the batch alive.
            del work

    def _finish_one(self, work: Canvas) -> None:
        begun = time.perf_counter()
        work.finished = self._decoders.assembler.make(work)
        work.finish_seconds += time.perf_counter() - begun

    def _take_complete(self) -> Canvas | None:
        """Return the next batch once all its clips are decoded; None when the iteration ends."""
        with self._lock:
            while not self._stopped:
                work = next((one for one in self._batches if one is not None), None)
                if work is not None and not work.pending and work.finished is None:
                    return work
                if self._planned and work is None:
                    return None
                self._ready.wait()
            return None

    def _decode(self, lanes: Lanes, watch: Watched) -> None:
        lane: Lane = lanes.take()
        while tasks := self._take(watch, lane):
            left = {task.number: task for task in tasks}
            lane.make(tasks, watch, partial(self._done, left))
            if left:  # the iteration has ended
                with self._lock:
                    (self._fetched if self._ahead else self._tasks).extend(left.values())
        lanes.put_back(lane)

    def _take(self, watch: Watched, lane: Lane | None) -> list[Row]:
        """Remove and return the next clips to decode on `lane`, or with None one clip to fetch; [] if none are left."""
        is_fetched = lane is not None and self._ahead > 0
        with self._lock:
            watch.rows = ()
            while not self._stopped:
                queue = self._fetched if is_fetched else self._tasks
                if queue:
                    break
                if not self._fetching if is_fetched else self._planned:
                    return []
                (self._arrived if is_fetched else self._work).wait()
            if self._stopped:
                return []
            # Leave enough clips for the other decode threads.
            most = 1 if lane is None else max(lane.least, min(lane.at_once, len(queue) // len(self._lanes)))
            watch.rows = tasks = [queue.popleft() for _ in range(min(most, len(queue)))]
            return tasks

    def _take_near(self, watch: Watched) -> list[Row]:
        """Remove and return the next clip and those queued clips that are best read together with it."""
        tasks = self._take(watch, None)
        if tasks:
            with self._lock:
                first, rest = tasks[0].target.place(tasks[0].row), deque[Row]()
                for task in self._tasks:
                    is_near = len(tasks) < _TOGETHER and are_near(first, task.target.place(task.row))
                    (tasks if is_near else rest).append(task)
                self._tasks = rest
        return tasks

    def _fetch_ahead(self, watch: Watched) -> None:
        while tasks := self._take_near(watch):
            for task, found in zip(tasks, fetch_rows(tasks), strict=True):
                if isinstance(found, Exception):
                    self._done({task.number: task}, task, found, Counters())
                    continue
                task.target.keep(task.row, *found)
                with self._lock:
                    self._fetched.append(task)
                    self._arrived.notify()
        with self._lock:
            self._fetching -= 1
            if not self._fetching:
                self._arrived.notify_all()

    def _done(self, left: dict[int, Row], task: Row, error: Exception | None, cost: Counters) -> None:
        """Record that a clip was made or has failed, and remove it from `left`, the unfinished clips of this call."""
        work, begun = cast(Canvas, task.target), time.perf_counter()
        del left[task.number]
        if error is not None:
            work.fail(task.row, error)
        elif task.row in work.planes:
            work.cut(task.row)
        cost.finish_seconds += time.perf_counter() - begun
        work.costs.append(cost)
        with self._lock:
            work.pending -= 1
            if not work.pending:
                self._ready.notify_all()

    def _late(self, timeout: float) -> WorkerError:
        places = [task.target.place(task.row) for watch in self._watches for task in watch.rows]
        now = [f"{place.key} of {place.shard.stem}" for place in places]
        return WorkerError(
            f"no batch within {timeout:.0f} s; being fetched or decoded: {', '.join(sorted(now)) or 'nothing'}",
            hint="exclude a clip that hangs with where=; raise the timeout of Workers for slow storage",
        )
