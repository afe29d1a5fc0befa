"""Several cameras and every frame of an episode: what each item shows is computed by hand from the episodes."""

import numpy as np
import pytest
import torch

import fastvid
from fastvid.errors import UsageError
from tests.datasets import make_clip, pack
from tests.load.tools import rows, walk

TOP, WRIST = "observation.images.top", "observation.images.wrist"
LENGTHS = (9, 1, 14, 6, 20)
OUTPUT = fastvid.Output(dtype=torch.uint8)
DELTAS = fastvid.Deltas([-0.08, 0.0, 0.04], tolerance=1e-4)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Episodes of two cameras of different sizes; the pixels of each differ from frame to frame."""
    folder = tmp_path_factory.mktemp("cameras")
    episodes = []
    for number, frames in enumerate(LENGTHS):
        top = make_clip(folder / f"top{number}.mp4", frames=frames, size="96x64", filters=f"hue=h={60 * number}")
        wrist = make_clip(
            folder / f"wrist{number}.mp4", frames=frames, size="64x80", filters=f"hue=h={60 * number + 30}"
        )
        episodes.append((f"episode{number}", {TOP: top, WRIST: wrist}, -1))
    return pack(folder / "set", [episodes[:2], episodes[2:]], classes=()).url


def make(url, **options):
    standard = {"frames": DELTAS, "spatial": fastvid.Native(), "global_batch_size": 6}
    standard |= {"output": OUTPUT, "decoder": "pyav"}
    return fastvid.ClipLoader(fastvid.EveryFrame(fastvid.open(url)), **standard | options)


@pytest.fixture(scope="module")
def frames(url):
    """Every frame of every camera, by episode, uint8 [F, 3, H, W]."""
    found = {}
    for video in fastvid.open(url):
        for stream in (TOP, WRIST):
            whole = video.camera(stream).frames(list(range(video.num_frames)))
            found[video.key, stream] = torch.as_tensor(np.asarray(whole.data)).permute(0, 3, 1, 2)
    return found


def test_cameras_show_the_same_frames(url, frames):
    loader = fastvid.ClipLoader(
        fastvid.open(url), frames=fastvid.Segments(3), spatial=fastvid.Native(), global_batch_size=2, output=OUTPUT
    )
    assert loader.dataset.streams == (TOP, WRIST)
    for batch in loader:
        assert batch.video is batch[TOP]
        assert (batch[TOP].shape[-2:], batch[WRIST].shape[-2:]) == ((64, 96), (80, 64))
        for row, key in enumerate(batch.key):
            for stream in (TOP, WRIST):
                expected = frames[key, stream][batch.frame_index[row]]
                assert torch.equal(batch[stream][row].transpose(0, 1), expected)


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_every_frame_is_an_item_once_an_epoch(url, frames, workers):
    loader = make(url, last="keep", workers=fastvid.Workers(workers, num_threads=2))
    items = fastvid.EveryFrame(fastvid.open(url))
    assert len(items) == sum(LENGTHS)
    seen = []
    for batch in loader:
        samples, at = items.place(batch.sample)
        assert [f"episode{sample}" for sample in samples] == list(batch.key)
        for row, (sample, frame) in enumerate(zip(samples.tolist(), at.tolist(), strict=True)):
            wanted = np.array([frame - 2, frame, frame + 1])
            assert batch.frame_index[row].tolist() == wanted.clip(0, LENGTHS[sample] - 1).tolist()
            outside = ((wanted < 0) | (wanted >= LENGTHS[sample])).tolist()
            for stream in (TOP, WRIST):
                assert batch[f"{stream}_is_pad"][row].tolist() == outside
                expected = frames[batch.key[row], stream][batch.frame_index[row]]
                assert torch.equal(batch[stream][row].transpose(0, 1), expected)
            seen.append((sample, frame))
    assert len(seen) == len(set(seen)) == sum(LENGTHS)
    loader.close()


def test_the_same_items_in_any_world_and_after_a_stop(url):
    expected = [row for batch in make(url, last="keep") for row in rows(batch)]
    options = {"frames": DELTAS, "spatial": fastvid.Native(), "decoder": "pyav", "last": "keep"}
    legs = [(3, 3, 2), (1, 3, 4), (2, 4, 1), (1, 5, 0)]  # of 6, 4, 6 and 6 items a batch
    assert walk(fastvid.EveryFrame(fastvid.open(url)), legs, **options) == expected


@pytest.mark.parametrize("views", [None, fastvid.Views(2, 1)])
def test_a_rank_without_clips_gets_the_shapes_of_the_others(url, views):
    """A model may not accept pictures of another size, and then the other ranks would wait for this one."""
    dataset = fastvid.open(url)
    options = {"frames": DELTAS, "dataset": fastvid.EveryFrame(dataset), "global_batch_size": 7}
    if views is not None:
        options = {
            "frames": fastvid.Segments(3, jitter=False),
            "dataset": dataset,
            "views": views,
            "global_batch_size": 4,
        }
    loaders = [
        fastvid.ClipLoader(**options, spatial=fastvid.Native(), last="mask", output=OUTPUT, rank=rank, world_size=4)
        for rank in (0, 3)
    ]
    *_, (first, last) = zip(*loaders, strict=True)
    assert first.valid.any()
    assert not last.valid.any()
    for stream in (TOP, WRIST):
        assert last[stream].shape[1:] == first[stream].shape[1:]
        assert not last[stream].any()
    assert not last.weight.any()
    assert (last.frame_index == -1).all()


def test_columns_and_labels_of_items_are_those_of_their_episode(url):
    loader = make(url, fields=("key", "num_frames"), streams=[WRIST])
    for batch in loader:
        assert batch.fields["key"] == batch.key
        assert batch.fields["num_frames"] == tuple(LENGTHS[int(key[-1])] for key in batch.key)
        assert set(batch.label.tolist()) == {-100}
        assert TOP not in batch


def test_blocks_of_items_follow_the_shards(url):
    items = fastvid.EveryFrame(fastvid.open(url))
    assert items.shard_sizes.tolist() == [10, 40]
    order = [key for batch in make(url, shuffle=fastvid.BlockShuffle(1), last="keep") for key in batch.key]
    firsts = [key in ("episode0", "episode1") for key in order]
    assert firsts in ([True] * 10 + [False] * 40, [False] * 40 + [True] * 10)


def test_transforms_are_the_same_for_all_cameras(url):
    seen = []

    def dark(clip):
        seen.append(tuple(clip.shape[-2:]))
        return clip * 0

    batch = next(iter(make(url, after=[dark], shuffle=False)))
    assert set(seen) == {(64, 96), (80, 64)}
    for stream in (TOP, WRIST):
        assert not batch[stream].any()


def test_wrong_uses_are_told(url):
    with pytest.raises(UsageError, match="relative to an item of EveryFrame") as error:
        make(url, frames=fastvid.Segments(2))
    assert "Deltas" in error.value.hint
    with pytest.raises(UsageError, match=r"0\.05 s is 1\.25 frames at 25 a second"):
        next(iter(make(url, frames=fastvid.Deltas([0.05], tolerance=1e-4))))
    with pytest.raises(UsageError, match="cannot be selected"):
        fastvid.EveryFrame(fastvid.open(url)).select([1])
    with pytest.raises(UsageError, match="given a Mixture"):
        fastvid.EveryFrame(fastvid.Mixture([fastvid.open(url)]))
    with pytest.raises(UsageError, match="the dataset has observation"):
        make(url, streams=["rgb"])


def test_a_hundred_million_items_are_placed_by_arithmetic(url):
    items = fastvid.EveryFrame(fastvid.open(url))
    items._stops = np.cumsum(np.full(100_000, 1000))
    assert len(items) == 100_000_000
    assert [part.tolist() for part in items.place([0, 999, 1000, 99_999_999])] == [[0, 0, 1, 99_999], [0, 999, 0, 999]]
