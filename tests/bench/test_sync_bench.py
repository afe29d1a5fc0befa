"""What the benchmark of the strategies expects, and that its slow network slows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.strategies.local_steps import Job, Link, Ranks
from bench.strategies.sync import crossover, efficiency


@given(t_comm=st.floats(0, 10), t_step=st.floats(0.001, 10), k=st.integers(1, 1000), rounds=st.integers(1, 50))
def test_the_efficiency_is_that_of_the_time_spent(t_comm: float, t_step: float, k: int, rounds: int) -> None:
    computing = rounds * k * t_step
    assert efficiency(t_comm, t_step, k) == pytest.approx(computing / (computing + rounds * t_comm), rel=1e-12)


@given(more=st.floats(1.001, 20), k=st.integers(2, 64))
def test_at_the_crossover_both_take_as_long(more: float, k: int) -> None:
    ratio = crossover(more, k)
    if ratio is None:
        # However slow the network, the rounds talk as often as they need more steps.
        assert more >= k
        return
    # With t_step as the unit: one step of ddp against `more` steps of which every k-th talks.
    assert 1 / efficiency(ratio, 1.0, 1) == pytest.approx(more / efficiency(ratio, 1.0, k), rel=1e-9)
    assert crossover(0.9, k) == 0


def test_slowed_ranks_talk_as_counted_and_take_their_time() -> None:
    with Ranks(2) as ranks:
        fast = ranks.run(Job("kavg", {"period": 4}, steps=16, look_every=4))
        slow = ranks.run(Job("kavg", {"period": 4}, steps=16, look_every=4, link=Link(0.2)))
        ddp = ranks.run(Job("ddp", steps=4, link=Link(0.2)))
    for one, other in zip(fast, slow, strict=True):
        # The network changes no number.
        assert one["steps"] == other["steps"] == 16
        assert [row[::2] for row in one["curve"]] == [row[::2] for row in other["curve"]]
        assert one["messages"] == other["messages"]
        assert one["message_bytes"] >= 4 * 4 * one["parameters"]
        # A sleep is never shorter than asked for.
        assert other["seconds"] > 4 * 0.2
    assert ddp[0]["seconds"] > 4 * 0.2


def test_a_link_is_delay_and_bytes() -> None:
    assert Link(0.1).seconds(10**9, 2) == 0.1
    # Each of two ranks sends the whole message once, each of four one and a half times.
    assert Link(0.1, 1e6).seconds(10**6, 2) == pytest.approx(1.1)
    assert Link(0.1, 1e6).seconds(10**6, 4) == pytest.approx(1.6)
