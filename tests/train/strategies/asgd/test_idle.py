"""Clients that are idle for a while, with a bound on how far a client may be ahead of another."""

from __future__ import annotations

import threading

import torch

from fastvid.train.strategies.asgd.client import LeaseProgress
from fastvid.train.strategies.asgd.lease import Lease, Leases
from fastvid.train.strategies.asgd.server import Policy
from tests.train.strategies.asgd.kit import client_of, noted_waits, serving, until


def test_an_idle_client_does_not_delay_others() -> None:
    """Of two leases the first is long: the client that finishes the other requests a third, which does not exist."""
    leases = Leases(samples_per_epoch=12, epochs=1, size=10)
    with serving(4, policy=Policy(bound=1), leases=leases) as server:
        weights = torch.zeros(4, dtype=torch.float64)
        with client_of(server, 4) as busy, client_of(server, 4) as idle:
            busy.join(weights)
            idle.join(weights.clone())
            long = busy.lease()
            assert long is not None
            short = idle.lease()
            assert short is not None
            assert (long.stop - long.start, short.stop - short.start) == (10, 2)

            def wait() -> None:
                idle.push(weights, 1.0, progress=LeaseProgress(short.number, short.stop))
                assert idle.lease() is None

            waiting = threading.Thread(target=wait)
            waiting.start()
            for position in range(long.start, long.stop):
                busy.push(weights, 1.0, progress=LeaseProgress(long.number, position + 1))
            waiting.join(20)
            assert not waiting.is_alive()
        assert leases.over
        assert server.head.version == 11


def test_a_client_with_new_samples_takes_the_slowest_clock() -> None:
    """Otherwise all others would wait until it had caught up on every push that it could not make."""
    leases = Leases(samples_per_epoch=8, epochs=1, size=4)
    with serving(4, policy=Policy(bound=2), leases=leases) as server:
        weights = torch.zeros(4, dtype=torch.float64)
        got = []
        with client_of(server, 4) as idle, client_of(server, 4) as other:
            with client_of(server, 4) as leaving:
                held = {}
                for client in (leaving, other, idle):
                    client.join(weights.clone())
                for client in (leaving, other):
                    held[client] = client.lease()
                    assert held[client] is not None
                waiting = threading.Thread(target=lambda: got.append(idle.lease()))
                waiting.start()
                for pushed in (1, 2, 3):
                    for client, lease in held.items():
                        client.push(weights, 1.0, progress=LeaseProgress(lease.number, lease.start + pushed))
            # The unfinished samples of the departed client are leased to the waiting one.
            waiting.join(20)
            assert [(lease.start, lease.stop) for lease in got] == [(3, 4)]
            assert server.clients[idle.number].clock == 3
            for client, lease in ((idle, got[0]), (other, held[other])):
                client.push(weights, 1.0, progress=LeaseProgress(lease.number, lease.stop))
        assert leases.over


def test_the_server_does_not_spin_while_clients_wait() -> None:
    """An idle client notifies the others only once; answering each notification would loop forever."""
    asked = []

    class Counting(Leases):
        def take(self, client: int) -> Lease | None:
            asked.append(client)
            return super().take(client)

    leases = Counting(samples_per_epoch=4, epochs=1, size=4)
    with noted_waits() as told, serving(4, leases=leases, timeout_s=6.0) as server, client_of(server, 4) as busy:
        weights = torch.zeros(4, dtype=torch.float64)
        with client_of(server, 4) as one, client_of(server, 4) as other:
            for client in (busy, one, other):
                client.join(weights.clone())
            held = busy.lease()
            assert held is not None
            waiting = [threading.Thread(target=client.lease) for client in (one, other)]
            for thread in waiting:
                thread.start()
            # Both have waited long enough to receive a heartbeat.
            until(lambda: len(set(map(id, told))) == 2)
            assert len(asked) < 20
            busy.push(weights, 1.0, progress=LeaseProgress(held.number, held.stop))
            for thread in waiting:
                thread.join(20)
        assert leases.over
