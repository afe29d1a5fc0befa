"""A custom engine needs only two methods and a line in a table."""

from __future__ import annotations

import sys

import pytest

from fastvid.errors import UsageError
from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.engines.local import ENGINES, open_engine
from fastvid.sharding.job.job import run_job
from fastvid.sharding.work.encode import encode_source
from fastvid.sharding.work.tasks import Settings
from tests.sharding.shardtools import ledger, make, tars

SMALL = PROFILES["compact"].changed(short_side=96)


class Backwards:
    """Encodes in this process, last task first."""

    def __init__(self, settings, workers=None, address=None):
        self.settings, self.address = settings, address

    def run(self, tasks):
        assert self.address == "here"
        for task in reversed(list(tasks)):
            yield encode_source(task, self.settings, lambda phase, seconds: None)

    def close(self):
        pass


def test_custom_engine_produces_the_same_bytes(tmp_path, monkeypatch):
    for number in range(4):
        make(tmp_path / "raw" / f"{number}.mp4", frames=3 + number)
    (tmp_path / "raw" / "bad.mp4").write_bytes(b"no video")
    monkeypatch.setitem(ENGINES, "backwards", f"{__name__}:Backwards")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Backwards.__module__])
    options = {"profile": SMALL, "samples_per_shard": 2}
    run_job(tmp_path / "raw", tmp_path / "one", workers=2, **options)
    run_job(tmp_path / "raw", tmp_path / "two", engine="backwards", ray_address="here", **options)
    assert len(tars(tmp_path / "one")) == 3
    assert tars(tmp_path / "two") == tars(tmp_path / "one")
    assert ledger(tmp_path / "two") == ledger(tmp_path / "one")


def test_unknown_engine_and_useless_address_raise():
    settings = Settings(SMALL, find_ffmpeg(), Limits(), 600.0)
    with pytest.raises(UsageError, match=r"unknown engine 'slurm'[\s\S]*use one of local, ray"):
        open_engine("slurm", settings)
    with pytest.raises(UsageError, match="local engine has no address"):
        open_engine("local", settings, address="127.0.0.1:6379")
