"""ClipLoader over real shards: painted frame numbers, real processes, real damage."""

import pytest
import torch

from fastvid.errors import FormatError, StorageError
from fastvid.format.dataset import Dataset
from fastvid.load.clips.crops import CenterCrop, HorizontalFlip, RandomCrop, RandomResizedCrop
from fastvid.load.clips.sampling import Dense, Segments, Uniform
from tests.datasets import pack
from tests.load.loaders import clip_loader
from tests.makers import read_numbers

LENGTHS = (70, 33, 9, 1, 64, 40, 5)


def build(folder, videos):
    """Create a dataset of painted videos of several lengths, spread over three shards."""
    samples = [(f"painted_{length}", videos.painted("compact", frames=length).data, length % 2) for length in LENGTHS]
    pack(folder, [samples[number::3] for number in range(3)])
    return folder


@pytest.fixture(scope="module")
def compact(tmp_path_factory, videos):
    return build(tmp_path_factory.mktemp("compact"), videos)


def make(folder, **options):
    standard = {"frames": Segments(8), "spatial": [RandomResizedCrop(64), HorizontalFlip(0.5)]}
    standard |= {"global_batch_size": 4, "last": "keep", "num_threads": 2}
    return clip_loader(Dataset(str(folder)), **standard | options)


@pytest.mark.parametrize("sampler", [Segments(8), Segments(3, length=4), Dense(8, 3), Dense(8, 9, short="clamp")])
def test_the_frames_shown_match_the_frame_index(compact, sampler):
    loader = make(compact, frames=sampler, spatial=CenterCrop((96, 160)), dtype=torch.uint8)
    seen = 0
    for epoch in range(2):
        for batch in loader:
            assert batch.epoch == epoch
            for video, frames, key in zip(batch.video, batch.frame_index, batch.key, strict=True):
                assert read_numbers(video[1].numpy()) == frames.tolist(), key
                seen += 1
    assert seen == 2 * len(LENGTHS)


def test_the_crop_shown_is_a_window_of_the_frame_or_its_mirror_image(compact):
    loader = make(compact, spatial=[RandomCrop((48, 64)), HorizontalFlip(0.5)], dtype=torch.uint8, frames=Uniform(4))
    whole = make(compact, spatial=CenterCrop((96, 160)), dtype=torch.uint8, frames=Uniform(4))
    full = {key: video for batch in whole for key, video in zip(batch.key, batch.video, strict=True)}
    places = set()
    for _ in range(3):
        for batch in loader:
            for key, video in zip(batch.key, batch.video, strict=True):
                found = window(full[key], video, False) + window(full[key], video.flip(-1), True)
                assert len(found) == 1, key
                places |= set(found)
    assert len(places) > 10


def window(full, video, flip):
    """Return the even corners (y, x, flip) at which `video` [3, T, h, w] is a crop of `full`."""
    _, _, height, width = video.shape
    candidates = (full[1, 0].unfold(0, height, 2).unfold(1, width, 2) == video[1, 0]).all(-1).all(-1).nonzero() * 2
    return [
        (y, x, flip) for y, x in candidates.tolist() if torch.equal(full[:, :, y : y + height, x : x + width], video)
    ]


def test_a_truncated_or_missing_shard_is_an_error_that_names_it(tmp_path, videos):
    folder = build(tmp_path / "cut", videos)
    tar = folder / "data-000001.tar"
    whole = tar.read_bytes()
    tar.write_bytes(whole[: len(whole) // 4])
    with pytest.raises(FormatError, match=rf"tar has {len(whole) // 4} bytes[\s\S]*data-000001"):
        list(make(folder))
    tar.unlink()
    with pytest.raises(StorageError, match="data-000001"):
        list(make(folder))
    skipping = make(folder, on_error="skip", max_skip_rate=1.0)
    lost = sorted(key for batch in skipping for key, valid in zip(batch.key, batch.valid, strict=True) if not valid)
    assert lost == sorted(f"painted_{length}" for length in LENGTHS[1::3])
    assert skipping.stats.total.skips == {"StorageError": len(lost)}
