"""Local storage besides the contract of all: bounded handles, what is no file."""

import os

import pytest

from fastvid.errors import StorageError, UsageError
from fastvid.storage import LocalStorage, local, open_storage


@pytest.fixture
def folder(tmp_path):
    return LocalStorage(tmp_path / "dataset")


def test_a_replaced_file_is_reopened_and_handles_stay_bounded(folder, monkeypatch):
    monkeypatch.setattr(local, "MAX_OPEN_FILES", 4)
    for number in range(20):
        folder.write(f"{number}", b"%02d" % number)
    buffer = bytearray(2)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        folder.read_into(f"{number}", [(0, memoryview(buffer))])
        assert buffer == b"%02d" % number
    assert len(os.listdir("/proc/self/fd")) - before <= 4
    folder.write("19", b"xx")
    folder.read_into("19", [(0, memoryview(buffer))])
    assert buffer == b"xx"
    folder.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_handles_of_many_folders_together_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "MAX_OPEN_FILES", 16)
    before = len(os.listdir("/proc/self/fd"))
    folders = [LocalStorage(tmp_path / f"{number}") for number in range(10)]
    for folder in folders:
        for number in range(16):
            folder.write(f"{number}", b"1")
            folder.read_into(f"{number}", [(0, memoryview(bytearray(1)))])
    assert len(os.listdir("/proc/self/fd")) - before <= 16 + 9 * 2


def test_a_path_inside_a_file_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file/x"):
        LocalStorage(tmp_path / "file").write("x", b"")


def test_unknown_scheme_is_rejected(tmp_path):
    with pytest.raises(UsageError, match="'gopher'"):
        open_storage("gopher://x/y")
    assert open_storage(tmp_path).url == str(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
@pytest.mark.parametrize("read", ["read", "map", "read_into"])
def test_what_is_no_file_is_an_error_and_not_waited_for(tmp_path, make, read):
    """Opening a named pipe waits for a writer, for ever in a downloaded folder."""
    make(tmp_path / "x")
    arguments = ("x", [(0, memoryview(bytearray(1)))]) if read == "read_into" else ("x",)
    with pytest.raises(StorageError, match=r"(?s)expected a file, found.*name a file"):
        getattr(LocalStorage(str(tmp_path)), read)(*arguments)
