"""Datasets with sound, made once."""

import shutil

import pytest

from fastvid.storage import LocalStorage
from tests.audio.footage import FRAMES, shard, write_tracks, write_video


@pytest.fixture(scope="session")
def tracks(tmp_path_factory):
    """A folder with a video for each codec and rate."""
    return write_tracks(tmp_path_factory.mktemp("tracks") / "sources")


def with_mute(tracks, folder, frames, **options):
    """Return the dataset made of the tracks and a video without sound, key "mute"."""
    sources = shutil.copytree(tracks, folder / "sources")
    write_video(sources / "mute.mov", None, 0, frames=frames)
    return shard(sources, folder / "out", "copy", **options)


@pytest.fixture(scope="session")
def clicks(tracks, tmp_path_factory):
    """A video for each codec and rate, and a mute one."""
    return with_mute(tracks, tmp_path_factory.mktemp("sound"), FRAMES)


@pytest.fixture(scope="session")
def parts(tracks, tmp_path_factory):
    """The same videos cut into parts of different length."""
    return with_mute(tracks, tmp_path_factory.mktemp("parts"), 40, max_seconds=1.7)


@pytest.fixture
def copied(clicks, tmp_path):
    """A copy of `clicks` that may be damaged."""
    store = LocalStorage(tmp_path / "copy")
    for name in clicks.storage.list(""):
        store.write(name, clicks.storage.read(name))
    return store
