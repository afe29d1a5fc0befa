"""Merges of deltas with the real server: their arithmetic, quorums, slow clients, deaths, checkpoints."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from fastvid.errors import UsageError
from fastvid.train.strategies.asgd.client import LeaseProgress, ParameterClient
from fastvid.train.strategies.asgd.deltas import DeltaPusher
from fastvid.train.strategies.asgd.lease import Leases
from fastvid.train.strategies.asgd.merger import OuterStep, Quorum
from fastvid.train.strategies.asgd.messages import ServerMessage
from fastvid.train.strategies.asgd.server import Server
from fastvid.train.strategies.asgd.staleness import Policy
from fastvid.train.strategies.asgd.vector import Vector
from fastvid.train.strategies.asgd.weight_shard import WeightRange
from tests import forks
from tests.train.strategies.asgd import doomed
from tests.train.strategies.asgd.kit import TOKEN, client_of, merging, serving, together, until, weights_of

SIZE, PERIOD, ROUNDS = 7, 4, 6
MEAN = OuterStep("none")


class Reference:
    """The outer step written out: Nesterov momentum on the weighted mean of the deltas."""

    def __init__(self, weights: Tensor, momentum: float = 0.9, lr: float = 0.7) -> None:
        self.weights, self.velocity = weights.clone(), torch.zeros_like(weights)
        self.momentum, self.lr = momentum, lr

    def merge(self, *brought: tuple[float, Tensor]) -> None:
        total = sum(clips for clips, _ in brought)
        mean = torch.zeros_like(self.weights)
        for clips, delta in brought:
            mean += clips / total * delta
        self.velocity = self.momentum * self.velocity + mean
        self.weights = self.weights - self.lr * (mean + self.momentum * self.velocity)


class Learner:
    """Local steps of SGD with momentum on a function of its own, from any weights."""

    def __init__(self, index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        self.target = torch.randn(SIZE, generator=generator, dtype=torch.float64)
        self.velocity = torch.zeros(SIZE, dtype=torch.float64)

    def gradient(self, weights: Tensor) -> Tensor:
        return torch.tanh(weights - self.target)

    def train(self, weights: Tensor) -> Tensor:
        for _ in range(PERIOD):
            self.velocity = 0.5 * self.velocity + self.gradient(weights)
            weights = weights - 0.1 * self.velocity
        return weights


def start() -> Tensor:
    return torch.linspace(-1, 1, SIZE, dtype=torch.float64)


def delta(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def near(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=0, atol=1e-15 * max(1.0, float(b.abs().max()))))


@contextlib.contextmanager
def joined(server: Server, count: int) -> Iterator[list[ParameterClient]]:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(client_of([server], SIZE)) for _ in range(count)]
        for client in clients:
            client.join(start())
        yield clients


class Replica:
    """A model with one parameter, its optimizer and its pusher."""

    def __init__(self, client: ParameterClient, learner: Learner) -> None:
        self.learner = learner
        self.model = nn.Linear(SIZE, 1, bias=False).double()
        self.optimizer = SGD([{"params": list(self.model.parameters()), "weight_decay": 0.0}], lr=0.1, momentum=0.5)
        vector = Vector(self.optimizer, self.model)
        vector.spread(start())
        client.join(vector.collect(vector.buffer()))
        self.pusher = DeltaPusher(client, vector, PERIOD)

    @property
    def weights(self) -> Tensor:
        return self.model.weight.detach()[0]

    def step(self, clips: int = 8) -> bool:
        self.model.weight.grad = self.learner.gradient(self.weights)[None]
        self.optimizer.step()
        return self.pusher.stepped(clips)


def test_lock_step_is_k_step_averaging_with_nesterov_momentum() -> None:
    """Three clients that wait for each other, in threads: whatever the order of their pushes."""
    reference, learners = Reference(start()), [Learner(index) for index in range(3)]
    for _ in range(ROUNDS):
        ends = [learner.train(reference.weights) for learner in learners]
        reference.merge(*((8 * PERIOD, reference.weights - end) for end in ends))
    everyone = threading.Barrier(3)
    with merging(SIZE, "all", policy=Policy(bound=1)) as server:

        def work(index: int) -> Tensor:
            with client_of([server], SIZE) as client:
                replica = Replica(client, Learner(index))
                everyone.wait(60)
                pushes = sum(replica.step() for _ in range(PERIOD * ROUNDS))
                assert pushes == ROUNDS
                return replica.weights.clone()

        found = together(3, work)
        assert server.shard.version == ROUNDS
    assert near(weights_of([server]), reference.weights)
    assert all(torch.equal(weights, weights_of([server])) for weights in found)


def test_a_client_continues_while_the_quorum_is_missing() -> None:
    """Its progress is in its own weights at once and in the server's once, after the merge."""
    with merging(SIZE, "all", MEAN) as server, client_of([server], SIZE) as one, client_of([server], SIZE) as other:
        fast, slow = Replica(one, Learner(0)), Replica(other, Learner(1))
        alone = start()
        learner = Learner(0)
        for _ in range(3):
            assert [fast.step() for _ in range(PERIOD)] == [False] * (PERIOD - 1) + [True]
            alone = learner.train(alone)
            assert near(fast.weights, alone)
        assert server.shard.version == 0
        for _ in range(PERIOD):
            slow.step()
        reference = Reference(start(), 0.0, 1.0)
        reference.merge((3 * 8 * PERIOD, start() - alone), (8 * PERIOD, start() - Learner(1).train(start())))
        assert near(weights_of([server]), reference.weights)
        # The slow one has the merge. The fast one moves to it with its next push, minus what is pending again.
        assert near(slow.weights, reference.weights)
        before = fast.weights.clone()
        for _ in range(PERIOD):
            fast.step()
        moved = learner.train(before) - before
        assert near(fast.weights, reference.weights + moved)
        for _ in range(PERIOD):
            slow.step()
        assert server.shard.version == 2
        assert fast.pusher.staleness == {0: 3, 1: 1}


def test_a_slow_client_slows_no_other() -> None:
    """While one of three stands in a step, the other two train, push and get merges of each other."""
    with merging(SIZE, 2) as server:
        leases = server.leases = Leases(samples_per_epoch=64, epochs=1, size=2)
        with joined(server, 3) as (slow, *fast):
            held, reference = slow.lease(), Reference(start())
            assert held is not None
            for turn in range(10):
                for client in fast:
                    lease = client.lease()
                    assert lease is not None
                    client.push_delta(delta(turn), 2, progress=LeaseProgress(lease.number, lease.stop))
                reference.merge((1, delta(turn)))
                # Both were merged, and no one waited.
                assert server.shard.version == turn + 1
            assert leases.acknowledged == 10 * 2 * 2
            answer = slow.push_delta(delta(99), 2, progress=LeaseProgress(held.number, held.stop))
            assert (answer.staleness, answer.merged) == (10, 0)
            lease = fast[0].lease()
            assert lease is not None
            fast[0].push_delta(delta(98), 6, progress=LeaseProgress(lease.number, lease.stop))
            reference.merge((2, delta(99)), (6, delta(98)))
            assert near(weights_of([server]), reference.weights)


def test_a_killed_client_is_merged_up_to_its_last_push() -> None:
    """A process dies during its second push; its first is pending and counts for the quorum."""
    leases = Leases(samples_per_epoch=10, epochs=1, size=2)
    with merging(SIZE, 2, leases=leases, timeout_s=200) as server, joined(server, 2) as (one, other):
        fault = f"payload-{ServerMessage.DELTA:d}:2"
        dying = forks.start(
            doomed.__name__, SIZE, server.address.port, "deltas", FASTVID_FAULT=fault, FASTVID_TOKEN=TOKEN
        )
        assert forks.wait(dying) == -signal.SIGKILL
        until(lambda: server.lost == 1)
        assert (leases.acknowledged, leases.returned, server.shard.version) == (2, 2, 0)
        reference, done, seen = Reference(start()), 0, []
        pending: list[tuple[int, Tensor]] = [(2, torch.ones(SIZE, dtype=torch.float64))]
        clients = [one, other, one, other]
        for index, client in enumerate(clients):
            lease = client.lease()
            assert lease is not None
            seen += range(lease.start, lease.stop)
            client.push_delta(delta(index), 2, progress=LeaseProgress(lease.number, lease.stop))
            pending.append((2, delta(index)))
            if len(pending) == 2:
                reference.merge(*pending)
                pending, done = [], done + 1
        # Nothing is left to do, so the last delta is merged without a quorum.
        reference.merge(*pending)
        assert sorted(seen) == list(range(2, 10))
        assert leases.over
        assert server.shard.version == done + 1 == 3
        assert near(weights_of([server]), reference.weights)


def test_clients_that_leave_or_wait_for_samples_are_not_awaited() -> None:
    reference = Reference(start())
    with merging(SIZE, "all") as server, joined(server, 2) as (one, other):
        leases = server.leases = Leases(samples_per_epoch=4, epochs=1, size=2)
        with joined(server, 1) as (leaving,):
            first, second = one.lease(), other.lease()
            assert first is not None
            assert second is not None
            one.push_delta(delta(1), 2, progress=LeaseProgress(first.number, first.stop))
            assert server.shard.version == 0
            # It joined and leaves without a push.
            leaving.fetch(torch.empty(SIZE, dtype=torch.float64))
        assert server.shard.version == 0
        # Nothing is left to lease, so this client waits until the other has pushed, or has died.
        waiting = threading.Thread(target=one.lease)
        waiting.start()
        until(lambda: server.shard.version == 1)
        reference.merge((1, delta(1)))
        assert near(weights_of([server]), reference.weights)
        other.push_delta(delta(2), 2, progress=LeaseProgress(second.number, second.stop))
        waiting.join(20)
        reference.merge((1, delta(2)))
        assert leases.over
        assert near(weights_of([server]), reference.weights)


def test_the_grace_lets_further_clients_in() -> None:
    now = 0.0
    with merging(SIZE, 1, MEAN, grace_s=5.0, clock=lambda: now) as server, joined(server, 3) as (one, two, three):
        reference = Reference(start(), 0.0, 1.0)
        one.push_delta(delta(1), 1)
        now = 4.0
        two.push_delta(delta(2), 3)
        assert server.shard.version == 0
        now = 5.0
        # The grace is over: this push is in the next merge.
        assert three.push_delta(delta(3), 1).merged == 0
        reference.merge((1, delta(1)), (3, delta(2)))
        assert near(weights_of([server]), reference.weights)
        now = 6.0
        two.push_delta(delta(4), 1)
        # All that work are in, so nobody is awaited.
        one.push_delta(delta(5), 1)
        reference.merge((1, delta(3)), (1, delta(4)), (1, delta(5)))
        assert near(weights_of([server]), reference.weights)


def test_pending_deltas_survive_the_server() -> None:
    """The next server merges them as soon as enough clients have joined: a single one needs no others."""
    reference = Reference(start())
    reference.merge((3, delta(0)), (1, delta(1)))
    with merging(SIZE, 2) as server, joined(server, 2) as (one, other):
        one.push_delta(delta(0), 3)
        other.push_delta(delta(1), 1)
        one.push_delta(delta(2), 3)
        state = server.state_dict()
        # Deltas that are pushed later do not change what was saved.
        one.push_delta(delta(7), 3)
    with merging(SIZE, 2, state=state) as server:
        assert server.shard.version == 1
        assert near(weights_of([server]), reference.weights)
        with joined(server, 2) as (one, other):
            reference.merge((3, delta(2)))
            one.push_delta(delta(3), 1)
            other.push_delta(delta(4), 4)
            reference.merge((1, delta(3)), (4, delta(4)))
            assert server.shard.version == 3
            assert near(weights_of([server]), reference.weights)


def test_statistics_are_averaged_and_never_extrapolated() -> None:
    """A merge of two of four moves a running variance halfway to their mean, whatever the outer rate."""
    sections = [WeightRange(0, SIZE - 2), WeightRange(SIZE - 2, SIZE, averaged=True)]
    with merging(SIZE, 2, OuterStep("nesterov", lr=50.0), sections=sections) as server, joined(server, 4) as clients:
        for client, value, clips in zip(clients[:2], (4.0, 1.0), (1, 2), strict=True):
            sent = torch.zeros(SIZE, dtype=torch.float64)
            sent[-2:] = value
            client.push_delta(sent, clips)
        expected = start()
        expected[-2:] = expected[-2:] + 0.5 * (2.0 - expected[-2:])
        assert torch.allclose(weights_of([server]), expected, rtol=0, atol=1e-15)


def test_a_quorum_counts_the_clients_that_work() -> None:
    cases: list[tuple[int | float | str, list[int]]] = [
        (1, [1, 1, 1, 1, 1]),
        (3, [1, 1, 2, 3, 3]),
        (0.5, [1, 1, 1, 2, 2]),
        (0.6, [1, 1, 2, 2, 3]),
        ("all", [1, 1, 2, 3, 4]),
    ]
    for clients, needed in cases:
        assert [Quorum(clients).needed(working) for working in range(5)] == needed
    assert Quorum(0.6).needed(5) == 3
    for wrong in (0, -1, 1.0, 0.0, True, "half"):
        with pytest.raises(UsageError, match="quorum"):
            Quorum(wrong)


def test_a_client_and_a_server_of_different_kinds_refuse_each_other() -> None:
    values = start()
    with merging(SIZE) as server, joined(server, 1) as (client,), pytest.raises(UsageError, match="same options"):
        client.push(values, 0.1)
    with serving(SIZE) as servers, joined(servers[0], 1) as (client,), pytest.raises(UsageError, match="same options"):
        client.push_delta(values, 1)
