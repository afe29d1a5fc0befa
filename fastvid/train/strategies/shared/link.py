"""A link between two processes: one TCP connection, so a death breaks no other link.

A message is a header of integers and at most one payload. The header is int64 [WORDS + 4] in the byte order of the
machine: a magic word, the payload's size in bytes, its CRC-32, `WORDS` words of the message, the header's CRC-32. The
first word is the kind of message; 0 is a heartbeat, which a side sends while it has nothing else to send.

A side that receives nothing for `timeout_s` treats the other as dead. A process that was killed is noticed at once,
because its connection closes. `fastvid.train.strategies.shared.listener` opens links.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fastvid.errors import ChecksumError, WorkerError
from fastvid.runtime import faults

WORDS: Final = 14
"""Integers of a message; those that it does not use are 0."""

MAGIC: Final = 0x66_76_6C_69_6E_6B_00_03
"""First word of a header: "fvlink" and the version of this format."""

_BEATS: Final = 4  # heartbeats in `timeout_s`
_LINGER_S: Final = 2.0  # for the other side to read the last message and close


class Link:
    """One end of a link. Every call blocks; one thread receives, any thread may send.

    Args:
        connection: Connected to the other side; closed by `close`.
        number: Number of the link, the same on both sides.
        timeout_s: Seconds of silence after which the other side is considered dead.
    """

    def __init__(self, connection: socket.socket, number: int, timeout_s: float) -> None:
        self.number, self.timeout_s = number, timeout_s
        self._connection = connection
        self._lock = threading.Lock()
        self._header = torch.empty(WORDS + 4, dtype=torch.int64)
        connection.settimeout(timeout_s)
        # A header and its payload are sent separately, and a reply should not wait for either.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def beat_s(self) -> float:
        """Seconds between two heartbeats."""
        return self.timeout_s / _BEATS

    def send(self, words: Sequence[int], payload: Tensor | None = None, checksum: int | None = None) -> None:
        """Send a message.

        Args:
            words: At most `WORDS`, the first of them not 0.
            payload: Contiguous, on the CPU; must not change until this returns.
            checksum: CRC-32 of the payload, if known.

        Raises:
            WorkerError: If the other side is gone.
        """
        if payload is not None and not payload.numel():
            payload = None
        if payload is not None and checksum is None:
            checksum = crc32(payload)
        header = encode(words, 0 if payload is None else payload.nbytes, checksum or 0)
        with self._lock, as_worker_error("the other side is gone", link=self.number):
            self._send(header)
            if payload is not None:
                faults.reach(f"payload-{words[0]:d}")
                self._send(payload)

    def beat(self) -> None:
        """Send a heartbeat. Raises as `send` does."""
        self.send((0,))

    def receive(
        self, into: Tensor | None = None, beaten: Callable[[], None] = lambda: None
    ) -> tuple[tuple[int, ...], Tensor | None]:
        """Wait for a message; heartbeats are skipped.

        Args:
            into: Contiguous, on the CPU; receives the payload, if there is one. None allocates uint8 [bytes].
            beaten: Called after each heartbeat.

        Returns:
            The message's words, and its payload.

        Raises:
            ChecksumError: If the header or the payload is damaged.
            WorkerError: If the other side is gone or silent, or the payload does not fit.
        """
        while True:
            self._receive(self._header)
            words, size, checksum = decode(self._header)
            if words[0]:
                break
            beaten()
        if not size:
            return words, None
        payload = torch.empty(size, dtype=torch.uint8) if into is None else into
        if payload.nbytes != size:
            raise WorkerError(
                f"a message has {size} bytes, expected {payload.nbytes}", hint="train the same model on both sides"
            )
        self._receive(payload)
        if crc32(payload) != checksum:
            raise ChecksumError(f"{size} bytes differ from the checksum that was sent with them", link=self.number)
        return words, payload

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Send heartbeats from a background thread during the block."""
        over = threading.Event()

        def beats() -> None:
            # If the other side is dead, the next message raises.
            with contextlib.suppress(WorkerError):
                while not over.wait(self.beat_s):
                    self.beat()

        thread = threading.Thread(target=beats, name=f"beat-{self.number}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def close(self, *, linger: bool = False) -> None:
        """Close the connection.

        Args:
            linger: Whether to wait until the other side has closed its end, at most two seconds. Closing at once could
                discard a message that the other side has not read yet.
        """
        deadline = time.monotonic() + _LINGER_S
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            while linger and (left := deadline - time.monotonic()) > 0:
                self._connection.settimeout(left)
                if not self._connection.recv(4096):
                    break
        self._connection.close()

    def _send(self, tensor: Tensor) -> None:
        rest = _bytes_of(tensor)
        # Not `sendall`, whose time limit would be for all of the tensor.
        while rest:
            rest = rest[self._connection.send(rest) :]

    def _receive(self, tensor: Tensor) -> None:
        rest = _bytes_of(tensor)
        with as_worker_error("the other side is gone or silent", link=self.number):
            while rest:
                size = self._connection.recv_into(rest)
                if not size:
                    raise ConnectionError("the connection was closed")
                rest = rest[size:]


def encode(words: Sequence[int], size: int = 0, checksum: int = 0) -> Tensor:
    """Return a message's header, see the module docstring."""
    body = torch.tensor([MAGIC, size, checksum, *words, *[0] * (WORDS - len(words))])
    return torch.cat([body, torch.tensor([crc32(body)])])


def decode(header: Tensor) -> tuple[tuple[int, ...], int, int]:
    """Return words, bytes of the payload and its CRC-32.

    Raises:
        ChecksumError: If it is not a header, or is damaged.
    """
    magic, size, checksum, *words, own = header.tolist()
    if magic != MAGIC or own != crc32(header[:-1]):
        raise ChecksumError(
            "message header is damaged or of another format",
            hint="run the same version of fastvid on both sides",
            magic=f"{magic:016x}",
        )
    return tuple(words), size, checksum


def crc32(values: Tensor) -> int:
    """Return the CRC-32 of a contiguous CPU tensor's bytes."""
    return zlib.crc32(_bytes_of(values))


def _bytes_of(values: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, which may be written to."""
    data: Any = values.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)


@contextlib.contextmanager
def as_worker_error(what: str, **where: str | int) -> Iterator[None]:
    """Convert errors of sockets, and of torch's stores, to WorkerError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise WorkerError(
            f"{what}: {error}", hint="check that the other process is running and reachable from this machine", **where
        ) from error
