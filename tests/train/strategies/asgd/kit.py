"""Servers and clients in threads of one process, over real connections."""

import contextlib
import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.optim import SGD

from fastvid.train.strategies.asgd.client import ParameterClient
from fastvid.train.strategies.asgd.lease import Leases
from fastvid.train.strategies.asgd.server import Server
from fastvid.train.strategies.asgd.weights import Weights
from fastvid.train.strategies.link import Link

TOKEN = "0123456789abcdef"
SGD_RULE = functools.partial(SGD, lr=0.0)
PLAIN = {"lr_mult": 1.0, "weight_decay": 0.0}


@contextlib.contextmanager
def serving(size, *, rule=SGD_RULE, kind=Weights, timeout_s=20.0, leases=None, **options):
    """Yield a server of float64 weights. Clients must leave before the block ends."""
    weights = kind(size, rule, [{"size": size, **PLAIN}], dtype=torch.float64)
    server = Server(weights, leases or Leases(1, 1, 1), token=TOKEN, timeout_s=timeout_s, **options)
    yield server
    server.close()


@contextlib.contextmanager
def client_of(server):
    client = ParameterClient(server.address, timeout_s=20.0)
    yield client
    client.leave()


@contextlib.contextmanager
def noted_waits():
    """Lines whose client was told to wait: a server does it after a quarter of its patience."""
    told = []
    plain = Link.beat

    def beat(link):
        plain(link)
        told.append(link)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "beat", beat)
        yield told


def weights_of(server):
    return server.weights.state_dict()["values"]


def together(count, work):
    """Run functions in threads that start at the same time."""
    barrier = threading.Barrier(count)

    def one(index):
        barrier.wait(20)
        return work(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))
