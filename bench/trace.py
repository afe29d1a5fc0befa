"""Count what fastvid's own code does for one clip and one source: files entered, file-to-file edges, Python calls.

Four traces: `ClipLoader(...)`, the iteration up to its first batch, a clip in the steady state (Segments(8),
RandomResizedCrop(112), one thread, batches of 4), and `fastvid.shard` of one video with an engine in this process. Only
files in fastvid count; a generator's resumption is a call, as Python sees it. Nothing is timed, and all is imported.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

import fastvid
from bench.common.harness import Record, options
from fastvid.load.options import Workers
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.sharding.engines import local
from fastvid.sharding.work.encode import encode_clips
from fastvid.sharding.work.tasks import Outcome, SourceTask, group_by_file

SCHEMA: Final = "fastvid-bench-trace/1"
GOALS: Final = {
    "constructor": {"files": 40},
    "clip": {"files": 20, "calls": 120},
    "source": {"files": 40},
}
"""What a reader can still follow."""

_VIDEOS: Final = 24
_BATCH: Final = 4
_BATCHES: Final = 3  # traced after the first; two more are prefetched meanwhile
_QUIET_SECONDS: Final = 0.5
_ROOT: Final = str(Path(fastvid.__file__).parent) + "/"


class Trace:
    """Counts calls of functions in fastvid's files by (file of the caller, file), in all threads started under it."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Trace:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def take(self, *, per: int = 1) -> dict[str, Any]:
        """Return what was counted since the last call, with the calls divided by `per`, once all threads are quiet."""
        before = -1
        while before != self._calls.total():
            before = self._calls.total()
            time.sleep(_QUIET_SECONDS)
        found, self._calls = self._calls, Counter()
        calls: Counter[str] = Counter()
        for (_, file), count in found.items():
            calls[file] += count
        edges = sorted(f"{caller} -> {file}" for caller, file in found if caller and caller != file)
        return {
            "files": len(calls),
            "edges": len(edges),
            "calls": round(found.total() / per, 1),
            "calls_by_file": {file: round(count / per, 2) for file, count in calls.most_common()},
            "all_edges": edges,
        }

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (file := _file(frame)):
            caller = frame.f_back
            while caller is not None and not _file(caller):
                caller = caller.f_back
            self._calls["" if caller is None else _file(caller), file] += 1


def _file(frame: FrameType) -> str:
    name = frame.f_code.co_filename
    return name[len(_ROOT) :].removesuffix(".py").replace("/", ".") if name.startswith(_ROOT) else ""


class InProcess(local.LocalEngine):
    """Encodes in this process, where calls can be counted."""

    def __init__(self, settings: Any, *_: object) -> None:
        self._settings = settings

    def run(self, tasks: Iterable[SourceTask]) -> Iterator[Outcome]:
        """Encode one file after another."""
        for group in group_by_file(tasks):
            yield from encode_clips(group, self._settings, lambda *_: None, lambda _: None)

    def close(self) -> None:
        """Nothing has been started."""


add_arguments = options(json="trace.json")


def run(args: argparse.Namespace) -> int:
    """Run the traces."""
    with tempfile.TemporaryDirectory(prefix="fastvid-trace-") as folder:
        here = Path(folder)
        for number in range(_VIDEOS):
            _make_video(here / "videos" / f"{number}.mp4")
        traces = _source(here / "videos" / "0.mp4", here / "one")
        fastvid.shard(here / "videos", here / "all", workers=1)
        traces |= _clip(here / "all")
    record = Record(SCHEMA, args, goals=GOALS, traces=traces)
    print(table(record))
    record.save()
    return 0


def _source(video: Path, out: Path) -> dict[str, Any]:
    """Trace one source on its way into a shard."""
    local.ENGINES["in-process"] = f"{__name__}:InProcess"
    fastvid.shard(video, out / "warm-up", engine="in-process")  # imports what is imported on first use
    with Trace() as trace:
        fastvid.shard(video, out / "traced", engine="in-process")
        return {"source": trace.take()}


def _clip(dataset: Path) -> dict[str, Any]:
    """Trace a loader: its constructor, its first batch, and the clips of its later batches."""
    next(iter(_loader(dataset)))  # imports what is imported on first use
    with Trace() as trace:
        loader = _loader(dataset)
        constructor = trace.take()
        batches = iter(loader)
        next(batches)
        first = trace.take()
        for _ in range(_BATCHES):
            next(batches)
        steady = trace.take(per=_BATCH * _BATCHES)
    return {"constructor": constructor, "first batch": first, "clip": steady}


def _loader(dataset: Path) -> fastvid.ClipLoader:
    return fastvid.ClipLoader(
        fastvid.open(str(dataset)),
        frames=fastvid.Segments(8),
        spatial=fastvid.RandomResizedCrop(112),
        global_batch_size=_BATCH,
        workers=Workers(num_threads=1),
        rank=0,
        world_size=1,
    )


def _make_video(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    source = ("-f", "lavfi", "-i", "testsrc2=size=320x240:rate=25:duration=3")
    encoder = ("-c:v", "libx264", "-pix_fmt", "yuv420p", "-metadata", f"title={path.stem}")
    subprocess.run([find_ffmpeg().path, "-v", "error", *source, *encoder, str(path)], check=True)


def table(record: dict[str, Any]) -> str:
    """Format the counts as a text table."""
    lines = [f"{'':12} {'files':>6} {'edges':>6} {'calls':>8}   goal"]
    for name, found in record["traces"].items():
        goal = ", ".join(f"at most {limit} {what}" for what, limit in record["goals"].get(name, {}).items())
        lines.append(f"{name:12} {found['files']:6} {found['edges']:6} {found['calls']:8,.0f}   {goal}".rstrip())
    return "\n".join(lines)
