"""Threads that wait for servers, and that a program which ends does not have to wait for.

`concurrent.futures` joins its threads before anybody can tell them that the program ends, so a request that is tried
again for minutes would hold the program for minutes. These threads are told first. They are not daemons: the library
below must not be cut off while it waits for the interpreter. (A daemon that starts a thread would make it one, too.)
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
"""How often it is looked whether the main thread has ended; a program that ends waits as long."""

_lock = threading.Lock()
_open: weakref.WeakSet[Pool] = weakref.WeakSet()
_watcher: threading.Thread | None = None


class Pool:
    """At most `size` calls at a time, in threads that are started when there is something to do.

    Args:
        size: Threads.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._tasks: SimpleQueue[_Task[Any] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        # Threads hold the queue but not the pool, so that a pool nobody uses any more ends them.
        self._stop = weakref.finalize(self, _stop, self._tasks, self._threads)
        _watch_over(self)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Calls in a thread."""
        task = _Task(call)
        with self._lock:
            if self._stop.alive:
                self._tasks.put(task)
                if not self._idle.acquire(blocking=False) and len(self._threads) < self._size:
                    name = f"fastvid-storage-{len(self._threads)}"
                    thread = threading.Thread(target=_work, args=(self._tasks, self._idle), name=name, daemon=False)
                    self._threads.append(thread)
                    thread.start()
                return task.future
        # After the end of the pool, which comes before that of a thread that still reads.
        task.run()
        return task.future

    def close(self) -> None:
        """Ends the threads once they have done what was submitted; later calls are made by those who submit them."""
        with _lock:
            _open.discard(self)
        with self._lock:
            self._stop()


class _Task(Generic[T]):
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
    """Sleeps; returns False, and early, when the program ends."""
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
    """Closes the pools that are open when the main thread ends; ends itself when none is left."""
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
        # Nothing here may keep a pool alive that nobody else uses.
        del pools
        time.sleep(_POLL_SECONDS)


def _work(tasks: SimpleQueue[_Task[Any] | None], idle: threading.Semaphore) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        # Without the task's result, which the thread would keep until the next.
        del task
        idle.release()


def _stop(tasks: SimpleQueue[_Task[Any] | None], threads: list[threading.Thread]) -> None:
    for _ in threads:
        tasks.put(None)
