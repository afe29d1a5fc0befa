"""The map of the tree: generated, complete, and in the order in which the code runs."""

from __future__ import annotations

import re
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import fastvid
from fastvid.media.ffmpeg import Limits
from fastvid.sharding.engines.local import ENGINES
from fastvid.sharding.work.encode import encode_clips
from fastvid.sharding.work.tasks import group_by_file
from tests.docs import architecture
from tests.sharding.shardtools import make

ROOT = Path(fastvid.__file__).parent
DOCS = ROOT.parent / "docs"


def named_files(page: str) -> list[str]:
    """Return the files of a page's tables, in order."""
    return re.findall(r"^\| `([\w/]+\.py)` \|", (DOCS / page).read_text(), re.MULTILINE)


@contextmanager
def entered():
    """Yield a list that receives each file of fastvid when one of its functions is first called, in any thread."""
    files: dict[str, None] = {}

    def note(frame, event, _argument):
        code = frame.f_code
        if event == "call" and not code.co_name.startswith("<") and code.co_filename.startswith(f"{ROOT}/"):
            files.setdefault(code.co_filename.removeprefix(f"{ROOT}/"))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class InThisProcess:
    """An engine without processes, so that the profiler sees the workers' code."""

    def __init__(self, settings, workers=None, address=None):
        self.settings = settings

    def run(self, tasks):
        for group in group_by_file(tasks):
            yield from encode_clips(group, self.settings, lambda _phase, _seconds: None, lambda _tasks: None)

    def close(self):
        pass


def test_map_is_up_to_date():
    assert architecture.PAGE.read_text() == architecture.page(), "run `python -m tests.docs.architecture`"


def test_every_file_that_a_path_page_names_exists():
    for page in ("clip-path.md", "source-path.md"):
        for name in re.findall(r"`([\w/]+\.py)`", (DOCS / page).read_text()):
            assert (ROOT / name).is_file(), f"{page} names {name}"


def test_path_pages_follow_the_code(tmp_path, monkeypatch):
    make(tmp_path / "raw" / "one.mp4", frames=40)
    monkeypatch.setitem(ENGINES, "here", f"{__name__}:InThisProcess")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[InThisProcess.__module__])
    fastvid.shard([tmp_path / "raw"], out=tmp_path / "first", engine="here", limits=Limits())  # imports everything
    with entered() as files:
        fastvid.shard([tmp_path / "raw"], out=tmp_path / "out", engine="here", limits=Limits())
    names = named_files("source-path.md")
    assert names == [name for name in files if name in names]

    dataset = fastvid.open(tmp_path / "out")
    spatial, frames = fastvid.CenterCrop(32), fastvid.Segments(4)
    loader = fastvid.ClipLoader(
        dataset,
        frames=frames,
        spatial=spatial,
        global_batch_size=1,
        device="cpu",
        decoder="pyav",
        workers=fastvid.Workers(num_threads=1),
    )
    with entered() as files:
        assert len(list(loader)) == 1
    names = named_files("clip-path.md")
    assert names == [name for name in files if name in names]
