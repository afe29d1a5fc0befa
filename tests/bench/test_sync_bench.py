"""The strategy benchmark: its expected values, and its simulated slow network."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.strategies.local_steps import Ranks, RunSpec, SlowLink
from bench.strategies.sync import crossover, efficiency


@given(t_comm=st.floats(0, 10), t_step=st.floats(0.001, 10), k=st.integers(1, 1000), rounds=st.integers(1, 50))
def test_efficiency_is_the_share_of_time_spent_computing(t_comm: float, t_step: float, k: int, rounds: int) -> None:
    computing = rounds * k * t_step
    assert efficiency(t_comm, t_step, k) == pytest.approx(computing / (computing + rounds * t_comm), rel=1e-12)


@given(more=st.floats(1.001, 20), k=st.integers(2, 64))
def test_at_the_crossover_both_take_the_same_time(more: float, k: int) -> None:
    ratio = crossover(more, k)
    if ratio is None:
        # The rounds need so many more steps that they communicate at least as often.
        assert more >= k
        return
    # With t_step as the unit: one step of ddp against `more` steps of which every k-th communicates.
    assert 1 / efficiency(ratio, 1.0, 1) == pytest.approx(more / efficiency(ratio, 1.0, k), rel=1e-9)
    assert crossover(0.9, k) == 0


def test_a_slow_network_delays_messages_and_changes_no_result() -> None:
    with Ranks(2) as ranks:
        fast = ranks.run(RunSpec("kavg", {"period": 4}, steps=16, look_every=4))
        slow = ranks.run(RunSpec("kavg", {"period": 4}, steps=16, look_every=4, link=SlowLink(0.2)))
        ddp = ranks.run(RunSpec("ddp", steps=4, link=SlowLink(0.2)))
    for one, other in zip(fast, slow, strict=True):
        # The network changes no number.
        assert one["steps"] == other["steps"] == 16
        assert [row[::2] for row in one["curve"]] == [row[::2] for row in other["curve"]]
        assert one["messages"] == other["messages"]
        assert one["message_bytes"] >= 4 * 4 * one["parameters"]
        # A sleep is never shorter than requested.
        assert other["seconds"] > 4 * 0.2
    assert ddp[0]["seconds"] > 4 * 0.2


def test_an_all_reduce_takes_delay_plus_bytes_over_bandwidth() -> None:
    assert SlowLink(0.1).seconds(10**9, 2) == 0.1
    # Each of two ranks sends the whole message once, each of four one and a half times.
    assert SlowLink(0.1, 1e6).seconds(10**6, 2) == pytest.approx(1.1)
    assert SlowLink(0.1, 1e6).seconds(10**6, 4) == pytest.approx(1.6)
