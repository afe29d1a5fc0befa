"""Random access to frames by key, as in a notebook."""

import itertools
import json
import pickle
import shutil
import threading
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastvid
from fastvid.decode.clips import reader_of
from fastvid.errors import ChecksumError, StateError, StorageError, UsageError
from fastvid.format.packets import StreamInfo
from fastvid.format.presentation import Times
from fastvid.format.schema import Codec
from fastvid.sharding.change.edit import remove_samples
from fastvid.sharding.in_place import index_videos
from fastvid.storage import LocalStorage
from fastvid.storage.objects import ObjectStorage
from fastvid.videos.pictures import frames_at
from fastvid.videos.video import decode_frames
from tests.datasets import damage, pack
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


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"split": "validation"}, "did you mean val?"),
        ({"split": "Val"}, "did you mean val?"),
        ({"split": ["val"]}, "split in ('a', 'b')"),
        ({"where": "label = 'archery'"}, "compare the column class"),
        ({"where": "split = train"}, "write text in single quotes: 'train'"),
        ({"where": 5}, "a condition"),
        ({"generation": 1.5}, "give generation as an int"),
        ({"path": 5}, "give a path or URL as str or pathlib.Path"),
    ],
)
def test_a_selection_by_other_words_is_answered_with_the_right_one(folder, arguments, hint):
    with pytest.raises(UsageError) as caught:
        fastvid.open(**{"path": folder, **arguments})
    assert hint in (caught.value.hint or "")


def test_open_raises_when_there_is_no_dataset(tmp_path):
    with pytest.raises(StorageError):
        fastvid.open(tmp_path / "nothing")


def test_read_raises_when_the_shard_is_damaged(folder, tmp_path):
    damage(shutil.copytree(folder, tmp_path / "copy"), "intra", packets=[30])
    video = fastvid.open(tmp_path / "copy")["intra"]
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
    with pytest.raises(IndexError, match="sample 99 is outside the selection"):
        videos[[0, 99]]
    assert videos[np.int64(1)].key == videos[1].key
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == str(caught.value)


@pytest.mark.parametrize(
    "samples",
    [
        slice(1, 3),
        slice(None, None, 2),
        slice(-2, None),
        slice(None, None, -1),
        [0, 2],
        np.array([1, 2]),
        [2, 0, 1],
        (1,),
        [True, False, True],
        np.array([False, True, False]),
        torch.tensor([2, 1]),
        np.array([1], np.uint8),
    ],
    ids=str,
)
def test_slices_and_lists_select_a_dataset(folder, samples):
    videos = fastvid.open(folder)
    videos.keys, videos.labels, videos.shard_sizes  # noqa: B018 - cached values must not pass to the selection
    chosen = videos[samples]
    numbers = np.arange(len(videos))[samples if isinstance(samples, slice) else np.asarray(samples)].tolist()
    assert [video.key for video in chosen] == [videos[number].key for number in numbers]
    assert chosen.labels.tolist() == videos.labels[numbers].tolist()
    assert chosen.column("split").to_pylist() == [videos.column("split")[number].as_py() for number in numbers]
    assert [chosen.annotations["key"][row].as_py() for row in chosen.rows.tolist()] == chosen.keys.to_pylist()
    if numbers == sorted(numbers):
        assert chosen.shard_sizes.sum() == len(chosen) == len(numbers)
    assert chosen.find(chosen[0].key) == 0
    assert [video.key for video in videos] == ["compact", "intra", "vp9"], "the whole is not changed"


def test_a_list_of_keys_selects_and_an_unknown_one_is_named(folder):
    videos = fastvid.open(folder)
    assert [video.key for video in videos[["vp9", "compact"]]] == ["vp9", "compact"]
    with pytest.raises(KeyError, match="no sample has the key 'vp8'"):
        videos[["vp9", "vp8"]]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([1, 1], "sample 1 is selected 2 times"),
        ([-1, 0], "sample -1 is outside the selection of 3"),
        ([3], "sample 3 is outside the selection of 3"),
        ([], "no sample is selected"),
        (slice(0, 0), "no sample is selected"),
        ([False] * 3, "no sample is selected"),
        ([True, False], "mask has 2 values for 3 samples"),
        ([0.5], "cannot select samples by float64"),
        ([[0], [1]], r"cannot select samples by int64 \[2, 1\]"),
    ],
    ids=str,
)
def test_samples_that_make_no_selection_are_refused(folder, samples, message):
    with pytest.raises(UsageError, match=f"^{message}") as caught:
        fastvid.open(folder)[samples]
    assert caught.value.hint


def test_an_unknown_key_names_near_ones(tmp_path, videos):
    data = videos.painted("intra").data
    keys = ("archery/v_001", "archery/v_002", "rowing/v_003", "other")
    pack(tmp_path, [[(key, data, 0) for key in keys]])
    dataset = fastvid.open(tmp_path)
    for wrong, near in (
        ("v_003", "'rowing/v_003'"),
        ("archery/v_001.mp4", "'archery/v_001'"),
        ("Archery/V_002", "'archery/v_002'"),
        ("archery/v_0O1", "'archery/v_001', 'archery/v_002'"),
        ("ohter", "'other'"),
    ):
        with pytest.raises(KeyError) as caught:
            dataset[wrong]
        assert f"did you mean {near}?" in caught.value.hint, wrong
    with pytest.raises(KeyError) as caught:
        dataset["xyz"]
    assert "did you mean" not in caught.value.hint


def test_shard_by_shard_order_of_samples_out_of_order_is_refused(folder):
    videos = fastvid.open(folder)[[2, 0, 1]]
    options = {"frames": fastvid.Uniform(2), "spatial": fastvid.CenterCrop(32), "global_batch_size": 3}
    with pytest.raises(UsageError, match="not in the order of the shards") as caught:
        fastvid.ClipLoader(videos, **options, shuffle=fastvid.BlockShuffle(4), decoder="pyav")
    assert "sort the numbers" in caught.value.hint
    (batch,) = fastvid.ClipLoader(videos, **options, shuffle=False, decoder="pyav")
    assert batch.key == ("vp9", "compact", "intra")


def test_a_loader_takes_a_subset_in_its_order(folder):
    def keys(dataset):
        loader = fastvid.ClipLoader(
            dataset, frames=fastvid.Uniform(2), spatial=fastvid.CenterCrop(32), global_batch_size=1, decoder="pyav",
            shuffle=False,
        )  # fmt: skip
        return [batch.key[0] for batch in loader]

    videos = fastvid.open(folder)
    subset = torch.utils.data.Subset(videos, [2, 0, 1])
    assert keys(subset) == ["vp9", "compact", "intra"]
    assert keys(torch.utils.data.Subset(subset, [0, 2])) == ["vp9", "intra"]
    assert keys(fastvid.Mixture([subset, videos[[1]]])) == ["vp9", "compact", "intra", "intra"]
    parts = torch.utils.data.random_split(videos, [2, 1], torch.Generator().manual_seed(0))
    assert sorted(keys(parts[0]) + keys(parts[1])) == ["compact", "intra", "vp9"]
    with pytest.raises(UsageError, match="sample 1 is selected 2 times"):
        keys(torch.utils.data.Subset(videos, [1, 1]))
    with pytest.raises(UsageError, match="Subset of a Mixture") as caught:
        keys(torch.utils.data.Subset(fastvid.Mixture([videos]), [0]))
    assert caught.value.hint
    for wrong in ([1, 2], str(folder), torch.utils.data.Subset([1, 2], [0])):
        with pytest.raises(UsageError, match="expected a dataset of fastvid") as caught:
            keys(wrong)
        assert "fastvid.open" in caught.value.hint


def test_frames_are_chosen_by_slice(folder):
    video = fastvid.open(folder)["intra"]
    for wanted in (slice(0, 30, 9), slice(None, None, 30), slice(-3, None), slice(60, 1000, 5), slice(9, 3, -3)):
        batch = video.frames(wanted)
        assert read_numbers(batch.data[..., 1]) == batch.frames.tolist() == list(range(70))[wanted]
    assert len(video.frames(7)) == len(video.frames(np.uint8([7]))) == 1


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([0.5], r"frames are \[0\.5\], expected integers"),
        ([True, False], "frames are .*, expected integers"),
        ([[0, 1]], "frames are .*, expected integers"),
        ("5", "frames are '5', expected integers"),
        ([-1], "frame -1 is outside"),
        ([0, 70], "frame 70 is outside"),
        (slice(5, 5), "no frame requested"),
        ([], "no frame requested"),
        (None, "expected either frames or seconds"),
    ],
    ids=str,
)
def test_frames_that_are_no_indices_are_refused(folder, frames, message):
    with pytest.raises(UsageError, match=f"^{message}") as caught:
        fastvid.open(folder)["intra"].frames(frames)
    assert caught.value.hint
    assert caught.value.where["key"] == "intra"


def test_frames_are_chosen_by_time(folder):
    video = fastvid.open(folder)["intra"]
    # 25 frames per second: a frame is shown for 0.04 s. As a fraction, the double 1.2 is below 30 / 25. Times are often
    # rounded, so one that is up to a millisecond early means the frame that follows.
    for second, frame in ((0, 0), (0.0389, 0), (0.0391, 1), (0.04, 1), (1.2, 30), (1.2389, 30), (2.7999, 69)):
        batch = video.frames(seconds=second)
        assert read_numbers(batch.data[..., 1]) == batch.frames.tolist() == [frame], second
    assert video.frames(seconds=[2.0, 0.5, 2.0]).frames.tolist() == [50, 12, 50]
    for second in (-0.01, 2.8, 1e9, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="is outside the video") as caught:
            video.frames(seconds=[0.0, second])
        assert "from 0 to less than 2.8" in caught.value.hint
        assert caught.value.where["key"] == "intra"
    for wrong in ("soon", [[1.0]], [None, {}]):
        with pytest.raises(UsageError, match="seconds are"):
            video.frames(seconds=wrong)
    with pytest.raises(UsageError, match="either frames or seconds"):
        video.frames([0], seconds=[0.0])


@given(st.fractions(Fraction(1, 10), 300, max_denominator=1001), st.integers(1, 10**7), st.integers(0, 10**7))
def test_the_time_of_a_frame_leads_back_to_it(fps, num_frames, frame):
    info = StreamInfo(Codec.H264, 16, 16, num_frames, fps)
    frame %= num_frames
    times = info.seconds(np.array([frame]))
    assert times[0] == float(frame / fps)
    early = min(0.001, float(1 / fps) / 2)  # a time with three decimals means the frame that is shown next
    assert frames_at(info, np.maximum(times - 0.9 * early, 0)).tolist() == [frame]
    if frame:
        assert frames_at(info, times - 1.1 * early).tolist() == [frame - 1]


@given(st.lists(st.integers(1, 5000), min_size=2, max_size=50), st.data())
def test_times_of_frames_that_last_differently(steps, data):
    ticks = np.cumsum([0, *steps])
    tick, fps = Fraction(1, 1000), Fraction(len(ticks)) * 1000 / (int(ticks[-1]) + 40)
    info = StreamInfo(Codec.H264, 16, 16, len(ticks), fps, times=Times.of(ticks, tick, fps))
    frame = data.draw(st.integers(0, len(ticks) - 1))
    seconds = info.seconds(np.arange(len(ticks)))
    if info.times is not None:
        assert seconds.tolist() == [time / 1000 for time in ticks.tolist()]
    assert info.frames_at(seconds[[frame]]).tolist() == [frame]
    shown = info.frames_at(seconds[[frame]] + 0.01)[0]  # the last that has begun, or begins within a millisecond
    assert seconds[shown] <= seconds[frame] + 0.011
    assert shown == len(ticks) - 1 or seconds[shown + 1] > seconds[frame] + 0.01


def test_a_video_has_its_row_of_the_annotations(folder):
    video = fastvid.open(folder, split="val")[0]
    assert video.annotations["key"] == "vp9"
    assert video.annotations["split"] == "val"
    assert video.class_name == "c"
    assert video.duration == Fraction(70, 25)
    again = pickle.loads(pickle.dumps(video))
    assert (again.annotations, again.class_name) == (video.annotations, "c")


def test_a_loader_state_belongs_to_the_samples_whatever_selected_them(folder, tmp_path):
    def loader(videos, **changed):
        options = {"frames": fastvid.Uniform(2), "spatial": fastvid.CenterCrop(32), "global_batch_size": 1}
        return clip_loader(videos, **{**options, "decoder": "pyav", **changed})

    for name, gone in (("one", "intra"), ("other", "vp9")):
        shutil.copytree(folder, tmp_path / name)
        remove_samples(LocalStorage(tmp_path / name), [gone])
    one, other = (fastvid.open(tmp_path / name) for name in ("one", "other"))
    assert (one.dataset_id, one.generation.number, len(one)) == (other.dataset_id, other.generation.number, len(other))
    state = json.loads(json.dumps(loader(one).state_dict()))
    loader(fastvid.open(tmp_path / "one")).load_state_dict(state)
    with pytest.raises(StateError, match=r"another selection: 2 samples \w{16}, this loader has 2 samples \w{16}"):
        loader(other).load_state_dict(state)
    # fastvid 0.2 did not say which samples they are.
    del state["fingerprint"]["selection"]
    loader(other).load_state_dict(state | {"version": 1})
    with pytest.raises(StateError, match="another selection: None"):
        loader(other).load_state_dict(state)


def test_states_of_02_whose_clips_have_other_frames_now_are_refused_with_the_reason(folder, videos, tmp_path):
    def loader(videos, frames, **batches):
        return clip_loader(videos, frames=frames, spatial=fastvid.CenterCrop(32), decoder="pyav", **batches)

    (tmp_path / "videos").mkdir()
    shutil.copy(videos.painted("compact").path, tmp_path / "videos/one.mp4")
    index_videos([tmp_path / "videos"], tmp_path / "in place")
    buckets = {"global_batch_size": fastvid.Buckets([(2, 32, 32)], per_batch=1)}
    one, sampler = {"global_batch_size": 1}, fastvid.AtFps(2, max_frames=8)
    for made, reason in (
        (partial(loader, fastvid.open(folder), sampler, **buckets), "AtFps spread the frames of a bucket over"),
        (partial(loader, fastvid.open(tmp_path / "in place"), sampler, **one, collate="list"), "were indexed by a la"),
        (partial(loader, fastvid.open(folder), sampler, **one, collate="list"), None),
        (partial(loader, fastvid.open(folder), fastvid.Window(fps=4), **buckets), None),
    ):
        state = made().state_dict() | {"version": 1}
        del state["fingerprint"]["selection"]
        if reason is None:
            made().load_state_dict(state)
            continue
        with pytest.raises(StateError, match=f"saved by fastvid 0.2: .*{reason}") as caught:
            made().load_state_dict(state)
        assert "start at the beginning of an epoch" in caught.value.hint


def test_packets_that_are_near_each_other_are_read_in_one_request(folder):
    pytest.importorskip("obstore", reason="obstore is not installed: the extra object-stores brings it")
    from tests.storage.faulty import FaultyServer

    same = fastvid.open(folder)["compact"]
    wanted = [8, 16]
    plan = same.table.plan(wanted)
    places = [(int(record["offset"]), int(record["size"])) for record in same.table.records[plan.packets]]
    between = [after[0] - sum(before) for before, after in itertools.pairwise(places)]
    with FaultyServer() as server:
        store = LocalStorage(folder)
        for name in store.list():
            server.files[name] = store.read(name)
        video = fastvid.open(server.url)["compact"]
        assert 0 < max(between) < ObjectStorage._GAP  # there are packets between them that no frame needs
        assert np.array_equal(video.frames([0]).data, same.frames([0]).data)
        before = len(server.gets())
        assert np.array_equal(video.frames(wanted).data, same.frames(wanted).data)
        assert len(server.gets()) == before + 1
