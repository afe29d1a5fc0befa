"""Worker processes: the same batches as threads, and a clip that hangs or crashes affects no other clip."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import psutil
import pytest
import torch

from fastvid.decode.backends import Backend
from fastvid.errors import MissingDependency, WorkerError
from fastvid.format.dataset import Dataset
from fastvid.format.schema import Codec
from fastvid.load.clips.crops import CenterCrop, HorizontalFlip, RandomCrop
from fastvid.load.clips.sampling import Segments
from fastvid.load.clips.views import Views
from fastvid.load.order.draws import Purpose
from tests.datasets import REPOSITORY, make_clip, pack
from tests.load import troubled
from tests.load.loaders import clip_loader
from tests.load.tools import fastvid_threads, rows, until

SAMPLES = 12
pytestmark = pytest.mark.usefixtures("own_interpreters")


def backend(name):
    return Backend(name, f"tests.load.troubled:{name}", "cpu", frozenset(Codec), "nothing")


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    path = tmp_path_factory.mktemp("workers")
    data = make_clip(path / "clip.mp4", frames=20)

    def make(name, *troubles, at=0):
        keys = [f"clip{n}" for n in range(SAMPLES - len(troubles))]
        keys[at:at] = troubles
        pack(path / name, [[(key, data, n % 2) for n, key in enumerate(keys)]])
        return path / name

    return make


@pytest.fixture(scope="module")
def good(build):
    return build("good")


def make(folder, **options):
    standard = {"frames": Segments(4), "spatial": [RandomCrop(32), HorizontalFlip(0.5)], "global_batch_size": 4}
    standard |= {"num_threads": 1, "dtype": torch.uint8, "workers": "process"}
    return clip_loader(Dataset(str(folder)), **standard | options)


def processes():
    """Return the process ids of this process's children, including zombies."""
    return {child.pid for child in psutil.Process().children()}


@dataclass(frozen=True)
class OwnSampler:
    """A user's sampler, whose module no worker process can import."""

    num_frames: int = 4
    asked: ClassVar[set[int]] = set()

    def draw(self, video, draws):
        self.asked.add(os.getpid())
        return np.array(draws.integers(Purpose.FRAMES, video.num_frames, 4), dtype=np.int64)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float32},
        {"dtype": torch.float32, "layout": "BTCHW"},
        {"dtype": torch.float16},
        {"dtype": torch.float32, "channels_last": True},
        {"layout": "BTCHW", "channels_last": True},
        {"frames": OwnSampler()},
        {"frames": Segments(4, jitter=False), "spatial": CenterCrop(32), "views": Views(2, 3)},
        {"clips_per_video": 2},
    ],
)
def test_processes_deliver_the_same_as_threads(good, options):
    loader = make(good, **options)
    expected = [rows(batch) for batch in make(good, workers="thread", **options)]
    # All batches are kept here, so none may be overwritten.
    assert [rows(batch) for batch in list(loader)] == expected
    assert loader.stats.total.clips == SAMPLES * options.get("clips_per_video", 1)
    assert OwnSampler.asked <= {os.getpid()}


def test_processes_end_with_the_loader_and_start_again(good):
    before = processes()
    loader = make(good, num_threads=2)
    batches = list(loader)
    assert len(processes() - before) == 2  # kept for the next epoch
    assert [rows(batch) for batch in batches] == [rows(batch) for batch in make(good, workers="thread")]
    total = loader.stats.total
    assert total.packets > 0
    assert total.bytes_read > 0
    assert total.decode_seconds > 0
    loader.close()
    assert processes() == before
    assert len(list(loader)) == len(batches)
    del loader
    gc.collect()
    assert processes() == before


def test_memory_of_released_batches_is_reused_by_processes(good):
    loader = make(good, prefetch=1)
    # Batches are not kept, so their memory may be reused.
    seen = [rows(batch) for _ in range(3) for batch in loader]
    threads = make(good, workers="thread")
    assert seen == [rows(batch) for _ in range(3) for batch in threads]


def test_loader_releases_descriptors_and_memory(good):
    def shared():
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if "fastvid-batches" in line]

    gc.collect()
    before = len(os.listdir("/proc/self/fd")), len(shared())
    loader = make(good)
    batch = next(iter(loader))
    loader.close()
    del loader
    gc.collect()
    assert len(shared()) == before[1] + 1
    assert batch.video.float().mean() > 0  # still readable
    del batch
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), len(shared())) == before


def test_worker_does_not_import_torch(good):
    loader = make(good)
    before = processes()
    next(iter(loader))
    (worker,) = processes() - before
    maps = Path(f"/proc/{worker}/maps").read_text()
    assert "libav" in maps
    assert "libtorch" not in maps


# At the start of the tasks sent to a worker, and in the middle of them.
@pytest.mark.parametrize(
    ("trouble", "message", "at"), [("hangs", "hung for 3 s and was killed", 2), ("crashes", "SIGSEGV", 0)]
)
def test_lost_worker_loses_one_clip_and_the_run_continues(build, trouble, message, at, caplog):
    folder = build(f"{trouble}{at}", trouble, at=at)
    options = {"decoder": backend("TroubledDecoder"), "shuffle": False, "clip_timeout": 3.0, "spatial": CenterCrop(32)}
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
    if at == 0:
        strict = make(folder, **options)
        with pytest.raises(WorkerError, match=message) as caught:
            list(strict)
        assert (caught.value.where["shard"], caught.value.where["key"]) == ("data-000000", trouble)


@pytest.mark.parametrize("at", [0, 2])
def test_clip_whose_worker_is_killed_once_is_delivered(build, at, tmp_path, monkeypatch, caplog):
    died = tmp_path / "died"
    monkeypatch.setenv(troubled.DIED, str(died))
    folder = build(f"once{at}", "dies-once", at=at)
    loader = make(folder, decoder=backend("TroubledDecoder"), shuffle=False)
    seen = [row for batch in loader for row in rows(batch)]
    assert died.exists()
    assert seen == [row for batch in make(folder, workers="thread", shuffle=False) for row in rows(batch)]
    assert sum(row[2] == "dies-once" for row in seen) == 1
    assert loader.stats.total.clips == SAMPLES
    assert "was killed by SIGKILL; its clip is tried once more in a new process" in caplog.text


def test_workers_killed_at_random_lose_no_clip(good):
    """Each kill hits a busy worker, as the OOM killer does."""
    loader = make(good, prefetch=1, global_batch_size=2, decoder=backend("SlowDecoder"))
    before, seen, killed = processes(), [], []
    for _ in range(2):
        for number, batch in enumerate(loader):
            seen.extend(rows(batch))
            if number % 2 == 0:
                for worker in processes() - before:
                    os.kill(worker, signal.SIGKILL)
                    killed.append(worker)
    expected = make(good, workers="thread")
    assert seen == [row for _ in range(2) for batch in expected for row in rows(batch)]
    assert len(killed) > 2


def test_worker_lost_between_batches_loses_no_clip(good):
    loader, before, seen = make(good, prefetch=1), processes(), []
    for batch in loader:
        seen.extend(rows(batch))
        # While the next batch is planned, the worker is idle.
        until(lambda: len(seen) == SAMPLES or loader._run.ready)
        for worker in processes() - before:
            os.kill(worker, signal.SIGKILL)
    assert seen == [row for batch in make(good, workers="thread") for row in rows(batch)]
    assert loader.stats.total.skips.total() == 0


def test_startup_deaths_are_retried_a_limited_number_of_times(good, tmp_path, monkeypatch):
    armed = tmp_path / "armed"
    body = f'rm {armed}/$(ls {armed} | head -1) && kill -9 $$; exec {sys.executable} "$@"'
    stub = tmp_path / "python"
    stub.write_text(f"#!/bin/sh\n{body}\n")
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    armed.mkdir()
    for tries in range(2):
        (armed / str(tries)).touch()
    loader = make(good)
    assert sum(len(rows(batch)) for batch in loader) == SAMPLES
    loader.close()
    for tries in range(9):
        (armed / str(tries)).touch()
    with pytest.raises(WorkerError, match="was killed by SIGKILL before it was ready"):
        list(loader)
    assert len(list(armed.iterdir())) == 6


def test_a_bug_in_a_worker_is_never_skipped(build):
    loader = make(build("bug", "bug"), decoder=backend("TroubledDecoder"), on_error="skip", max_skip_rate=1.0)
    with pytest.raises(ZeroDivisionError) as caught:
        list(loader)
    assert any("in worker process" in note for note in caught.value.__notes__)


def test_a_decoder_that_does_not_open_in_a_worker_ends_the_iteration(good):
    loader = make(good, decoder=backend("AbsentDecoder"), on_error="skip")
    with pytest.raises(MissingDependency, match="no such device"):
        list(loader)


def test_closing_an_iteration_does_not_wait_for_a_hung_worker(build, tmp_path, monkeypatch):
    hangs = tmp_path / "hangs"
    monkeypatch.setenv(troubled.HANGS, str(hangs))
    options = {"decoder": backend("TroubledDecoder"), "shuffle": False, "global_batch_size": 1}
    loader = make(build("left", "clip", "hangs"), **options)
    iterator = iter(loader)
    assert next(iterator).key == ("clip",)
    until(hangs.exists)
    iterator.close()
    loader.close()
    assert not fastvid_threads()


def test_ctrl_c_stops_loader_and_workers(good, tmp_path):
    script = tmp_path / "train.py"
    # No `if __name__ == "__main__"`: workers do not import the main module.
    script.write_text(
        textwrap.dedent(f"""
        import signal, sys, time
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have ignored the signal
        sys.path.insert(0, {str(REPOSITORY)!r})
        from tests.load.workers.test_workers import make
        loader = make({str(good)!r})
        for batch in loader:
            print("batch", flush=True)
            time.sleep(600)
        """)
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("batch")
    children = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=200)
    assert "KeyboardInterrupt" in errors
    assert process.returncode in (1, 130, -signal.SIGINT)
    assert not [child for child in children if child.is_running()]
