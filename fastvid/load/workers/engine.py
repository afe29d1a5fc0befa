"""The threads behind an iteration: plan, fetch, decode, in order, bounded, and ended together.

One planner thread turns positions into clips, at most `prefetch` batches ahead of the consumer. Decode threads take
clips in order, each with a decoder or a worker process of its own, so that one slow clip delays no other; for storage
that answers late, other threads read ahead of them, as many clips as are planned. Batches leave in order. The threads
belong to one iteration and end with it, whatever ends it: the last batch, an error, `break`, Ctrl-C or the
interpreter's exit. No thread lives between iterations, so a process may fork there, but not while one is under way.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

from fastvid.decode.clips import Scratch
from fastvid.decode.request import Decoder, EncodedClip, Output
from fastvid.errors import WorkerError
from fastvid.load.batch.canvas import Canvas, Finisher
from fastvid.load.clips.clip import Clip, Row, reads
from fastvid.load.clips.plan import Plan, place
from fastvid.load.clips.planner import ClipPlanner
from fastvid.load.memory.row_layout import SharedRow
from fastvid.load.workers.fetch import fetch
from fastvid.load.workers.lanes import Lanes
from fastvid.load.workers.processes import ProcessLane
from fastvid.load.workers.stats import Counters
from fastvid.runtime.arrays import IntArray

_log = logging.getLogger(__name__)

FETCH_CLIPS: Final = 4
"""Clips that a thread fetches before it decodes them one by one. A decoder fills the caches with its own code and data,
after which fetching a single clip takes 2 to 3 times as long as fetching the next one."""

APART_CLIPS: Final = 16
"""Clips that a worker process is sent at once. Its thread here wakes up with cold caches, which costs 0.4 ms of the
interpreter's time however many clips it is about, and a training step waits for that."""

_JOIN_SECONDS: Final = 10.0
"""How long the end of an iteration waits for clips that are being decoded; a healthy one takes milliseconds."""


@dataclass(slots=True, eq=False)
class Work:
    """A batch being made.

    Attributes:
        plan: What it holds.
        canvas: Its memory.
        pending: Rows not done.
        errors: What went wrong, by row.
        frames: Frames that each row shows, as soon as they are decided.
        counters: What it cost.
    """

    plan: Plan
    canvas: Canvas
    pending: int
    errors: dict[int, Exception]
    frames: dict[int, IntArray]
    counters: Counters = field(default_factory=Counters)


class Run:
    """The threads of one iteration.

    Args:
        plans: The batches in order; computed in the planner thread.
        lanes: Where each decode thread takes its decoder.
        finisher: Makes the batches' memory.
        prefetch: Batches made ahead of the consumer.
        planner: Decides, in worker processes, the clips that the plans left undecided.
        num_fetchers: Threads that read ahead of the decode threads, for storage that answers late; with none, a decode
            thread reads its clips itself, which keeps them in its cache.
    """

    def __init__(
        self,
        plans: Iterator[Plan],
        lanes: Sequence[Lanes],
        finisher: Finisher,
        *,
        prefetch: int,
        planner: ClipPlanner | None = None,
        num_fetchers: int = 0,
    ) -> None:
        self._lanes, self._finisher, self._prefetch, self._planner = lanes, finisher, prefetch, planner
        self._batches: deque[Work] = deque()
        self._tasks: deque[tuple[Work, Row]] = deque()
        self._fetched: deque[tuple[Work, Row, EncodedClip]] = deque()
        self._ahead = self._fetching = num_fetchers
        self._failure: BaseException | None = None
        self._planned = self._stopped = False
        self._pid = os.getpid()
        self._active: dict[int, Sequence[tuple[Work, Row]]] = {}
        # Reentrant, because the garbage collector may close a forgotten iteration from inside any thread.
        self._lock = threading.RLock()
        self._room, self._work, self._ready, self._arrived = (threading.Condition(self._lock) for _ in range(4))
        self._threads = [threading.Thread(target=self._guard, args=(self._plan, plans), name="fastvid-plan")]
        for number in range(len(lanes)):
            self._threads.append(
                threading.Thread(target=self._guard, args=(self._decode, number), name=f"fastvid-decode-{number}")
            )
        for number in range(num_fetchers):
            self._threads.append(
                threading.Thread(target=self._guard, args=(self._fetch_ahead, number), name=f"fastvid-fetch-{number}")
            )
        for thread in self._threads:
            # A daemon, because the interpreter joins all others before it runs the exit handler that ends them.
            thread.daemon = True
            thread.start()
        atexit.register(self.close)

    @property
    def ready(self) -> int:
        """Batches that are complete and wait for the consumer."""
        with self._lock:
            return sum(not work.pending for work in self._batches)

    @property
    def queued(self) -> int:
        """Clips that wait for a thread."""
        return len(self._tasks)

    def next(self, timeout: float) -> Work | None:
        """The next batch, or None after the last.

        Raises:
            WorkerError: It took longer than `timeout` seconds, or this process was forked from the one that started.
            Exception: What a thread died of.
        """
        if os.getpid() != self._pid:
            raise WorkerError(
                f"the iteration was begun by process {self._pid} and has no threads in process {os.getpid()}",
                hint="begin it in the process that uses it, or start processes by 'spawn'",
            )
        deadline = time.monotonic() + timeout
        with self._lock:
            while True:
                if self._failure is not None:
                    raise self._failure
                if self._batches and not self._batches[0].pending:
                    self._room.notify()
                    return self._batches.popleft()
                if self._planned and not self._batches:
                    return None
                if not self._ready.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise self._late(timeout)

    def close(self) -> None:
        """Ends all threads and waits for them. May be called twice, and from any thread."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._stopped = True
            self._tasks.clear()
            self._fetched.clear()
            for condition in (self._room, self._work, self._ready, self._arrived):
                condition.notify_all()
        atexit.unregister(self.close)
        if threading.current_thread() in self._threads:
            return
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _log.warning("thread %s did not end within %.0f s and is left behind", thread.name, _JOIN_SECONDS)

    def _guard(self, run: Callable[..., None], *arguments: object) -> None:
        try:
            run(*arguments)
        except BaseException as error:  # noqa: BLE001 - whatever ends a thread must reach the consumer
            with self._lock:
                self._failure = self._failure or error
                self._ready.notify_all()

    def _plan(self, plans: Iterator[Plan]) -> None:
        for plan in plans:
            with self._lock:
                while len(self._batches) >= self._prefetch and not self._stopped:
                    self._room.wait()
                if self._stopped:
                    return
            rows = reads(plan.clips)
            frames = {clip.row: clip.frames for clip in plan.clips if isinstance(clip, Clip)}
            work = Work(plan, self._finisher.open(plan.clips), len(rows), dict(plan.errors), frames)
            with self._lock:
                self._batches.append(work)
                self._tasks.extend((work, row) for row in rows)
                self._work.notify(len(rows))
                self._ready.notify()
        with self._lock:
            self._planned = True
            self._work.notify_all()
            self._ready.notify()

    def _decode(self, number: int) -> None:
        decoder = self._lanes[number].take()
        if isinstance(decoder, ProcessLane):
            if self._ahead:
                while got := self._take_fetched(number, 1):
                    ((work, clip, encoded),) = got
                    self._serve_apart(number, decoder, [(work, clip)], encoded)
            else:
                while tasks := self._take(number, 1, at_once=APART_CLIPS):
                    self._serve_apart(number, decoder, tasks)
            self._lanes[number].give(decoder)
            return
        if self._ahead:
            while got := self._take_fetched(number, decoder.max_clips):
                self._decode_clips(decoder, [(*one, one[0].canvas.output(one[1].row, decoder.outputs)) for one in got])
            self._lanes[number].give(decoder)
            return
        scratches = [Scratch() for _ in range(max(decoder.max_clips, FETCH_CLIPS))]
        while tasks := self._take(number, decoder.max_clips):
            self._serve(number, decoder, tasks, scratches)
        self._lanes[number].give(decoder)

    def _take(self, number: int, most: int, at_once: int = FETCH_CLIPS) -> Sequence[tuple[Work, Row]]:
        with self._lock:
            self._active.pop(number, None)
            while not self._tasks and not self._planned and not self._stopped:
                self._work.wait()
            # Never so many that another thread gets none.
            most = max(most, min(at_once, len(self._tasks) // len(self._lanes)))
            tasks = [self._tasks.popleft() for _ in range(min(most, len(self._tasks)))]
            self._active[number] = tasks
            return tasks

    def _take_fetched(self, number: int, most: int) -> Sequence[tuple[Work, Row, EncodedClip]]:
        with self._lock:
            self._active.pop(number, None)
            while not self._fetched and self._fetching and not self._stopped:
                self._arrived.wait()
            got = [self._fetched.popleft() for _ in range(min(most, len(self._fetched)))]
            self._active[number] = [(work, clip) for work, clip, _ in got]
            return got

    def _fetch_ahead(self, number: int) -> None:
        while tasks := self._take(-1 - number, 1, at_once=1):
            ((work, clip),) = tasks
            encoded = self._fetch(work, clip, None)
            if encoded is not None:
                with self._lock:
                    self._fetched.append((work, clip, encoded))
                    self._arrived.notify()
        with self._lock:
            self._fetching -= 1
            if not self._fetching:
                self._arrived.notify_all()

    def _fetch(self, work: Work, clip: Row, scratch: Scratch | None) -> EncodedClip | None:
        """A clip's packets, or None when there was an error, which is then noted."""
        assert isinstance(clip, Clip)
        begun = time.perf_counter()
        counters = Counters()
        try:
            got = fetch(clip.shard, clip.shard_row, clip.request, key=clip.key, info=clip.info, scratch=scratch)
        except Exception as error:  # noqa: BLE001 - belongs to this clip; the consumer decides
            work.canvas.done(clip.row, good=False)
            self._done(work, [(clip, error)], counters)
            return None
        counters.count(got)
        counters.fetch_seconds = time.perf_counter() - begun
        with self._lock:
            work.counters.add(counters)
        return got.clip

    def _serve_apart(
        self, number: int, lane: ProcessLane, tasks: Sequence[tuple[Work, Row]], encoded: EncodedClip | None = None
    ) -> None:
        # Batch by batch, because costs are counted for each.
        for work, group in itertools.groupby(tasks, key=itemgetter(0)):
            rows = [row for _, row in group]
            outputs = [self._place(work.canvas, row.row) for row in rows]

            def under_way(which: int, work: Work = work, rows: Sequence[Row] = rows) -> None:
                self._active[number] = [(work, rows[which])]

            counters, done = Counters(), []
            for which, error, frames in lane.serve(
                rows,
                outputs,
                lambda: self._stopped,
                counters,
                planner=self._planner,
                encoded=encoded,
                at=under_way,
            ):
                row = rows[which]
                begun = time.perf_counter()
                work.canvas.done(row.row, good=error is None)
                counters.finish_seconds += time.perf_counter() - begun
                if frames is not None:
                    work.frames[row.row] = frames
                done.append((row, error))
            self._done(work, done, counters)

    @staticmethod
    def _place(canvas: Canvas, row: int) -> Output | SharedRow:
        """Where a process puts a clip: into the batch, if it lies in memory that processes share."""
        return canvas.shared(row) or canvas.output(row, ProcessLane.outputs)

    def _serve(
        self, number: int, decoder: Decoder, tasks: Sequence[tuple[Work, Row]], scratches: Sequence[Scratch]
    ) -> None:
        fetched: list[tuple[Work, Row, EncodedClip, Output]] = []
        for (work, clip), scratch in zip(tasks, scratches, strict=False):
            # What this thread would be named for if it hung. Its entry is there already, so no lock is needed.
            self._active[number] = [(work, clip)]
            encoded = self._fetch(work, clip, scratch)
            if encoded is not None:
                fetched.append((work, clip, encoded, work.canvas.output(clip.row, decoder.outputs)))
        for first in range(0, len(fetched), decoder.max_clips):
            group = fetched[first : first + decoder.max_clips]
            self._active[number] = [(work, clip) for work, clip, _, _ in group]
            self._decode_clips(decoder, group)

    def _decode_clips(self, decoder: Decoder, fetched: Sequence[tuple[Work, Row, EncodedClip, Output]]) -> None:
        begun = time.perf_counter()
        errors: Sequence[Exception | None]
        try:
            errors = decoder.decode([clip for _, _, clip, _ in fetched], [output for _, _, _, output in fetched])
        except Exception as error:  # noqa: BLE001 - a decoder that raises has failed all its clips
            errors = [error] * len(fetched)
        share = (time.perf_counter() - begun) / len(fetched)
        for (work, clip, _, _), problem in zip(fetched, errors, strict=True):
            begun = time.perf_counter()
            work.canvas.done(clip.row, good=problem is None)
            good = int(problem is None)
            counters = Counters(clips=good, decode_seconds=share, finish_seconds=time.perf_counter() - begun)
            self._done(work, [(clip, problem)], counters)

    def _done(self, work: Work, rows: Sequence[tuple[Row, Exception | None]], counters: Counters) -> None:
        for row, error in rows:
            if error is not None:
                place(error, row.shard.stem, row.key)
        with self._lock:
            work.counters.add(counters)
            for row, error in rows:
                if error is not None:
                    work.errors.update(dict.fromkeys(row.failing, error))
            work.pending -= len(rows)
            if not work.pending:
                self._ready.notify()

    def _late(self, timeout: float) -> WorkerError:
        now = [f"{clip.key} of {clip.shard.stem}" for tasks in self._active.values() for _, clip in tasks]
        return WorkerError(
            f"no batch within {timeout:.0f} s; being fetched or decoded: {', '.join(sorted(now)) or 'nothing'}",
            hint="a clip that never ends can be left out with where=; a slow storage needs a larger timeout=",
        )
