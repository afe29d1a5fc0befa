"""Servers and clients in threads of one process, over real connections."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from fastvid.train.strategies.asgd.client import ParameterClient
from fastvid.train.strategies.asgd.server import Server
from fastvid.train.strategies.asgd.weights import OptimizerFactory, Weights
from fastvid.train.strategies.link import Link

TOKEN = "0123456789abcdef"
SGD_RULE: OptimizerFactory = functools.partial(SGD, lr=0.0)


@contextlib.contextmanager
def serving(
    size: int,
    *,
    rule: OptimizerFactory = SGD_RULE,
    kind: type[Weights] = Weights,
    timeout_s: float = 20.0,
    **options: Any,
) -> Iterator[Server]:
    """Yield a server of float64 weights. Clients must leave before the block ends."""
    server = Server(kind(size, rule, dtype=torch.float64), token=TOKEN, timeout_s=timeout_s, **options)
    yield server
    server.close()


@contextlib.contextmanager
def client_of(server: Server) -> Iterator[ParameterClient]:
    client = ParameterClient(server.address, timeout_s=20.0)
    yield client
    client.leave()


@contextlib.contextmanager
def noted_waits() -> Iterator[list[Link]]:
    """Lines whose client was told to wait: a server does it after a quarter of its patience."""
    told: list[Link] = []
    plain = Link.beat

    def beat(link: Link) -> None:
        plain(link)
        told.append(link)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "beat", beat)
        yield told


def until(reached: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for a condition, and fail after a time limit."""
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)


def weights_of(server: Server) -> Tensor:
    values: Tensor = server.weights.state_dict()["values"]
    return values


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run functions in threads that start at the same time."""
    barrier = threading.Barrier(count)

    def one(index: int) -> Any:
        barrier.wait(20)
        return work(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))
