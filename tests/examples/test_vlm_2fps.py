"""The example for video-language models makes what the model takes, and resumes in another world."""

import pytest
import torch

from tests.datasets import make_clip, pack
from tests.examples import kit

LOOKS = [("96x64", 25, 130), ("64x96", 10, 31), ("80x80", 30, 20), ("128x32", 24, 100)]


@pytest.fixture(scope="module")
def example():
    return kit.load("vlm_2fps")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vlm")
    clips = [
        make_clip(folder / f"{number}.mp4", size=size, rate=rate, frames=frames)
        for number, (size, rate, frames) in enumerate(LOOKS)
    ]
    pack(folder / "set", [[(f"v{n}", clips[n % 4], 0) for n in range(8)]])
    return str(folder / "set")


def test_patches_and_grids_are_those_of_the_clips(example, url):
    seen = set()
    for batch in example.make(url, decoder="pyav"):
        made = example.inputs(batch)
        grids = made["video_grid_thw"].tolist()
        parts = torch.split(made["pixel_values_videos"], [t * h * w for t, h, w in grids])
        for key, clip, patches, (t, h, w), seconds in zip(
            batch.key, batch.video, parts, grids, made["second_per_grid_ts"].tolist(), strict=True
        ):
            assert clip.shape == (3, 2 * t, 14 * h, 14 * w)
            assert h % 2 == w % 2 == 0
            # Qwen2-VL: patches of one merged token follow each other; the second one is to the right of the first.
            assert torch.equal(patches[1].reshape(3, 2, 14, 14), clip[:, :2, :14, 14:28])
            assert torch.equal(patches[2].reshape(3, 2, 14, 14), clip[:, :2, 14:28, :14])
            assert torch.equal(patches[4].reshape(3, 2, 14, 14), clip[:, :2, :14, 28:42])
            assert torch.equal(patches[h * w].reshape(3, 2, 14, 14), clip[:, 2:4, :14, :14])
            _, rate, frames = LOOKS[int(key[1:]) % 4]
            expected = frames / rate * 2 // 2 * 2
            assert 2 * t == max(4, expected if frames / rate >= 2 else 4)
            if frames / rate >= 2:
                assert seconds == pytest.approx(1, abs=1 / rate)
            seen.add(key)
    assert seen == {f"v{n}" for n in range(8)}


def test_a_run_of_one_rank_continues_on_two(example, url):
    def rows(loaders):
        return [
            [(key, clip.numpy().tobytes()) for part in parts for key, clip in zip(part.key, part.video, strict=True)]
            for parts in zip(*loaders, strict=True)
        ]

    whole = rows([example.make(url, decoder="pyav", seed=3)])
    first = example.make(url, decoder="pyav", seed=3)
    next(iter(first))
    ranks = [example.make(url, decoder="pyav", seed=3, rank=rank, world_size=2) for rank in range(2)]
    for loader in ranks:
        loader.load_state_dict(first.state_dict())
    assert rows(ranks) == whole[1:]


def test_the_example_runs(example, url, capsys):
    example.main(url)
    assert capsys.readouterr().out.count("pixel_values_videos") == 2
