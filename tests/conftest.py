"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests.makers import Videos
from tests.served import ceph, nginx, obstore, s3

__all__ = ["ceph", "footage", "nginx", "obstore", "s3", "videos"]

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
