"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest

FOOTAGE = Path(__file__).parents[2] / "shared" / "videos"


@pytest.fixture(scope="session")
def footage() -> Path:
    """Folder of real videos: ``clean``, ``odd``, ``bad`` and ``manifest.csv``."""
    if not FOOTAGE.is_dir():
        pytest.skip(f"real footage is not here: no {FOOTAGE.name}/ beside the project")
    return FOOTAGE
