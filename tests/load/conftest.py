"""What every test of the loader ends with."""

from __future__ import annotations

import gc
import time

import pytest

from tests.load.tools import fastvid_threads


@pytest.fixture(autouse=True)
def no_thread_survives():
    yield
    gc.collect()
    deadline = time.monotonic() + 10
    while fastvid_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not fastvid_threads()
