"""Records the progress of every process of a job, for ``fastvid status``, in one small file each.

The files are next to the ledger's parts and rewritten every few seconds. Nothing depends on them; locks are in
`fastvid.sharding.job.lock`.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from fastvid.errors import StorageError
from fastvid.format.schema import LEDGER_PARTS
from fastvid.media.reasons import Reason
from fastvid.runtime.liveness import namespace
from fastvid.runtime.progress import Progress
from fastvid.sharding.job.ledger import Part
from fastvid.sharding.job.plan import JobPart
from fastvid.storage import Storage

_LOG = logging.getLogger(__name__)

PROGRESS: Final = f"{LEDGER_PARTS}/progress"

BEAT_SECONDS: Final = 20.0
"""Interval between two records: at 200 processes an object store gets ten small writes a second."""

_FIRST_SECONDS: Final = 2.0  # the second record, which has the results of earlier runs


class Heartbeat:
    """Records the progress of one process of a job, while the block runs and once at its end."""

    def __init__(
        self,
        storage: Storage,
        command: str,
        part: JobPart | None,
        progress: Progress,
        *,
        parts: Mapping[int, Part],
        shards: int,
        all_shards: int,
    ) -> None:
        self._storage, self._progress, self._parts = storage, progress, parts
        name = "job" if part is None else f"part-{part.index}-of-{part.of}"
        self._name = f"{PROGRESS}/{name}.json"
        self._fixed = {
            "command": command,
            "part": None if part is None else str(part),
            "host": socket.gethostname(),
            "namespace": namespace(),
            "pid": os.getpid(),
            "shards": shards,
            "all_shards": all_shards,
        }
        self.reasons: Counter[Reason] = Counter()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="fastvid-heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._fixed["started"] = utc_now()
        self._write("running")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._write("finished" if kind is None else "failed")

    def _keep(self) -> None:
        wait = _FIRST_SECONDS
        while not self._over.wait(wait):
            self._write("running")
            wait = BEAT_SECONDS

    def _write(self, state: str) -> None:
        try:
            self._storage.write(self._name, (json.dumps(self._record(state), sort_keys=True) + "\n").encode())
        except StorageError as error:
            _LOG.warning("progress could not be recorded for `fastvid status`: %s", error)

    def _record(self, state: str) -> dict[str, Any]:
        progress = self._progress
        done = [part for part in list(self._parts.values()) if part.digest is not None]
        return self._fixed | {
            "state": state,
            "time": utc_now(),
            "shards_done": len(self._parts),
            "sources": progress.total,
            "sources_done": progress.done,
            "rejected": progress.rejected,
            "reasons": {reason.value: count for reason, count in sorted(self.reasons.items())},
            "bytes": sum(part.digest.bytes for part in done if part.digest is not None),
            "sources_per_second": round(progress.rate(time.monotonic()), 4),
        }


def utc_now() -> str:
    """Return the time in UTC to the second, as ISO 8601; the true one, by which others judge whether the process lives,
    unlike `fastvid.format.reason.now`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
