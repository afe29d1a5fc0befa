"""Depth of LeRobot datasets: distances are those of LeRobot's own loader, in place and beside encoded pictures."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

import fastvid
from fastvid.errors import UsageError
from fastvid.format.planes import DepthScale
from fastvid.sharding.change.export import export_samples
from fastvid.sharding.encode.profiles import get_profile
from fastvid.sharding.lerobot.jobs import index_lerobot, shard_lerobot
from fastvid.sharding.verify.verify import verify_dataset
from tests.sharding.lerobot.tools import FIXTURE, digest

V3 = FIXTURE.parent / "depth" / "v3"
ORACLE = json.loads((V3.parent / "items.json").read_text())
CAMERA = "observation.images.depth"


@pytest.fixture(scope="module", params=["none", "sample", "all", "encoded"])
def made(request, tmp_path_factory):
    out = tmp_path_factory.mktemp(request.param) / "set"
    if request.param == "encoded":
        shard_lerobot(f"lerobot:{V3}", out, profile=get_profile("intra").changed(short_side=48), workers=1)
    else:
        index_lerobot(f"lerobot:{V3}", out, proof=request.param, workers=1)
    return out


TWO = pytest.mark.parametrize("made", ["sample", "encoded"], indirect=True)


def loader(folder, **options):
    made = {"frames": fastvid.Deltas(ORACLE["deltas"][CAMERA]), "spatial": fastvid.Native(), "shuffle": False}
    made |= {"output": fastvid.Output(dtype=torch.uint8, layout="BTCHW"), "global_batch_size": 1}
    return fastvid.ClipLoader(fastvid.EveryFrame(fastvid.open(folder)), **(made | options))


def wrong(batches):
    items = [[digest(frame) for frame in row] for batch in batches for row in batch[CAMERA]]
    return [item for item, right in zip(items, ORACLE["items"]["mm"], strict=True) if item != right["frames"]]


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_distances_are_those_of_lerobot(made, kind):
    loaded = loader(made, workers=fastvid.Workers(kind=kind, num_threads=1))
    assert wrong(loaded) == []
    loaded.close()
    batch = next(iter(loader(made, global_batch_size=3, streams=[CAMERA])))
    assert (batch.video.shape, batch.video.dtype) == ((3, 2, 1, 48, 64), torch.float32)
    assert verify_dataset(str(made), workers=1).problems == []


def test_depth_is_written_back(made, tmp_path):
    export_samples(str(made), str(tmp_path / "back"), to="lerobot")
    index_lerobot(f"lerobot:{tmp_path / 'back'}", tmp_path / "again", workers=1)
    assert wrong(loader(tmp_path / "again")) == []
    feature = json.loads((tmp_path / "back/meta/info.json").read_text())["features"][CAMERA]
    assert feature == json.loads((V3 / "meta/info.json").read_text())["features"][CAMERA]


@TWO
def test_crops_flips_and_sizes_are_those_of_the_pictures(made):
    whole = next(iter(loader(made)))[CAMERA][0, 0, 0]
    crop = next(iter(loader(made, spatial=fastvid.CenterCrop(32), output=fastvid.Output())))[CAMERA]
    assert torch.equal(crop[0, 0, 0], whole[8:40, 16:48])
    options = {"spatial": [fastvid.RandomResizedCrop(24), fastvid.HorizontalFlip(1.0)], "seed": 2, "streams": [CAMERA]}
    small = next(iter(loader(made, **options))).video[0, 0, 0]
    assert small.shape == (24, 24)
    # Nearest levels: no distance between an object and what is behind it is made up.
    assert set(small.unique().tolist()) <= set(whole.unique().tolist())
    assert (small[:, 0] > small[:, -1]).all()  # the slope rises to the right, and is mirrored


@TWO
def test_a_clip_dataset_and_joint_clips_have_the_same_depth(made):
    dataset = fastvid.open(made)
    options = {"frames": fastvid.Uniform(4), "spatial": fastvid.Native()}
    (batch,) = fastvid.ClipLoader(dataset, **options, global_batch_size=2, shuffle=False, last="keep")
    rows = fastvid.ClipDataset(dataset, **options)
    for number in range(2):
        assert torch.equal(rows[number][CAMERA], batch[CAMERA][number])


@TWO
def test_who_cannot_decode_depth_is_refused(made):
    with pytest.raises(UsageError, match="decoder 'dali-cpu' does not decode depth"):
        loader(made, decoder="dali-cpu")
    with pytest.raises(UsageError, match="moves pixels, but not the depth of the same clips"):
        loader(made, after=[fastvid.RandAugment()])


@TWO
def test_pictures_without_more_than_8_bits_are_no_depth_and_a_scale_covers_its_range(made):
    dataset = fastvid.open(made)
    dataset.generation.extras["depth"]["observation.images.top"] = asdict(DepthScale())
    options = {"frames": fastvid.Deltas([0.0]), "spatial": fastvid.Native(), "global_batch_size": 1}
    with pytest.raises(fastvid.FastvidError, match="have no luma of more than 8 bits"):
        next(iter(fastvid.ClipLoader(fastvid.EveryFrame(dataset), **options)))
    for log in (True, False):
        table = DepthScale(0.5, 4.0, 3.5, log).millimetres()
        assert (table[0], table[-1], table.dtype) == (500, 4000, np.float32)
        assert (np.diff(table) >= 0).all()
