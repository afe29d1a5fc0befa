"""Processes: their environment and exit status, cores, file locks, messages, and ranks.

Lock files: the last process that has a lock removes its file. A lock belongs to the inode, so a process that waited for
the lock of a removed file creates the file and locks it again.

Dead processes: whether the process that wrote a file is dead is known only within one PID namespace, because containers
may share a host name and a disk but not their process IDs.

Messages are plain data, a JSON header and binary blobs with lengths and a checksum. A child process reads untrusted
files, so its messages are parsed and checked, and never unpickled.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import secrets
import signal
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from fastvid.errors import FormatError, UsageError
from fastvid.runtime.values import check_integer, sha256

SAFE_PATH: Final = {"PYTHONSAFEPATH": "1"}
"""Environment variable of every Python process that fastvid starts, inherited by that process's own children.

Like ``python -P``: modules are not imported from the current folder, which may contain a downloaded ``av.py``.
"""


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Set `SAFE_PATH` for the children that `multiprocessing` starts in the block; it has no argument for variables."""
    before = {name: os.environ[name] for name in SAFE_PATH if name in os.environ}
    os.environ.update(SAFE_PATH)
    try:
        yield
    finally:
        for name in SAFE_PATH:
            del os.environ[name]
        os.environ.update(before)


def how_it_ended(status: int) -> str:
    """Describe an exit status, for example ``exited with 1`` or ``was killed by SIGKILL``."""
    if status >= 0:
        return f"exited with {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # real-time signals have no names
        return f"was killed by signal {-status}"


_CGROUPS = Path("/sys/fs/cgroup")


def available_cores(ranks: int | None = None) -> int:
    """Return the number of cores for each rank on this machine, at least 1.

    It is the number of cores in the CPU affinity, or the container's quota if lower, divided by `ranks`, by default the
    local ranks of torchrun.
    """
    if ranks is None:
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        ranks = int(local) if local.isdigit() else 1
    return max(1, math.floor(min(len(os.sched_getaffinity(0)), _quota()) / max(1, ranks)))


def _quota() -> float:
    """Return the CPU quota in cores: the lowest of this process's cgroup (v2) and all its parents; inf without one."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return math.inf
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    cores = math.inf
    for group in (own, *(str(parent) for parent in Path(own).parents)):
        try:
            quota, period = (_CGROUPS / group.lstrip("/") / "cpu.max").read_text().split()
            if quota != "max":
                cores = min(cores, int(quota) / int(period))
        except (OSError, ValueError):
            continue
    return cores


_REMOVAL_SECONDS: Final = 0.05
"""Seconds in which the holder of a lock removes its file, and the folder if it is empty, when it is about to end."""

_TRIES: Final = 100  # to open a file in a folder that its last holder has just removed


def lock_file(path: Path, *, shared: bool = False, wait: bool = True) -> int:
    """Lock a file, created with its folder if necessary. The kernel releases the lock of a killed process.

    The file is opened for writing, because NFS locks no others. Without `wait`, raises BlockingIOError if another
    process has the lock. Returns the file descriptor; closing it releases the lock. A process with an exclusive lock
    may remove the file before it closes the descriptor.
    """
    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    while True:
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, how)
            if _lies_at(descriptor, path):
                return descriptor
        except BlockingIOError:
            time.sleep(_REMOVAL_SECONDS)
            if _lies_at(descriptor, path):
                os.close(descriptor)
                raise
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, flags, 0o666)
    return os.open(path, flags, 0o666)


def _lies_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


_DIGITS = 12


@cache
def namespace() -> str:
    """Return an ID, in hex, of this boot of this machine and of the PID namespace of this process.

    No two namespaces that exist at the same time have the same ID. If the kernel does not tell, it is random.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        inode = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return secrets.token_hex(_DIGITS // 2)
    return sha256(f"{boot}:{inode}".encode())[:_DIGITS]


def is_dead(space: object, pid: object) -> bool:
    """Return whether a process has certainly ended; False if it is of another PID namespace or machine.

    `space`: what `namespace` returned in that process.
    """
    if space != namespace() or not str(pid).isdecimal() or int(str(pid)) < 1:
        return False
    try:
        # Not by /proc, which may show the PIDs of another namespace; os.kill uses this process's namespace.
        os.kill(int(str(pid)), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


# Size of the header, size of all blobs, CRC-32 of both.
_FRAME: Final = struct.Struct("<IQI")
HEADER_BYTES: Final = _FRAME.size
_MAX_HEADER: Final = 64 << 20


class Inbox:
    """Assembles messages from the bytes received from a process; `max_bytes`: maximum size of a message."""

    def __init__(self, max_bytes: int = 1 << 40) -> None:
        self._max_bytes, self._buffer = max_bytes, bytearray()

    def add(self, data: bytes) -> Iterator[tuple[dict[str, Any], memoryview]]:
        """Add received bytes; yield the messages that they complete."""
        self._buffer += data
        while len(self._buffer) >= HEADER_BYTES:
            size = piece_size(memoryview(self._buffer)[:HEADER_BYTES])
            if size > self._max_bytes:
                raise FormatError(f"a message has {size} bytes, at most {self._max_bytes} are allowed")
            if len(self._buffer) < size:
                return
            piece = bytes(self._buffer[:size])
            del self._buffer[:size]
            yield unpack(piece)


def pack(header: Mapping[str, Any], *blobs: bytes) -> bytes:
    """Return a header and blobs as one message with lengths and a checksum."""
    text = json.dumps(header).encode("ascii")
    checksum = zlib.crc32(text)
    for blob in blobs:
        checksum = zlib.crc32(blob, checksum)
    return b"".join([_FRAME.pack(len(text), sum(map(len, blobs)), checksum), text, *blobs])


def piece_size(start: bytes | memoryview) -> int:
    """Return the size of a whole message in bytes, from its first `HEADER_BYTES` bytes."""
    text, blobs, _ = _FRAME.unpack_from(start)
    if text > _MAX_HEADER or blobs > 1 << 40:
        raise FormatError(f"a message claims a header of {text} bytes and {blobs} bytes of blobs")
    return HEADER_BYTES + int(text) + int(blobs)


def unpack(data: bytes | memoryview) -> tuple[dict[str, Any], memoryview]:
    """Return the header and the blobs of one complete message."""
    view = memoryview(data)
    if len(view) < HEADER_BYTES or len(view) != piece_size(view):
        raise FormatError("a message is truncated")
    text, _, checksum = _FRAME.unpack_from(view)
    body = view[HEADER_BYTES:]
    if zlib.crc32(body) != checksum:
        raise FormatError("a message does not match its checksum")
    try:
        header = json.loads(bytes(body[:text]))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the header of a message is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise FormatError(f"the header of a message is a {type(header).__name__}, expected an object")
    return header, body[text:]


@dataclass(frozen=True, slots=True)
class World:
    """The number (rank) of this process among the `size` processes that share every global batch."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise UsageError(f"rank {self.rank} is outside a world of {self.size}", hint="count ranks from 0")

    @classmethod
    def resolve(cls, rank: int | None, world_size: int | None) -> World:
        """Return the arguments if given, else torch's process group, else torchrun's environment, else rank 0 of 1."""
        if (rank is None) != (world_size is None):
            raise UsageError(f"rank={rank} and world_size={world_size} must be given together", hint="give both")
        if rank is not None and world_size is not None:
            return cls(check_integer("rank", rank), check_integer("world_size", world_size))
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        found = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        if found == (None, None):
            return cls()
        try:
            return cls(int(found[0] or ""), int(found[1] or ""))
        except ValueError:
            raise UsageError(f"environment has RANK={found[0]!r} and WORLD_SIZE={found[1]!r}") from None
