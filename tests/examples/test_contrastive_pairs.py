"""The contrastive example learns from pairs of clips of the same video."""

import math

import pytest
import torch

from tests.datasets import make_clip, pack
from tests.examples import kit


@pytest.fixture(scope="module")
def example():
    return kit.load("contrastive_pairs")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Sixteen videos of one colour each."""
    folder = tmp_path_factory.mktemp("pairs")
    samples = []
    for number in range(16):
        colour = f"0x{255 * (number & 1):02x}{85 * (number >> 1 & 3):02x}{255 * (number >> 3 & 1):02x}"
        clip = make_clip(folder / f"{number}.mp4", filters=f"drawbox=color={colour}:t=fill")
        samples.append((f"v{number}", clip, 0))
    pack(folder / "set", [samples])
    return str(folder / "set")


def test_rows_of_a_pair_are_of_one_video_on_every_rank(example, url):
    ranks = [example.make(url, decoder="pyav", rank=rank, world_size=3) for rank in range(3)]
    keys = [key for batches in zip(*ranks, strict=True) for batch in batches for key in batch.key]
    assert keys[::2] == keys[1::2]
    assert sorted(keys[::2]) == sorted(f"v{number}" for number in range(16))


def test_the_loss_is_that_of_its_definition_and_ignores_pairs_with_a_masked_clip(example):
    features = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    valid = torch.ones(8, dtype=torch.bool)
    unit = features / features.norm(dim=1, keepdim=True)
    expected = 0.0
    for row in range(8):
        alike = {other: math.exp(float(unit[row] @ unit[other]) / 0.1) for other in range(8) if other != row}
        pair = row + 1 if row % 2 == 0 else row - 1
        expected -= math.log(alike[pair] / sum(alike.values())) / 8
    assert float(example.simclr(features, valid)) == pytest.approx(expected, rel=1e-5)
    valid[3] = False
    kept = torch.cat([features[:2], features[4:]])
    assert torch.equal(example.simclr(features, valid), example.simclr(kept, torch.ones(6, dtype=torch.bool)))


def test_the_example_learns(example, url, capsys):
    losses = example.main(url)
    # Without learning it would be the logarithm of the 15 other clips, 2.7.
    assert losses[-1] < min(losses[0], math.log(15) / 4)
    assert capsys.readouterr().out.count("loss") == 5
