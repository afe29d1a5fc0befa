"""Videos in place in object stores and on web servers: indexed and read by ranges, never downloaded."""

import shutil

import numpy as np
import pytest

import fastvid
from fastvid.errors import StorageError
from fastvid.media.index_video import SMALL_FILE
from fastvid.sharding.in_place import index_videos, reindex
from fastvid.sharding.verify.verify import verify_dataset
from fastvid.storage import open_storage
from tests import makers
from tests.sharding.in_place import tools
from tests.storage.faulty import FaultyServer

GAP = 2 * SMALL_FILE


@pytest.fixture
def film(videos, tmp_path):
    """An MP4 of more bytes than are read whole, most of which are no packet."""
    path = tmp_path / "films" / "film.mp4"
    path.parent.mkdir()
    makers.spread(videos.painted("compact", frames=200).path, path, GAP)
    return path


@pytest.fixture
def bucket(s3, film, videos):
    """The URL of a folder in a store that contains two videos."""
    url = f"s3://{s3.bucket()}/films"
    store = open_storage(url)
    store.write("c/film.mp4", film.read_bytes())
    store.write("p/pyramid.mp4", videos.painted("pyramid").path.read_bytes())
    return url


@pytest.mark.parametrize("proof", ["none", "sample"])
def test_a_bucket_is_indexed_and_read_in_place(bucket, film, videos, tmp_path, proof):
    report = index_videos([bucket], tmp_path / "set", proof=proof, workers=1)
    assert (report.packed, report.rejected) == (2, {})
    dataset = fastvid.open(tmp_path / "set")
    assert dataset.classes == ("c", "p")
    for key, path in (("c/film", film), ("p/pyramid", videos.painted("pyramid").path)):
        assert tools.wrong_frames(dataset, dataset.find(key), path, most=10) == []
    assert verify_dataset(str(tmp_path / "set"), workers=1).problems == []
    shutil.rmtree(film.parent)
    clips = fastvid.ClipLoader(
        dataset, frames=fastvid.Segments(2), spatial=fastvid.Resize(32), global_batch_size=2,
        workers=fastvid.Workers("process", num_threads=1),
    )  # fmt: skip
    assert sum(len(batch.position) for batch in clips) == 2


def test_an_index_in_the_store_itself(bucket, tmp_path):
    out = bucket.rpartition("/")[0] + "/index"
    index_videos([bucket], out, workers=1)
    dataset = fastvid.open(out)
    assert len(dataset) == 2
    assert dataset[0].frames([1]).data.shape[0] == 1
    assert not [name for name in open_storage(out).list() if name.endswith((".tar", ".mp4"))]


def test_an_object_that_was_replaced_is_an_error(bucket, videos, tmp_path):
    index_videos([bucket], tmp_path / "set", proof="none", workers=1)
    store = open_storage(bucket)
    data = bytearray(store.read("c/film.mp4"))
    data[-1000] ^= 1
    store.write("c/film.mp4", bytes(data))
    dataset = fastvid.open(tmp_path / "set")
    with pytest.raises(StorageError, match=r"not the version that was indexed.*film\.mp4"):
        dataset["c/film"].frames([3])
    store.write("c/film.mp4", videos.painted("compact", frames=200).path.read_bytes())
    assert reindex(str(tmp_path / "set")).changed == 1
    assert np.array_equal(fastvid.open(tmp_path / "set")["c/film"].frames([3]).data[0].shape, (96, 160, 3))


def test_a_film_on_a_web_server_is_indexed_by_few_small_ranges(film, tmp_path):
    data = film.read_bytes()
    with FaultyServer() as server:
        server.files["film.mp4"] = data
        table = tmp_path / "films.csv"
        table.write_text(f"path\n{server.url}/film.mp4\n")
        index_videos([], tmp_path / "set", annotations=f"csv:{table}", proof="none", workers=1)
        gets = [seen for seen in server.log if seen.method == "GET"]
        assert all(seen.range is not None for seen in gets)
        assert sum(seen.body for seen in gets) < len(data) / 10
        assert len(gets) < 20
        before = len(server.log)
        dataset = fastvid.open(tmp_path / "set")
        dataset[0].frames([100])
        mine = server.log[before:]
        assert sum(seen.method == "GET" for seen in mine) <= 2
        assert sum(seen.body for seen in mine) < 200_000
        assert tools.wrong_frames(dataset, 0, film, most=5) == []
