"""Leases: each is a range of positions in the order of an epoch, assigned to one client to train on.

Every position of every epoch is acknowledged exactly once. The positions that a dead client has not acknowledged are
leased again, so each position is trained on at least once; `Leases.returned` counts the positions that may have been
trained on twice. Acknowledged samples are recorded by a digest of their keys, so a run can prove what it trained on.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from fastvid.errors import StateError, UsageError
from fastvid.runtime.values import check_least
from fastvid.train.parts.replica import Lineage


class Lease(NamedTuple):
    """Positions [start, stop) of an epoch."""

    number: int
    epoch: int  # counted from 0
    start: int
    stop: int


class Leases:
    """Leases the positions of a run to clients, and records which are done. Thread-safe.

    `size`: positions per lease. `total`: number of positions of the run. `lineage`: record of the samples that are
    done, see `fastvid.train.parts.replica.Lineage`.
    """

    def __init__(self, samples_per_epoch: int, epochs: int, size: int) -> None:
        check_least(1, samples_per_epoch=samples_per_epoch, epochs=epochs, positions_per_lease=size)
        self.samples_per_epoch, self.epochs, self.size = samples_per_epoch, epochs, size
        self.total = samples_per_epoch * epochs
        self.acknowledged = self.returned = 0
        self.lineage = Lineage()
        self._number = self._next = 0  # last lease number; next position never leased yet, counted over all epochs
        self._free: list[tuple[int, int, int]] = []  # epoch, start, stop
        self._lent: dict[int, Lease] = {}  # by client
        self._digests: dict[int, int] = {}  # by client, of the acknowledged part of its lease
        self._lock = threading.Lock()

    @property
    def over(self) -> bool:
        """Whether every position is acknowledged."""
        return self.acknowledged == self.total

    def take(self, client: int) -> Lease | None:
        """Lease positions to a client, returned ones first; None if all are leased or done."""
        with self._lock:
            if client in self._lent:
                raise UsageError(f"client {client} requests a lease, but still has {self._lent[client]}")
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
        """Mark the positions of a client's lease before `position` as done.

        `digest`: sum of the digests of all samples trained on in this lease so far, see
        `fastvid.train.parts.replica.Lineage`.
        """
        with self._lock:
            lease = self._lent.get(client)
            if lease is None or lease.number != number or not lease.start <= position <= lease.stop:
                raise UsageError(f"client {client} acknowledges lease {number} up to {position}, but has {lease}")
            self.acknowledged += position - lease.start
            self.lineage.add(lease.epoch, position - lease.start, digest - self._digests[client])
            self._digests[client] = digest
            if position == lease.stop:
                del self._lent[client]
            else:
                self._lent[client] = lease._replace(start=position)

    def give_back(self, client: int) -> int:
        """Revoke a client's lease; return the number of positions that will be leased again, 0 without a lease."""
        with self._lock:
            lease = self._lent.pop(client, None)
            if lease is None:
                return 0
            self._free.append((lease.epoch, lease.start, lease.stop))
            self._free.sort()
            self.returned += lease.stop - lease.start
            return lease.stop - lease.start

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; positions that are leased but not acknowledged count as not leased."""
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
        """Restore a state; the size of leases may differ, and the run may have more epochs."""
        if state["samples_per_epoch"] != self.samples_per_epoch or state["epochs"] > self.epochs:
            raise StateError(
                f"checkpoint has {state['epochs']} epochs of {state['samples_per_epoch']} samples, this run "
                f"{self.epochs} of {self.samples_per_epoch}",
                hint="use the same dataset and at least as many epochs, or another run.out",
            )
        with self._lock:
            self.acknowledged, self.returned = int(state["acknowledged"]), int(state["returned"])
            self._number, self._next = int(state["number"]), int(state["next"])
            self._free = [(int(epoch), int(start), int(stop)) for epoch, start, stop in state["free"]]
            self._lent.clear()
            self.lineage.load_state_dict(state["lineage"])
