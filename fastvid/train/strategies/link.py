"""A link: a TCP connection between a server and a client, who prove to each other that they know the same token.

A message has a kind, values that JSON can represent, and at most one payload, the bytes of a tensor. It is sent as a
header, the JSON of kind and values, and the payload. The header is little-endian: a magic word, the sizes in bytes of
JSON and payload, the CRC-32 of each, and the CRC-32 of the header up to there. A message without JSON is a heartbeat,
which a side sends while it has nothing else to send.

A side that receives nothing for `timeout_s` treats the other side as dead. A killed process is noticed at once, because
its connection closes; its death breaks no other link.

To open a link, the two sides exchange random numbers and a keyed hash (HMAC-SHA256) of both, so the token itself is
never sent. The server parses no message of a client before this proof. The proof keeps strangers out, but messages are
not encrypted: anyone who can read or change the traffic of the network can read or change the messages.

`shared_store` opens a store of numbers and bytes by name that all ranks of a job share.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from fastvid.errors import ChecksumError, UsageError, WorkerError
from fastvid.runtime import faults
from fastvid.runtime.values import check_integer
from fastvid.train.ranks import Interrupted, Member, StopSignal, as_worker_error, broadcast_bytes

MAGIC: Final = b"fvlink\0\6"
"""First word of a header, and the greeting of a server: its last byte is the version of this format."""

_HEADER: Final = struct.Struct("<8sQQIII")
_BEATS: Final = 4  # heartbeats in `timeout_s`
_LINGER_S: Final = 2.0  # seconds to wait, when closing, for the other side to read the last message and close

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Message:
    """A message on a link.

    Attributes:
        kind: Type of the message, such as "push".
        values: JSON values by name.
        payload: The tensor that the receiver gave for it, or a new one, uint8 [bytes]; None without a payload.
    """

    kind: str
    values: Mapping[str, Any]
    payload: Tensor | None = None

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


class Link:
    """One end of a link. Every call blocks; one thread receives, any thread may send.

    Args:
        connection: Connected to the other side; closed by `close`.
        number: Number of the link, the same on both sides.
        timeout_s: Seconds of silence after which the other side is considered dead.

    Attributes:
        beat_s: Seconds between two heartbeats.
    """

    def __init__(self, connection: socket.socket, number: int, timeout_s: float) -> None:
        self.number, self.timeout_s = number, timeout_s
        self.beat_s = timeout_s / _BEATS
        self._connection = connection
        self._lock = threading.Lock()
        connection.settimeout(timeout_s)
        # Header and payload are sent separately; without this option TCP may delay the second of them.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(
        self,
        kind: str,
        values: Mapping[str, Any] | None = None,
        payload: Tensor | bytes = b"",
        checksum: int | None = None,
    ) -> None:
        """Send a message.

        Args:
            kind: Type of the message.
            values: JSON values by name; None for none.
            payload: A contiguous CPU tensor or bytes; must not change until this returns.
            checksum: CRC-32 of the payload, if known.

        Raises:
            WorkerError: If the other side is gone.
        """
        data = _bytes_of(payload)
        text = json.dumps([kind, dict(values or {})]).encode() if kind else b""
        head = encode(text, len(data), zlib.crc32(data) if checksum is None else checksum)
        with self._lock, as_worker_error("the other side is gone", link=self.number):
            self._send(memoryview(head))
            if data:
                faults.reach(f"payload-{kind}")
                self._send(data)

    def beat(self) -> None:
        """Send a heartbeat. Raises as `send` does."""
        self.send("")

    def receive(self, into: Tensor | None = None, beaten: Callable[[], None] = lambda: None) -> Message:
        """Wait for a message; heartbeats are skipped.

        Args:
            into: A contiguous CPU tensor that receives the payload, if there is one. None allocates uint8 [bytes].
            beaten: Called after each heartbeat.

        Raises:
            ChecksumError: If the message is damaged.
            WorkerError: If the other side is gone or silent, or the payload does not fit.
        """
        header = bytearray(_HEADER.size)
        while True:
            self._receive(memoryview(header))
            length, size, text_checksum, checksum = decode(header)
            if length:
                break
            beaten()
        text = bytearray(length)
        self._receive(memoryview(text))
        self._check(text, text_checksum)
        kind, values = json.loads(text)
        if not size:
            return Message(kind, values)
        payload = torch.empty(size, dtype=torch.uint8) if into is None else into
        if payload.nbytes != size:
            raise WorkerError(
                f"a message has {size} bytes, expected {payload.nbytes}", hint="train the same model on both sides"
            )
        data = _bytes_of(payload)
        self._receive(data)
        self._check(data, checksum)
        return Message(kind, values, payload)

    def wait(self, changed: threading.Condition, find: Callable[[], Found | None]) -> Found:
        """Wait until `find` returns a true value, and return it; send heartbeats meanwhile.

        Args:
            changed: Condition that other threads notify when the result of `find` may have changed.
            find: Called while the condition's lock is held.

        Raises:
            WorkerError: If the other side is gone.
        """
        while True:
            with changed:
                found = changed.wait_for(find, self.beat_s)
            if found:
                return found
            self.beat()

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

    def _send(self, rest: memoryview) -> None:
        # Not `sendall`, whose time limit is for all bytes together: a large payload may take longer.
        while rest:
            rest = rest[self._connection.send(rest) :]

    def _receive(self, rest: memoryview) -> None:
        with as_worker_error("the other side is gone or silent", link=self.number):
            while rest:
                size = self._connection.recv_into(rest)
                if not size:
                    raise ConnectionError("the connection was closed")
                rest = rest[size:]

    def _check(self, data: bytearray | memoryview, checksum: int) -> None:
        if zlib.crc32(data) != checksum:
            raise ChecksumError(f"{len(data)} bytes differ from the checksum that was sent with them", link=self.number)


def encode(text: bytes, size: int = 0, checksum: int = 0) -> bytes:
    """Return a message's header and JSON, see the module docstring; `size` and `checksum` describe the payload."""
    head = _HEADER.pack(MAGIC, len(text), size, zlib.crc32(text), checksum, 0)[:-4]
    return head + zlib.crc32(head).to_bytes(4, "little") + text


def decode(header: bytes | bytearray) -> tuple[int, int, int, int]:
    """Return the sizes in bytes of JSON and payload, and the CRC-32 of JSON and payload; raise if it is damaged."""
    magic, length, size, text_checksum, checksum, own = _HEADER.unpack(header)
    if magic != MAGIC or own != zlib.crc32(header[:-4]):
        raise ChecksumError(
            "message header is damaged or of another format",
            hint="run the same version of fastvid on both sides",
            magic=magic.hex(),
        )
    return length, size, text_checksum, checksum


def crc32(values: Tensor) -> int:
    """Return the CRC-32 of a contiguous CPU tensor's bytes."""
    return zlib.crc32(_bytes_of(values))


def _bytes_of(values: Tensor | bytes) -> memoryview:
    """Return the memory of a contiguous CPU tensor, writable, or of bytes, read-only."""
    if isinstance(values, bytes):
        return memoryview(values)
    data: Any = values.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)


log = logging.getLogger(__name__)

TOKEN_VARIABLE: Final = "FASTVID_TOKEN"  # noqa: S105 - the name of a variable
"""Environment variable with the token that all jobs of one training share."""

_TOKEN_CHARACTERS: Final = 16  # minimum length: 16 random hexadecimal digits are 64 bits
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32  # of SHA-256
_NUMBER: Final = struct.Struct("<q")
_PROOF_S: Final = 10.0  # time for a client to prove that it knows the token
_MOST_UNPROVEN: Final = 32  # connections without a proof, each with a thread; with more, the oldest is closed
_LONGEST_START_S: Final = 60.0  # maximum wait for a server's first answer, even if `timeout_s` is longer
_ATTEMPT_S: Final = 5.0  # time of one attempt to connect: a signal to stop is checked between attempts
_PAUSE_S: Final = 0.05  # between two checks whether a listener is closed, and between two attempts to connect


@dataclass(frozen=True, slots=True)
class Address:
    """Host and port of a listener, and the token that its clients must know."""

    host: str
    port: int
    token: str = field(repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def encode(self) -> bytes:
        """Return the address as JSON for the other ranks of a job, without the token if it is in their environment."""
        return json.dumps([self.host, self.port, "" if self.token == token_of_launcher() else self.token]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Address:
        """Return the address that `encode` turned into `data` on another rank."""
        host, port, token = json.loads(data)
        return cls(str(host), int(port), str(token) or shared_token("the server of rank 0"))


def token_of_launcher() -> str | None:
    """Return the token in the environment variable FASTVID_TOKEN; None if it is not set."""
    token = os.environ.get(TOKEN_VARIABLE)
    if token and len(token) < _TOKEN_CHARACTERS:
        raise UsageError(
            f"{TOKEN_VARIABLE} has {len(token)} characters, expected at least {_TOKEN_CHARACTERS}",
            hint=f"run `export {TOKEN_VARIABLE}=$(openssl rand -hex 32)`, with the same value for every job",
        )
    return token or None


def shared_token(what: str) -> str:
    """Return the token in the environment; raise UsageError without one, because `what` is shared by several jobs."""
    token = token_of_launcher()
    if token is None:
        raise UsageError(
            f"{what} needs a token, but {TOKEN_VARIABLE} is not set",
            hint=f"run `export {TOKEN_VARIABLE}=$(openssl rand -hex 32)`, with the same value for every job",
        )
    return token


def token_of_job() -> str:
    """Return the token for a server of this job: the one in the environment, or a new one that only this job has."""
    return token_of_launcher() or secrets.token_hex(32)


def host_of_job() -> str:
    """Return the name or address of rank 0's machine from torchrun; without torchrun 127.0.0.1, this machine only."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


_MOST_PORT: Final = 2**16 - 1


def server_elsewhere(option: str, text: str | None, port: int) -> Address | None:
    """Return the address of a server in another job that a sync option names as HOST:PORT, or None.

    Raises UsageError without a shared token if the server is in another job, or if this job's server has a fixed
    `port`, so that other jobs can reach it.
    """
    check_integer("sync option port", port, 0, _MOST_PORT)
    if text is None:
        if port:
            shared_token("sync option port")
        return None
    host, colon, number = str(text).rpartition(":")
    if not colon or not number.isdecimal() or int(number) > _MOST_PORT:
        raise UsageError(f"sync option {option} is {text!r}, expected host:port")
    return Address(host, int(number), shared_token(f"sync option {option}"))


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address of `host` only, not on all addresses of this machine.

    `port`: 0 for any free one.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=socket.SOMAXCONN)
    except (OSError, UnicodeError) as error:  # a name with an empty or long part is a UnicodeError
        raise WorkerError(
            f"cannot listen: {error}",
            hint="use a free port, and a host that is this machine: torchrun's --master-addr, or sync_options.host",
            address=f"{host}:{port}",
        ) from error


class Listener:
    """Accepts clients that know its token, any number of them; each gets a link, and a thread that serves it.

    Args:
        session: Called in a client's thread with the server's side of its link, which is closed afterwards.
        timeout_s: See `Link`.
        token: Token that clients must know, see `token_of_job`.
        host: Name or address of this machine; it listens on no other.
        port: Port to listen on; 0 for any free one.
        first: Number of the first link.

    Attributes:
        address: Where clients connect, and with which token.
        refused: Number of connections that did not prove that they know the token.

    Raises:
        WorkerError: If the host is not this machine, or the port is in use.
    """

    def __init__(
        self,
        session: Callable[[Link], None],
        timeout_s: float,
        *,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        first: int = 0,
    ) -> None:
        self._session, self._timeout_s, self._next = session, timeout_s, first
        self._socket = listening_socket(host, port)
        self._socket.settimeout(_PAUSE_S)
        self.address = Address(host, int(self._socket.getsockname()[1]), token)
        self.refused = 0
        self._lock = threading.Lock()
        self._unproven: dict[socket.socket, None] = {}  # in the order of their arrival
        self._sessions: list[threading.Thread] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="link-listener", daemon=True)

    def start(self) -> None:
        """Begin to accept clients."""
        self._thread.start()

    def close(self) -> None:
        """Accept no more clients."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._socket.close()

    def join(self, patience_s: float) -> None:
        """Wait for the sessions to end, at most `patience_s` seconds for each."""
        for session in self._sessions:
            session.join(patience_s)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, peer = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:  # such as too many open files
                log.warning("cannot accept a connection: %s", error)
                self._closed.wait(_PAUSE_S)
                continue
            with self._lock:
                if len(self._unproven) >= _MOST_UNPROVEN:
                    oldest = next(iter(self._unproven))
                    del self._unproven[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
                self._unproven[connection] = None
            session = threading.Thread(target=self._serve, args=(connection, peer[0]), name="link", daemon=True)
            self._sessions = [*(one for one in self._sessions if one.is_alive()), session]
            session.start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        with connection:
            link = self._admit(connection, peer)
            if link is not None:
                self._session(link)
                link.close(linger=True)

    def _admit(self, connection: socket.socket, peer: str) -> Link | None:
        """Return the link to a client that knows the token, else None."""
        try:
            mine, deadline = secrets.token_bytes(_NONCE_BYTES), time.monotonic() + _PROOF_S
            connection.settimeout(_PROOF_S)
            connection.sendall(MAGIC + mine)
            theirs = _read(connection, _NONCE_BYTES, deadline)
            proof = _read(connection, _PROOF_BYTES, deadline)
            known = hmac.compare_digest(proof, _proof(self.address.token, b"client", mine, theirs))
            with self._lock:
                known = known and connection in self._unproven
                number = self._next
                self._next += known
            if known:
                connection.sendall(_proof(self.address.token, b"server", mine, theirs) + _NUMBER.pack(number))
                return Link(connection, number, self._timeout_s)
        except OSError:
            pass  # the client is gone or silent, or its connection was closed to make room for others
        finally:
            with self._lock:
                self._unproven.pop(connection, None)
        with self._lock:
            self.refused += 1
            count = self.refused
        # Log only the 1st, 2nd, 4th, 8th ... refusal, so that strangers cannot fill the log.
        if count & (count - 1) == 0:
            log.warning("refused a connection from %s, which does not know the token; %d so far", peer, count)
        return None


def open_link(address: Address, timeout_s: float) -> Link:
    """Return the client's side of a new link to the `Listener` at an address, which may start later.

    Raises:
        WorkerError: If it does not answer within `timeout_s` (at most a minute is waited), or has another token.
        Interrupted: If a signal stops the run meanwhile.
    """
    deadline = time.monotonic() + min(timeout_s, _LONGEST_START_S)
    refused = as_worker_error("the server refused this client", hint=_SAME_TOKEN, address=str(address))
    with contextlib.ExitStack() as failed, refused:
        connection = failed.enter_context(_connect(address, deadline))
        if _read(connection, len(MAGIC), deadline) != MAGIC:
            raise WorkerError(
                "the server is not fastvid, or of another version",
                hint="run the same version of fastvid on both sides",
                address=str(address),
            )
        theirs, mine = _read(connection, _NONCE_BYTES, deadline), secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(mine + _proof(address.token, b"client", theirs, mine))
        proof = _read(connection, _PROOF_BYTES, deadline)
        if not hmac.compare_digest(proof, _proof(address.token, b"server", theirs, mine)):
            raise WorkerError("the server does not know the token", hint=_SAME_TOKEN, address=str(address))
        (number,) = _NUMBER.unpack(_read(connection, _NUMBER.size, deadline))
        failed.pop_all()
    return Link(connection, number, timeout_s)


_SAME_TOKEN: Final = f"set {TOKEN_VARIABLE} to the same value in every job, and check that the server is running"


def _connect(address: Address, deadline: float) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection(
                (address.host, address.port), timeout=min(_ATTEMPT_S, max(_PAUSE_S, deadline - time.monotonic()))
            )
        except (OSError, UnicodeError) as error:
            if StopSignal.pending():
                raise Interrupted(f"stopped by a signal while waiting for the server at {address}") from error
            if time.monotonic() < deadline:
                time.sleep(_PAUSE_S)
                continue
            raise WorkerError(
                f"no process answers: {error}",
                hint="check that the server is running and reachable from this machine; "
                "where a host has several names or addresses, set sync_options.host on the server",
                address=str(address),
            ) from error
        # While nothing listens on a port of this machine, TCP may connect a socket to itself.
        if connection.getsockname() != connection.getpeername():
            return connection
        connection.close()


def _proof(token: str, side: bytes, server: bytes, client: bytes) -> bytes:
    """Return the keyed hash by which `side` proves that it knows the token, for the random numbers of both sides."""
    return hmac.digest(token.encode(), side + server + client, "sha256")


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left)
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionError("the connection was closed")
        data += piece
    return data


def shared_store(member: Member, timeout_s: float = 60.0) -> TCPStore:
    """Open a store that rank 0 serves to all ranks of a job; call it on every rank at the same point.

    It listens only on the address of rank 0's machine, but needs no token: anyone who can reach that address can read
    and write it. Rank 0 must keep a reference until the other ranks no longer use the store.

    Raises:
        WorkerError: If rank 0 cannot be reached.
    """
    host, limit = host_of_job(), timedelta(seconds=timeout_s)
    own = None
    if member.leads:
        listening = listening_socket(host, 0)
        port = int(listening.getsockname()[1])
        with as_worker_error("cannot serve a store", address=f"{host}:{port}"):
            # Given a host instead of a socket, TCPStore would listen on all addresses of the machine (torch 2.13).
            own = TCPStore(
                host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listening.detach()
            )
    number = broadcast_bytes(None if own is None else str(own.port).encode(), member)
    assert number is not None
    if own is not None:
        return own
    with as_worker_error("no process answers", address=f"{host}:{int(number)}"):
        return TCPStore(host, int(number), is_master=False, timeout=limit)
