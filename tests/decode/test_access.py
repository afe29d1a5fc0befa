"""Random access to frames by key, as in a notebook."""

from __future__ import annotations

import threading
from fractions import Fraction

import numpy as np
import pytest

import fastvid
from fastvid.decode.access import decode_frames
from fastvid.decode.clips import read_clip, reader_of
from fastvid.decode.request import ClipRequest
from fastvid.errors import ChecksumError, StorageError, UsageError
from tests.datasets import pack
from tests.makers import read_numbers


@pytest.fixture(scope="module")
def folder(videos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dataset")
    samples = [(name, videos.painted(name).data, label) for label, name in enumerate(("compact", "intra", "vp9"))]
    pack(folder, [samples[:2], samples[2:]], classes=("a", "b", "c"), columns={"split": ["train", "train", "val"]})
    return folder


def test_frames_are_read_by_key(folder):
    dataset = fastvid.open(folder)
    for key in ("compact", "intra", "vp9"):
        batch = dataset[key].frames([60, 8, 8, 0])
        assert batch.data.shape == (4, 96, 160, 3)
        assert batch.data.dtype == np.uint8
        assert batch.data.flags.c_contiguous
        assert read_numbers(batch.data[..., 1]) == [60, 8, 8, 0]
        assert batch.frames.tolist() == [60, 8, 8, 0]
        assert batch.seconds.tolist() == [60 / 25, 8 / 25, 8 / 25, 0]
        assert "160x96" in repr(batch)


def test_facts_are_read_by_key(folder):
    dataset = fastvid.open(folder)
    video = dataset["vp9"]
    assert (video.key, video.label, video.num_frames, len(video)) == ("vp9", 2, 70, 70)
    assert (video.fps, video.width, video.height) == (Fraction(25), 160, 96)
    assert "vp9" in repr(video)
    assert "70 frames of 160x96" in repr(video)
    assert [video.key for video in dataset] == ["compact", "intra", "vp9"]
    assert dataset[1].key == dataset[np.int64(1)].key == "intra"
    assert "intra" in dataset
    assert "other" not in dataset


def test_selection_by_split_and_filter_is_opened(folder):
    assert [video.key for video in fastvid.open(folder, split="val")] == ["vp9"]
    assert [video.key for video in fastvid.open(folder, where="label <= 1")] == ["compact", "intra"]
    with pytest.raises(UsageError):
        fastvid.open(folder, split="val")["intra"]


@pytest.mark.parametrize("sample", ["other", 3, -1])
def test_unknown_sample_raises(folder, sample):
    with pytest.raises(UsageError):
        fastvid.open(folder)[sample]


@pytest.mark.parametrize("frames", [[], [70], [-1], [0, 700]])
def test_frames_outside_the_video_raise(folder, frames):
    with pytest.raises(UsageError) as caught:
        fastvid.open(folder)["compact"].frames(frames)
    assert caught.value.where["key"] == "compact"


def test_open_raises_when_there_is_no_dataset(tmp_path):
    with pytest.raises(StorageError):
        fastvid.open(tmp_path / "nothing")


def test_read_raises_when_the_shard_is_damaged(folder, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.rglob("*"):
        if file.is_file():
            target = copy / file.relative_to(folder)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(file.read_bytes())
    dataset = fastvid.open(copy)
    video = dataset["intra"]
    offset = int(video.table.records["offset"][30])
    shard = copy / "data-000000.tar"
    tar = bytearray(shard.read_bytes())
    member = dataset.shard(0).member(1)[0]
    tar[member + offset + 50] ^= 1
    shard.write_bytes(tar)
    video = fastvid.open(copy)["intra"]
    assert read_numbers(video.frames([29, 31]).data[..., 0]) == [29, 31]
    with pytest.raises(ChecksumError) as caught:
        video.frames([29, 30])
    assert caught.value.where == {"shard": "data-000000", "key": "intra", "packet": 30}


def test_threads_read_the_same_frames(folder):
    dataset = fastvid.open(folder)
    found = []

    def work(first):
        for number in range(first, 60, 7):
            key = ("compact", "intra", "vp9")[number % 3]
            found.append(read_numbers(dataset[key].frames([number]).data[..., 1]) == [number])

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * len([n for first in range(4) for n in range(first, 60, 7)])


def test_stream_in_memory_decodes_and_raises_when_truncated(videos):
    video = videos.painted("pyramid")
    batch = decode_frames(video.info, video.table, reader_of(video.data), [3, 44])
    assert read_numbers(batch.data[..., 2]) == [3, 44]
    cut = reader_of(video.data[:2000])
    with pytest.raises(ChecksumError, match="2000"):
        decode_frames(video.info, video.table, cut, [44])


def test_read_clip_reads_the_planned_packets(videos):
    video = videos.painted("compact")
    request = ClipRequest(0, np.array([5, 37]), video.full, (96, 160))
    clip, expected = read_clip(request, video.info, video.table, reader_of(video.data)), video.clip([5, 37])
    assert bytes(clip.data) == bytes(expected.data)
    for name in ("starts", "sizes", "shows", "keys"):
        assert np.array_equal(getattr(clip, name), getattr(expected, name))
