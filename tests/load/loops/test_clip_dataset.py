"""ClipDataset and ExactSampler: the clips, order, shares and state of a ClipLoader, through torch's DataLoader."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import fastvid
from fastvid.errors import ChecksumError, StateError, UsageError
from fastvid.load.clip_dataset import ClipDataset, ExactSampler, SampleVisit, collate_rows
from fastvid.load.order.epoch import BlockShuffle, ClassBalanced
from fastvid.sharding.in_place import index_videos
from tests.datasets import make_clip, pack
from tests.load.fakes import FakeDataset, fake
from tests.load.tools import SPATIAL, make, rows
from tests.sharding.shardtools import make as film
from tests.sharding.shardtools import turn

# From torchdata, which calls it.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

OUTPUT = fastvid.Output(dtype=torch.uint8)


def clips_of(dataset, **options):
    standard = {"frames": fastvid.Segments(3), "spatial": SPATIAL, "decoder": fake(), "output": OUTPUT}
    return ClipDataset(dataset, **standard | options)


def sampler_of(clips, rank=0, world=1, size=6, **options):
    return ExactSampler(clips, global_batch_size=size, rank=rank, world_size=world, **options)


def epoch_of(clips, world, size, state=None, **options):
    """Return the rest of an epoch as global batches, through one DataLoader per rank."""
    ranks = []
    for rank in range(world):
        sampler = sampler_of(clips, rank, world, size, **options)
        if state is not None:
            sampler.load_state_dict(state)
        ranks.append(list(DataLoader(clips, batch_size=size // world, sampler=sampler)))
    return [[row for batch in batches for row in rows(batch)] for batches in zip(*ranks, strict=True)]


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": BlockShuffle(2)}, {"balance": ClassBalanced()}, {"clips_per_video": 2}]
)
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_clips_order_and_shares_are_those_of_a_clip_loader_and_resume_in_any_world(options, data):
    dataset, seed, epoch = FakeDataset(97), data.draw(st.integers(0, 2**64 - 1)), data.draw(st.integers(0, 3))
    world, per_rank = data.draw(st.sampled_from([1, 2, 3, 5, 7])), data.draw(st.integers(1, 4))
    of_a_video = options.get("clips_per_video", 1)
    per_rank *= of_a_video
    size = world * per_rank
    loader = make(dataset, seed=seed, global_batch_size=size, **options)
    loader.set_epoch(epoch)
    start = loader.state_dict()
    expected, states = [], []
    for batch in loader:
        expected.append(rows(batch))
        states.append(loader.state_dict())
    clips = clips_of(dataset, seed=seed)
    assert epoch_of(clips, world, size, start, **options) == expected

    # Another world and batch size continue with the next clip, from the state of a loader or of a sampler.
    at = data.draw(st.integers(0, len(expected) - 2))
    other = data.draw(st.sampled_from([1, 2, 3, 5, 7]))
    least = other * of_a_video
    flat = list(itertools.chain(*expected[at + 1 :]))
    left = sampler_of(clips, 0, other, least, **options).batches.num_samples - states[at]["position"]
    if left < least:  # too few for a batch of the other world, so it begins the next epoch
        loader.set_epoch(epoch + 1)
        flat = [row for batch in loader for row in rows(batch)]
    rest = list(itertools.chain(*epoch_of(clips, other, least, states[at], **options)))
    assert rest[: len(flat)] == flat[: len(rest)]
    assert len(rest) >= len(flat) - least

    sampler = sampler_of(clips, world - 1, world, size, **options)
    sampler.load_state_dict(start)
    batches = iter(DataLoader(clips, batch_size=per_rank, sampler=sampler))
    for _ in range(at + 1):
        batch = next(batches)
    own = {name: states[at][name] for name in sampler.state_dict()}
    assert sampler.state_dict() == sampler.state_dict(after=batch) == own


@pytest.mark.parametrize("last", ["drop", "keep"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_epoch_has_every_sample_once_and_its_length_is_true(last, world):
    clips = clips_of(FakeDataset(43))
    samplers = [sampler_of(clips, rank, world, 6, last=last) for rank in range(world)]
    visits = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(part) for part in visits]
    positions = sorted(visit.position for part in visits for visit in part)
    assert positions == list(range(42 if last == "drop" else 43))


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("spawn", 1), ("forkserver", 1)])
def test_worker_processes_deliver_the_same_batches(tmp_path, method, workers):
    data = make_clip(tmp_path / "clip.mp4", frames=20)
    pack(tmp_path / "set", [[(f"clip{number}", data, number % 2) for number in range(16)]])
    dataset = fastvid.open(tmp_path / "set")
    dataset[0].frames([0])  # its shard is open before the processes start
    parts = {"frames": fastvid.Segments(4), "spatial": fastvid.RandomResizedCrop(32)}
    loader = fastvid.ClipLoader(dataset, global_batch_size=4, decoder="pyav", fields=("num_frames",), **parts)
    clips = ClipDataset(dataset, fields=("num_frames",), **parts)
    sampler = sampler_of(clips, size=4)
    options = {"num_workers": workers, "multiprocessing_context": method, "persistent_workers": True}
    mine = DataLoader(clips, 4, sampler=sampler, **options)
    for epoch in range(2):
        for batch, expected in zip(mine, loader, strict=True):
            assert isinstance(batch, fastvid.Batch)
            assert (batch.epoch, batch.start, batch.stop) == (epoch, expected.start, expected.stop)
            assert set(batch) == set(expected)
            assert (batch.key, dict(batch.fields)) == (expected.key, dict(expected.fields))
            for name in ("video", "label", "weight", "valid", "frame_index", "sample", "position"):
                assert torch.equal(batch[name], expected[name]), name


def test_a_stateful_dataloader_resumes_at_the_delivered_batch_despite_prefetching_workers():
    clips = clips_of(FakeDataset(48))

    def loader():
        return StatefulDataLoader(clips, batch_size=4, sampler=sampler_of(clips, size=4), num_workers=2)

    whole = [rows(batch) for batch in loader()]
    for taken in (1, 5, 11):
        first = loader()
        seen = [rows(batch) for batch in itertools.islice(first, taken)]
        resumed = loader()
        resumed.load_state_dict(first.state_dict())
        assert seen + [rows(batch) for batch in resumed] == whole


def test_a_dataloader_with_prefetching_workers_resumes_after_the_last_batch_used():
    clips = clips_of(FakeDataset(48))
    sampler = sampler_of(clips, size=4)
    whole, used = [], None
    for number, batch in enumerate(DataLoader(clips, batch_size=4, sampler=sampler, num_workers=2)):
        whole.append(rows(batch))
        used = batch if number == 3 else used
    resumed = sampler_of(clips, size=4)
    resumed.load_state_dict(sampler.state_dict(after=used))
    assert [rows(batch) for batch in DataLoader(clips, batch_size=4, sampler=resumed)] == whole[4:]


def test_a_loop_ended_early_begins_again_where_it_began_and_each_epoch_differs():
    clips = clips_of(FakeDataset(24))
    sampler = sampler_of(clips)
    first = list(itertools.islice(sampler, 7))
    again = list(sampler)
    assert again[:7] == first
    following = list(sampler)
    assert ({visit.epoch for visit in again}, {visit.epoch for visit in following}) == ({0}, {1})
    assert [visit.sample for visit in following] != [visit.sample for visit in again]
    sampler.set_epoch(0)
    assert list(sampler) == again
    # zip asks its first argument first, so the sampler is never asked beyond its last visit.
    sampler.set_epoch(0)
    taken = [visit for _, visit in zip(range(24), sampler, strict=False)]
    assert (taken, next(iter(sampler)).epoch) == (again, 1)


def test_one_read_delivers_the_clips_of_single_reads_in_the_order_asked_for():
    clips = clips_of(FakeDataset(40), seed=3)
    clips.set_epoch(2)
    asked = [5, 39, 5, SampleVisit(7, 20, 9, 4, 0, 40), -1, 0]
    together, alone = clips.__getitems__(asked), [clips[index] for index in asked]
    for one, other in zip(together, alone, strict=True):
        assert one["key"] == other["key"]
        assert torch.equal(one["video"], other["video"])
        assert torch.equal(one["frame_index"], other["frame_index"])
    assert [row["sample"] for row in together] == [5, 39, 5, 7, 39, 0]
    assert [(row["epoch"], row["position"]) for row in together[2:4]] == [(2, 5), (4, 20)]
    # An integer is the position of the unshuffled epoch.
    loader = make(FakeDataset(40), seed=3, shuffle=False)
    loader.set_epoch(2)
    assert [row[-1] for batch in loader for row in rows(batch)][5] == together[0]["video"].numpy().tobytes()
    with pytest.raises(IndexError, match="sample 40 is outside a dataset of 40 samples"):
        clips[40]


def test_rows_of_plain_indices_collate_with_equal_weights():
    clips = clips_of(FakeDataset(40))
    for sampler in (range(8), [5] * 8):
        batch = next(iter(DataLoader(clips, batch_size=8, sampler=sampler)))
        assert isinstance(batch, fastvid.Batch)
        assert torch.equal(batch.weight, torch.full((8,), 1 / 8))
        assert batch.video.shape == (8, 3, 3, 16, 16)


def test_rows_of_one_read_collate_without_a_copy_and_others_by_one():
    clips = clips_of(FakeDataset(40))
    read, again = clips.__getitems__([3, 1, 2]), clips.__getitems__([2])
    for some, is_shared in (
        (read, True),
        (read[1:], True),
        (read[::-1], False),
        (read[::2], False),
        (read + again, False),
    ):
        batch = collate_rows(some)
        assert torch.equal(batch.video, torch.stack([row["video"] for row in some]))
        assert (batch.video.data_ptr() == some[0]["video"].data_ptr()) == is_shared


def test_a_damaged_clip_is_an_error_that_names_it():
    dataset = FakeDataset(20)
    dataset.damage(3)
    clips = clips_of(dataset)
    with pytest.raises(ChecksumError, match="key3"):
        clips.__getitems__([1, 3, 5])
    assert clips[1]["sample"] == 1  # the decoder can be used again
    with pytest.raises(ChecksumError, match="key3") as caught:
        list(DataLoader(clips, batch_size=4, num_workers=1))
    # torch puts the traceback of its worker process into the message.
    assert "clip_worker.py" not in str(caught.value)


def test_a_weighted_mixture_has_the_clips_of_a_clip_loader():
    mixture = fastvid.Mixture([FakeDataset(30), FakeDataset(5)], weights=[1, 2], num_samples=24)
    (rows_of_loader,) = [[row for batch in make(mixture, global_batch_size=6, last="keep") for row in rows(batch)]]
    found = epoch_of(clips_of(mixture), 2, 6)
    assert [row for batch in found for row in batch] == rows_of_loader


@pytest.mark.parametrize("shown", ["stretched", "turned"])
@pytest.mark.parametrize("resize", ["exact", "fast"])
def test_clips_of_pictures_that_are_changed_to_be_shown_do_not_depend_on_those_read_with_them(tmp_path, shown, resize):
    (tmp_path / "films").mkdir()
    if shown == "turned":
        turn(film(tmp_path / "upright.mp4"), tmp_path / "films" / "turned.mp4")
    else:
        film(tmp_path / "films" / "wide.mp4", "-vf", "setsar=2")
    index_videos([str(tmp_path / "films")], tmp_path / "set", workers=1)
    spatial = [fastvid.RandomResizedCrop(64), fastvid.HorizontalFlip()]
    output = fastvid.Output(dtype=torch.uint8, resize=resize)
    options = {"frames": fastvid.Uniform(2), "spatial": spatial, "output": output}
    clips = ClipDataset(fastvid.open(tmp_path / "set"), **options)
    visits = list(ExactSampler(clips, global_batch_size=4, order=fastvid.Order(clips_per_video=4)))
    together = clips.__getitems__(visits)
    assert len(together) == 4
    for row, visit in zip(together, visits, strict=True):
        assert torch.equal(row["video"], clips[visit]["video"])


def test_wrong_use_is_refused_with_a_hint():
    clips = clips_of(FakeDataset(40))
    with pytest.raises(UsageError, match=r"global_batch_size 8 is not a multiple of 3: 3 ranks\n"):
        sampler_of(clips, 0, 3, 8)
    for options in ({"clips_per_video": 2}, {"group_size": 2}):
        with pytest.raises(UsageError, match="6 is not a multiple of 4: 2 ranks with whole groups of 2"):
            sampler_of(clips, 0, 2, 6, **options)
    with pytest.raises(StateError, match="another sampler"):
        sampler_of(clips).load_state_dict(
            sampler_of(clips_of(FakeDataset(40), frames=fastvid.Segments(4))).state_dict()
        )
    with pytest.raises(UsageError, match="last is 'mask'"):
        sampler_of(clips, last="mask")


def test_collating_clips_of_different_shape_says_what_to_do():
    small, large = clips_of(FakeDataset(8)), clips_of(FakeDataset(8), frames=fastvid.Segments(5))
    with pytest.raises(UsageError, match=r"\(3, 3, 16, 16\), \(3, 5, 16, 16\)"):
        torch.utils.data.default_collate([small[0], large[0]])
