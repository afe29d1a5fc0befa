"""Prevents that two jobs work in one folder, and lets jobs resume: locks, leases, scratch folders, and staging.

While a job runs in a dataset's folder, no other may; of a job that is divided into parts, each part may run once. On a
local or shared disk, kernel locks are used; the kernel releases those of a killed process. An object store has no
locks. There the record of a job is its lease: the job renews it every few seconds, and a record that has not changed
for `LEASE_SECONDS` belongs to a dead job.

The record also contains the progress of the process, for ``fastvid status``; on a disk it has no other use. Staging is
where encoded samples wait until their shard is complete, so that a killed job loses only what was being encoded. They
are next to the record; if the dataset is in an object store, in a local scratch folder, which the next run on this
machine finds. Another machine encodes them again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from fastvid.errors import FormatError, JobError, StorageError
from fastvid.format.schema import LEDGER_PARTS
from fastvid.runtime.processes import is_dead, lock_file, namespace
from fastvid.runtime.values import sha256
from fastvid.sharding.job.plan import JobPart, digest
from fastvid.sharding.work.tasks import Outcome
from fastvid.storage import LocalStorage, Storage

_LOG = logging.getLogger(__name__)

BEAT_SECONDS: Final = 20.0
"""Seconds between updates of a record."""

LEASE_SECONDS: Final = 90.0
"""Seconds after which an unchanged record has expired; a slow store may lose up to four updates."""

PROGRESS: Final = f"{LEDGER_PARTS}/progress/"
"""Folder of the records of a dataset's jobs, one per process."""

_CLAIM: Final = f"{LEDGER_PARTS}/plan/claim.json"  # lease of the process that lists the sources
_FIRST_SECONDS: Final = 2.0  # until the second update, which includes the results of earlier runs
_POLL_SECONDS: Final = 1.0
_JOB_LOCK: Final = ".job.lock"
# Errors of network file systems mounted without locks.
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


@contextlib.contextmanager
def lock_folder(storage: Storage, part: JobPart | None = None, command: str = "") -> Iterator[JobLease]:
    """Lock the folder, or one part of its job, until the block ends. `command`: name of the command, for the record."""
    lease, state = JobLease(storage, part, command), "failed"
    with _locked(storage, part) if isinstance(storage, LocalStorage) else contextlib.nullcontext():
        try:
            if not isinstance(storage, LocalStorage):
                lease.take(part)
            yield lease
            state = "finished"
        finally:
            lease.release(state)


@contextlib.contextmanager
def _locked(storage: LocalStorage, part: JobPart | None) -> Iterator[None]:
    folder = storage.path(LEDGER_PARTS)
    job = folder / _JOB_LOCK
    made = [path for path in (storage.root, *storage.root.parents) if not path.exists()]
    if [path.name for path in storage.root.glob("*")] == [LEDGER_PARTS]:
        made = [storage.root]  # by a part that starts now too, or was killed
    with contextlib.ExitStack() as stack:
        # Parts share this lock, so that none runs at the same time as a whole job.
        held = stack.enter_context(_lock(job, shared=part is not None))
        if held is None:
            _LOG.warning("the file system of %s has no locks: nothing prevents a second job there", storage.url)
        own = None if part is None else folder / f".part-{part.index}-of-{part.of}.lock"
        if own is not None:
            stack.enter_context(_lock(own, shared=False))
        try:
            yield
            made = []
        finally:
            with contextlib.suppress(OSError):
                _clear(storage, folder, held, own)
                for path in made:
                    path.rmdir()  # fails unless it is empty


def _clear(storage: LocalStorage, folder: Path, held: int | None, own: Path | None) -> None:
    """Remove lock files while holding their locks; a job that has opened a removed one notices, and creates another."""
    if own is not None:
        own.unlink(missing_ok=True)
        if held is None or any(names not in ([], [_JOB_LOCK]) for _, _, names in os.walk(folder)):
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


class JobLease:
    """A process's record in a folder, renewed by a thread. In an object store it is a lease: it excludes other jobs."""

    def __init__(self, storage: Storage, part: JobPart | None, command: str) -> None:
        self.storage, self.name = storage, f"{PROGRESS}{_own_name(part)}"
        process = {"host": socket.gethostname(), "namespace": namespace(), "pid": os.getpid()}
        told = {"command": command, "part": None if part is None else str(part), "started": utc_now()}
        self._fixed = {"owner": uuid.uuid4().hex, **process, **told}
        self._excludes = not isinstance(storage, LocalStorage)
        self._progress: Callable[[], Mapping[str, Any]] | None = None
        self._content: bytes | None = None  # of the record, once it is written
        self._number, self._lost, self._since = 0, False, time.monotonic()
        self._writing, self._over = threading.Lock(), threading.Event()
        self._beats: threading.Thread | None = None

    def take(self, part: JobPart | None) -> None:
        """Acquire the lease; raise JobError if another job is running. Waits to see whether other holders are dead."""
        expected = None
        while not self.claim(expected):
            expected = _wait_until_dead(self.storage, [self.name]).get(self.name)
        # Write this record before searching for others: if two jobs begin at once, at least one sees the other.
        whole = f"{PROGRESS}{_own_name(None)}"
        others = [name for name in self.storage.list(PROGRESS) if name != self.name and (part is None or name == whole)]
        _wait_until_dead(self.storage, others)
        if part is None:
            for name in others:
                self.storage.delete(name)

    def claim(self, expected: bytes | None) -> bool:
        """Write the record and start to renew it; return False if another process was faster.

        `expected`: content of the expired record to replace; None if there is no record.
        """
        content = self._next("running")
        if not self.storage.swap(self.name, content, expected):
            return False
        self._content, self._since = content, time.monotonic()
        self._start()
        return True

    def report(self, progress: Callable[[], Mapping[str, Any]]) -> None:
        """Start to record progress.

        `progress`: called for every update; returns fields of `fastvid.sharding.job.status.PartStatus`.
        """
        self._progress = progress
        self._write("running")
        self._start()

    def check(self) -> None:
        """Raise JobError if another job has taken over, for example because this one was suspended for too long."""
        if self._lost:
            raise JobError(
                "another job has taken over here, because this one did not renew its lease in time",
                file=self.storage.url,
                hint="let the other job continue; finished work is kept",
            )

    def end(self) -> None:
        """Delete the records of all processes of a job that is committed."""
        self._stop()
        for name in self.storage.list(PROGRESS):
            self.storage.delete(name)
        self._content = self._progress = None

    def release(self, state: str) -> None:
        """Record how the process ended, if it reported progress; otherwise delete its record."""
        self._stop()
        if self._progress is not None:
            self._write(state)
        elif self._content is not None and not self._lost:
            try:
                if _read(self.storage, self.name) == self._content:
                    self.storage.delete(self.name)
            except StorageError as error:
                _LOG.warning("a lease could not be released and lasts %.0f s more: %s", LEASE_SECONDS, error)

    def _start(self) -> None:
        if self._beats is None:
            self._beats = threading.Thread(target=self._renew, name="fastvid-lease", daemon=True)
            self._beats.start()

    def _stop(self) -> None:
        self._over.set()
        if self._beats is not None:
            self._beats.join()

    def _renew(self) -> None:
        wait = min(_FIRST_SECONDS, BEAT_SECONDS)
        while not self._over.wait(wait):
            self._write("running")
            wait = BEAT_SECONDS

    def _write(self, state: str) -> None:
        with self._writing:
            if self._lost:
                return
            content = self._next(state)
            try:
                if self._excludes:
                    self._lost = not self.storage.swap(self.name, content, self._content)
                else:
                    self.storage.write(self.name, content)
                self._content, self._since = content, time.monotonic()
            except StorageError as error:
                _LOG.warning("the record of this job could not be renewed: %s", error)
                self._lost = self._excludes and time.monotonic() - self._since > LEASE_SECONDS

    def _next(self, state: str) -> bytes:
        self._number += 1
        told = {} if self._progress is None else self._progress()
        record = {**self._fixed, "beat": self._number, "state": state, "time": utc_now(), **told}
        return (json.dumps(record, sort_keys=True) + "\n").encode()


@contextlib.contextmanager
def first_of(storage: Storage, is_done: Callable[[], bool]) -> Iterator[None]:
    """Let one process at a time run the block, which does something once for all.

    Waits until `is_done` returns true, or until this process has the lease because no other holds it or its holder
    died. Inside the block, call `is_done` again.
    """
    lease = JobLease(storage, None, "list the sources")
    lease.name = _CLAIM
    expired: bytes | None = None
    while not is_done() and not lease.claim(expired):
        with contextlib.suppress(JobError):  # its holder is alive
            expired = _wait_until_dead(storage, [_CLAIM]).get(_CLAIM)
    try:
        yield
    finally:
        lease.release("finished")


def _own_name(part: JobPart | None) -> str:
    """Return the name of the record of a whole job, or of a part."""
    return "job.json" if part is None else f"part-{part.index}-of-{part.of}.json"


def _wait_until_dead(storage: Storage, names: list[str]) -> dict[str, bytes]:
    """Watch leases until each is deleted or has expired; return the expired ones."""
    seen = {name: content for name in names if (content := _read(storage, name)) is not None}
    waiting = {name: content for name, content in seen.items() if not _is_dead(content)}
    if waiting and names != [_CLAIM]:
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
    """Return whether the record is of a process that has certainly ended."""
    record = _parse(content)
    return record.get("state") != "running" or is_dead(record.get("namespace"), record.get("pid"))


def _parse(content: bytes) -> dict[str, Any]:
    try:
        record = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def utc_now() -> str:
    """Return the time in UTC to the second, as ISO 8601.

    It is always the real time, unlike `fastvid.format.reason.now`, because others see by it whether the process lives.
    """
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


_DIGITS: Final = 12


def scratch_folder(storage: Storage, folder: str | os.PathLike[str] | None = None) -> LocalStorage | None:
    """Return the local folder for work on a dataset; None if the dataset's own folder is used."""
    if folder is None:
        if isinstance(storage, LocalStorage):
            return None
        folder = tempfile.gettempdir()
    name = f"fastvid-{sha256(storage.url.encode())[:_DIGITS]}"
    path = Path(folder).absolute() / name
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise StorageError(f"scratch folder cannot be created: {error.strerror}", file=path) from error
    # Check the owner: the name is predictable, and other users can create folders in the folder for temporary files.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise StorageError("scratch folder belongs to another user", file=path, hint="name another with --scratch")
    return LocalStorage(path)


@contextlib.contextmanager
def short_scratch(storage: Storage) -> Iterator[LocalStorage | None]:
    """Yield a scratch folder that is removed after the block; None if the dataset's own folder is used."""
    if isinstance(storage, LocalStorage):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="fastvid-") as folder:
        yield LocalStorage(folder)


_JOB: Final = f"{LEDGER_PARTS}/job.json"
_SAMPLES: Final = f"{LEDGER_PARTS}/staging"
_ADDITION: Final = f"{LEDGER_PARTS}/add/"  # folder of an addition, another job; see `fastvid.sharding.change.add`
_BUILD_DIGITS: Final = 8


class Staging:
    """The record of an unfinished job, and the samples of its unfinished shards.

    They are stored by shard and slot, which is the position of the source among those of its shard.
    `scratch`: where samples are stored; by default the dataset's folder, so that any machine can resume the job.
    `encoder`: build of the encoder; samples of other builds are ignored.
    """

    def __init__(
        self, storage: Storage, scratch: Storage | None = None, encoder: Mapping[str, Any] | None = None
    ) -> None:
        self.storage, self.scratch = storage, scratch or storage
        self._build = f"build-{digest(encoder or {})[:_BUILD_DIGITS]}"

    def job(self) -> dict[str, Any] | None:
        """Return the identity of the unfinished job here; None if there is none."""
        if not self.storage.exists(_JOB):
            return None
        try:
            record: dict[str, Any] = json.loads(self.storage.read(_JOB))
        except (ValueError, RecursionError) as error:
            raise FormatError(f"record of the unfinished job is broken: {error}", file=_JOB) from error
        return record

    def begin(self, identity: Mapping[str, Any], *, replace: bool = False) -> dict[str, Any] | None:
        """Record the unfinished job, unless one is recorded already and `replace` is false.

        Returns the identity recorded already, perhaps by another part that began at the same moment; otherwise
        None.
        """
        record = (json.dumps(identity, indent=1, sort_keys=True) + "\n").encode()
        if replace:
            self.storage.write(_JOB, record)
            return None
        return None if self.storage.swap(_JOB, record, None) else self.job()

    def slots(self) -> dict[str, set[int]]:
        """Return the slots with a stored outcome, by shard."""
        found: dict[str, set[int]] = {}
        for name in self.scratch.list(f"{_SAMPLES}/{self._build}/"):
            stem, slot = name.split("/")[-2:]
            found.setdefault(stem, set()).add(int(slot))
        return found

    def put(self, stem: str, slot: int, outcome: Outcome) -> None:
        """Store an outcome atomically."""
        self.scratch.write(self._name(stem, slot), outcome.to_bytes())

    def get(self, stem: str, slot: int) -> Outcome | None:
        """Return an outcome; None if it is damaged, for example by a power failure."""
        try:
            return Outcome.from_bytes(self.scratch.read(self._name(stem, slot)))
        except FormatError:
            return None

    def drop(self, stem: str) -> None:
        """Delete the samples of a shard."""
        delete_below(self.scratch, f"{_SAMPLES}/{self._build}/{stem}")

    def end(self) -> None:
        """Delete everything that belongs to the job, including the ledger's parts."""
        delete_below(self.scratch, _SAMPLES)
        # Delete the job's record last: until then, the next run knows that the other files belong to this job.
        delete_below(self.storage, LEDGER_PARTS, keep=(_JOB, _ADDITION))
        delete_below(self.storage, LEDGER_PARTS, keep=(_ADDITION,))

    def _name(self, stem: str, slot: int) -> str:
        return f"{_SAMPLES}/{self._build}/{stem}/{slot:06d}"


def delete_below(storage: Storage, folder: str, keep: tuple[str, ...] = ()) -> None:
    """Delete the files below a folder, except those whose names begin as one of `keep`, and folders that are empty."""
    for name in storage.list(f"{folder}/"):
        if not name.startswith(keep):
            storage.delete(name)
    if isinstance(storage, LocalStorage):
        storage.prune(folder)
