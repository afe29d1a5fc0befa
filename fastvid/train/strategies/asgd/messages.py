"""Headers of the messages between a client and a shard, sent over a `Link`."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum


class ServerMessage(IntEnum):
    """Kind of message: a client's request (below 16) or the reply to it."""

    JOIN = 1
    INIT = 2
    FETCH = 3
    GRADIENT = 4
    LEASE = 6
    LEAVE = 7
    SHARDS = 8
    DONE = 16
    REFUSED = 17
    NOT_FINITE = 18


@dataclass(frozen=True, slots=True)
class MessageHeader:
    """The header of a message, all integers."""

    kind: ServerMessage
    version: int = 0
    staleness: int = 0
    clock: int = 0
    clips: int = 0
    rate: int = 0  # in GRADIENT, learning rate as the bits of a float64, see `float_bits`
    lease: int = -1
    epoch: int = 0
    start: int = 0
    stop: int = 0
    digest: int = 0  # in an acknowledgement, digest of the samples trained on in the lease, see `Leases.acknowledge`
    samples: int = 0
    fresh: int = 0

    @classmethod
    def of(cls, words: tuple[int, ...]) -> MessageHeader:
        """Return the header with these words."""
        kind, *values = words
        return cls(ServerMessage(kind), *values)


def float_bits(value: float) -> int:
    """Return a float64 as the integer with the same bits."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def bits_float(bits: int) -> float:
    """Return the float64 whose bits are an integer, the inverse of `float_bits`."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
