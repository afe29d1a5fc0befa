"""Local storage besides the contract of all: atomic writes, bounded handles, what is no file."""

import os
import subprocess
import sys
import threading

import pytest

from fastvid.errors import StorageError, UsageError
from fastvid.storage import LocalStorage, local, open_storage


@pytest.fixture
def folder(tmp_path):
    return LocalStorage(tmp_path / "dataset")


def test_killed_write_is_not_listed_and_sweep_removes_it(folder):
    folder.write("x", b"old")
    code = (
        "import os, signal, sys; from fastvid.storage import LocalStorage\n"
        "with LocalStorage(sys.argv[1]).create('x') as file:\n"
        "    file.write(b'new'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.run([sys.executable, "-c", code, folder.url], check=False)
    assert run.returncode == -9
    assert folder.read("x") == b"old"
    assert folder.list() == ["x"]
    assert len(os.listdir(folder.root)) == 2
    folder.sweep()
    assert os.listdir(folder.root) == ["x"]


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


def test_many_threads_read_while_handles_are_evicted(folder, monkeypatch):
    monkeypatch.setattr(local, "MAX_OPEN_FILES", 2)
    for number in range(8):
        folder.write(f"{number}", bytes([number]) * 1000)
    wrong = []

    def read(start):
        buffer = bytearray(1000)
        for step in range(200):
            number = (start + step) % 8
            folder.read_into(f"{number}", [(0, memoryview(buffer))])
            if buffer != bytes([number]) * 1000:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


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
    with pytest.raises(StorageError, match="expected a file, found"):
        getattr(LocalStorage(str(tmp_path)), read)(*arguments)
