"""A dataset in an object store and on a web server: the clips of the local one, from only the planned bytes."""

import os

import numpy as np
import pytest

pytest.importorskip("obstore", reason="obstore is not installed: the extra object-stores brings it")

from fastvid.decode.request import Box, ClipRequest
from fastvid.errors import ChecksumError, StorageError
from fastvid.format.dataset import Dataset
from fastvid.load.workers.clip_worker import fetch
from fastvid.storage import LocalStorage, RemoteOptions, open_storage
from tests.datasets import make_clip, pack
from tests.storage.faulty import FaultyServer

FRAMES = [3, 17, 30, 44]


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Keys with MP4s."""
    folder = tmp_path_factory.mktemp("clips")
    return [(f"clip{n}", make_clip(folder / f"{n}.mp4", frames=48 + n, size="192x128")) for n in range(4)]


@pytest.fixture(scope="module")
def local(tmp_path_factory, clips):
    """A dataset on the local disk: two shards of two clips."""
    samples = [(key, data, number % 2) for number, (key, data) in enumerate(clips)]
    return pack(tmp_path_factory.mktemp("dataset") / "set", [samples[:2], samples[2:]])


def copy(source, target):
    """Return all files, the commit record last."""
    for name in sorted(source.list(), key=lambda name: name == "dataset.json"):
        target.write(name, source.read(name))


def fetch_all(dataset, gap=0):
    """Return the clip of every sample of a dataset."""
    fetched = []
    for sample, (shard, row) in enumerate(zip(*dataset.locate(range(len(dataset))), strict=True)):
        shard = dataset.shard(int(shard))
        info = shard.info(int(row))
        box = Box(0, 0, info.height, info.width)
        request = ClipRequest(sample, np.array(FRAMES), box, (box.height, box.width), False)
        fetched.append(fetch(shard, int(row), request, key=dataset.key(sample), gap=gap))
    return fetched


def test_dataset_in_an_object_store_yields_the_clips_of_the_local_one(s3, local):
    url = f"s3://{s3.bucket()}/sets/one"
    copy(local, open_storage(url))
    remote = Dataset(url)
    assert remote.annotations.equals(Dataset(local.url).annotations)
    for there, here in zip(fetch_all(remote), fetch_all(Dataset(local.url)), strict=True):
        assert bytes(there[0].data) == bytes(here[0].data)
        assert there[1].requests == here[1].requests > 1


def test_loader_requests_only_the_planned_ranges(web, local):
    copy(local, LocalStorage(web.folder / "counted"))
    dataset = Dataset(f"{web.url}/counted")
    for shard in range(2):
        dataset.shard(shard)
    # A look-up and a read each of the commit record and the generation; a read of the annotations; for each shard a
    # read of its sidecar and a look-up of the size of its tar.
    opened = web.requests("counted", 9)
    assert [method for method, *_ in opened] == ["HEAD", "GET", "HEAD", "GET", "GET", "GET", "HEAD", "GET", "HEAD"]
    total = len(opened)
    for gap in (0, 1000, dataset.storage.gap):
        fetched = fetch_all(dataset, gap)
        expected = sum(costs.requests for _, costs in fetched)
        seen = web.requests("counted", total + expected)[total:]
        total += expected
        assert [(method, status) for method, _, status, _ in seen] == [("GET", 206)] * expected
        assert sum(size for *_, size in seen) == sum(costs.bytes_read for _, costs in fetched)


def test_error_names_the_shard_when_it_is_replaced_truncated_or_missing(local):
    with FaultyServer() as server:
        for name in local.list():
            server.files[name] = local.read(name)
        whole = server.files["data-000000.tar"]
        for change, says in ((whole[::-1], "replaced"), (whole[:-20_000], "replaced"), (None, "does not exist")):
            server.files["data-000000.tar"] = whole
            dataset = Dataset(server.url)
            fetch_all(dataset)
            if change is None:
                del server.files["data-000000.tar"]
            else:
                server.files["data-000000.tar"] = change
            with pytest.raises(StorageError, match=rf"{says}.*data-000000.tar.*shard=data-000000, key=clip0"):
                fetch_all(dataset)


def test_checksum_detects_a_change_with_the_same_tag_and_date(local):
    with FaultyServer(tags=False) as server:
        for name in local.list():
            server.files[name] = local.read(name)
        dataset = Dataset(server.url)
        fetch_all(dataset)
        server.files["data-000000.tar"] = os.urandom(len(server.files["data-000000.tar"]))
        with pytest.raises(ChecksumError, match="shard=data-000000, key=clip0"):
            fetch_all(dataset)


def test_sidecars_are_read_from_the_node_cache(local, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTVID_CACHE", str(tmp_path / "cache"))
    with FaultyServer() as server:
        for name in local.list():
            server.files[name] = local.read(name)
        for _ in range(2):
            fetch_all(Dataset(server.url))
        sidecars = [seen.method for seen in server.log if seen.name.endswith(".pkt")]
        assert sidecars == ["HEAD", "GET", "HEAD", "GET", "HEAD", "HEAD"]
        assert RemoteOptions().cache_folder() == tmp_path / "cache"
