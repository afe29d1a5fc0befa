"""ClipLoader over real shards: painted frame numbers, real processes, real damage."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fastvid.errors import ChecksumError, FormatError, StorageError
from fastvid.format.annotations import annotation_table
from fastvid.format.dataset import Dataset
from fastvid.format.generations import Generation, ShardRecord, commit_generation
from fastvid.format.writing import sample_members, write_shard
from fastvid.load.clips.crops import CenterCrop, HorizontalFlip, RandomCrop, RandomResizedCrop
from fastvid.load.clips.sampling import Dense, Segments, Uniform
from fastvid.storage import LocalStorage
from tests.load.loaders import clip_loader
from tests.makers import Videos, read_numbers

LENGTHS = (70, 33, 9, 1, 64, 40, 5)


def build(folder: Path, videos: Videos, encoding: str, shards: int = 3) -> Path:
    """Create a dataset of painted videos of several lengths, spread over some shards."""
    storage, records, rows = LocalStorage(folder), [], []
    for number in range(shards):
        samples = []
        for length in LENGTHS[number::shards]:
            key = f"painted_{length}"
            data = videos.painted(encoding, frames=length).data
            samples.append((key, sample_members({"source_id": key}, {"rgb": data})))
            rows.append({"key": key, "source_id": key, "label": length % 4, "num_frames": length, "removed": False})
        digest = write_shard(storage, f"data-{number:06d}", samples)
        records.append(ShardRecord(f"data-{number:06d}", digest.bytes, digest.sha256, len(samples)))
    commit_generation(storage, f"painted-{encoding}", Generation(1, tuple(records)), annotation_table(rows))
    return folder


@pytest.fixture(scope="module")
def compact(tmp_path_factory, videos) -> Path:
    return build(tmp_path_factory.mktemp("compact"), videos, "compact")


@pytest.fixture(scope="module")
def vp9(tmp_path_factory, videos) -> Path:
    return build(tmp_path_factory.mktemp("vp9"), videos, "vp9")


def make(folder, **options):
    standard = {"frames": Segments(8), "spatial": [RandomResizedCrop(64), HorizontalFlip(0.5)]}
    standard |= {"global_batch_size": 4, "last": "keep", "num_threads": 2}
    return clip_loader(Dataset(str(folder)), **standard | options)


@pytest.mark.parametrize("sampler", [Segments(8), Segments(3, length=4), Dense(8, 3), Dense(8, 9, short="clamp")])
@pytest.mark.parametrize("encoding", ["compact", "vp9"])
def test_the_frames_shown_match_the_frame_index(encoding, sampler, request):
    loader = make(request.getfixturevalue(encoding), frames=sampler, spatial=CenterCrop((96, 160)), dtype=torch.uint8)
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


def test_dali_and_pyav_deliver_the_same_clips(vp9):
    pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    options = {"dtype": torch.uint8, "spatial": [RandomCrop(64), HorizontalFlip(0.5)]}
    ours, theirs = make(vp9, **options), make(vp9, decoder="dali-cpu", **options)
    for one, other in zip(ours, theirs, strict=True):
        assert one.key == other.key
        assert torch.equal(one.frame_index, other.frame_index)
        difference = (one.video.float() - other.video.float()).abs()
        # One decoder interpolates chroma, the other repeats it; a wrong frame or crop differs by 20 or more.
        assert float(difference.mean()) < 4
    full = make(vp9, decoder="dali-cpu", dtype=torch.uint8, spatial=CenterCrop((96, 160)), frames=Dense(6, 5))
    for batch in full:
        for video, frames in zip(batch.video, batch.frame_index, strict=True):
            assert read_numbers(video[1].numpy()) == frames.tolist()


def test_a_flipped_bit_in_a_planned_packet_is_detected_and_named(tmp_path, videos):
    folder = build(tmp_path / "damaged", videos, "compact", shards=1)
    tar = folder / "data-000000.tar"
    whole = tar.read_bytes()
    dataset = Dataset(str(folder))
    shard, row = dataset.shard(0), int(dataset.locate([dataset.find("painted_33")])[1][0])
    start, _ = shard.member(row)
    records = shard.table(row).records
    options = {"frames": Uniform(33), "spatial": CenterCrop(64), "global_batch_size": 7, "shuffle": False}
    rng = np.random.default_rng(0)
    for packet in rng.permutation(len(records))[:8].tolist():
        damaged = bytearray(whole)
        byte = start + int(records["offset"][packet]) + int(rng.integers(int(records["size"][packet])))
        damaged[byte] ^= 1 << int(rng.integers(8))
        tar.write_bytes(damaged)
        with pytest.raises(ChecksumError) as caught:
            list(make(folder, **options))
        where = caught.value.where
        assert (where["packet"], where["key"], where["shard"]) == (packet, "painted_33", "data-000000")
        (batch,) = make(folder, on_error="skip", **options)
        assert [key for key, valid in zip(batch.key, batch.valid, strict=True) if not valid] == ["painted_33"]
    tar.write_bytes(whole)
    (batch,) = make(folder, **options)
    assert batch.valid.all()


def test_a_truncated_or_missing_shard_is_an_error_that_names_it(tmp_path, videos):
    folder = build(tmp_path / "cut", videos, "compact")
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
