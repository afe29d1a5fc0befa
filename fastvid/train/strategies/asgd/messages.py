"""Messages between a client and a shard over a `Link` of `fastvid.train.strategies.shared.link`."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

PORTS: Final = "asgd/ports"
"""Where the store of a server's head has the ports of all shards, the head's first."""


class Kind(IntEnum):
    """What a message asks or says. Questions come from clients, and each has one answer."""

    JOIN = 1
    INIT = 2
    FETCH = 3
    PUSH = 4
    EXCHANGE = 5
    LEASE = 6
    LEAVE = 7
    DONE = 16
    REFUSED = 17


@dataclass(frozen=True, slots=True)
class Header:
    """The words of a message. All are integers; a rate is carried as the bits of a float64.

    Attributes:
        kind: See `Kind`.
        client: Number of the client, given when it joins.
        version: PUSH: of the weights that the oldest gradient was computed from. Answers: of the shard.
        staleness: Answer to PUSH: versions committed since then, without this one.
        clock: Pushes and exchanges of this client so far.
        steps: PUSH: gradients in the sum.
        rate: PUSH: learning rate as the bits of a float64, see `float_bits`.
        lease: The lease that start and stop speak of; -1 for none.
        epoch: Of the lease.
        start: First position of the lease, or what is acknowledged: positions before it.
        stop: After the last position of the lease.
        digest: With a lease that is acknowledged: of the samples trained on in it, see `Leases.acknowledge`.
        samples: Answers of the head: positions acknowledged so far, by all clients.
        fresh: Answer to JOIN: 1 where this client's weights become the first.
    """

    kind: Kind
    client: int = 0
    version: int = 0
    staleness: int = 0
    clock: int = 0
    steps: int = 0
    rate: int = 0
    lease: int = -1
    epoch: int = 0
    start: int = 0
    stop: int = 0
    digest: int = 0
    samples: int = 0
    fresh: int = 0

    @classmethod
    def of(cls, words: tuple[int, ...]) -> Header:
        """Return the header whose words came."""
        kind, *values = words
        return cls(Kind(kind), *values)


def float_bits(value: float) -> int:
    """Return a float64 as the integer with the same bits."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def bits_float(bits: int) -> float:
    """Return the float64 of `float_bits`."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
