"""A thread pool for requests that does not delay the exit of the program.

`concurrent.futures` joins its threads at exit without telling them to stop, so a request that retries for minutes would
delay the exit by minutes. This pool stops its retries first. Its threads are not daemons, because obstore must not be
killed while it waits for the interpreter. They set `daemon=False` explicitly: a thread started by a daemon thread would
be a daemon, too.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_POLL_SECONDS = 0.2
"""How often to check whether the main thread has ended; the exit may take this much longer."""

_lock = threading.Lock()
_open: weakref.WeakSet[Pool] = weakref.WeakSet()
_watcher: threading.Thread | None = None


class Pool:
    """Runs at most `size` calls at a time, in threads that start on demand."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._tasks: SimpleQueue[_PendingCall[Any] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        # Threads reference the queue but not the pool, so that an unused pool is collected and ends its threads.
        self._stop = weakref.finalize(self, _stop, self._tasks, self._threads)
        _watch_over(self)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run a call in a thread and return its future."""
        task = _PendingCall(call)
        with self._lock:
            if self._stop.alive:
                self._tasks.put(task)
                if not self._idle.acquire(blocking=False) and len(self._threads) < self._size:
                    name = f"fastvid-storage-{len(self._threads)}"
                    thread = threading.Thread(target=_work, args=(self._tasks, self._idle), name=name, daemon=False)
                    self._threads.append(thread)
                    thread.start()
                return task.future
        # The pool is closed, but a thread of the program may still be reading: run the call here.
        task.run()
        return task.future

    def close(self) -> None:
        """End the threads after all submitted calls; later calls run in the thread that submits them."""
        with _lock:
            _open.discard(self)
        with self._lock:
            self._stop()


class _PendingCall(Generic[T]):
    __slots__ = ("call", "future")

    def __init__(self, call: Callable[[], T]) -> None:
        self.call = call
        self.future: Future[T] = Future()

    def run(self) -> None:
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.call())
            except BaseException as error:  # noqa: BLE001
                self.future.set_exception(error)


def pause(seconds: float) -> bool:
    """Sleep, and return True; return False early when the program is exiting."""
    if seconds <= 0:
        return True
    end = time.monotonic() + seconds
    while threading.main_thread().is_alive():
        left = end - time.monotonic()
        if left <= 0:
            return True
        time.sleep(min(left, _POLL_SECONDS))
    return False


def _watch_over(pool: Pool) -> None:
    global _watcher
    with _lock:
        _open.add(pool)
        if _watcher is None or not _watcher.is_alive():
            _watcher = threading.Thread(target=_watch, name="fastvid-storage-end", daemon=False)
            _watcher.start()


def _watch() -> None:
    """Close all open pools when the main thread ends; return when no pool is left."""
    global _watcher
    while True:
        with _lock:
            pools = list(_open)
            if not pools:
                _watcher = None
                return
        if not threading.main_thread().is_alive():
            for pool in pools:
                pool.close()
        # Drop the references: this thread must not keep an unused pool alive.
        del pools
        time.sleep(_POLL_SECONDS)


def _work(tasks: SimpleQueue[_PendingCall[Any] | None], idle: threading.Semaphore) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        # Drop the call and its result now instead of keeping them until the next call.
        del task
        idle.release()


def _stop(tasks: SimpleQueue[_PendingCall[Any] | None], threads: list[threading.Thread]) -> None:
    for _ in threads:
        tasks.put(None)
