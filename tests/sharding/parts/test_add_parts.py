"""An addition divided into parts, one of them killed, adds the same as a single run."""

from __future__ import annotations

import os

from fastvid.sharding.change.add import add_sources
from fastvid.sharding.job.job import run_job
from fastvid.sharding.job.status import read_status
from fastvid.storage import LocalStorage
from tests import forks
from tests.datasets import make_clip
from tests.sharding.change.test_add import state


def make(path, frames):
    path.parent.mkdir(parents=True, exist_ok=True)
    make_clip(path, frames=frames)


def start(data, videos, part, fault=""):
    options = ["--samples-per-shard", "1", "--workers", "1", "--part", part]
    return forks.start_fastvid("add", data, videos, *options, fault=fault)


def test_parts_of_an_addition_equal_one_run(tmp_path):
    videos = tmp_path / "videos"
    make(videos / "run" / "a.mp4", 5)
    for name in ("whole", "parts"):
        run_job(str(videos), str(tmp_path / name), workers=1)
    for number in range(5):
        make(videos / "jump" / f"{number}.mp4", 6 + number)
    whole = add_sources(str(tmp_path / "whole"), str(videos), samples_per_shard=1, workers=1)
    assert whole.report.packed == 5
    data = tmp_path / "parts"
    parts = [start(data, videos, f"{n}/2", fault="ledger:2" if n == 0 else "") for n in range(2)]
    said = [part.communicate(timeout=240) for part in parts]
    assert [part.returncode for part in parts] == [-9, 0], said
    assert "generation" not in said[1][0]
    store = LocalStorage(data)
    assert len(state(store)[0]) == 1, "nothing is added before the run without a part"
    status = read_status(str(data))
    assert (status.job.kind, status.job.command, status.job.state) == ("addition", "add", "interrupted")
    assert (status.job.shards, status.job.sources, status.dataset.generation) == (5, 5, 1)
    done = add_sources(str(data), str(videos), samples_per_shard=1, workers=1)
    assert (done.report.packed, done.generation, done.known) == (5, 2, 1)
    assert state(store) == state(LocalStorage(tmp_path / "whole"))
    assert sorted(os.listdir(data)) == sorted(os.listdir(tmp_path / "whole"))
    assert not (data / "ledger-parts").exists()
    assert not list(data.rglob("*.lock"))
    assert read_status(str(data)).job is None
    again = add_sources(str(data), str(videos), samples_per_shard=1, workers=1, part="1/2")
    assert (again.known, again.report.packed) == (6, 0)
