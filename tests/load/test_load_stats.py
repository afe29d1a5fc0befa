"""What a loader says about its time, and memory that comes back."""

from __future__ import annotations

import gc
import os
import time

import numpy as np
import pytest
import torch

from fastvid.load.augment import CenterCrop
from fastvid.load.buffers import BufferPool
from fastvid.load.loader import ClipLoader
from fastvid.load.sampling import Segments
from fastvid.load.stats import Counters, LoaderStats
from tests.load import fakes
from tests.load.fakes import FakeDataset, fake


def make(**options):
    standard = {
        "frames": Segments(3, jitter=False),
        "spatial": CenterCrop(16),
        "global_batch_size": 8,
        "decoder": fake(),
        "num_threads": 2,
        "rank": 0,
        "world_size": 1,
    }
    return ClipLoader(FakeDataset(80), **standard | options)


def spent(**seconds):
    return LoaderStats(total=Counters(**{f"{name}_seconds": value for name, value in seconds.items()}))


def test_a_run_that_waits_is_data_bound_and_told_what_to_change():
    verdict = spent(wait=60, compute=40, fetch=5, decode=90, finish=5).verdict()
    assert verdict.startswith("data-bound: 60% of the time is spent waiting, 90% of it on decode; ")
    assert "num_threads" in verdict
    assert "on fetch; put the shards on faster storage" in spent(wait=60, compute=40, fetch=9, decode=1).verdict()


def test_a_run_that_computes_is_compute_bound():
    assert spent(wait=2, compute=98, decode=500).verdict() == "compute-bound: 2% of the time is spent waiting for data"


def test_without_a_second_batch_there_is_no_verdict():
    assert "nothing measured yet" in spent(fill=3).verdict()


def test_waiting_and_computing_add_up_to_the_clock():
    loader = make()
    begun = time.perf_counter()
    for _ in loader:
        time.sleep(0.01)
    clock = time.perf_counter() - begun
    total = loader.stats.total
    assert 0.09 <= total.compute_seconds <= clock
    assert total.fill_seconds + total.wait_seconds + total.compute_seconds <= clock


def test_a_slow_decoder_shows(monkeypatch):
    monkeypatch.setattr(fakes.RgbDecoder, "delay", 0.005)
    loader = make(num_threads=1)
    list(loader)
    assert loader.stats.total.decode_seconds >= 80 * 0.005
    assert loader.stats.verdict().startswith("data-bound")
    assert loader.stats.step.decode_seconds >= 8 * 0.005


def test_counts_are_exact_and_the_step_is_the_last_batch():
    loader = make()
    for number, _ in enumerate(loader):
        assert loader.stats.step.clips == 8
        assert loader.stats.step.batches == 1
        assert loader.stats.total.clips == 8 * (number + 1)
    total = loader.stats.total
    lengths = FakeDataset(80).lengths
    assert total.packets == sum(len(set(Segments(3, jitter=False).draw(n, None).tolist())) for n in lengths)
    assert total.packets_from_keys == total.packets  # every fake packet is a key
    assert total.requests == 80
    row = total.as_dict()
    assert row["clips"] == 80
    assert row["skips"] == {}


def test_a_buffer_comes_back_when_its_last_view_dies():
    pool = BufferPool(2)
    array = pool.take(4096)
    place = array.ctypes.data
    view = torch.from_numpy(array.view(np.float32).reshape(32, 32))[3:5].numpy()[0]
    del array
    gc.collect()
    assert pool.take(4096).ctypes.data != place
    del view
    assert pool.take(4096).ctypes.data == place
    assert pool.take(8192).ctypes.data != place


def test_buffers_are_kept_up_to_a_number():
    pool = BufferPool(2)
    arrays = [pool.take(4096) for _ in range(5)]
    places = {array.ctypes.data for array in arrays}
    assert len(places) == 5
    arrays.clear()
    assert sum(len(free) for free in pool._free.values()) == 2


@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_has_a_copy():
    array = BufferPool(2).take(4096)
    array[:] = 1
    child = os.fork()
    if not child:
        array[:] = 2
        os._exit(0)
    os.waitpid(child, 0)
    assert (array == 1).all()
