"""Find samples, and get their files, by the command line."""

import io
import json
import subprocess
import tarfile

import av
import numpy as np
import pytest

import fastvid
from fastvid.cli.main import main
from fastvid.errors import SampleNotFoundError
from fastvid.sharding.change.edit import relabel_samples, remove_samples
from fastvid.sharding.in_place import index_videos
from fastvid.storage import open_storage
from fastvid.storage.objects import ObjectStorage
from fastvid.storage.urls import copy_file
from fastvid.videos.dataset import find_samples
from tests.datasets import pack
from tests.makers import ffmpeg, read_numbers
from tests.sharding.shardtools import make


@pytest.fixture(scope="module")
def store(videos, tmp_path_factory):
    clips = [(name, videos.painted(name).data, n) for n, name in enumerate(("compact", "intra", "vp9"))]
    made = pack(tmp_path_factory.mktemp("d"), [clips[:2], clips[2:]], classes=("a", "b", "c"))
    remove_samples(made, ["intra"])
    relabel_samples(made, {"vp9": {"label": "a"}})
    return made


def numbers(data):
    with av.open(io.BytesIO(data)) as container:
        return read_numbers(np.stack([frame.to_ndarray(format="rgb24")[..., 1] for frame in container.decode(video=0)]))


def test_find_says_where_the_bytes_are(store, videos, capsys):
    assert main(["find", store.url, "vp9", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["shard"], found["row"], found["class"], found["source_id"]) == ("data-000001", 0, "a", "vp9.avi")
    tar = store.read("data-000001.tar")
    assert tar[found["member_offset"] :][: found["member_size"]] == videos.painted("vp9").data


def test_find_says_in_which_generation_a_sample_was_removed(store):
    (found,) = find_samples(store.url, "intra")
    assert (found["row"], found["removed"], found["removed_in"]) == (1, True, 2)


def test_find_by_source_part_and_condition(store, capsys):
    assert [s["key"] for s in find_samples(store.url, source="compact.avi")] == ["compact"]
    assert [s["key"] for s in find_samples(store.url, "p9.av")] == ["vp9"]
    assert main(["find", store.url, "--where", "class = 'a'"]) == 0
    assert capsys.readouterr().out.split() == ["compact", "vp9"]


def test_find_prints_nothing_that_a_terminal_obeys_and_json_that_every_reader_accepts(tmp_path, videos, capsys):
    made = pack(tmp_path / "set", [[("one", videos.painted("compact").data, 0)]], classes=("a\x1b[2J",))
    relabel_samples(made, {"one": {"caption": "b\x9b2J\n", "score": float("nan"), "shard": "theirs"}})
    assert main(["find", made.url, "one"]) == 0
    text = capsys.readouterr().out
    assert "a\\x1b[2J" in text
    assert "b\\x9b2J\\n" in text
    assert not {"\x1b", "\x9b"} & set(text)
    assert main(["find", made.url, "one", "--json"]) == 0
    text = capsys.readouterr().out
    assert not {"\x1b", "\x9b"} & set(text)

    def refused(name):
        raise AssertionError(name)

    found = json.loads(text, parse_constant=refused)
    assert found["shard"] == "data-000000"
    assert (found["class"], found["caption"], found["score"]) == ("a\x1b[2J", "b\x9b2J\n", None)


def test_find_names_near_keys_when_none_matches(store):
    with pytest.raises(SampleNotFoundError) as caught:
        find_samples(store.url, "compcat")
    assert "'compact'" in str(caught.value)


def test_get_writes_the_stored_bytes(store, videos, tmp_path, capfdbinary):
    assert main(["get", store.url, "vp9", "-o", str(tmp_path / "x.mp4")]) == 0
    assert (tmp_path / "x.mp4").read_bytes() == videos.painted("vp9").data


@pytest.mark.parametrize(
    ("seconds", "first", "last"),
    [("0.4:0.8", 10, 19), ("0.41:0.81", 10, 19), ("1:2.4", 25, 59), ("2.79:2.8", 69, 69)],
)
def test_get_clip_has_exactly_the_frames_shown_then(store, tmp_path, seconds, first, last):
    target = tmp_path / "clip.mp4"
    assert main(["get", store.url, "compact", "--seconds", seconds, "-o", str(target)]) == 0
    assert numbers(target.read_bytes()) == list(range(first, last + 1))
    with av.open(str(target)) as container:
        assert container.streams.video[0].average_rate == 25


def test_get_clip_of_odd_sides_has_the_pixels_of_its_frames(tmp_path):
    make(tmp_path / "in/a.mp4", "-pix_fmt", "yuv444p", "-vf", "format=yuv444p,gblur=2,crop=95:63:exact=1", frames=6)
    index_videos([str(tmp_path / "in")], tmp_path / "set", workers=1)
    target = tmp_path / "clip.mp4"
    assert main(["get", str(tmp_path / "set"), "a", "--seconds", "0:0.2", "-o", str(target)]) == 0
    with av.open(str(target)) as container:
        found = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    frames = fastvid.open(tmp_path / "set")["a"].frames(range(5)).data
    assert found.shape == frames.shape == (5, 62, 94, 3)
    assert np.abs(found.astype(int) - frames).mean() < 3


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_get_frame_is_the_one_asked_for(store, tmp_path, suffix):
    target = tmp_path / f"f.{suffix}"
    assert main(["get", store.url, "compact", "--frame", "37", "-o", str(target)]) == 0
    assert numbers(target.read_bytes()) == [37]


@pytest.mark.parametrize("options", [["--sheet"], []])
def test_get_sheet_is_a_picture(store, tmp_path, options):
    assert main(["get", store.url, "compact", *options, "-o", str(tmp_path / "s.png")]) == 0
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "options",
    [
        ["--seconds", "3"],
        ["--seconds", "2:1"],
        ["--seconds", "0:99"],
        ["--seconds=-1:1"],
        ["--frame", "5"],
        ["--audio"],
    ],
)
def test_get_writes_nothing_when_asked_for_what_is_not_there(store, tmp_path, options):
    target = tmp_path / "x.gif"
    assert main(["get", store.url, "compact", *options, "-o", str(target)]) == 2
    assert not target.exists()


def test_get_reads_a_sample_from_an_object_store_without_its_neighbours(s3, store, videos, tmp_path, monkeypatch):
    url = f"s3://{s3.bucket()}/d"
    for name in store.list():
        copy_file(store, name, open_storage(url))
    reads = []
    read_into = ObjectStorage.read_into

    def counted(self, name, ranges, version=None):
        reads.extend((name, len(view)) for _, view in ranges)
        return read_into(self, name, ranges, version)

    monkeypatch.setattr(ObjectStorage, "read_into", counted)
    assert main(["get", url, "compact", "-o", str(tmp_path / "x.mp4")]) == 0
    data = videos.painted("compact").data
    assert (tmp_path / "x.mp4").read_bytes() == data
    assert [read for read in reads if read[0].endswith(".tar")] == [("data-000000.tar", len(data))]


def test_get_audio_writes_the_stored_track(tmp_path):
    sources = tmp_path / "sources"
    sources.mkdir()
    command = [ffmpeg(), "-v", "error", "-f", "lavfi", "-i", "testsrc2=s=96x64:r=25:d=1", "-f", "lavfi"]
    command += ["-i", "sine=f=440:d=1", "-c:a", "aac", "-pix_fmt", "yuv420p", str(sources / "a.mp4")]
    subprocess.run(command, check=True)
    out = tmp_path / "d"
    assert main(["shard", str(sources), "--out", str(out), "--profile", "compact", "--audio", "copy"]) == 0
    (found,) = find_samples(str(out), where="true")
    assert main(["get", str(out), found["key"], "--audio", "-o", str(tmp_path / "a.m4a")]) == 0
    with tarfile.open(out / f"{found['shard']}.tar") as tar:
        assert (tmp_path / "a.m4a").read_bytes() == tar.extractfile(f"{found['key']}.m4a").read()
