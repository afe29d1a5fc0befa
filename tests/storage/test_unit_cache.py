"""The node's cache of videos: each byte is fetched once, a wrong or lost copy is fetched again, the limit holds."""

import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastvid.storage.cache import UNIT, UnitCache


class Video:
    """A video in a store that counts what is read of it."""

    def __init__(self, size, seed=0):
        self.data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()
        self.reads = []

    def fetch(self, ranges):
        for offset, view in ranges:
            assert offset + len(view) <= len(self.data)
            view[:] = self.data[offset : offset + len(view)]
            self.reads.append((offset, len(view)))

    def get(self, cache, ranges, name="video"):
        views = [(offset, memoryview(bytearray(size))) for offset, size in ranges]
        cache.read(name, len(self.data), views, self.fetch)
        return [bytes(view) for _, view in views]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_read_is_right_and_each_unit_is_fetched_once(tmp_path_factory, data):
    size = data.draw(st.sampled_from([1, 100, UNIT - 1, UNIT, UNIT + 1, 3 * UNIT + 7]))
    video, cache = Video(size), UnitCache(tmp_path_factory.mktemp("cache"), 100 * UNIT)
    for _ in range(3):
        ranges = []
        for _ in range(data.draw(st.integers(1, 3))):
            offset = data.draw(st.integers(0, size - 1))
            ranges.append((offset, data.draw(st.integers(1, size - offset))))
        assert video.get(cache, ranges) == [video.data[offset : offset + length] for offset, length in ranges]
    fetched = [unit for offset, length in video.reads for unit in range(offset // UNIT, -(-(offset + length) // UNIT))]
    assert len(fetched) == len(set(fetched))
    assert all(offset % UNIT == 0 for offset, _ in video.reads)


def test_neighbouring_units_are_one_request(tmp_path):
    video, cache = Video(5 * UNIT), UnitCache(tmp_path, 100 * UNIT)
    video.get(cache, [(2 * UNIT + 5, 1)])
    video.get(cache, [(0, 5 * UNIT)])
    assert video.reads == [(2 * UNIT, UNIT), (0, 2 * UNIT), (3 * UNIT, 2 * UNIT)]


def test_another_process_reads_what_one_has_fetched(tmp_path):
    video = Video(2 * UNIT)
    assert video.get(UnitCache(tmp_path, 100 * UNIT), [(0, 10)])
    assert Video(2 * UNIT).get(UnitCache(tmp_path, 100 * UNIT), [(0, 10)]) == [video.data[:10]]
    other = Video(2 * UNIT, seed=1)
    assert other.get(UnitCache(tmp_path, 100 * UNIT), [(0, 10)], name="other") == [other.data[:10]]


@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "empty", "forget", "delete"])
def test_a_wrong_or_lost_unit_is_fetched_again(tmp_path, damage):
    video, cache = Video(UNIT + 9), UnitCache(tmp_path, 100 * UNIT)
    video.get(cache, [(0, UNIT + 9)])
    if damage == "forget":
        cache.forget("video", UNIT + 9)
    for path in tmp_path.glob("??/*"):
        data = bytearray(path.read_bytes())
        data[3] ^= 1
        if damage == "delete":
            path.unlink()
        else:
            path.write_bytes({"flip": data, "cut": data[:-1], "longer": data + b"0", "empty": b""}[damage])
    assert video.get(cache, [(5, 20), (UNIT, 9)]) == [video.data[5:25], video.data[UNIT:]]
    assert video.reads == [(0, UNIT + 9)] * 2
    assert video.get(cache, [(5, 20)]) == [video.data[5:25]]
    assert len(video.reads) == 2, "the copy is right again"


def test_the_least_recently_used_units_make_room(tmp_path):
    cache = UnitCache(tmp_path, 20 * UNIT)
    videos = [Video(2 * UNIT, seed) for seed in range(30)]
    for number, video in enumerate(videos):
        assert video.get(cache, [(0, 2 * UNIT)], name=str(number)) == [video.data]
        videos[0].get(cache, [(0, 1)], name="0")
        assert sum(path.stat().st_size for path in tmp_path.glob("??/*")) <= 20.1 * UNIT
    assert len(videos[0].reads) == 1, "it is used all the time"
    kept = sum(path.stat().st_size for path in tmp_path.glob("??/*"))
    assert kept >= 15 * UNIT


def test_a_folder_that_cannot_be_written_costs_only_the_cache(tmp_path, caplog, monkeypatch):
    video, cache = Video(UNIT), UnitCache(tmp_path, 100 * UNIT)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert video.get(cache, [(0, 5)]) == video.get(cache, [(0, 5)]) == [video.data[:5]]
    assert len(video.reads) == 2
    assert [record.message for record in caplog.records if "No space left" in record.message][1:] == []
    assert not list(tmp_path.glob("??/*"))


def test_threads_that_miss_the_same_unit_all_get_it(tmp_path):
    video, cache, found = Video(3 * UNIT), UnitCache(tmp_path, 100 * UNIT), []
    threads = [threading.Thread(target=lambda: found.append(video.get(cache, [(7, 2 * UNIT)]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[video.data[7 : 7 + 2 * UNIT]]] * 8
