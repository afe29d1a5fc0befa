"""The worker process, which parses untrusted files.

`fastvid.sharding.engines.local_engine` starts and may kill it. It reads messages (see `fastvid.runtime.messages`) from
its standard input, first the job's settings, then tasks, and writes phases and outcomes to its standard output. When
its input closes, because the job has finished or died, it kills itself and its ffmpeg at once.
"""

from __future__ import annotations

import os
from typing import Final

from fastvid.media.limits import confine
from fastvid.runtime.messages import pack
from fastvid.sharding.engines.child import Parent
from fastvid.sharding.work.encode_source import encode_source
from fastvid.sharding.work.index_source import index_member
from fastvid.sharding.work.messages import Settings, Task

_FETCH_THREADS: Final = "2"


def main() -> None:
    """Process tasks until the input closes."""
    parent = Parent()
    settings = Settings.from_json(parent.messages.get())
    # Threads of the library that fetches sources: by default one per core, and each reserves 64 MiB or more of the
    # address space, which is limited here.
    os.environ.setdefault("TOKIO_WORKER_THREADS", _FETCH_THREADS)
    confine(settings.limits)
    while True:
        task = Task(**parent.messages.get())

        def report(phase: str, seconds: float) -> None:
            parent.send(pack({"phase": phase, "seconds": seconds}))

        work = index_member if task.indexes else encode_source
        parent.send(work(task, settings, report).to_bytes())


if __name__ == "__main__":
    main()
