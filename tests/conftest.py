"""Fixtures that several test files share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from fastvid.runtime.cores import available_cores
from tests.makers import Videos
from tests.served import ceph, obstore, s3, web
from tests.skips import pytest_make_collect_report, pytest_runtest_makereport

__all__ = [
    "ceph", "footage", "obstore", "pytest_make_collect_report", "pytest_runtest_makereport", "s3", "videos", "web",
]  # fmt: skip

# A core for each worker of pytest-xdist; torch reads it when it is imported. Threads that wait for each other spin, and
# where there are more of them than cores that takes longer than the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's store asks for the name of whoever connects. Where no answer comes from the name server, which is common on
# machines without a network, that takes a second instead of ten.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Files that take longest, in this order: begun first, none of them is left to one worker when the others are done.
LONG = (
    "test_snippets.py",
    "test_large_batch.py",
    "test_workers.py",
    "test_batch_policy.py",
    "test_scale.py",
    "test_remote_job.py",
    "test_run.py",
    "test_job.py",
    "test_ray_engine.py",
    "test_relay_run.py",
    "test_decode_bench.py",
    "test_parts.py",
    "test_pyav.py",
    "test_asgd_run.py",
    "test_loader_video.py",
    "test_quality.py",
    "test_sync_bench.py",
)

# Examples take as long as a busy machine makes them.
settings.register_profile("fastvid", deadline=None)
settings.load_profile("fastvid")

FOOTAGE = Path(__file__).parents[2] / "shared" / "videos"


@pytest.fixture(scope="session")
def footage() -> Path:
    """Folder of real videos: ``clean``, ``odd``, ``bad`` and ``manifest.csv``."""
    if not FOOTAGE.is_dir():
        pytest.skip(f"real footage is not here: no {FOOTAGE.name}/ beside the project")
    return FOOTAGE


@pytest.fixture(scope="session")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Videos:
    """Makes videos, each once a session."""
    return Videos(tmp_path_factory.mktemp("videos"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first."""
    ranks = {name: rank for rank, name in enumerate(LONG)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than cores, because some tests wait."""
    return available_cores() + 1
