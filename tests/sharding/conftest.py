"""Films of 240 painted numbers in many containers and codecs, each encoded once in a session."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.makers import encode, paint
from tests.sharding.shardtools import FILMS, ffmpeg


@pytest.fixture(scope="session")
def film(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives a film by its name in FILMS; nobody may change it."""
    folder, planes = tmp_path_factory.mktemp("films"), []

    def painted(name: str) -> Path:
        suffix, options = FILMS[name]
        path = folder / f"{name}.{suffix}"
        if not path.exists():
            planes[:] = planes or paint(240, (96, 160))
            encode(path, tuple(planes), options)
            if name == "edit-list":  # which hides the frames from the key frame to the cut
                whole = path.rename(folder / "whole.mp4")
                ffmpeg("-ss", "1.3", "-i", str(whole), "-c", "copy", str(path))
        return path

    return painted
