"""The thread pool for requests: bounded, ended with its pool, and usable until the program exits."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from fastvid.storage.requests import Pool


def named():
    return [thread for thread in threading.enumerate() if thread.name.startswith("fastvid-storage-")]


def wait_for(condition):
    end = time.monotonic() + 100
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_futures_return_results_and_errors():
    pool = Pool(3)

    def fail():
        raise KeyError("no")

    good, bad = [pool.submit(lambda n=n: n * n) for n in range(50)], pool.submit(fail)
    assert [future.result(30) for future in good] == [n * n for n in range(50)]
    with pytest.raises(KeyError, match="no"):
        bad.result(30)
    pool.close()


def test_cancelled_call_is_not_run():
    pool, gate, made = Pool(1), threading.Event(), []
    first = pool.submit(lambda: gate.wait(30))
    second = pool.submit(lambda: made.append(1))
    assert second.cancel()
    gate.set()
    assert first.result(30)
    assert pool.submit(lambda: 7).result(30) == 7
    assert not made
    pool.close()


def test_closed_pool_still_runs_calls():
    pool = Pool(2)
    assert pool.submit(lambda: 1).result(30) == 1
    pool.close()
    assert pool.submit(threading.current_thread).result(30) is threading.current_thread()


@pytest.mark.parametrize("end", ["close", "drop"])
def test_threads_end_when_the_pool_ends(end):
    before = set(named())
    pool = Pool(4)
    gate = threading.Barrier(5)
    for _ in range(4):
        pool.submit(lambda: gate.wait(30))
    gate.wait(30)
    mine = set(named()) - before
    # The thread that watches for the program's exit stays.
    mine = {thread for thread in mine if not thread.name.endswith("-end")}
    assert len(mine) == 4
    assert not any(thread.daemon for thread in mine)
    if end == "close":
        pool.close()
    else:
        del pool
        gc.collect()
    assert wait_for(lambda: not any(thread.is_alive() for thread in mine))
