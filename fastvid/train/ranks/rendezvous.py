"""Rendezvous of the ranks of one attempt, under an unused key prefix of torchrun's store.

torchrun's agent keeps one store over restarts, and in torch 2.13 every attempt uses the same keys in it. Restarted
workers may therefore read the addresses of their dead predecessors: measured with two ranks on gloo, half of the
restarts fail ("Connection refused") or hang. TORCHELASTIC_RESTART_COUNT does not identify an attempt, because every
node counts separately (pytorch issue 135712). The ranks of an attempt therefore identify each other by random numbers:

    every rank  writes a new random number under its rank
    rank 0      reads the numbers of all ranks, hashes them to a token, and writes the token under each number
    every rank  acknowledges the token that it finds under its number
    rank 0      writes "go" once all ranks have acknowledged; if a number changes before that, the old one was of a dead
                rank, and rank 0 makes a new token

A dead rank never acknowledges, because every token includes the new number of rank 0.
"""

from __future__ import annotations

import time
import uuid
from typing import Final

from torch.distributed.distributed_c10d import PrefixStore, Store

from fastvid.errors import WorkerError
from fastvid.runtime.hashing import sha256
from fastvid.runtime.world import World

_PREFIX: Final = "fastvid"
_PAUSE_S: Final = 0.02  # between two polls of the store; startup takes seconds anyway


def fresh_store(store: Store, world: World, timeout_s: float) -> Store:
    """Return a prefix of `store` that the ranks of this attempt share and that no other attempt has used.

    `timeout_s`: seconds to wait for the other ranks.
    """
    number = uuid.uuid4().hex
    store.set(f"{_PREFIX}/place/{world.rank}", number)
    deadline = time.monotonic() + timeout_s
    peer = _Leader(store, world) if world.rank == 0 else _Follower(store, number)
    while (token := peer.poll()) is None:
        if time.monotonic() > deadline:
            raise WorkerError(
                f"rank {world.rank} of {world.size} waited {timeout_s:g} s for the other ranks",
                hint="check that all nodes are started, with the same rendezvous endpoint, and can reach it",
            )
        time.sleep(_PAUSE_S)
    return PrefixStore(f"{_PREFIX}/{token}", store)


class _Leader:
    """Rank 0 of the rendezvous."""

    def __init__(self, store: Store, world: World) -> None:
        self.store, self.world = store, world
        self.places = [f"{_PREFIX}/place/{rank}" for rank in range(world.size)]
        self.token = ""

    def poll(self) -> str | None:
        if not self.store.check(self.places):
            return None
        numbers = [number.decode() for number in self.store.multi_get(self.places)]
        token = sha256("".join(numbers).encode())
        if token != self.token:
            self.token = token
            for number in numbers:
                self.store.set(f"{_PREFIX}/seat/{number}", token)
        if self.store.add(f"{_PREFIX}/seen/{token}", 0) < self.world.size - 1:
            return None
        self.store.set(f"{_PREFIX}/go/{token}", "go")
        return token


class _Follower:
    """Any other rank of the rendezvous."""

    def __init__(self, store: Store, number: str) -> None:
        self.store, self.seat = store, f"{_PREFIX}/seat/{number}"
        self.seen = ""

    def poll(self) -> str | None:
        if not self.store.check([self.seat]):
            return None
        token = self.store.get(self.seat).decode()
        if token != self.seen:
            self.seen = token
            self.store.add(f"{_PREFIX}/seen/{token}", 1)
        return token if self.store.check([f"{_PREFIX}/go/{token}"]) else None
