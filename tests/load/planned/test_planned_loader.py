"""ClipLoader with Buckets and Packed: exact, elastic, resumable, and the shapes that they promise."""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastvid.errors import StateError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.batch.assemble import Patches
from fastvid.load.clips.crops import CenterCrop, HorizontalFlip, Native, RandomResizedCrop, Resize
from fastvid.load.clips.sampling import Segments
from fastvid.load.clips.timed_sampling import AtFps, Window
from fastvid.load.clips.views import Views
from fastvid.load.order.buckets import Buckets
from fastvid.load.order.packed import Packed
from tests.datasets import make_clip, pack
from tests.load.fakes import fake
from tests.load.planned.tools import BUCKETS, LOOKS, PACKED, Every, FakeVideos, loaders, rows, together
from tests.load.tools import make

PLANS = [BUCKETS, PACKED]
OPEN, RATE = Buckets([(1, 32, 32), (2, 32, 48), (2, 48, 32), (3, 32, 48)], per_batch=7), AtFps(6, max_frames=8)
CASES = {
    "buckets": (BUCKETS, {}),
    "packed": (PACKED, {}),
    # Buckets decide lengths and sizes that sampler and crop leave open.
    "windows": (OPEN, {"frames": Window(fps=6), "spatial": Native(8)}),
    "rates": (OPEN, {"frames": RATE, "spatial": Resize(short_side=24)}),
    "regions": (OPEN, {"frames": RATE, "spatial": [RandomResizedCrop(None), HorizontalFlip(0.5)]}),
}
WORLDS = (1, 2, 3, 5, 7)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Let a small epoch have several blocks."""
    monkeypatch.setattr("fastvid.load.order.packed._STEPS_OF_BLOCK", 2)


@pytest.mark.parametrize(("batches", "chosen"), CASES.values(), ids=CASES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_loader_stopped_anywhere_continues_in_another_world(batches, chosen, data):
    seed, size = data.draw(st.integers(0, 2**64 - 1)), data.draw(st.integers(60, 130))
    last = data.draw(st.sampled_from(["drop", "mask", "keep"]))
    dataset, options = FakeVideos(size), {"seed": seed, "last": last, **chosen}
    whole = together(loaders(dataset, batches, 1, **options))
    delivered = [row for *_, rows_ in whole for row in rows_]
    assert len({row[1] for row in delivered}) == len(delivered)
    assert len(delivered) == size or last == "drop"
    assert len({row[-2] for row in delivered}) > 2  # clips of several shapes
    found, state = [], None
    while len(found) < len(whole):
        world, steps = data.draw(st.sampled_from(WORLDS)), data.draw(st.integers(1, 6))
        ranks = loaders(dataset, batches, world, **options)
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(json.loads(state))
        assert {rank.steps_left for rank in ranks} == {len(whole) - len(found)}
        iterators = [iter(rank) for rank in ranks]
        found += together([itertools.islice(one, steps) for one in iterators])
        states = {json.dumps(rank.state_dict()) for rank in ranks}
        assert len(states) == 1
        state = states.pop()
        assert set(json.loads(state)) == {"version", "fingerprint", "seed", "epoch", "position"}
        for iterator in iterators:
            iterator.close()
    assert found == whole


@pytest.mark.parametrize("batches", PLANS, ids=["buckets", "packed"])
def test_the_next_epoch_follows_and_differs(batches):
    (loader,) = loaders(FakeVideos(90), batches, 1, last="mask")
    first, steps = together([loader]), len(loader)
    assert (loader.epoch, loader.position, steps) == (1, 0, len(loader))
    second = together([loader])
    assert first != second
    assert {row[1] for _, _, found in first for row in found} == {row[1] for _, _, found in second for row in found}
    loader.set_epoch(0)
    assert together([loader]) == first


def test_the_clips_of_a_bucket_have_its_shape_and_their_row_of_the_batch():
    dataset = FakeVideos(130)
    (loader,) = loaders(dataset, BUCKETS, 1, last="keep")
    shapes = set()
    for batch in loader:
        frames, height, width = batch.video.shape[2:]
        shape = (frames, height, width)
        shapes.add(shape)
        assert shape in BUCKETS.shapes
        assert batch.frame_index.shape == (batch.num_rows, frames)
        assert all(dataset.lengths[sample] >= frames for sample in batch.sample.tolist())
        # Channel 0 is the sample and channel 1 the frame, see `picture`.
        assert torch.equal(batch.video[:, 0, 0, 0, 0], batch.sample.to(torch.uint8))
        assert torch.equal(batch.video[:, 1, :, 0, 0], batch.frame_index.to(torch.uint8))
        if shape == (4, 24, 16):
            assert all(height > width for _, height, width in (LOOKS[sample % 5] for sample in batch.sample.tolist()))
    assert len(shapes) == 4


def test_the_clips_of_a_bucket_are_those_that_sampler_and_crop_of_its_shape_draw():
    # The same position, sampler and crop with a fixed batch size: the same random numbers.
    dataset, batches = FakeVideos(40), Buckets([(4, 16, 16)], 8, unfit="skip")
    (loader,) = loaders(dataset, batches, 1, spatial=[CenterCrop(None)], last="keep")
    planned = {row[0]: row for _, _, found in together([loader]) for row in found}
    fixed = make(dataset, frames=Segments(4), spatial=CenterCrop(None).of_size((16, 16)), last="keep")
    plain = {row[0]: row for batch in fixed for row in rows(batch)}
    assert planned
    assert planned == {position: plain[position] for position in planned}


def test_packed_rows_are_the_patches_of_whole_clips():
    dataset = FakeVideos(130)
    (listed,) = [make(dataset, frames=Every(), spatial=[Native(8)], collate="list", last="keep", dtype=torch.float32)]
    clips = {int(batch.sample[row]): batch.video[row] for batch in listed for row in range(batch.num_rows)}
    for merge in (1, 2):
        packed = Packed(200, (2, 8, 8), merge=merge, bins=7, window=16)
        (loader,) = loaders(dataset, packed, 1, spatial=[Native(8 * merge)], last="keep", dtype=torch.float32)
        seen = 0
        for batch in loader:
            assert batch.video.shape == (int(batch.cu_seqlens[-1]), 3 * 2 * 8 * 8)
            assert batch.cu_seqlens.dtype == torch.int32
            assert batch.grid.prod(dim=1).tolist() == batch.cu_seqlens.diff().tolist()
            assert batch.max_seqlen == int(batch.cu_seqlens.diff().max())
            for first, end in itertools.pairwise(batch.bins.tolist()):
                assert int(batch.cu_seqlens[end] - batch.cu_seqlens[first]) <= 200
            for row, sample in enumerate(batch.sample.tolist()):
                patches = batch.video[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]]
                t, h, w = batch.grid[row].tolist()
                if merge == 1:
                    assert torch.equal(patches, one_by_one(clips[sample], t, h, w))
                seen += 1
        assert seen == 130


def one_by_one(clip, t, h, w):
    """Return the patches of a clip, cut out one after the other."""
    if clip.shape[1] % 2:
        clip = torch.cat([clip, clip[:, -1:]], dim=1)
    return torch.stack(
        [
            clip[:, 2 * i : 2 * i + 2, 8 * j : 8 * j + 8, 8 * k : 8 * k + 8].reshape(-1)
            for i, j, k in itertools.product(range(t), range(h), range(w))
        ]
    )


def test_patches_are_in_the_order_of_qwen2_vl():
    # The reshape and transpose of transformers' Qwen2VLImageProcessor._preprocess, on [T, C, H, W].
    video = torch.arange(4 * 3 * 56 * 84, dtype=torch.float32).view(4, 3, 56, 84)
    t, h, w = 2, 4, 6
    theirs = video.numpy().reshape(t, 2, 3, h // 2, 2, 14, w // 2, 2, 14)
    theirs = theirs.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, 3 * 2 * 14 * 14)
    for layout, clip in (("BTCHW", video), ("BCTHW", video.transpose(0, 1))):
        packed, grids = Patches((2, 14, 14), 2, layout).pack([clip])
        assert grids.tolist() == [[t, h, w]]
        assert np.array_equal(packed.numpy(), theirs)


def test_clips_that_are_no_multiple_of_the_patch_are_filled_up():
    clip = torch.arange(1, 1 + 3 * 3 * 3 * 5, dtype=torch.float32).view(3, 3, 3, 5)
    packed, grids = Patches((2, 2, 4), 1, "BCTHW").pack([clip, clip[:, :0, :0, :0]])
    assert grids.tolist() == [[2, 2, 2], [1, 1, 1]]
    first = packed[0].view(3, 2, 2, 4)
    assert torch.equal(first, clip[:, :2, :2, :4])
    corner = packed[7].view(3, 2, 2, 4)
    assert torch.equal(corner[:, 0, 0, 0], clip[:, 2, 2, 4])
    assert torch.equal(corner[:, 1], corner[:, 0])  # the last frame twice
    assert not corner[:, :, 1].any()
    assert not corner[..., 1:].any()
    assert not packed[8].any()


def test_a_rank_without_bins_gets_one_masked_row():
    ranks = loaders(FakeVideos(3), Packed(400, (2, 8, 8), merge=2, bins=7), 7, last="mask")
    batches = [next(iter(rank)) for rank in ranks]
    empty = [batch for batch in batches if not batch.valid.any()]
    assert len(empty) == 6
    for batch in empty:
        assert batch.grid.tolist() == [[1, 2, 2]]
        assert not batch.video.any()
        assert batch.weight.tolist() == [0]
    assert sum(float(batch.weight.sum()) for batch in batches) == pytest.approx(1)


@pytest.mark.parametrize("batches", PLANS, ids=["buckets", "packed"])
def test_damaged_clips_are_masked_and_all_others_are_as_before(batches):
    dataset = FakeVideos(130)
    whole = together(loaders(dataset, batches, 1, last="mask"))
    for sample in (7, 50):
        dataset.damage(sample)
    options = {"last": "mask", "on_error": "skip", "max_skip_rate": 0.5}
    found = together(loaders(dataset, batches, 3, **options))
    kept = [(start, stop, [row for row in rows_ if row[1] not in (7, 50)]) for start, stop, rows_ in whole]
    assert found == kept
    for batch in loaders(dataset, batches, 1, **options)[0]:
        for row in (~batch.valid).nonzero().flatten().tolist():
            edges = batch.cu_seqlens.tolist() if "cu_seqlens" in batch else range(batch.num_rows + 1)
            assert not batch.video[edges[row] : edges[row + 1]].any()


@pytest.mark.parametrize(
    ("batches", "other", "part"),
    [
        (BUCKETS, {"batches": Buckets(BUCKETS.shapes, 8)}, "batches"),
        (PACKED, {"batches": Packed(208, (2, 8, 8), bins=7)}, "batches"),
        (PACKED, {"frames": Every(2)}, "batches|sampler"),
    ],
)
def test_a_state_of_other_batches_is_refused(batches, other, part):
    dataset = FakeVideos(90)
    (loader,) = loaders(dataset, batches, 1)
    state = loader.state_dict()
    (changed,) = loaders(dataset, **{"batches": batches, "world": 1} | other)
    with pytest.raises(StateError, match=f"another ({part})"):
        changed.load_state_dict(state)


@pytest.mark.parametrize("batches", PLANS, ids=["buckets", "packed"])
def test_changed_facts_and_a_position_inside_a_batch_are_refused(batches):
    dataset = FakeVideos(90)
    (loader,) = loaders(dataset, batches, 1)
    state = loader.state_dict()
    with pytest.raises(StateError, match="position 1 is inside the batch"):
        loader.load_state_dict(state | {"position": 1})
    dataset.shards[0].lengths[0] += 9
    (changed,) = loaders(dataset, batches, 1)
    with pytest.raises(StateError, match="another batches"):
        changed.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 8}, "global_batch_size is 8 and group_size 1 with batches=Buckets"),
        ({"batches": None}, "global_batch_size is missing"),
        ({"group_size": 7}, "group_size 7"),
        ({"collate": "pad"}, "collate='pad' was given with batches="),
        ({"batches": PACKED, "views": Views(2), "frames": Segments(2, False)}, "batches=Packed was given with views"),
        ({"spatial": [CenterCrop(32)]}, "32"),
    ],
)
def test_arguments_that_contradict_planned_batches_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        loaders(FakeVideos(90), **{"batches": BUCKETS, "world": 1} | options)


def test_batches_of_varying_shape_have_no_one_size():
    (loader,) = loaders(FakeVideos(90), BUCKETS, 1)
    assert "batches=Buckets(" in repr(loader)
    with pytest.raises(UsageError, match="no global_batch_size"):
        _ = loader.global_batch_size
    with pytest.raises(UsageError, match="no global_batch_size"):
        loader.set_batch_size(4)
    assert "global_batch_size=8" in repr(make(FakeVideos(90)))


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    """A dataset of real videos of four lengths and sizes."""
    folder = tmp_path_factory.mktemp("films")
    kinds = [(9, 96, 64), (14, 64, 80), (21, 80, 48), (30, 64, 64)]
    clips = [make_clip(folder / f"{n}.mp4", frames=t, size=f"{w}x{h}") for n, (t, w, h) in enumerate(kinds)]
    samples = [(f"clip{n:02d}", clips[n % 4], n % 2) for n in range(44)]
    pack(folder / "set", [samples[:20], samples[20:]])
    return folder / "set"


@pytest.mark.parametrize(
    "batches",
    [Buckets([(4, 32, 32), (8, 32, 48), (8, 48, 32)], 7), Packed(1000, (2, 8, 8), bins=7, window=16)],
    ids=["buckets", "packed"],
)
def test_processes_deliver_what_threads_deliver(films, batches):
    dataset = Dataset(films)
    options = {"last": "mask", "decoder": "pyav", "spatial": [Native(8)]}
    whole = together(loaders(dataset, batches, 1, **options))
    assert sum(len(found) for *_, found in whole) == 44
    ranks = loaders(dataset, batches, 2, **options, workers="process", num_threads=1)
    assert together(ranks) == whole


def test_planes_of_a_bucket_are_resized_to_its_shape():
    options = {"last": "keep", "decoder": fake("PlanesDecoder")}
    found = together(loaders(FakeVideos(60), BUCKETS, 2, **options))
    assert {row[-2][2:] for *_, rows_ in found for row in rows_} <= set(BUCKETS.shapes)
