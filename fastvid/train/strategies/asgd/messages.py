"""Messages between a client and a shard: a header of integers, then at most one payload of numbers."""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields, replace
from enum import IntEnum
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastvid.errors import ChecksumError, WorkerError
from fastvid.runtime import faults

MAGIC: Final = 0x66_76_61_73_67_64_00_01
"""First word of a header: "fvasgd" and the version of this format."""

HEADER_TAG: Final = 1
PAYLOAD_TAG: Final = 2


class Kind(IntEnum):
    """What a message asks or says. Questions come from clients; each has one answer, with any number of WAIT before."""

    JOIN = 1
    INIT = 2
    FETCH = 3
    PUSH = 4
    EXCHANGE = 5
    LEASE = 6
    PING = 7
    LEAVE = 8
    DONE = 16
    WAIT = 17
    REFUSED = 18


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before a payload. All are integers; a rate is carried as the bits of a float64.

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
        stop: Behind the last position of the lease.
        digest: With a lease that is acknowledged: of the samples trained on in it, see `Leases.acknowledge`.
        samples: Answers of the head: positions acknowledged so far, by all clients.
        fresh: Answer to JOIN: 1 where this client's weights become the first.
        count: Numbers of the payload.
        checksum: CRC-32 of the payload.
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
    count: int = 0
    checksum: int = 0

    def encode(self) -> Tensor:
        """int64 [WORDS]: the magic word, the fields, a CRC-32 of both."""
        body = torch.tensor([MAGIC, *astuple(self)])
        return torch.cat([body, torch.tensor([crc32(body)])])

    def about(self, *, version: int, lease: int, start: int, digest: int) -> Header:
        """The same question to one shard."""
        return replace(self, version=version, lease=lease, start=start, digest=digest)

    @classmethod
    def decode(cls, words: Tensor) -> Header:
        """The header of a message.

        Raises:
            ChecksumError: The words are no header, or are damaged.
        """
        magic, *values, checksum = words.tolist()
        if magic != MAGIC or checksum != crc32(words[:-1]):
            raise ChecksumError(
                "a message's header is damaged or of another format",
                hint="run the same version of fastvid on server and clients",
                magic=f"{magic:016x}",
            )
        return cls(Kind(values[0]), *values[1:])


WORDS: Final = len(fields(Header)) + 2


def crc32(values: Tensor) -> int:
    """CRC-32 of a contiguous CPU tensor's bytes."""
    # An array is a buffer; numpy's annotations say so from Python 3.12 on.
    words: Any = values.detach().numpy().view(np.uint8)
    return zlib.crc32(words) if values.numel() else 0


def float_bits(value: float) -> int:
    """A float64 as the integer with the same bits."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def bits_float(bits: int) -> float:
    """The float64 of `float_bits`."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


class Link:
    """One end of a pair. Used by one thread at a time; every call blocks.

    Args:
        group: A process group of two.
        rank: This end, 0 or 1.
    """

    def __init__(self, group: ProcessGroup, rank: int) -> None:
        self._group, self._peer = group, 1 - rank
        self._words = torch.empty(WORDS, dtype=torch.int64)

    def send(self, header: Header, payload: Tensor | None = None, checksum: int | None = None) -> None:
        """Sends a message.

        Args:
            header: Its count and checksum are filled in.
            payload: [n], contiguous, on the CPU; not changed until this returns.
            checksum: Of the payload, where it is known.

        Raises:
            WorkerError: The peer is gone.
        """
        if payload is not None:
            checksum = crc32(payload) if checksum is None else checksum
            header = replace(header, count=payload.numel(), checksum=checksum)
        self._send(header.encode(), HEADER_TAG)
        if payload is not None:
            if header.kind is Kind.PUSH:
                faults.reach("asgd-push")
            self._send(payload, PAYLOAD_TAG)

    def receive(self, into: Tensor | None = None) -> Header:
        """Waits for a message.

        Args:
            into: [n], contiguous, on the CPU; takes the payload, if there is one.

        Raises:
            ChecksumError: The payload is not what the header says.
            WorkerError: The peer is gone or silent, or the payload does not fit.
        """
        self._receive(self._words, HEADER_TAG)
        header = Header.decode(self._words)
        if header.count:
            if into is None or into.numel() != header.count:
                raise WorkerError(
                    f"a message has {header.count} numbers, expected {0 if into is None else into.numel()}",
                    hint="server and clients must train the same model",
                    kind=header.kind.name,
                )
            self._receive(into, PAYLOAD_TAG)
            if crc32(into) != header.checksum:
                raise ChecksumError(
                    f"{header.count} numbers differ from the checksum that was sent with them",
                    kind=header.kind.name,
                    version=header.version,
                )
        return header

    def _send(self, tensor: Tensor, tag: int) -> None:
        with _translated():
            self._group.send([tensor], self._peer, tag).wait()

    def _receive(self, tensor: Tensor, tag: int) -> None:
        with _translated():
            self._group.recv([tensor], self._peer, tag).wait()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise WorkerError(f"the other end is gone or silent: {error}") from error
