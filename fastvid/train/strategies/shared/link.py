"""A link between two processes: a process group of two, so a death breaks no other link.

A message is a header of integers and at most one payload. The header is int64 [WORDS + 4]: a magic word, the payload's
size in bytes, its CRC-32, `WORDS` words of the message, the header's CRC-32. The first word is the kind of message; 0
is a heartbeat, which a side sends while it has nothing else to send.

A side that receives nothing for `timeout_s` treats the other as dead. A process that was killed is noticed at once,
because its socket closes. Receiving blocks: gloo's ``irecv(...).is_completed()`` never turns true (torch 2.13).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import ProcessGroupGloo

from fastvid.errors import ChecksumError, WorkerError
from fastvid.runtime import faults
from fastvid.train.ranks.elastic import Member, broadcast_bytes

WORDS: Final = 14
"""Integers of a message; those that it does not use are 0."""

MAGIC: Final = 0x66_76_6C_69_6E_6B_00_02
"""First word of a header: "fvlink" and the version of this format."""

SERVER, CLIENT = 0, 1
_NUMBERS: Final = "link/numbers"
_OPEN: Final = "link/open"
_BEATS: Final = 4  # heartbeats in `timeout_s`
_PAUSE_S: Final = 0.01  # between two checks for new clients


def listen(host: str, port: int, timeout_s: float) -> TCPStore:
    """Open a store that this process serves.

    Args:
        host: Name or address of this machine, as others reach it.
        port: 0 for any free one.
        timeout_s: How long an operation of the store may take.

    Raises:
        WorkerError: If the port is in use.
    """
    with as_worker_error("cannot listen", address=f"{host}:{port}"):
        return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def connect(host: str, port: int, timeout_s: float) -> TCPStore:
    """Open the store that another process serves at an address.

    Raises:
        WorkerError: If no process answers in time.
    """
    with as_worker_error("no process answers", address=f"{host}:{port}"):
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def shared_store(member: Member, timeout_s: float = 60.0) -> TCPStore:
    """Open a store that rank 0 serves to all ranks of a job; call it on every rank at the same point.

    Rank 0 must keep a reference until the other ranks no longer use the store.

    Raises:
        WorkerError: If rank 0 cannot be reached.
    """
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")  # set by torchrun to the machine of rank 0
    own = listen(host, 0, timeout_s) if member.leads else None
    port = broadcast_bytes(None if own is None else str(own.port).encode(), member)
    assert port is not None
    return own or connect(host, int(port), timeout_s)


class Link:
    """One end of a link. Every call blocks; one thread receives, any thread may send.

    Args:
        store: Shared by both sides.
        number: Number of the link.
        side: `SERVER` or `CLIENT`.
        timeout_s: Seconds of silence after which the other side is considered dead; also the connection timeout.

    Raises:
        WorkerError: If the other side does not connect.
    """

    def __init__(self, store: Store, number: int, side: int, timeout_s: float) -> None:
        self.number, self.timeout_s = number, timeout_s
        self._other = 1 - side
        self._lock = threading.Lock()
        self._header = torch.empty(WORDS + 4, dtype=torch.int64)
        with as_worker_error("the other side did not connect", link=number):
            # Not `torch.distributed.new_group`: every process of the job must call that.
            self._group: Any = ProcessGroupGloo(
                PrefixStore(f"link/{number}", own_connection(store)), side, 2, timedelta(seconds=timeout_s)
            )

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
            self._group.send([header], self._other, 0).wait()
            if payload is not None:
                faults.reach(f"payload-{words[0]:d}")
                self._group.send([payload], self._other, 0).wait()

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

    def _receive(self, tensor: Tensor) -> None:
        with as_worker_error("the other side is gone or silent", link=self.number):
            self._group.recv([tensor], self._other, 0).wait()


class Listener:
    """Accepts any number of clients: each gets a link, and a thread that serves it.

    Args:
        store: Shared with the clients.
        session: Called in a client's thread with the number of its link, which it opens by `open`.
        timeout_s: See `Link`.
        first: Number of the first link.
    """

    def __init__(self, store: Store, session: Callable[[int], None], timeout_s: float, *, first: int = 0) -> None:
        self._store, self._session, self._timeout_s = own_connection(store), session, timeout_s
        self._sessions: list[threading.Thread] = []
        self._closed = threading.Event()
        self._store.add(_NUMBERS, first)
        self._store.set(_OPEN, "")
        self._thread = threading.Thread(target=self._accept, args=(first,), name="link-listener", daemon=True)

    def start(self) -> None:
        """Begin to accept clients."""
        self._thread.start()

    def open(self, number: int) -> Link:
        """Return the server's side of a client's link.

        Raises:
            WorkerError: If the client does not connect.
        """
        return Link(self._store, number, SERVER, self._timeout_s)

    def close(self) -> None:
        """Accept no more clients."""
        self._closed.set()
        self._thread.join()

    def join(self, patience_s: float) -> None:
        """Wait for the sessions to end, at most `patience_s` seconds for each."""
        for session in self._sessions:
            session.join(patience_s)

    def _accept(self, first: int) -> None:
        for number in itertools.count(first):
            while self._store.add(_NUMBERS, 0) <= number:
                if self._closed.wait(_PAUSE_S):
                    return
            session = threading.Thread(target=self._session, args=(number,), name=f"link-{number}", daemon=True)
            self._sessions.append(session)
            session.start()


def open_link(store: Store, timeout_s: float) -> Link:
    """Return the client's side of a new link to the `Listener` of a store.

    Raises:
        WorkerError: If there is none, or it does not answer in time.
    """
    own = own_connection(store)
    with as_worker_error("no server listens"):
        own.wait([_OPEN], timedelta(seconds=timeout_s))
        number = own.add(_NUMBERS, 1) - 1
    return Link(own, number, CLIENT, timeout_s)


def own_connection(store: Store) -> Any:
    """Return another connection to a store, because each serves one call at a time."""
    # Any: torch's stubs lack clone.
    shared: Any = store
    return shared.clone()


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
    # Any, because numpy's annotations declare arrays as buffers only from Python 3.12 on.
    data: Any = values.detach().view(torch.uint8).numpy()
    return zlib.crc32(data) if values.numel() else 0


@contextlib.contextmanager
def as_worker_error(what: str, **where: str | int) -> Iterator[None]:
    """Convert errors of torch's stores and process groups to WorkerError."""
    try:
        yield
    except RuntimeError as error:
        raise WorkerError(
            f"{what}: {error}", hint="check that the other process is running and reachable from this machine", **where
        ) from error
