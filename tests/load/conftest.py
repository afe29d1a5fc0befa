"""Check after every test of the loader that its threads have ended, and close its loaders."""

import gc

import pytest

from tests.load.loaders import OPEN
from tests.load.tools import fastvid_threads, until


@pytest.fixture(autouse=True)
def no_thread_survives():
    yield
    if fastvid_threads():
        gc.collect()  # a loader that nothing refers to has ended, but may not have been collected
    until(lambda: not fastvid_threads())
    for loader in list(OPEN):
        loader.close()
