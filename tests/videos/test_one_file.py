"""A video file without a dataset: the frames that a dataset of it has, and errors that name the file."""

import pickle
import traceback

import av
import numpy as np
import pytest

import fastvid
from fastvid.cli.main import main
from fastvid.errors import ChecksumError, DecodeError, SourceError, StorageError, UsageError
from fastvid.sharding.in_place import index_videos
from tests.sharding.shardtools import make, turn
from tests.storage.faulty import FaultyServer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("files")
    make(made / "plain.mp4", frames=40)
    make(made / "film.mkv", "-c:v", "libx264", "-pix_fmt", "yuv420p", "-g", "10", frames=40)
    turn(made / "plain.mp4", made / "phone.mp4")
    return made


@pytest.mark.parametrize("prove", ["none", "sample", "all"])
@pytest.mark.parametrize("name", ["plain.mp4", "film.mkv", "phone.mp4"])
def test_a_file_has_the_frames_that_a_dataset_of_it_has(folder, name, prove, tmp_path):
    index_videos([str(folder / name)], tmp_path / "set", workers=1)
    placed, video = fastvid.open(tmp_path / "set")[0], fastvid.Video(folder / name, prove=prove)
    assert isinstance(placed, fastvid.Video)
    facts = ("key", "num_frames", "fps", "width", "height", "duration", "class_name", "label", "cameras")
    assert all(getattr(video, fact) == getattr(placed, fact) for fact in facts if fact != "key")
    assert video.key == name.partition(".")[0]
    for chosen in ({"frames": [0, 33, 7]}, {"frames": slice(30, None)}, {"seconds": [0.5, 1.2]}):
        mine, theirs = video.frames(**chosen), placed.frames(**chosen)
        assert np.array_equal(mine.data, theirs.data)
        assert np.array_equal(mine.seconds, theirs.seconds)
    assert video.annotations["num_frames"] == 40
    assert not video.has_sound
    assert video.save(tmp_path / f"copy{video.suffix}").read_bytes() == (folder / name).read_bytes()
    assert "40" in video._repr_html_()


def test_a_matroska_file_is_not_written_as_an_mp4(folder, tmp_path):
    index_videos([str(folder / "film.mkv")], tmp_path / "set", workers=1)
    (placed,) = fastvid.open(tmp_path / "set")
    for video in (placed, fastvid.Video(folder / "film.mkv")):
        with pytest.raises(UsageError, match=r"cannot save video as \.mp4") as caught:
            video.save(tmp_path / "no.mp4")
        assert ".mkv" in caught.value.hint
    for name in ("as-it-is.mkv", "again.mp4"):
        assert main(["get", str(tmp_path / "set"), placed.key, "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / "as-it-is.mkv").read_bytes() == (folder / "film.mkv").read_bytes()
    with av.open(str(tmp_path / "again.mp4")) as container:
        assert "mp4" in container.format.name
        assert sum(1 for _ in container.decode(video=0)) == 40


def test_a_file_on_a_web_server_is_read_by_ranges_and_travels_to_another_process(folder):
    with FaultyServer() as server:
        server.files["plain.mp4"] = (folder / "plain.mp4").read_bytes()
        video = fastvid.Video(f"{server.url}/plain.mp4")
        again = pickle.loads(pickle.dumps(video))
        assert np.array_equal(again.frames([3]).data, fastvid.Video(folder / "plain.mp4").frames([3]).data)
        assert video.key == "plain"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda at: fastvid.Video(at / "none.mp4"), SourceError, "is not there"),
        (lambda at: fastvid.Video(at / "empty.mp4"), SourceError, "has no bytes"),
        (lambda at: fastvid.Video(at / "text.mp4"), SourceError, "not an accepted video container"),
        (lambda at: fastvid.Video(at / "plain.mp4", prove="most"), UsageError, "use one of none, sample, all"),
        (lambda at: fastvid.Video(at / "plain.mp4", hdr="maybe"), UsageError, "use one of tonemap, keep"),
        (lambda at: fastvid.Video(at / "plain.mp4").frames([40]), UsageError, "outside"),
        (lambda at: fastvid.Video(at / "plain.mp4").audio(), UsageError, "without its sound"),
        (lambda at: fastvid.Video(at / "plain.mp4").flow([0]), UsageError, "no stream 'flow'"),
        (lambda at: fastvid.open(at), StorageError, "it has 5 videos: `fastvid index"),
        (lambda at: fastvid.open(at / "plain.mp4"), StorageError, r"fastvid\.Video\("),
    ],
)
def test_errors_name_the_file_and_the_way_out(call, error, message, folder):
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "text.mp4").write_text("no video\n" * 100)
    with pytest.raises(error, match=message) as caught:
        call(folder)
    assert "prove" in str(caught.value) or "hdr" in str(caught.value) or str(folder) in str(caught.value)
    assert "shard" not in caught.value.where


def test_a_file_that_changed_is_an_error_that_names_it(folder, tmp_path):
    path = tmp_path / "film.mp4"
    path.write_bytes((folder / "plain.mp4").read_bytes())
    video = fastvid.Video(path)
    video.frames([5])
    data = bytearray(path.read_bytes())
    at = data.index(b"mdat") + 8
    data[at : at + 2000] = bytes(2000)
    path.write_bytes(data)
    with pytest.raises((StorageError, ChecksumError, DecodeError), match=r"film\.mp4"):
        video.frames([5])


def test_the_traceback_of_a_broken_file_has_only_the_lines_that_lead_to_it(tmp_path):
    (tmp_path / "broken.mp4").write_bytes(b"\0\0\0\x18ftypisom" + bytes(range(256)) * 20)
    with pytest.raises(SourceError, match=r"broken\.mp4") as caught:
        fastvid.Video(tmp_path / "broken.mp4").frames([0])
    assert "".join(traceback.format_exception(caught.value)).count("\n  File ") <= 3
