"""Datasets with sound, made once."""

import pytest

from fastvid.storage import LocalStorage
from tests.audio.footage import shard, shard_clicks, write_tracks, write_video


@pytest.fixture(scope="session")
def clicks(tmp_path_factory):
    """A video for each codec and rate, and a mute one."""
    return shard_clicks(tmp_path_factory.mktemp("sound"))


@pytest.fixture(scope="session")
def parts(tmp_path_factory):
    """The same videos cut into parts of different length."""
    folder = tmp_path_factory.mktemp("parts")
    sources = write_tracks(folder / "sources")
    write_video(sources / "mute.mov", None, 0, frames=40)
    return shard(sources, folder / "parts", "copy", max_seconds=1.7)


@pytest.fixture
def copied(clicks, tmp_path):
    """A copy of `clicks` that may be damaged."""
    store = LocalStorage(tmp_path / "copy")
    for name in clicks.storage.list(""):
        store.write(name, clicks.storage.read(name))
    return store
