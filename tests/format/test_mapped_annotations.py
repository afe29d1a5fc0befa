"""Annotations that processes map from the node's cache behave like those in memory."""

import logging
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastvid.errors import FormatError, SampleNotFoundError, UsageError
from fastvid.format import annotations as opening
from fastvid.format.annotations import annotation_table, map_table, write_table
from fastvid.format.dataset import Dataset, Generation, ShardRecord, commit_generation
from fastvid.storage import LocalStorage

ROWS = 300


def commit(folder: Path, *, rows: int = ROWS, offset: int = 0) -> str:
    """Commit a dataset of annotations alone: nothing here reads a sample."""
    order = np.random.default_rng(offset).permutation(rows).tolist()
    table = annotation_table(
        [
            {
                "key": f"é{n % 7}/{n + offset:04d}",
                "source_id": f"{n}.mp4",
                "label": None if n % 11 == 0 else n % 3,
                "num_frames": n + 1,
                "fps": 25.0,
                "removed": False,
                "split": ("train", "val")[n % 2],
                "caption": f"video {n}" if n % 5 else None,
            }
            for n in order
        ]
    )
    shards = tuple(ShardRecord(f"data-{n:06d}", 1, "0" * 64, rows // 3) for n in range(3))
    generation = Generation(1, shards, classes=("a", "b", "c"))
    commit_generation(LocalStorage(folder), "id", generation, table)
    return str(folder)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("FASTVID_CACHE", str(folder))
    monkeypatch.setattr(opening, "MAPPED_ROWS", 1)
    return folder


@pytest.fixture
def url(tmp_path):
    return commit(tmp_path / "data")


def files(cache: Path) -> list[Path]:
    return sorted(path for path in cache.glob("??/*") if path.name != ".lock" and path.suffix != ".verified")


def is_mapped(array: np.ndarray, cache: Path) -> bool:
    """Whether an array's first byte lies in a mapping of a file of the cache."""
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < stop:
            return str(cache) in line
    return False


def test_whole_selection_is_views_of_the_mapped_file(url, cache):
    dataset = Dataset(url)
    for array in (dataset.rows, dataset.labels, dataset.num_frames):
        assert array.dtype == np.int64
        assert is_mapped(array, cache)
    # The positive control of `is_mapped`: a selection needs arrays of its own.
    assert not is_mapped(Dataset(url, split="train").rows, cache)


def test_later_processes_do_not_read_the_parquet_file(url):
    Dataset(url)
    (Path(url) / "annotations-000001.parquet").unlink()
    assert len(Dataset(url)) == ROWS


def test_pickle_contains_no_rows_and_opens_in_another_process(url):
    dataset = Dataset(url)
    assert len(dataset.labels) == ROWS
    assert dataset.find("é1/0001") >= 0
    data = pickle.dumps(dataset)
    assert dataset.rows.tobytes() not in data
    assert "é1/0001".encode() not in data
    command = "import pickle, sys; d = pickle.load(sys.stdin.buffer); print(len(d), d.labels.sum(), d.find('é1/0001'))"
    found = subprocess.run([sys.executable, "-c", command], input=data, capture_output=True, check=True).stdout
    assert found.split() == [b"%d" % n for n in (ROWS, dataset.labels.sum(), dataset.find("é1/0001"))]


def test_small_annotations_stay_in_memory(url, cache, monkeypatch):
    monkeypatch.setattr(opening, "MAPPED_ROWS", ROWS + 1)
    dataset = pickle.loads(pickle.dumps(Dataset(url)))
    assert dataset.find(dataset.key(5)) == 5
    assert not cache.exists()


def test_empty_variable_switches_the_cache_off(url, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTVID_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert len(Dataset(url)) == ROWS
    assert not (tmp_path / "home").exists()
    monkeypatch.delenv("FASTVID_CACHE")
    assert is_mapped(Dataset(url).rows, tmp_path / "home" / "fastvid")


def flipped(data: bytes, bit: int) -> bytes:
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


DAMAGES = {
    "cut": lambda data: data[:-100],
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "a page": lambda data: flipped(data, len(data) // 2 * 8),
    "a bit": lambda data: flipped(data, random.Random(len(data)).randrange(8 * len(data))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_written_again(url, cache, caplog, damage):
    labels = Dataset(url).labels.copy()
    assert len(files(cache)) == 2
    for path in files(cache):
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with caplog.at_level(logging.WARNING, "fastvid.format"):
        np.testing.assert_array_equal(Dataset(url).labels, labels)
    assert "cannot map a table" in caplog.text
    caplog.clear()
    Dataset(url)
    assert not caplog.text


def test_damaged_parquet_is_refused_and_not_cached(url, cache):
    path = Path(url) / "annotations-000001.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(FormatError, match="differs from the SHA-256") as caught:
        Dataset(url)
    assert caught.value.hint.startswith("restore")
    assert files(cache) == []


@pytest.mark.parametrize("why", ["No space left", "more than its limit of 1024", "cannot use the cache"])
def test_a_cache_that_takes_no_files_keeps_the_annotations_in_memory(url, cache, caplog, monkeypatch, why):
    def full(*_args, **_options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "fastvid.storage"):
        if why == "No space left":
            patch.setattr(os, "fsync", full)
        elif "limit" in why:
            patch.setenv("FASTVID_CACHE_BYTES", "1K")
        else:
            cache.write_bytes(b"")  # permissions would not stop root
        dataset = Dataset(url)
    assert dataset.find(dataset.key(7)) == 7
    assert why in caplog.text
    assert files(cache) == []


def test_mapped_files_may_be_evicted(url, cache):
    dataset = Dataset(url)
    expected = dataset.labels.copy(), dataset.keys.to_pylist()
    data = pickle.dumps(dataset)
    for path in files(cache):
        path.unlink()
    np.testing.assert_array_equal(dataset.labels, expected[0])
    assert dataset.keys.to_pylist() == expected[1]
    assert pickle.loads(data).keys.to_pylist() == expected[1]


def test_datasets_share_the_cache_by_content(url, tmp_path, cache):
    other = commit(tmp_path / "other", offset=1000)
    first, second = Dataset(url), Dataset(other)
    assert len(files(cache)) == 4
    with pytest.raises(SampleNotFoundError):
        second.find("é1/0001")
    assert first.key(first.find("é1/0001")) == "é1/0001"


def test_dictionary_columns_and_chunks_keep_their_values(tmp_path, monkeypatch):
    parts = [pa.array(values).dictionary_encode() for values in (["a", "b"], ["c", "a", None])]
    table = pa.table({"word": pa.chunked_array(parts), "list": [["x"], [], None, ["y", "z"], ["x"]]})
    write_table(tmp_path / "file", table, chunk=2)
    found = map_table(tmp_path / "file")
    assert found.schema == table.schema
    assert found.to_pylist() == table.to_pylist()


SELECTIONS = st.one_of(
    st.builds(slice, st.integers(0, 40), st.integers(41, ROWS), st.integers(1, 7)),
    st.lists(st.integers(0, 40), min_size=1, max_size=9, unique=True),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    split=st.sampled_from([None, "train"]),
    where=st.sampled_from([None, "num_frames > 20", "class = 'b'", "caption IS NULL OR label IN (0, 1)", "fps = 25"]),
    chosen=st.one_of(st.none(), SELECTIONS),
    key=st.integers(0, ROWS),
)
def test_mapped_and_unmapped_datasets_are_the_same(url, monkeypatch, split, where, chosen, key):
    def opened(least):
        monkeypatch.setattr(opening, "MAPPED_ROWS", least)
        dataset = Dataset(url, split=split, where=where)
        if chosen is not None:
            try:
                dataset = dataset.select(chosen)
            except (SampleNotFoundError, UsageError) as error:
                return [str(error)]
        dataset = pickle.loads(pickle.dumps(dataset))
        keys = dataset.keys.to_pylist()
        asked = f"é{key % 7}/{key:04d}"
        # The definition of `find`, by the list of all keys.
        assert (asked in dataset) == (asked in keys)
        if asked in keys:
            assert dataset.find(asked) == keys.index(asked)
        facts = [dataset.labels.tolist(), dataset.num_frames.tolist(), dataset.rows.tolist(), dataset.is_in_order]
        return [keys, dataset.selection, dataset.annotations.to_pylist(), dataset.column("caption").to_pylist(), *facts]

    assert opened(1) == opened(10**9)


def test_many_keys_are_found_in_one_pass_in_their_order(url, monkeypatch):
    monkeypatch.setattr("fastvid.format.dataset._MANY_KEYS", 3)
    dataset = Dataset(url, split="val")
    keys = dataset.keys.to_pylist()[::-3]
    assert dataset.select(keys).keys.to_pylist() == keys
    with pytest.raises(SampleNotFoundError, match="no sample has the key 'nobody'"):
        dataset.select([*keys, "nobody"])
