"""Which samples a client trains on: ranges of positions, lent to one client at a time.

Every position of every epoch is acknowledged exactly once. A client that dies gives back what it has not acknowledged,
and another trains on that again: so weights see each position at least once, and `Leases.returned` counts how many
they may have seen twice. What is acknowledged is booked by its samples' keys, so a run can prove what it trained on.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastvid.errors import StateError, UsageError
from fastvid.train.parts.loader_protocol import Lineage


@dataclass(frozen=True, slots=True)
class Lease:
    """Positions [start, stop) of an epoch.

    Attributes:
        number: Of the lease; never used twice in a run.
        epoch: Counted from 0.
        start: First position.
        stop: Behind the last.
    """

    number: int
    epoch: int
    start: int
    stop: int


class Leases:
    """All positions of a run.

    Args:
        samples_per_epoch: Positions of an epoch.
        epochs: Of the run.
        size: Positions of a lease; the last of an epoch may have fewer.

    Attributes:
        acknowledged: Positions that are done.
        returned: Positions that were lent and given back.
        lineage: Of the samples at the positions that are done.
    """

    def __init__(self, samples_per_epoch: int, epochs: int, size: int) -> None:
        if min(samples_per_epoch, epochs, size) < 1:
            raise UsageError(
                f"leases of {size} positions over {epochs} epochs of {samples_per_epoch} samples",
                hint="each is at least 1",
            )
        self.samples_per_epoch, self.epochs, self.size = samples_per_epoch, epochs, size
        self.acknowledged = self.returned = 0
        self.lineage = Lineage()
        self._number = self._next = 0  # the next lease; the next position that was never lent, over all epochs
        self._free: list[tuple[int, int, int]] = []  # epoch, start, stop
        self._lent: dict[int, Lease] = {}  # by client
        self._digests: dict[int, int] = {}  # by client, of what it has acknowledged of its lease
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """Positions of the run."""
        return self.samples_per_epoch * self.epochs

    @property
    def over(self) -> bool:
        """Whether every position is acknowledged."""
        return self.acknowledged == self.total

    def take(self, client: int) -> Lease | None:
        """Lends positions; those that came back first. None where all are lent or done.

        Raises:
            UsageError: The client has not acknowledged all of its last lease.
        """
        with self._lock:
            if client in self._lent:
                raise UsageError(f"client {client} asks for a lease and holds {self._lent[client]}")
            if self._free:
                epoch, start, stop = self._free.pop(0)
            elif self._next < self.total:
                epoch, start = divmod(self._next, self.samples_per_epoch)
                stop = min(start + self.size, self.samples_per_epoch)
                self._next += stop - start
            else:
                return None
            self._number += 1
            lease = self._lent[client] = Lease(self._number, epoch, start, stop)
            self._digests[client] = 0
            return lease

    def acknowledge(self, client: int, number: int, position: int, digest: int = 0) -> None:
        """Positions of a client's lease before `position` are done.

        Args:
            client: Who.
            number: Of the lease.
            position: Behind the last one that is done.
            digest: Sum of the digests of all samples that it has trained on in this lease, see
                `fastvid.train.parts.loader_protocol.Lineage`.

        Raises:
            UsageError: The client holds no such lease or position.
        """
        with self._lock:
            lease = self._lent.get(client)
            if lease is None or lease.number != number or not lease.start <= position <= lease.stop:
                raise UsageError(f"client {client} acknowledges lease {number} up to {position} and holds {lease}")
            self.acknowledged += position - lease.start
            self.lineage.add(lease.epoch, position - lease.start, digest - self._digests[client])
            self._digests[client] = digest
            if position == lease.stop:
                del self._lent[client]
            else:
                self._lent[client] = replace(lease, start=position)

    def give_back(self, client: int) -> int:
        """Takes a client's lease from it. Returns how many positions others get again."""
        with self._lock:
            lease = self._lent.pop(client, None)
            if lease is None:
                return 0
            self._free.append((lease.epoch, lease.start, lease.stop))
            self._free.sort()
            self.returned += lease.stop - lease.start
            return lease.stop - lease.start

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: positions under way count as not lent."""
        with self._lock:
            lent = [(lease.epoch, lease.start, lease.stop) for lease in self._lent.values()]
            return {
                "samples_per_epoch": self.samples_per_epoch,
                "epochs": self.epochs,
                "acknowledged": self.acknowledged,
                "returned": self.returned + sum(stop - start for _, start, stop in lent),
                "number": self._number,
                "next": self._next,
                "free": sorted([*self._free, *lent]),
                "lineage": self.lineage.state_dict(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where a state was taken; with any size of leases, and more epochs.

        Raises:
            StateError: It is of another dataset, or a longer run.
        """
        if state["samples_per_epoch"] != self.samples_per_epoch or state["epochs"] > self.epochs:
            raise StateError(
                f"checkpoint leases {state['epochs']} epochs of {state['samples_per_epoch']} samples, this run "
                f"{self.epochs} of {self.samples_per_epoch}"
            )
        with self._lock:
            self.acknowledged, self.returned = int(state["acknowledged"]), int(state["returned"])
            self._number, self._next = int(state["number"]), int(state["next"])
            self._free = [(int(epoch), int(start), int(stop)) for epoch, start, stop in state["free"]]
            self._lent.clear()
            self.lineage.load_state_dict(state["lineage"])
