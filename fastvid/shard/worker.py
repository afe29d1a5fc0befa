"""The process that works on hostile files. Started by `fastvid.shard.engines`, which kills it when it must.

It reads pieces (see `fastvid.shard.wire`) from its standard input: first the job's settings, then one task after the
other; it answers on its standard output with phases and outcomes. When its input ends, because the job is over or dead,
it takes itself and its ffmpeg with it at once.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from typing import IO, Any

from fastvid.shard.encode import encode_source
from fastvid.shard.foreign_work import index_member
from fastvid.shard.limits import confine
from fastvid.shard.wire import HEADER_BYTES, Settings, Task, pack, piece_size, unpack


def main() -> None:
    """Works until the input ends."""
    source, sink = _private_pipes()
    tasks: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(source, tasks), daemon=True).start()
    settings = Settings.from_json(tasks.get())
    confine(settings.limits)
    while True:
        task = Task(**tasks.get())

        def report(phase: str, seconds: float) -> None:
            _send(sink, pack({"phase": phase, "seconds": seconds}))

        work = encode_source if task.member is None else index_member
        _send(sink, work(task, settings, report).to_bytes())


def _private_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Takes the two pipes away from the standard descriptors, where a stray print or a child could reach them."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    return source, sink


def _listen(source: IO[bytes], tasks: queue.SimpleQueue[dict[str, Any]]) -> None:
    try:
        while start := source.read(HEADER_BYTES):
            body = source.read(piece_size(start) - HEADER_BYTES)
            tasks.put(unpack(start + body)[0])
    finally:
        # Nobody waits for a result any more. The group holds this process and the ffmpeg it may be running.
        os.killpg(0, signal.SIGKILL)


def _send(sink: IO[bytes], piece: bytes) -> None:
    sink.write(piece)
    sink.flush()


if __name__ == "__main__":
    main()
