"""A fetched vector is one committed version, even during pushes."""

import contextlib
import functools
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.optim import Adam

from fastvid.errors import ChecksumError
from fastvid.train.strategies.asgd.weights import Snapshot, Weights
from tests.train.strategies.asgd.kit import client_of, serving, together

SIZE = 400_000
WRITERS, READERS = 2, 2


class Unlocked(Weights):
    """What is often written: weights change in place while they are sent. A version's checksum is taken when it is
    made, as it is in the real one."""

    @torch.no_grad()
    def step(self, gradient: Tensor, rate: float, share: float = 1.0) -> int:
        for part in self._values.chunk(50):
            part -= rate
        self._version += 1
        self._made = Snapshot(self._version, self._values)
        assert self._made.checksum
        return self._version

    @contextlib.contextmanager
    def reading(self) -> Iterator[Snapshot]:
        yield self._made if self._version else Snapshot(0, self._values)


def readings(kind: type[Weights]) -> tuple[int, int, int]:
    """Every push changes all weights by one, so a version is a constant vector; returns how many fetched vectors were
    constant, how many were not, and how many the checksum refused."""
    counts = {"whole": 0, "torn": 0, "refused": 0}
    lock, over, joined = threading.Lock(), threading.Event(), threading.Barrier(WRITERS + READERS)
    with serving(SIZE, kind=kind) as server:

        def work(index: int) -> None:
            with client_of(server) as client:
                weights = torch.zeros(SIZE, dtype=torch.float64)
                client.join(weights)
                joined.wait(60)
                ones = torch.ones_like(weights)
                if index < WRITERS:
                    for _ in range(25):
                        client.push(ones, 1.0)
                    over.set()
                    return
                while not over.is_set():
                    refused = False
                    try:
                        client.fetch()
                    except ChecksumError:
                        refused = True
                    same = bool((weights == weights[0]).all())
                    with lock:
                        counts["refused"] += refused
                        counts["whole" if same else "torn"] += 1

        together(WRITERS + READERS, work)
    return counts["whole"], counts["torn"], counts["refused"]


def test_snapshots_are_never_torn() -> None:
    whole, torn, refused = readings(Weights)
    assert whole > 5
    assert torn == refused == 0


def test_tearing_is_detected_without_the_lock() -> None:
    """Positive control of the test above: without snapshots, the oracle and the checksum detect torn vectors."""
    torn = refused = attempts = 0
    # Tearing depends on timing: on a busy machine, one attempt in five sees none.
    while not (torn and refused) and attempts < 20:
        _, *seen = readings(Unlocked)
        torn, refused, attempts = torn + seen[0], refused + seen[1], attempts + 1
    assert torn > 0
    assert refused > 0


def test_a_step_leaves_the_weights_to_their_readers() -> None:
    """Each version that is read stays what it was, whatever the optimizer; two buffers are enough for one reader."""
    rule = functools.partial(Adam, lr=0.0)
    shard, alone = (Weights(6, rule, dtype=torch.float64) for _ in range(2))
    for made in (shard, alone):
        made.initialize(torch.arange(6.0))
    places = set()
    for step in range(8):
        gradient = torch.full((6,), float(step), dtype=torch.float64)
        with shard.reading() as snapshot, shard.reading() as same:
            assert same is snapshot
            before, checksum = snapshot.values.clone(), snapshot.checksum
            assert shard.step(gradient, 0.1) == step + 1
            with shard.reading() as after:
                assert (after.version, snapshot.version) == (step + 1, step)
                assert not torch.equal(after.values, before) or step == 0
                assert (after.checksum != checksum) or step == 0
            assert torch.equal(snapshot.values, before)
            places.add(snapshot.values.data_ptr())
        # Without a reader, the optimizer steps in place; the weights are the same.
        alone.step(gradient, 0.1)
        assert torch.equal(shard.state_dict()["values"], alone.state_dict()["values"])
    assert len(places) == 2
    with alone.reading() as snapshot:
        assert snapshot.values.data_ptr() == alone._values.data_ptr()


def test_a_payload_with_a_wrong_checksum_is_refused() -> None:
    with serving(8) as server, contextlib.ExitStack() as stack:
        client = stack.enter_context(client_of(server))
        client.join(torch.zeros(8, dtype=torch.float64))
        with server.weights.reading() as snapshot:
            snapshot.checksum ^= 1
        with pytest.raises(ChecksumError, match="64 bytes differ"):
            client.fetch()
