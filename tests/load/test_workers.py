"""Worker processes: the same batches, and a clip that hangs or crashes costs that clip and nothing else."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from fastvid.decode.backends import Backend
from fastvid.decode.pyav import PyAvDecoder
from fastvid.errors import ChecksumError, MissingDependency, UsageError, WorkerError
from fastvid.format.dataset import Dataset
from fastvid.format.schema import Codec
from fastvid.load.augment import CenterCrop, HorizontalFlip, RandomCrop
from fastvid.load.loader import ClipLoader
from fastvid.load.sampling import Segments
from fastvid.load.views import Views
from tests.datasets import REPOSITORY, make_clip, pack
from tests.load.tools import fastvid_threads, rows

SAMPLES = 12


class TroubledDecoder(PyAvDecoder):
    """Does to the clip of some keys what native code can do."""

    def decode(self, clips, outputs):
        key = clips[0].key
        if key == "hangs":
            ctypes.PyDLL(None).sleep(600)  # with the interpreter held, so that no thread of the process can go on
        elif key == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif key == "bug":
            raise ZeroDivisionError("not the clip's fault")
        return super().decode(clips, outputs)


class AbsentDecoder(PyAvDecoder):
    """Loads here, but does not open."""

    def __init__(self):
        raise MissingDependency("no such device")


def backend(name):
    return Backend(name, f"tests.load.test_workers:{name}", "cpu", frozenset(Codec), "nothing")


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    path = tmp_path_factory.mktemp("workers")
    data = make_clip(path / "clip.mp4", frames=20)

    def make(name, *troubles):
        keys = [*troubles, *(f"clip{n}" for n in range(SAMPLES - len(troubles)))]
        pack(path / name, [[(key, data, n % 2) for n, key in enumerate(keys)]])
        return path / name

    return make


@pytest.fixture(scope="module")
def good(build):
    return build("good")


def make(folder, **options):
    standard = {"frames": Segments(4), "spatial": [RandomCrop(32), HorizontalFlip(0.5)], "global_batch_size": 4}
    standard |= {"num_threads": 1, "dtype": torch.uint8, "workers": "process", "rank": 0, "world_size": 1}
    return ClipLoader(Dataset(str(folder)), **standard | options)


def processes():
    """Process ids of this process's children, zombies included."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # Behind the name, which may hold anything: state, parent.
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.float32, "layout": "BTCHW"},
        {"frames": Segments(4, jitter=False), "spatial": CenterCrop(32), "views": Views(2, 3)},
        {"repeats": 2},
    ],
)
def test_processes_give_what_threads_give_and_end_with_the_loader(good, options):
    before = processes()
    loader = make(good, num_threads=2, **options)
    batches = list(loader)
    assert len(processes() - before) == 2  # kept for the next epoch
    expected = list(make(good, workers="thread", **options))
    assert [rows(batch) for batch in batches] == [rows(batch) for batch in expected]
    total = loader.stats.total
    assert total.packets > 0
    assert total.bytes_read > 0
    assert total.decode_seconds > 0
    loader.close()
    assert processes() == before
    assert len(list(loader)) == len(batches)  # the loader can be used again
    del loader
    gc.collect()
    assert processes() == before


@pytest.mark.parametrize(("trouble", "message"), [("hangs", "hung for 1 s and was killed"), ("crashes", "SIGSEGV")])
def test_a_worker_that_is_lost_costs_its_clip_and_the_run_goes_on(build, trouble, message, caplog):
    folder = build(trouble, trouble)
    options = {"decoder": backend("TroubledDecoder"), "shuffle": False, "clip_timeout": 1.0, "spatial": CenterCrop(32)}
    loader = make(folder, on_error="skip", **options)
    batches = list(loader)
    lost = [key for batch in batches for key, valid in zip(batch.key, batch.valid, strict=True) if not valid]
    assert lost == [trouble]
    assert loader.stats.total.skips == {"WorkerError": 1}
    assert message in caplog.text
    assert f"shard=data-000000, key={trouble}" in caplog.text
    expected = list(make(folder, workers="thread", **{**options, "decoder": "pyav"}))
    kept = [row for batch in expected for row in rows(batch) if row[2] != trouble]
    assert [row for batch in batches for row in rows(batch)] == kept
    loader.close()
    strict = make(folder, **options)
    with pytest.raises(WorkerError, match=message) as caught:
        list(strict)
    assert (caught.value.where["shard"], caught.value.where["key"]) == ("data-000000", trouble)
    strict.close()


def test_damage_is_found_in_workers_as_in_threads(build):
    folder = build("damaged")
    dataset = Dataset(str(folder))
    start, _ = dataset.shard(0).member(5)
    tar = folder / "data-000000.tar"
    data = bytearray(tar.read_bytes())
    data[start + int(dataset.shard(0).table(5).records["offset"][0]) + 3] ^= 1
    tar.write_bytes(data)
    loader = make(folder, shuffle=False)
    with pytest.raises(ChecksumError, match="indexed was") as caught:
        list(loader)
    assert caught.value.where["key"] == "clip5"
    loader.close()


def test_a_bug_in_a_worker_is_never_skipped(build):
    loader = make(build("bug", "bug"), decoder=backend("TroubledDecoder"), on_error="skip", max_skip_rate=1.0)
    with pytest.raises(ZeroDivisionError) as caught:
        list(loader)
    assert any("in worker process" in note for note in caught.value.__notes__)
    loader.close()


def test_a_decoder_that_does_not_open_in_a_worker_ends_the_iteration(good):
    loader = make(good, decoder=backend("AbsentDecoder"), on_error="skip")
    with pytest.raises(MissingDependency, match="no such device"):
        list(loader)
    loader.close()


def test_leaving_an_iteration_does_not_wait_for_a_hung_worker(build):
    keys = ["clip", "hangs"]
    folder = build("left", *keys)
    options = {"decoder": backend("TroubledDecoder"), "shuffle": False, "global_batch_size": 1}
    loader = make(folder, **options)
    iterator = iter(loader)
    assert next(iterator).key == ("clip",)
    time.sleep(0.5)  # the worker hangs in the next clip
    iterator.close()
    loader.close()
    assert not fastvid_threads()


def test_ctrl_c_ends_everything_at_once(good, tmp_path):
    script = tmp_path / "train.py"
    # No guard around the main module: workers do not import it.
    script.write_text(
        textwrap.dedent(f"""
        import signal, sys, time
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have switched it off
        sys.path.insert(0, {str(REPOSITORY)!r})
        from tests.load.test_workers import make
        loader = make({str(good)!r})
        for batch in loader:
            print("batch", flush=True)
            time.sleep(60)
        """)
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("batch")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - begun < 20
    assert "KeyboardInterrupt" in errors
    assert process.returncode in (1, 130, -signal.SIGINT)
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": "fork"}, "known are thread, process"),
        ({"clip_timeout": 0}, "clip_timeout is 0"),
    ],
)
def test_wrong_arguments_are_refused(good, options, message):
    with pytest.raises(UsageError, match=message):
        make(good, **options)
