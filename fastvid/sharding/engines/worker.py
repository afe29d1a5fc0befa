"""The worker process, which parses untrusted files.

`fastvid.sharding.engines.local` starts and may kill it. It reads messages (see `fastvid.runtime.processes`) from
its standard input: first the job's settings, then groups of tasks, each of one file. It writes messages to its standard
output: the phase that begins and its time limit, the tasks that it begins, and outcomes. When its input closes, because
the job has finished or died, it kills itself and its ffmpeg at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from fastvid.media.ffmpeg import confine
from fastvid.runtime.processes import pack
from fastvid.sharding.encode.profiles import Settings
from fastvid.sharding.engines.local import Parent
from fastvid.sharding.work.encode import encode_clips
from fastvid.sharding.work.index import index_clips
from fastvid.sharding.work.tasks import SourceTask, parse_record

_FETCH_THREADS: Final = "2"


def main() -> None:
    """Process tasks until the input closes."""
    parent = Parent()
    settings = parse_record(parent.messages.get(), Settings, "settings")
    # Limit the threads of the library that fetches sources: by default there is one per core, and each reserves 64 MiB
    # or more of the address space, which is limited in this process.
    os.environ.setdefault("TOKIO_WORKER_THREADS", _FETCH_THREADS)
    confine(settings.limits)

    def report(phase: str, seconds: float) -> None:
        parent.send(pack({"phase": phase, "seconds": seconds}))

    def begin(indices: Sequence[int]) -> None:
        parent.send(pack({"begins": list(indices)}))

    while True:
        tasks = parse_record(parent.messages.get()["tasks"], list[SourceTask], "tasks")
        work = encode_clips if settings.proof is None else index_clips
        for outcome in work(tasks, settings, report, begin):
            parent.send(outcome.to_bytes())


if __name__ == "__main__":
    main()
