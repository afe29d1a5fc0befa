"""Clients that join, leave and die, their leases, and a server that resumes from its checkpoint."""

import threading
import time

import pytest
import torch

from fastvid.errors import UsageError
from fastvid.train.strategies.asgd.client import ParameterClient
from fastvid.train.strategies.asgd.lease import Leases
from tests.load.tools import until
from tests.train.strategies.asgd.kit import client_of, noted_waits, serving, together, weights_of

pytestmark = pytest.mark.soak  # many processes and real waiting: a minute or two

SIZE = 5


def ones(size=SIZE):
    return torch.ones(size, dtype=torch.float64)


def test_the_first_client_initializes_the_weights():
    with serving(SIZE) as server:

        def work(index):
            with client_of(server) as client:
                client.join(ones() * (index + 1))
                return client.weights, client.version

        found = together(3, work)
        first = weights_of(server)
        # The server has the weights of one client, and the other clients have fetched them.
        assert first[0] in (1, 2, 3)
        assert torch.equal(first, ones() * first[0])
        assert all(torch.equal(weights, first) and version == 0 for weights, version in found)


def test_requests_before_initialization_are_rejected():
    with serving(SIZE) as server, client_of(server) as client:
        client.weights = ones()
        for ask in (client.fetch, lambda: client.push(ones(), 1.0, 0), client.lease):
            with pytest.raises(UsageError, match="rejected"):
                ask()


def test_another_client_initializes_the_weights_if_the_first_leaves():
    with serving(SIZE) as server:
        gone = ParameterClient(server.address, timeout_s=20.0)
        # It is chosen to initialize the weights, but leaves instead.
        assert gone._ask("join")["fresh"]
        with client_of(server) as client:
            joined = threading.Thread(target=client.join, args=(ones() * 7,))
            joined.start()
            gone.leave()
            joined.join(20)
            assert torch.equal(weights_of(server), ones() * 7)


def test_a_warm_start_admits_other_clients_after_the_warm_up():
    with serving(SIZE, warm_up=6) as server, client_of(server) as first:
        first.join(ones())
        with client_of(server) as second:
            waiting = threading.Thread(target=second.join, args=(ones(),))
            waiting.start()
            for _ in range(6):
                time.sleep(0.01)
                assert waiting.is_alive()
                first.push(ones(), 1.0)
            waiting.join(20)
            assert second.version == 6


def test_a_client_waits_for_leases_that_may_be_returned():
    leases = Leases(samples_per_epoch=4, epochs=1, size=4)
    with noted_waits() as told, serving(SIZE, leases=leases, timeout_s=8.0) as server, client_of(server) as second:
        first = ParameterClient(server.address)
        first.join(ones())
        second.join(ones())
        assert first.lease() is not None
        got = []
        waiting = threading.Thread(target=lambda: got.append(second.lease()))
        waiting.start()
        until(lambda: bool(told))
        assert not got
        first.leave()
        waiting.join(10)
        assert got
        assert got[0] is not None


def test_a_lease_is_acknowledged_by_its_holder_only():
    leases = Leases(10, 1, 4)
    lease = leases.take(1)
    assert lease is not None
    with pytest.raises(UsageError):
        leases.take(1)
    for client, number, position in ((2, lease.number, 2), (1, lease.number + 1, 2), (1, lease.number, 5)):
        with pytest.raises(UsageError):
            leases.acknowledge(client, number, position)
    leases.acknowledge(1, lease.number, 3)
    assert leases.give_back(1) == 1
    again = leases.take(2)
    assert again is not None
    assert (again.start, again.stop) == (3, 4)
    assert again.number != lease.number
