"""Weights of a server: a vector, never torn, and the staleness of what is pushed."""

import contextlib
import functools
import threading

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from fastvid.errors import ChecksumError
from fastvid.train.strategies.asgd.weights import Snapshot, Vector, Weights
from fastvid.train.strategies.average import statistics
from tests.train.strategies.asgd.kit import PLAIN, client_of, serving, together


def test_the_staleness_of_a_push_is_the_number_of_updates_since_its_weights():
    ones = torch.ones(3, dtype=torch.float64)
    with serving(3) as server, client_of(server) as client:
        client.join(ones.clone())
        assert [client.push(ones, 0.5, since) for since in (0, 0, 2, 0)] == [0, 1, 0, 3]
        assert server.staleness == {0: 2, 1: 1, 3: 1}


SIZE = 400_000
WRITERS, READERS = 2, 2


class Unlocked(Weights):
    """What is often written: weights change in place while they are sent. A version's checksum is taken when it is
    made, as it is in the real one."""

    @torch.no_grad()
    def step(self, gradient, rate, share=1.0):
        for part in self._values.chunk(50):
            part -= rate
        self.version += 1
        self._made = Snapshot(self.version, self._values)
        assert self._made.checksum
        return self.version

    @contextlib.contextmanager
    def reading(self):
        yield self._made if self.version else Snapshot(0, self._values)


def readings(kind):
    """Every push changes all weights by one, so a version is a constant vector; returns how many fetched vectors were
    constant, how many were not, and how many the checksum refused."""
    counts = {"whole": 0, "torn": 0, "refused": 0}
    lock, over, joined = threading.Lock(), threading.Event(), threading.Barrier(WRITERS + READERS)
    with serving(SIZE, kind=kind) as server:

        def work(index):
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


def test_snapshots_are_never_torn():
    whole, torn, refused = readings(Weights)
    assert whole > 5
    assert torn == refused == 0


def test_tearing_is_detected_without_the_lock():
    """Positive control of the test above: without snapshots, the oracle and the checksum detect torn vectors."""
    torn = refused = attempts = 0
    # Tearing depends on timing: on a busy machine, one attempt in five sees none.
    while not (torn and refused) and attempts < 20:
        _, *seen = readings(Unlocked)
        torn, refused, attempts = torn + seen[0], refused + seen[1], attempts + 1
    assert torn > 0
    assert refused > 0


def test_a_step_leaves_the_weights_to_their_readers():
    """Each version that is read stays what it was, whatever the optimizer; two buffers are enough for one reader."""
    rule = functools.partial(Adam, lr=0.0)
    shard, alone = (Weights(6, rule, [{"size": 6, **PLAIN}], dtype=torch.float64) for _ in range(2))
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


CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])


def made(device):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8), nn.Flatten(), nn.Linear(8, 5))
    # Strides that are not those of the vector, and half precision.
    net = layers.to(memory_format=torch.channels_last_3d)
    net[3].bfloat16()
    net.to(device)
    groups = [{"params": [*net[0].parameters(), net[3].weight], "weight_decay": 0.1, "lr_mult": 2.0}]
    groups += [{"params": [*net[1].parameters(), net[3].bias], "weight_decay": 0.0}]
    return net, Vector(SGD(groups, lr=0.1), net)


def in_order(net, *, gradients=False):
    """Return parameters or gradients by group, then statistics, element by element."""
    order = [*net[0].parameters(), net[3].weight, *net[1].parameters(), net[3].bias]
    values = [parameter.grad if gradients else parameter.detach() for parameter in order]
    parts = [torch.zeros_like(p) if value is None else value for p, value in zip(order, values, strict=True)]
    return torch.cat([part.float().cpu().contiguous().reshape(-1) for part in [*parts, *statistics(net)]])


@DEVICES
def test_a_model_and_its_vector_are_copies_of_each_other(device):
    net, vector = made(device)
    values = vector.collect(vector.buffer())
    assert torch.equal(values, in_order(net))
    assert [(group["size"], group["lr_mult"]) for group in vector.groups] == [
        (8 * 3 * 27 + 8 + 40, 2.0),
        (8 + 8 + 5, 1.0),
    ]
    assert vector.size == sum(group["size"] for group in vector.groups) + 16
    other = (torch.arange(vector.size) % 64).float()  # exact in bfloat16
    vector.spread(other, statistics=False)
    assert torch.equal(in_order(net)[:-16], other[:-16])
    assert torch.equal(in_order(net)[-16:], values[-16:])
    vector.spread(other)
    assert torch.equal(in_order(net), other)


@DEVICES
def test_gradients_are_copied_with_zeros_where_there_are_none(device):
    net, vector = made(device)
    for parameter in [*net[0].parameters(), *net[1].parameters()]:
        parameter.grad = torch.randn_like(parameter)
    into = vector.buffer().fill_(7)
    assert torch.equal(vector.gradients(into), in_order(net, gradients=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_vectors_of_a_gpu_are_pinned():
    _, vector = made("cuda")
    assert vector.buffer().is_pinned()
    assert vector.collect(vector.buffer()).device.type == "cpu"
