"""How a client and a server find each other: a store that the server holds, and a process group of two for the pair.

One process group for all would end for everybody when one of them dies; here a death ends one pair.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import ProcessGroupGloo

from fastvid.errors import WorkerError
from fastvid.train.strategies.asgd.messages import Link

SERVER, CLIENT = 0, 1
_TICKETS: Final = "tickets"
_CLOSE: Final = "close"
_KNOCK: Final = "knock"
_PORTS: Final = "ports"
_PAUSE_S: Final = 0.01  # between two looks for a client that comes


class Door:
    """The server's side: knocks, in their order.

    Args:
        host: Name or address of this machine, as clients reach it.
        port: 0 for any that is free.
        timeout_s: How long a peer may be silent.
        first: Number of the first client.
    """

    def __init__(self, host: str, port: int, timeout_s: float, first: int = 0) -> None:
        self.timeout_s, self._first = timeout_s, first
        with _translated("a server cannot listen", host, port):
            self._store = TCPStore(
                host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
            )
        self.address = host, int(self._store.port)
        self._store.add(_TICKETS, first)

    def knocks(self) -> Iterator[int]:
        """Numbers of clients as they come, until `close`. Used by one thread."""
        # A store serves one call at a time, so whoever waits on one needs its own.
        store = _connect(self.address, self.timeout_s)
        for ticket in itertools.count(self._first + 1):
            if self._wait(store, ticket) == _CLOSE:
                return
            yield ticket

    @staticmethod
    def _wait(store: TCPStore, ticket: int) -> str:
        key = f"{_KNOCK}/{ticket}"
        # A blocking get would warn on stderr whenever its time is over.
        while not store.check([key]):
            time.sleep(_PAUSE_S)
        return bytes(store.get(key)).decode()

    def open(self, ticket: int) -> Link:
        """The link to a client that has knocked.

        Raises:
            WorkerError: It does not answer.
        """
        return _pair(self.address, ticket, SERVER, self.timeout_s)

    def tell(self, ports: list[int]) -> None:
        """Leaves the ports of all shards, this one's first, for `find`."""
        self._store.set(_PORTS, json.dumps(ports))

    def close(self) -> None:
        """Ends `knocks`."""
        self._store.set(f"{_KNOCK}/{self._store.add(_TICKETS, 1)}", _CLOSE)


def knock(host: str, port: int, timeout_s: float) -> Link:
    """A new client's link to a server.

    Raises:
        WorkerError: No server answers there in time.
    """
    store = _connect((host, port), timeout_s)
    ticket = store.add(_TICKETS, 1)
    store.set(f"{_KNOCK}/{ticket}", "")
    return _pair((host, port), ticket, CLIENT, timeout_s)


def find(host: str, port: int, timeout_s: float) -> list[tuple[str, int]]:
    """Addresses of all shards of the server whose head is at an address; they are on the same machine.

    Raises:
        WorkerError: No server answers there in time.
    """
    store = _connect((host, port), timeout_s)
    with _translated("a server does not tell its shards", host, port):
        return [(host, int(shard)) for shard in json.loads(store.get(_PORTS))]


def _connect(address: tuple[str, int], timeout_s: float) -> TCPStore:
    with _translated("no server answers", *address):
        return TCPStore(*address, is_master=False, timeout=timedelta(seconds=timeout_s))


def _pair(address: tuple[str, int], ticket: int, rank: int, timeout_s: float) -> Link:
    store = _connect(address, timeout_s)
    with _translated("a pair of server and client does not form", *address):
        # Made by itself: `torch.distributed.new_group` asks everybody in the job.
        group: Any = ProcessGroupGloo(PrefixStore(f"pair/{ticket}", store), rank, 2, timedelta(seconds=timeout_s))
    return Link(group, rank)


@contextlib.contextmanager
def _translated(what: str, host: str, port: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise WorkerError(
            f"{what}: {error}", hint="is the server running, and can this machine reach it?", address=f"{host}:{port}"
        ) from error
