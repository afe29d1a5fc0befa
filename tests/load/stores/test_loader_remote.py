"""ClipLoader over a slow, failing, stalling or wrong web server: the same clips, a clear error, or a counted skip."""

import random
import shutil
from collections import Counter, deque

import pytest
import torch

pytest.importorskip("obstore", reason="obstore is not installed: the extra object-stores brings it")

from fastvid.errors import ChecksumError, StorageError, UnavailableError
from fastvid.format.dataset import Dataset
from fastvid.load.clip_dataset import ClipDataset
from fastvid.load.clips.crops import CenterCrop
from fastvid.load.clips.sampling import Segments
from fastvid.load.order.epoch import BlockShuffle
from fastvid.load.order.mixture import Mixture
from fastvid.load.workers import engine
from fastvid.storage import RemoteOptions, open_storage, requests
from tests.datasets import make_clip, pack
from tests.load.loaders import clip_loader
from tests.load.tools import fastvid_threads, rows
from tests.skips import soak_but
from tests.storage.faulty import FaultyServer

# Long enough for a busy machine, on which a slow response must not count as a stall and be requested again.
PATIENT = RemoteOptions(stall_seconds=20, patience_seconds=60)
IMPATIENT = RemoteOptions(stall_seconds=0.5, patience_seconds=20)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Three shards of eight clips."""
    folder = tmp_path_factory.mktemp("remote")
    clips = [make_clip(folder / f"{n}.mp4", frames=30 + n, size="160x128") for n in range(3)]
    samples = [[(f"clip{shard}{n}", clips[(shard + n) % 3], n % 2) for n in range(8)] for shard in range(3)]
    return pack(folder / "set", samples)


@pytest.fixture
def server(local):
    with FaultyServer(local) as server:
        yield server


def opened(source, options=PATIENT):
    dataset = Dataset(source)
    if "://" in source:
        dataset.storage = open_storage(source, options=options)
    return dataset


def make(source, options=PATIENT, **arguments):
    return over(opened(source, options), **arguments)


def over(dataset, **arguments):
    standard = {"frames": Segments(4), "spatial": CenterCrop(64), "global_batch_size": 8, "num_threads": 2}
    standard |= {"dtype": torch.uint8, "decoder": "pyav"}
    return clip_loader(dataset, **standard | arguments)


def clips(loader):
    return [row for batch in loader for row in rows(batch)]


def test_opening_a_dataset_and_its_shards_takes_few_requests(server):
    dataset = Dataset(server.url)
    for shard in range(3):
        dataset.shard(shard)
    # A look-up and a read each of the commit record and the generation; a read of the annotations; for each shard a
    # read of its sidecar and a look-up of the size of its tar.
    asked = [seen.method for seen in server.log]
    assert asked == ["HEAD", "GET", "HEAD", "GET", "GET", *["GET", "HEAD"] * 3]


@pytest.mark.parametrize("workers", soak_but(["thread", "process"], "process"))
def test_packets_are_prefetched_for_one_slow_decode_thread_or_process(server, local, workers):
    server.delay = 0.1  # long enough that requests which may overlap do, on a busy machine
    loader = make(server.url, num_threads=1, workers=workers)
    expected = clips(make(local.url, num_threads=1))
    assert clips(loader) == expected
    assert server.most_at_once >= 8
    seen = [one for one in server.gets() if one.name.endswith(".tar")]
    total = loader.stats.total
    assert (total.clips, total.requests, total.bytes_read) == (24, len(seen), sum(one.body for one in seen))
    assert total.decode_seconds > 0
    # The control: a worker that reads for itself has at most one clip's ranges in flight.
    server.most_at_once = 0
    assert clips(make(server.url, num_threads=1, workers=workers, num_fetchers=0)) == expected
    assert server.most_at_once < 8


def test_a_clip_dataset_reads_the_clips_of_a_batch_at_once(server, local):
    server.delay = 0.1  # long enough that requests which may overlap do, on a busy machine
    parts = {"frames": Segments(4), "spatial": CenterCrop(64), "seed": 3}
    there, here = (ClipDataset(opened(source), **parts).__getitems__(range(8)) for source in (server.url, local.url))
    for one, other in zip(there, here, strict=True):
        assert one["key"] == other["key"]
        assert torch.equal(one["video"], other["video"])
    assert server.most_at_once >= 8
    server.files["data-000000.tar"] = bytes(len(server.files["data-000000.tar"]))
    with pytest.raises(ChecksumError, match="key=clip00"):
        ClipDataset(opened(server.url), **parts).__getitems__(range(8))


def test_transient_faults_do_not_change_the_clips(server, local):
    faults = [500, "reset", "none", "stall-body", "short", "none", 503, "reset-body", "stall", "none", "none"]
    loader = make(server.url, IMPATIENT)
    next(iter(loader))  # reads the sidecars
    loader.set_epoch(1)
    server.faults = deque(faults)
    found = clips(loader)
    assert not server.faults
    expected = make(local.url)
    expected.set_epoch(1)
    assert found == clips(expected)


def test_a_busy_store_is_asked_again_only_for_what_it_refused(server, local, monkeypatch):
    """One request in ten is refused, whatever their rate: no other clip waits for it, and no byte is read twice."""
    waits = []
    monkeypatch.setattr(requests, "pause", lambda seconds: waits.append(seconds) or True)
    # How many clips a thread reads in one pass depends on the time. One epoch a loader: none is read for a next one.
    monkeypatch.setattr(engine, "are_near", lambda *_: False)

    def traffic(share):
        draw = random.Random(1)
        server.faults = deque(503 if draw.random() < share else "none" for _ in range(10_000))
        before, found, dataset = len(server.gets()), [], opened(server.url)
        waits.clear()
        for epoch in range(8):
            loader = over(dataset)
            loader.set_epoch(epoch)
            found += clips(loader)
        seen = server.gets()[before:]
        refused = [one for one in seen if one.status == 503]
        answered = Counter((one.name, one.range) for one in seen if one.status != 503)
        return found, answered, len(refused), sum(waits)

    whole, asked, _, _ = traffic(0)
    found, asked_again, refused, waited = traffic(0.1)
    assert found == whole
    assert asked_again == asked
    assert waited <= 0.2 * refused
    assert refused > 10


def test_a_permanently_broken_server_is_an_error_and_not_a_hang(server):
    for fault in (500, "stall"):
        loader = make(server.url, RemoteOptions(stall_seconds=0.5, patience_seconds=1))
        next(iter(loader))
        loader.set_epoch(1)
        before = len(server.gets())
        server.faults = deque([fault] * 10_000)
        with pytest.raises(StorageError, match=r"data-00000\d.tar.*key=clip"):
            clips(loader)
        tries = Counter((one.name, one.range) for one in server.gets()[before:])
        # At most as many as fit into a second of doubling pauses, for the ranges that are read ahead.
        assert max(tries.values()) <= 8
        assert len(tries) <= 32
        server.faults.clear()
        assert not fastvid_threads()


@pytest.mark.parametrize(("status", "message"), [(403, "access denied"), (503, "responded 503")])
@pytest.mark.parametrize("workers", ["thread", "process"])
def test_a_refusal_or_an_outage_is_raised_and_never_skipped(server, status, message, workers):
    # One worker: the first epoch then opens all shards where the second reads them, so that a clip is what is refused.
    options = {"on_error": "skip", "max_skip_rate": 1.0, "workers": workers, "num_fetchers": 0, "num_threads": 1}
    loader = make(server.url, RemoteOptions(patience_seconds=0.01), **options)
    assert len(clips(loader)) == 24
    # One request in ten is refused, as with credentials that expire.
    server.faults = deque(["none", *[status] * 3, *["none"] * 20] * 10)
    with pytest.raises(UnavailableError, match=rf"{message}.*data-00000\d.tar.*key=clip"):
        clips(loader)
    assert loader.stats.total.skips == {}


def test_an_unreachable_store_is_raised_and_never_skipped(local):
    with FaultyServer(local) as server:
        loader = make(server.url, RemoteOptions(patience_seconds=0.1), on_error="skip", max_skip_rate=1.0)
        assert len(clips(loader)) == 24
    with pytest.raises(UnavailableError, match=r"data-00000\d"):
        clips(loader)
    assert loader.stats.total.skips == {}


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_a_disk_that_fails_is_raised_and_never_skipped(local, workers, tmp_path):
    folder = tmp_path / "set"
    shutil.copytree(local.root, folder)
    loader = make(str(folder), on_error="skip", max_skip_rate=1.0, workers=workers, shuffle=False)
    for shard in range(3):
        loader.dataset.shard(shard)
    tar = folder / "data-000001.tar"
    tar.unlink()
    tar.symlink_to("/proc/self/mem")  # reading the first page of a process is an I/O error
    with pytest.raises(UnavailableError, match=r"Input/output error.*data-000001\.tar.*key=clip1"):
        clips(loader)


@pytest.mark.parametrize(
    ("change", "tags", "error"),
    [
        (lambda data: None, True, "StorageError"),
        (lambda data: data[::-1], True, "StorageError"),
        (lambda data: data[:-50_000], True, "StorageError"),
        (lambda data: data[::-1], False, "ChecksumError"),
    ],
)
def test_a_shard_deleted_replaced_or_truncated_while_open_is_skipped_and_counted(server, local, change, tags, error):
    server.tags = tags
    loader = make(server.url, shuffle=False, on_error="skip", max_skip_rate=1.0)
    assert len(clips(loader)) == 24
    changed = change(server.files["data-000001.tar"])
    if changed is None:
        del server.files["data-000001.tar"]
    else:
        server.files["data-000001.tar"] = changed
    found = clips(loader)
    lost = {f"clip1{n}" for n in range(8)}
    expected = make(local.url, shuffle=False)
    expected.set_epoch(1)
    assert found == [row for row in clips(expected) if row[2] not in lost]
    assert loader.stats.total.skips == {error: 8}


def test_a_mixture_reads_local_and_remote_datasets_alike(server, local):
    mixture = Mixture([Dataset(local.url), Dataset(server.url)], weights=[1, 1], num_samples=32)
    options = {"frames": Segments(4), "spatial": CenterCrop(64), "global_batch_size": 8, "dtype": torch.uint8}
    loader = clip_loader(mixture, decoder="pyav", **options)
    found = clips(loader)
    here = Mixture([Dataset(local.url), Dataset(local.url)], weights=[1, 1], num_samples=32)
    assert found == clips(clip_loader(here, decoder="pyav", **options))
    assert sum(row[1] < 24 for row in found) == 16


def test_clips_that_are_neighbours_are_read_together(server, local, monkeypatch):
    server.delay = 0.02
    # As after refusals: a request costs as much as many bytes.
    monkeypatch.setattr("fastvid.storage.objects.ObjectStorage.gap", 10**6)
    options = {"shuffle": BlockShuffle(1), "num_threads": 1}
    expected = clips(make(local.url, **options))

    def traffic():
        before = len(server.gets())
        loader = make(server.url, **options)
        assert clips(loader) == expected
        seen = [one for one in server.gets()[before:] if one.name.endswith(".tar")]
        assert (loader.stats.total.requests, loader.stats.total.bytes_read) == (len(seen), sum(s.body for s in seen))
        return loader.stats.total

    together = traffic()
    monkeypatch.setattr("fastvid.load.workers.engine.are_near", lambda *_: False)
    alone = traffic()
    assert together.requests < 0.6 * alone.requests
    assert (together.packets, together.bytes_whole) == (alone.packets, alone.bytes_whole)


def test_a_damaged_clip_among_clips_that_are_read_together_fails_alone(server, local, monkeypatch):
    monkeypatch.setattr("fastvid.storage.objects.ObjectStorage.gap", 10**6)
    tar = bytearray(server.files["data-000001.tar"])
    start, size = Dataset(local.url).shard(1).member(3)
    tar[start + size // 4 : start + size // 2] = bytes(size // 2 - size // 4)
    server.files["data-000001.tar"] = bytes(tar)
    server.delay = 0.02
    options = {"shuffle": BlockShuffle(1), "num_threads": 1}
    loader = make(server.url, on_error="skip", max_skip_rate=0.5, **options)
    damaged = Dataset(local.url).key(8 + 3)
    assert clips(loader) == [row for row in clips(make(local.url, **options)) if row[2] != damaged]
    assert loader.stats.total.skips == {"ChecksumError": 1}
