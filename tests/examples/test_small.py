"""The whole idea in one file gives the product's very clips."""

import numpy as np
import pytest
import torch

import fastvid
from tests.datasets import make_clip, pack
from tests.examples.kit import load

INTRA = "-c:v libx264 -threads 1 -preset ultrafast -x264-params keyint=1"
SEED = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two shards of videos of several sizes and lengths, one of them shorter than a clip, one removed."""
    made = tmp_path_factory.mktemp("small")
    kinds = [
        {"frames": 40, "size": "320x240"},
        {"frames": 5},
        {"frames": 33, "size": "98x130"},
        {"frames": 20, "arguments": INTRA},
        {"frames": 64, "size": "176x144"},
        {"frames": 8},
        {"frames": 50, "size": "64x256"},
        {"frames": 9, "size": "256x64"},
    ]
    clips = [make_clip(made / f"{number}.mp4", **kind) for number, kind in enumerate(kinds)]
    samples = [(f"clip{number}", data, 0) for number, data in enumerate(clips)]
    pack(made / "set", [samples[:3], samples[3:]], columns={"removed": [number == 2 for number in range(len(samples))]})
    return str(made / "set")


def product(folder, batch, epoch, rank=0, world=1):
    """Return the product's loader at the start of an epoch."""
    loader = fastvid.ClipLoader(
        fastvid.open(folder), frames=fastvid.Segments(8),
        spatial=[fastvid.RandomResizedCrop(112), fastvid.HorizontalFlip()], global_batch_size=batch, seed=SEED,
        rank=rank, world_size=world, output=fastvid.Output(dtype=torch.uint8), workers=fastvid.Workers(num_threads=1),
    )  # fmt: skip
    loader.load_state_dict(loader.state_dict() | {"epoch": epoch})
    return loader


def compare(folder, batch, epoch, rank=0, world=1):
    """Compare an epoch of one rank, and return how many clips it had."""
    mine = load("small").Loader(folder, batch, seed=SEED, epoch=epoch, rank=rank, world_size=world)
    clips = 0
    for theirs, (positions, video) in zip(product(folder, batch, epoch, rank, world), mine, strict=True):
        assert theirs.position.tolist() == positions.tolist()
        assert np.array_equal(theirs.video.numpy(), video)
        clips += len(video)
    return clips


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_small_loader_gives_the_clips_of_the_product(folder, world):
    for epoch in (0, 1):
        assert sum(compare(folder, 3, epoch, rank, world) for rank in range(world)) == 6  # of 7 samples


def test_the_small_loader_resumes_anywhere_with_another_world(folder):
    small = load("small")
    whole = dict(zip(range(6), np.concatenate([video for _, video in small.Loader(folder, 2, seed=SEED)]), strict=True))
    for rank in range(2):
        for positions, video in small.Loader(folder, 4, seed=SEED, position=2, rank=rank, world_size=2):
            assert all(np.array_equal(whole[position], clip) for position, clip in zip(positions, video, strict=True))
    assert not np.array_equal(whole[0], next(iter(small.Loader(folder, 2, seed=SEED + 1)))[1][0])
