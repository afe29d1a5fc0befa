"""Copies of datasets between folders and object stores."""

from __future__ import annotations

import pytest

from fastvid.cli.main import main
from fastvid.errors import FormatError, StorageError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.sharding.change.edit import copy_dataset, remove_samples
from fastvid.storage import LocalStorage, open_storage
from tests import forks
from tests.datasets import make_clip, pack


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return make_clip(tmp_path_factory.mktemp("clip") / "clip.mp4")


@pytest.fixture
def store(tmp_path, clip):
    """Two generations of two shards with two samples each; c/1 is removed."""
    made = pack(tmp_path / "d", [[(f"c/{n}", clip, 0) for n in (s, s + 1)] for s in (0, 2)])
    remove_samples(made, ["c/1"])
    return made


def contents(storage):
    return {name: storage.read(name) for name in storage.list()}


def test_copy_of_all_generations_has_the_same_files(store, tmp_path):
    out = LocalStorage(tmp_path / "out")
    done = copy_dataset(store, out, every=True)
    assert done.generations == (2, 1)
    assert contents(out) == contents(store)
    assert copy_dataset(store, out, every=True).copied == 0


def test_copy_has_only_the_current_generation_by_default(store, tmp_path):
    assert main(["copy", store.url, str(tmp_path / "out")]) == 0
    assert Dataset(str(tmp_path / "out")).keys.to_pylist() == ["c/0", "c/2", "c/3"]
    with pytest.raises(StorageError, match="no generation 1"):
        Dataset(str(tmp_path / "out"), generation=1)


def test_killed_copy_is_no_dataset_and_resumes(store, tmp_path):
    out = LocalStorage(tmp_path / "out")
    done = forks.fastvid("copy", store.url, tmp_path / "out", "--all", fault="copy:6")
    assert done.returncode == -9
    assert not out.exists("dataset.json")
    resumed = copy_dataset(store, out, every=True)
    assert resumed.copied < len(store.list()) - 1
    assert contents(out) == contents(store)


def test_damaged_tar_is_not_copied(store, tmp_path):
    damaged = bytearray(store.read("data-000001.tar"))
    damaged[1000] ^= 1
    store.write("data-000001.tar", bytes(damaged))
    out = LocalStorage(tmp_path / "out")
    with pytest.raises(FormatError, match=r"data-000001\.tar differs from the SHA-256"):
        copy_dataset(store, out)
    assert not out.exists("data-000001.tar")
    assert not out.exists("dataset.json")


def test_damaged_file_of_an_earlier_copy_is_copied_again(store, tmp_path):
    out = LocalStorage(tmp_path / "out")
    copy_dataset(store, out)
    damaged = bytearray(out.read("data-000000.tar"))
    damaged[1000] ^= 1
    out.write("data-000000.tar", bytes(damaged))
    assert copy_dataset(store, out).copied == 1
    assert out.read("data-000000.tar") == store.read("data-000000.tar")


def test_another_dataset_is_not_overwritten(store, clip, tmp_path):
    other = pack(tmp_path / "other", [[("x", clip, 0)]])
    before = contents(other)
    with pytest.raises(UsageError, match="another dataset"):
        copy_dataset(store, other)
    with pytest.raises(UsageError, match="itself"):
        copy_dataset(store, store)
    assert contents(other) == before


def test_copies_between_disk_and_object_store(s3, store, tmp_path):
    first, second = (f"s3://{s3.bucket()}/copy" for _ in range(2))
    assert main(["copy", store.url, first, "--all"]) == 0
    assert main(["copy", first, second, "--all"]) == 0
    assert contents(open_storage(second)) == contents(store)
