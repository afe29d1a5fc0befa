"""The node-local cache: mapped files and units of videos are fetched once, a bounded folder, crash safety."""

import hashlib
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastvid.storage import RemoteOptions, open_storage
from fastvid.storage.cache import UNIT, NodeCache, UnitCache
from tests.storage.faulty import FaultyServer

SIZE = 1000


def content(number: int) -> bytes:
    return bytes([number]) * SIZE


def key(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()


class Source:
    """A source of bytes that counts its fetches."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def fetch(self, number: int) -> bytes:
        self.fetched.append(number)
        return content(number)

    def get(self, cache: NodeCache, number: int) -> bytes:
        """Return the bytes of the cached file, or without a usable cache those of the source, as a storage does."""
        path = cache.file(key(number), lambda path: path.write_bytes(self.fetch(number)))
        return path.read_bytes() if path else self.fetch(number)


@pytest.fixture
def source():
    return Source()


def used(folder) -> int:
    return sum(path.stat().st_size for path in folder.glob("??/*"))


def age(cache, number, seconds):
    """Set a file's last use to `seconds` after the epoch."""
    os.utime(cache.folder / key(number)[:2] / key(number), (seconds, seconds))


def test_eviction_keeps_the_limit_and_the_most_recently_used_files(tmp_path, source):
    cache = NodeCache(tmp_path, 5 * SIZE)
    source.get(cache, 0)
    for number in range(1, 5):
        source.get(cache, number)
    for number in range(5):
        age(cache, number, 1_000_000 + number)
    source.get(cache, 1)  # used again, so 0, 2 and 3 are now the oldest
    source.get(cache, 5)
    assert used(tmp_path) <= 5 * SIZE
    source.fetched.clear()
    for number in (5, 1, 4):
        source.get(cache, number)
    assert source.fetched == []
    source.get(cache, 0)
    assert source.fetched == [0]
    for number in range(200):
        source.get(cache, number)
        assert used(tmp_path) <= 5 * SIZE


def test_concurrent_threads_fetch_a_file_once(tmp_path):
    caches, fetched = [NodeCache(tmp_path, 10_000) for _ in range(6)], []
    gate = threading.Barrier(6)

    def fetch(path):
        fetched.append(1)
        path.write_bytes(content(7))

    def want(cache):
        gate.wait()
        return cache.file(key(7), fetch).read_bytes()

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(want, caches)) == [content(7)] * 6
    assert fetched == [1]


@pytest.mark.parametrize("book", [b"", b"nonsense", b"0", b"999999999"])
def test_wrong_count_of_used_bytes_is_corrected(tmp_path, source, book):
    cache = NodeCache(tmp_path, 5 * SIZE)
    for number in range(4):
        source.get(cache, number)
    (tmp_path / ".used").write_bytes(book)
    for number in range(20):
        assert source.get(cache, number) == content(number)
    # A count of zero admits at most one more limit before the files are counted again.
    assert used(tmp_path) <= (9 if book == b"0" else 5) * SIZE
    for number in range(20, 40):
        source.get(cache, number)
    assert used(tmp_path) <= 5 * SIZE


def test_failed_fetch_leaves_no_file_and_the_next_one_succeeds(tmp_path, source):
    cache = NodeCache(tmp_path, 10_000)

    def fail(path):
        path.write_bytes(b"half")
        raise ValueError("no bytes")

    with pytest.raises(ValueError, match="no bytes"):
        cache.file(key(1), fail)
    assert source.get(cache, 1) == content(1)


def test_killed_process_does_not_block_others(tmp_path, source):
    # Kill the process once while it fetches, and once when half of the file is in the folder.
    code = (
        "import os, signal, sys; from pathlib import Path; from fastvid.storage.cache import NodeCache\n"
        "die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "if sys.argv[3] == 'write': os.replace = die\n"
        "write = die if sys.argv[3] == 'fetch' else lambda path: path.write_bytes(bytes([1]) * 1000)\n"
        "NodeCache(Path(sys.argv[1]), 2500).file(sys.argv[2], write)\n"
    )
    neighbour = key(1)[:2] + "0" * 62  # in the same drawer
    for moment, name in (("fetch", key(1)), ("write", key(1)), ("write", neighbour)):
        run = subprocess.run([sys.executable, "-c", code, tmp_path, name, moment], check=False, timeout=300)
        assert run.returncode == -9
    # The second process deleted the first one's temporary file before it was killed itself.
    assert [path.name for path in tmp_path.glob("??/*.tmp")] == [f"{neighbour}.tmp"]
    cache = NodeCache(tmp_path, 2500)
    assert source.get(cache, 1) == content(1)
    assert list(tmp_path.glob("??/*.tmp")) == []
    for number in range(6):
        assert source.get(cache, number) == content(number)
        assert used(tmp_path) <= 2500


@pytest.mark.parametrize("moment", ["fetch", "count"])
def test_a_stopped_process_blocks_the_others_for_their_patience_only(tmp_path, source, caplog, moment):
    """It holds the lock of its subfolder while it fetches, and that of the whole cache while it counts bytes."""
    code = (
        "import os, signal, sys; from pathlib import Path; from fastvid.storage import cache\n"
        "def stop(*_):\n"
        "    print('stopped', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "if sys.argv[3] == 'count': cache.NodeCache._evict = stop\n"
        "write = stop if sys.argv[3] == 'fetch' else lambda path: path.write_bytes(bytes([1]) * 1000)\n"
        "cache.NodeCache(Path(sys.argv[1]), 10_000).file(sys.argv[2], write)\n"
    )
    command = [sys.executable, "-c", code, tmp_path, key(1), moment]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stopped:
        assert stopped.stdout.readline() == "stopped\n"
        cache = NodeCache(tmp_path, 10_000, patience=0.2)
        wanted = 1 if moment == "fetch" else 2
        try:
            with caplog.at_level(logging.WARNING, "fastvid.storage"):
                assert [source.get(cache, wanted) for _ in range(20)] == [content(wanted)] * 20
            # Bytes are counted when a file was written, so each attempt fetches once in vain.
            assert source.fetched == [wanted] * (20 if moment == "fetch" else 40), "without the cache"
            assert "another process has held a lock for 0.2 s" in caplog.text
        finally:
            stopped.kill()
    assert source.get(cache, wanted) == source.get(cache, wanted) == content(wanted)
    assert source.fetched == [wanted] * (21 if moment == "fetch" else 41), "the lock was released: cached again"


def test_what_another_user_put_into_the_cache_is_neither_read_nor_overwritten(tmp_path, source, caplog, monkeypatch):
    cache, units = NodeCache(tmp_path / "files", 10_000), UnitCache(tmp_path / "units", 10 * UNIT)
    planted = cache.folder / key(1)[:2] / key(1)

    def read_unit(byte):
        view = memoryview(bytearray(1))
        units.read("video", 1, [(0, view)], lambda ranges: ranges[0][1].__setitem__(slice(None), byte))
        return bytes(view)

    source.get(cache, 1)
    planted.write_bytes(bytes(len(content(1))))
    assert source.get(cache, 1) == bytes(len(content(1)))  # the control: its own file is believed
    assert [read_unit(b"a"), read_unit(b"b")] == [b"a", b"a"]
    if me := os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    else:  # what root owns is trusted
        for path in tmp_path.rglob("*"):
            os.chown(path, 12345, 12345)
    assert source.get(cache, 1) == content(1)
    assert read_unit(b"b") == b"b"
    assert "its folder belongs to another user" in caplog.text
    assert planted.read_bytes() == bytes(len(content(1)))


def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path, source, caplog):
    (tmp_path / "precious").write_bytes(b"12345")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/.used").symlink_to(tmp_path / "precious")
    assert source.get(NodeCache(tmp_path / "cache", 10_000), 1) == content(1)
    assert (tmp_path / "precious").read_bytes() == b"12345"
    assert "cannot use the cache" in caplog.text


def test_a_copy_that_another_process_evicts_at_once_is_fetched_again(tmp_path, monkeypatch):
    pytest.importorskip("obstore", reason="obstore is not installed: the extra object-stores brings it")

    with FaultyServer() as server:
        server.files["a.pkt"] = os.urandom(1000)
        storage = open_storage(server.url, options=RemoteOptions(cache=tmp_path, cache_bytes=10_000))
        file = storage._cache.file
        for times in (1, 9):
            gone = [times]

            def evicting(*args, gone=gone):
                path = file(*args)
                if gone[0]:
                    gone[0] -= 1
                    path.unlink()
                return path

            monkeypatch.setattr(storage._cache, "file", evicting)
            assert storage.keep("a.pkt") == (times == 1)
            assert bytes(storage.map("a.pkt")) == server.files["a.pkt"]


def test_processes_share_the_cache_set_in_the_environment(tmp_path):
    pytest.importorskip("obstore", reason="obstore is not installed: the extra object-stores brings it")
    code = (
        "import sys; from fastvid.storage import open_storage\n"
        "s = open_storage(sys.argv[1]); print(sum(s.map('a.pkt')), sum(s.map('a.pkt')))"
    )
    data = os.urandom(50_000)
    environment = os.environ | {"FASTVID_CACHE": str(tmp_path / "cache"), "FASTVID_CACHE_BYTES": "200K"}
    with FaultyServer(delay=0.2) as server:
        server.files["a.pkt"] = data
        command = [sys.executable, "-c", code, server.url]
        ranks = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
        assert [rank.communicate(timeout=300)[0] for rank in ranks] == [f"{sum(data)} {sum(data)}\n"] * 3
        assert sorted(seen.method for seen in server.log) == ["GET", "HEAD", "HEAD", "HEAD"]
        # A new version on the server is a new file in the cache; an existing map does not change.
        options = RemoteOptions(cache=tmp_path / "cache", cache_bytes=200 * 1024)
        before = open_storage(server.url, options=options)
        old = before.map("a.pkt")
        server.files["a.pkt"] = data[::-1]
        assert bytes(open_storage(server.url, options=options).map("a.pkt")) == data[::-1]
        assert bytes(old) == bytes(before.map("a.pkt")) == data
        assert sum(seen.method == "GET" for seen in server.log) == 2
        # A truncated file in the cache is fetched again.
        for path in (tmp_path / "cache").rglob("*"):
            if path.is_file() and path.stat().st_size == len(data):
                path.write_bytes(b"cut")
        assert bytes(open_storage(server.url, options=options).map("a.pkt")) == data[::-1]
        assert sum(seen.method == "GET" for seen in server.log) == 3


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
