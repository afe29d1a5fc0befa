"""Fixtures shared by several test files."""

import gc
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from fastvid.runtime.processes import available_cores
from fastvid.storage import urls
from tests import forks
from tests.makers import Videos
from tests.server_fixtures import obstore, s3, web
from tests.skips import pytest_make_collect_report, pytest_runtest_makereport

__all__ = [
    "footage", "obstore", "own_interpreters", "pytest_make_collect_report", "pytest_runtest_makereport", "s3",
    "videos", "web",
]  # fmt: skip

# One core per worker of pytest-xdist; torch reads the variable when it is imported. OpenMP threads wait by spinning,
# which takes longer than the work if there are more threads than cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's store resolves the name of every peer. If the name server does not answer, as on machines without a network,
# this limits the delay to one second instead of ten.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Datasets record when they were made: tests compare the bytes of datasets that were made at different times.
os.environ.setdefault("SOURCE_DATE_EPOCH", "1700000000")

# The slowest files, in descending order: they start first, so that none runs alone at the end.
LONG = (
    "test_large_batch.py",
    "test_workers.py",
    "test_run.py",
    "test_clip_dataset.py",
    "test_segments.py",
    "test_remote_job.py",
    "test_batch_policy.py",
    "test_salvage.py",
    "test_ray_engine.py",
    "test_job.py",
    "test_sound.py",
    "test_loader_shapes.py",
    "test_doctor.py",
    "test_decode_bench.py",
    "test_in_place.py",
    "test_interrupted.py",
    "test_snippets.py",
    "test_pyav.py",
    "test_safe_path.py",
)

forks.fork_workers()

# No deadline: on a busy machine examples may take long.
settings.register_profile("fastvid", deadline=None)
settings.load_profile("fastvid")

FOOTAGE = Path(__file__).parents[2] / "shared" / "videos"


@pytest.fixture(scope="session")
def footage() -> Path:
    """Folder of real videos: ``clean``, ``odd``, ``bad`` and ``manifest.csv``."""
    if not FOOTAGE.is_dir():
        pytest.skip("no footage beside the repository")
    return FOOTAGE


@pytest.fixture(scope="session")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Videos:
    """Makes each video once per session."""
    return Videos(tmp_path_factory.mktemp("videos"))


@pytest.fixture
def own_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are children of this process, in interpreters of their own, see `tests.forks`."""
    for module in forks.STARTERS:
        monkeypatch.setattr(module, "subprocess", subprocess)


@pytest.fixture(scope="module", autouse=True)
def open_stores_end() -> Iterator[None]:
    """Close the stores that a file's tests leave open for the next read: later tests count threads."""
    yield
    if urls._open.cache_info().currsize:
        urls._open.cache_clear()
        gc.collect()
        end = time.monotonic() + 60
        while any(thread.name.startswith("fastvid-storage-") for thread in threading.enumerate()):
            assert time.monotonic() < end, "threads of a store are still alive after 60 s"
            time.sleep(0.01)


def pytest_configure(config: pytest.Config) -> None:
    """Start the server of forks once for all workers of pytest-xdist, while they collect tests."""
    if config.getoption("numprocesses", None) and not config.option.collectonly:
        forks.serve()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slow files first."""
    ranks = {name: rank for rank, name in enumerate(LONG)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))


def pytest_collection_finish() -> None:
    """Leave what imports and collection made out of every later `gc.collect`, which would take half a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let everything be collected again, or extension modules report what they leak at the exit."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of cores that this process may use."""
    return available_cores()
