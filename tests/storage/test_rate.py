"""The rate of requests that a store takes is found from its refusals, and shared fairly by processes."""

import heapq
import itertools
from collections import deque

import pytest

from fastvid.storage.requests import LEAST, PAUSE, Rate


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_requests_are_paced_only_after_many_were_refused():
    clock = Clock()
    rate = Rate(clock)
    assert [rate.delay() for _ in range(100)] == [0.0] * 100
    assert not any(rate.refuse(clock.now) for _ in range(8))
    assert rate.limit is None
    assert rate.refuse(clock.now)
    assert rate.limit == 50
    delays = [rate.delay() for _ in range(3)]
    assert delays == pytest.approx([PAUSE + 0.02, PAUSE + 0.04, PAUSE + 0.06])


def test_requests_that_were_sent_at_the_old_rate_lower_it_once():
    clock = Clock()
    rate = Rate(clock)
    for _ in range(100):
        rate.delay()
    clock.now = 0.1
    for _ in range(40):
        rate.refuse(0.0)
    assert rate.limit == 50
    clock.now += PAUSE
    for _ in range(40):
        rate.refuse(clock.now)
    assert rate.limit == LEAST, "nothing was sent in the last second"


def test_the_rate_never_ends_and_recovers():
    clock = Clock()
    rate = Rate(clock)
    for _ in range(20):
        clock.now += rate.delay()
        rate.refuse(clock.now)
    assert rate.limit == LEAST
    for _ in range(1000):
        clock.now += rate.delay()
        rate.answer()
    assert rate.limit > 50


@pytest.mark.parametrize("processes", [1, 8])
def test_processes_share_what_a_store_takes(processes):
    """Each process has 64 requests in flight; the store serves 200 a second, after 50 ms, and refuses the others."""
    clock, order = Clock(), itertools.count()
    rates = [Rate(clock) for _ in range(processes)]
    events = []  # (time, order, process, when the request was sent or None if it is sent now, whether it is served)
    served, refused, window = [0] * processes, 0, deque()
    for process, rate in enumerate(rates):
        for _ in range(64):
            heapq.heappush(events, (rate.delay(), next(order), process, None, False))
    while events[0][0] < 60:
        clock.now, _, process, sent, is_served = heapq.heappop(events)
        if sent is None:
            while window and window[0] <= clock.now - 1:
                window.popleft()
            if is_served := len(window) < 200:
                window.append(clock.now)
            heapq.heappush(events, (clock.now + 0.05, next(order), process, clock.now, is_served))
            continue
        if is_served:
            rates[process].answer()
            served[process] += clock.now > 10
        else:
            rates[process].refuse(sent)
            refused += clock.now > 10
        heapq.heappush(events, (clock.now + rates[process].delay(), next(order), process, None, False))
    assert sum(served) > 0.6 * 200 * 50
    assert refused < 0.15 * sum(served)
    assert min(served) > 0.7 * max(served)
