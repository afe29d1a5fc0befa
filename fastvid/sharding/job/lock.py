"""Locks a dataset's folder for one job: a whole job excludes all others, a part only itself and whole jobs.

On a local or shared disk, kernel locks are used; the kernel releases those of a killed process. An object store has no
locks, so each job writes an object, a lease, and updates it every few seconds; a lease that has not changed for longer
belongs to a dead job.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from fastvid.errors import JobError, StorageError
from fastvid.format.schema import LEDGER_PARTS
from fastvid.runtime.file_lock import lock_file
from fastvid.runtime.liveness import is_dead, namespace
from fastvid.sharding.job.plan import JobPart
from fastvid.storage import LocalStorage, Storage

_LOG = logging.getLogger(__name__)

Check = Callable[[], None]
"""Raises JobError if another job has taken over the folder."""

BEAT_SECONDS: Final = 20.0
"""Interval between updates of a lease."""

LEASE_SECONDS: Final = 90.0
"""A lease unchanged for so long has expired: up to four updates may be lost to a slow store."""

_POLL_SECONDS: Final = 1.0
_JOB_LOCK: Final = ".job.lock"
_LEASES: Final = "leases/"
# Errors of network file systems mounted without locks.
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


@contextlib.contextmanager
def lock_folder(storage: Storage, part: JobPart | None = None) -> Iterator[Check]:
    """Lock the folder, or one part of its job, until the block ends.

    Yields A function that raises JobError if another job has taken over, as happens to a job on an object store
    that was suspended for longer than a lease lasts.
    """
    with _locked(storage, part) if isinstance(storage, LocalStorage) else _leased(storage, part) as check:
        yield check


@contextlib.contextmanager
def _locked(storage: LocalStorage, part: JobPart | None) -> Iterator[Check]:
    folder = storage.path(LEDGER_PARTS)
    job = folder / _JOB_LOCK
    with contextlib.ExitStack() as stack:
        # Parts share this lock, so that none runs at the same time as a whole job.
        held = stack.enter_context(_lock(job, shared=part is not None))
        if held is None:
            _LOG.warning("the file system of %s has no locks: nothing prevents a second job there", storage.url)
        own = None if part is None else folder / f".part-{part.index}-of-{part.of}.lock"
        if own is not None:
            stack.enter_context(_lock(own, shared=False))
        try:
            yield lambda: None
        finally:
            with contextlib.suppress(OSError):
                _clear(storage, folder, held, own)


def _clear(storage: LocalStorage, folder: Path, held: int | None, own: Path | None) -> None:
    """Remove lock files while holding their locks: a job that has opened one notices and creates another."""
    if own is not None:
        own.unlink(missing_ok=True)
        if os.listdir(folder) != [_JOB_LOCK] or held is None:
            return
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while other parts are running
    for path in [*folder.glob(".part-*.lock"), folder / _JOB_LOCK]:
        path.unlink(missing_ok=True)
    storage.prune(LEDGER_PARTS)


@contextlib.contextmanager
def _lock(path: Path, *, shared: bool) -> Iterator[int | None]:
    """Lock a separate lock file.

    Yields its descriptor, or None if the file system has no locks.
    """
    folder = path.parent.parent
    try:
        descriptor = lock_file(path, shared=shared, wait=False)
    except BlockingIOError as error:
        raise JobError("another job is running here", file=folder) from error
    except OSError as error:
        if error.errno in _NO_LOCKS:
            yield None
            return
        raise StorageError(f"folder cannot be created, written or locked: {error.strerror}", file=folder) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _leased(storage: Storage, part: JobPart | None) -> Iterator[Check]:
    own = f"{_LEASES}job.json" if part is None else f"{_LEASES}part-{part.index}-of-{part.of}.json"
    lease = _JobLease(storage, own)
    lease.take()
    try:
        # Write the own lease before looking for others: of two jobs that begin at once, at least one sees the other.
        others = [
            name for name in storage.list(_LEASES) if name != own and (part is None or name == f"{_LEASES}job.json")
        ]
        _wait_until_dead(storage, others)
        if part is None:
            for name in others:
                storage.delete(name)
        yield lease.check
    finally:
        lease.release()


class _JobLease:
    """One lease and the thread that renews it."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage, self.name = storage, name
        self._owner, self._beats = uuid.uuid4().hex, 0
        self._content = b""
        self._over, self._lost = threading.Event(), False
        self._thread = threading.Thread(target=self._keep, name="fastvid-lease", daemon=True)

    def take(self) -> None:
        """Acquire the lease, also from a dead job."""
        content, expected = self._next(), None
        while not self.storage.swap(self.name, content, expected):
            expected = _wait_until_dead(self.storage, [self.name]).get(self.name)
        self._content = content
        self._thread.start()

    def check(self) -> None:
        """Raise JobError if another job has taken over the lease."""
        if self._lost:
            raise JobError(
                "another job has taken over here, because this one did not renew its lease in time",
                file=self.storage.url,
                hint="let the other job continue; finished work is kept",
            )

    def release(self) -> None:
        """Release the lease, if it still belongs to this job."""
        self._over.set()
        self._thread.join()
        try:
            if not self._lost and self.storage.exists(self.name) and self.storage.read(self.name) == self._content:
                self.storage.delete(self.name)
        except StorageError as error:
            _LOG.warning("a lease could not be released and lasts %.0f s more: %s", LEASE_SECONDS, error)

    def _keep(self) -> None:
        since = time.monotonic()
        while not self._over.wait(BEAT_SECONDS):
            content = self._next()
            try:
                if not self.storage.swap(self.name, content, self._content):
                    self._lost = True
                    return
                self._content, since = content, time.monotonic()
            except StorageError as error:
                _LOG.warning("the lease of this job could not be renewed: %s", error)
                if time.monotonic() - since > LEASE_SECONDS:
                    self._lost = True
                    return

    def _next(self) -> bytes:
        self._beats += 1
        process = {"host": socket.gethostname(), "namespace": namespace(), "pid": os.getpid()}
        record = {"owner": self._owner, **process, "beat": self._beats}
        return (json.dumps(record) + "\n").encode()


def _wait_until_dead(storage: Storage, names: list[str]) -> dict[str, bytes]:
    """Watch leases until each is deleted or has expired; return the expired ones."""
    seen = {name: content for name in names if (content := _read(storage, name)) is not None}
    waiting = {name: content for name, content in seen.items() if not _is_dead(content)}
    if waiting:
        _LOG.info("waiting up to %.0f s to see whether another job is running in %s", LEASE_SECONDS, storage.url)
    end = time.monotonic() + LEASE_SECONDS
    while waiting and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
        for name, content in list(waiting.items()):
            now = _read(storage, name)
            if now is None:
                del waiting[name], seen[name]
            elif now != content:
                record = _parse(now)
                raise JobError(
                    f"another job is running here, on {record.get('host')} as process {record.get('pid')}",
                    file=storage.url,
                )
    return seen


def _read(storage: Storage, name: str) -> bytes | None:
    try:
        return storage.read(name)
    except StorageError:
        if storage.exists(name):
            raise
        return None


def _is_dead(content: bytes) -> bool:
    """Return whether the lease names a process that has certainly ended."""
    record = _parse(content)
    return is_dead(record.get("namespace"), record.get("pid"))


def _parse(content: bytes) -> dict[str, Any]:
    try:
        record = json.loads(content)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
