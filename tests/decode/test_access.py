"""Random access to frames by key, as in a notebook."""

from __future__ import annotations

import pickle
import threading
from fractions import Fraction

import numpy as np
import pytest

import fastvid
from fastvid.decode.access import decode_frames
from fastvid.decode.clips import read_clip, reader_of
from fastvid.decode.request import ClipRequest
from fastvid.errors import ChecksumError, StateError, StorageError, UsageError
from tests.datasets import pack
from tests.load.loaders import clip_loader
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


def test_a_used_dataset_and_its_videos_pickle(folder):
    videos = fastvid.open(folder)
    expected = [video.frames([0]).data.tobytes() for video in videos]
    again = pickle.loads(pickle.dumps(videos))
    assert videos.is_open(0)
    assert not again.is_open(0), "another process opens what it uses"
    assert [video.frames([0]).data.tobytes() for video in again] == expected
    assert pickle.loads(pickle.dumps(videos[0])).frames([0]).data.tobytes() == expected[0]


def test_an_unknown_key_or_number_is_a_key_error_an_index_error_and_a_usage_error(folder):
    videos = fastvid.open(folder)
    for kind in (KeyError, IndexError, UsageError):
        with pytest.raises(kind, match=r"^no sample has the key 'nope'") as caught:
            videos["nope"]
        assert caught.value.hint
        for number in (len(videos), -1):
            with pytest.raises(kind, match=f"sample {number} is outside the selection"):
                videos[number]
    with pytest.raises(UsageError, match=r"sample is 1\.5, expected an integer"):
        videos[1.5]
    with pytest.raises(IndexError, match="cannot select samples"):
        videos[[0, 99]]
    assert videos[np.int64(1)].key == videos[1].key
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == str(caught.value)


@pytest.mark.parametrize("samples", [slice(1, 3), slice(None, None, 2), slice(-2, None), [0, 2], np.array([1, 2])])
def test_slices_and_lists_select_a_dataset(folder, samples):
    videos = fastvid.open(folder)
    videos.keys, videos.labels, videos.shard_sizes  # noqa: B018 - cached values must not pass to the selection
    chosen = videos[samples]
    numbers = np.arange(len(videos))[samples].tolist()
    assert [video.key for video in chosen] == [videos[number].key for number in numbers]
    assert chosen.labels.tolist() == videos.labels[numbers].tolist()
    assert chosen.shard_sizes.sum() == len(chosen) == len(numbers)
    assert chosen.find(chosen[0].key) == 0
    assert len(videos) > len(chosen)


@pytest.mark.parametrize("samples", [[2, 1], [1, 1], [-1, 0], [], slice(0, 0), [0.5]])
def test_samples_that_make_no_selection_are_refused(folder, samples):
    with pytest.raises(UsageError) as caught:
        fastvid.open(folder)[samples]
    assert caught.value.hint


def test_a_loader_state_belongs_to_its_selection(folder):
    def loader(videos):
        return clip_loader(
            videos, frames=fastvid.Uniform(2), spatial=fastvid.CenterCrop(32), global_batch_size=1, decoder="pyav"
        )

    videos = fastvid.open(folder)
    state = loader(videos[1:]).state_dict()
    loader(fastvid.open(folder)[1:]).load_state_dict(state)
    for other in (videos, videos[:-1]):
        with pytest.raises(StateError, match="another filter"):
            loader(other).load_state_dict(state)
