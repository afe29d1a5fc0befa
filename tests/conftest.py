"""Fixtures that several test files share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests.makers import Videos
from tests.served import ceph, obstore, s3, web
from tests.skips import pytest_make_collect_report, pytest_runtest_makereport

__all__ = [
    "ceph", "footage", "obstore", "pytest_make_collect_report", "pytest_runtest_makereport", "s3", "videos", "web",
]  # fmt: skip

# A core for each worker of pytest-xdist; torch reads it when it is imported. Threads that wait for each other spin, and
# where there are more of them than cores that takes longer than the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

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
