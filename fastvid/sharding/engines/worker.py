"""The process that works on hostile files; `fastvid.sharding.engines.local_engine` starts it, and kills it if it must.

It reads pieces (see `fastvid.runtime.messages`) from its standard input: first the job's settings, then one task
after the other; it answers on its standard output with phases and outcomes. When its input ends, because the job is
over or dead, it takes itself and its ffmpeg with it at once.
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
    """Works until the input ends."""
    parent = Parent()
    settings = Settings.from_json(parent.messages.get())
    # Of the library that fetches sources: by default it starts a thread for each core, and each maps 64 MiB or more of
    # the address space that is limited here.
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
