"""A place in torchrun's store that no process of an earlier attempt has written to.

torchrun's agent keeps one store over restarts, and torch 2.13 gives every attempt the same keys in it. Workers that
are started again may then read the addresses of their dead predecessors: measured with two ranks on gloo, half of the
restarts fail ("Connection refused") or hang. TORCHELASTIC_RESTART_COUNT does not tell attempts apart, because every
node counts for itself (pytorch issue 135712). So the ranks of an attempt find each other by numbers made up on the
spot.

    every rank  writes a fresh number at its place
    rank 0      reads all places, makes a token of the numbers and leaves it where only their owners look
    every rank  that finds a token acknowledges it
    rank 0      says go when all have; when a place changes meanwhile, a dead rank had been read: a new token

A dead rank never acknowledges, because every token is made of rank 0's fresh number too.
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
_PAUSE_S: Final = 0.02  # between two looks at the store; a start takes seconds anyway


def fresh_store(store: Store, world: World, timeout_s: float) -> Store:
    """A prefix of `store` that the ranks of this attempt share, and that no other attempt has used.

    Args:
        store: Shared by all ranks, perhaps with what earlier attempts left in it.
        world: This rank and the number of ranks.
        timeout_s: How long to wait for the others.

    Raises:
        WorkerError: They did not all come.
    """
    number = uuid.uuid4().hex
    store.set(f"{_PREFIX}/place/{world.rank}", number)
    deadline = time.monotonic() + timeout_s
    meet = _Lead(store, world) if world.rank == 0 else _Follow(store, number)
    while (token := meet.step()) is None:
        if time.monotonic() > deadline:
            raise WorkerError(
                f"rank {world.rank} of {world.size} waited {timeout_s:g} s for the others",
                hint="are all nodes started, with one rendezvous endpoint that each can reach?",
            )
        time.sleep(_PAUSE_S)
    return PrefixStore(f"{_PREFIX}/{token}", store)


class _Lead:
    """Rank 0."""

    def __init__(self, store: Store, world: World) -> None:
        self.store, self.world = store, world
        self.places = [f"{_PREFIX}/place/{rank}" for rank in range(world.size)]
        self.token = ""

    def step(self) -> str | None:
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


class _Follow:
    """Every other rank."""

    def __init__(self, store: Store, number: str) -> None:
        self.store, self.seat = store, f"{_PREFIX}/seat/{number}"
        self.seen = ""

    def step(self) -> str | None:
        if not self.store.check([self.seat]):
            return None
        token = self.store.get(self.seat).decode()
        if token != self.seen:
            self.seen = token
            self.store.add(f"{_PREFIX}/seen/{token}", 1)
        return token if self.store.check([f"{_PREFIX}/go/{token}"]) else None
