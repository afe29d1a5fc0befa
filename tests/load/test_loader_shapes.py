"""Clips of different length and size: put together on the way to the batch, the same in any world."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastvid
from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.clips.clip import ClipRules, clip_sizes
from fastvid.load.clips.crops import CenterCrop, HorizontalFlip, Native, RandomCrop, Resize
from fastvid.load.clips.sampling import Dense, Segments, Uniform
from fastvid.load.clips.timed_sampling import AtFps, Deltas, Window
from fastvid.load.clips.views import Views
from fastvid.load.order.mixture import Mixture
from tests.datasets import make_clip, pack
from tests.load.fakes import FakeDataset, fake
from tests.load.loaders import clip_loader
from tests.load.planned.tools import LOOKS, FakeVideos
from tests.load.tools import Own, make, walk

SAMPLERS = [
    AtFps(4),
    AtFps(3, min_frames=2, max_frames=6, multiple=2),
    Window(fps=6),
    Window(seconds=0.5, num_frames=4),
    Deltas([-0.2, 0, 0.3]),
]
CROPS = [Native(), Native(8, max_pixels=1200), Resize(short_side=24), [RandomCrop(16), HorizontalFlip(0.5)]]
FREE = {"frames": AtFps(4), "spatial": Native()}


def content(batch):
    """Return all that a batch says of each valid row, comparable."""
    columns = (batch.position, batch.sample, batch.frame_index, batch.seconds, batch.fps, batch.size, batch.valid)
    made = []
    for row, (position, sample, frames, seconds, fps, size, valid) in enumerate(zip(*columns, strict=True)):
        if valid:
            mask = batch.mask[row].tolist() if "mask" in batch else None
            shown = (batch.key[row], tuple(frames.tolist()), tuple(seconds.tolist()), float(fps), tuple(size.tolist()))
            video = batch.video[row]
            made.append((int(position), int(sample), shown, mask, tuple(video.shape), video.numpy().tobytes()))
    return made


@settings(max_examples=25)
@given(
    st.sampled_from(SAMPLERS),
    st.sampled_from(CROPS),
    st.sampled_from(["pad", "list"]),
    st.sampled_from(["drop", "mask", "keep"]),
    st.integers(0, 3),
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 5, 7]), st.integers(0, 4)), min_size=2, max_size=4),
)
def test_the_rows_are_the_same_in_any_world_and_after_a_resume(sampler, crop, collate, last, epoch, legs):
    dataset = FakeVideos(47)
    options = {"frames": sampler, "spatial": crop, "collate": collate, "last": last, "seed": 5}
    alone = make(dataset, **options)
    alone.set_epoch(epoch)
    expected = [row for batch in alone for row in content(batch)]
    assert len(expected) == (40 if last == "drop" else 47)
    # Always batches of eight clips: how far a row is padded depends on the others.
    legs = [(world, 8 - world, steps) for world, steps in legs]
    assert walk(dataset, legs, epoch=epoch, of=content, **options) == expected


def test_padding_is_zero_and_masked_and_reaches_the_largest_of_the_global_batch():
    dataset, seen = FakeVideos(48), set()
    sizes = clip_sizes(dataset, ClipRules.of(dataset, FREE["frames"], FREE["spatial"]))
    loader = make(dataset, collate="pad", rank=1, world_size=3, **FREE)
    order = make(dataset, collate="list", **FREE)
    for batch, everything in zip(loader, order, strict=True):
        samples = everything.sample.numpy()
        largest = tuple(int(side[samples].max()) for side in (sizes.frames, sizes.heights, sizes.widths))
        assert batch.video.shape[2:] == largest
        assert batch.mask.dtype == torch.bool
        assert batch.mask.shape == batch.frame_index.shape == (batch.num_rows, largest[0])
        assert torch.equal(batch.mask, batch.frame_index >= 0)
        alone = dict(zip(everything.sample.tolist(), everything.video, strict=True))
        for row, sample in enumerate(batch.sample.tolist()):
            frames, height, width = alone[sample].shape[1:]
            assert (frames, height, width) == (sizes.frames[sample], sizes.heights[sample], sizes.widths[sample])
            assert batch.mask[row].tolist() == [True] * frames + [False] * (largest[0] - frames)
            padded = torch.zeros_like(batch.video[row])
            padded[:, :frames, :height, :width] = alone[sample]
            assert torch.equal(batch.video[row], padded)
            assert alone[sample].any()
            seen.add(frames == largest[0])
    assert seen == {True, False}


def test_seconds_rate_and_size_describe_each_row():
    for batch in make(FakeVideos(44), collate="pad", last="mask", **FREE):
        for row, sample in enumerate(batch.sample.tolist()):
            if sample < 0:
                assert (batch.fps[row], batch.size[row].tolist()) == (-1, [-1, -1])
                assert (batch.seconds[row] == -1).all()
                continue
            rate, *size = LOOKS[sample % len(LOOKS)]
            frames = batch.frame_index[row].tolist()
            assert batch.seconds[row].tolist() == [-1.0 if one < 0 else float(one / rate) for one in frames]
            assert batch.fps[row] == float(rate)
            spans = [(k, one - frames[0]) for k, one in enumerate(frames) if one > frames[0]]
            shown = spans[-1][0] * rate / spans[-1][1] if spans else -1
            assert float(batch.clip_fps[row]) == pytest.approx(float(shown))
            assert batch.size[row].tolist() == size
        assert (batch.seconds.dtype, batch.fps.dtype, batch.size.dtype) == (torch.float64, torch.float64, torch.int64)
    options = {"frames": Segments(3, jitter=False), "spatial": CenterCrop(16), "views": Views(2, 3)}
    (views,) = make(FakeDataset(8), decoder=fake("PlanesDecoder"), **options)
    assert torch.equal(views.seconds, views.frame_index.double() / 25)
    assert views.clip_fps.shape == (8, 6)


def test_a_skipped_clip_has_its_facts_but_no_times():
    dataset = FakeVideos(8)
    dataset.damage(3)
    (batch,) = make(dataset, collate="pad", on_error="skip", max_skip_rate=1.0, **FREE)
    row = batch.sample.tolist().index(3)
    assert not batch.valid[row]
    assert not batch.video[row].any()
    assert not batch.mask[row].any()
    assert (batch.seconds[row] == -1).all()
    assert (batch.fps[row], batch.size[row].tolist()) == (25, [20, 64])


@pytest.mark.parametrize("world", [1, 2])
def test_stacking_different_shapes_names_both_and_the_cure(world):
    loader = make(FakeVideos(48), frames=AtFps(4), spatial=CenterCrop(16), rank=world - 1, world_size=world)
    with pytest.raises(UsageError, match=r"shapes \(\d+, 16, 16\), \(\d+, 16, 16\)") as caught:
        list(loader)
    assert "collate='pad' or 'list'" in caught.value.hint


def test_every_rank_refuses_a_global_batch_of_different_shapes():
    """A rank whose own rows are alike must not train on while another one stops."""
    dataset = FakeVideos(20)  # rows of two frame rates in turn: each of two ranks sees one length
    options = {"frames": AtFps(4), "spatial": CenterCrop(16), "shuffle": False, "global_batch_size": 2}
    for rank in range(2):
        with pytest.raises(UsageError, match="have the shapes"):
            list(make(dataset, rank=rank, world_size=2, **options))


def test_clips_that_happen_to_have_one_shape_are_stacked():
    dataset = FakeDataset(40)
    for batch in make(dataset, frames=AtFps(4, min_frames=3, max_frames=3), spatial=Native()):
        assert batch.video.shape == (8, 3, 3, 32, 48)
        assert "mask" not in batch


def any_length(video, draws):
    return range(1 + draws.position % video.num_frames)


def test_a_sampler_without_count_is_padded_by_one_rank_and_refused_by_several():
    options = {"frames": Own(any_length), "spatial": Native(), "collate": "pad"}
    for batch in make(FakeVideos(40), **options):
        assert batch.mask.any(0).all()
    with pytest.raises(UsageError, match=r"Own\(\) does not say how many frames") as caught:
        make(FakeVideos(40), world_size=2, **options)
    assert "add count" in caught.value.hint


def test_a_clip_longer_than_counted_is_an_error():
    wrong = Own(any_length, count=lambda num_frames, _fps: np.ones_like(num_frames))
    with pytest.raises(UsageError, match="more frames, rows or columns than counted") as caught:
        list(make(FakeVideos(40), frames=wrong, spatial=Native(), collate="pad"))
    assert caught.value.hint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Create a dataset of videos that differ in rate, duration and size."""
    path = tmp_path_factory.mktemp("shapes")
    looks = [
        ("96x64", 25, 40),
        ("64x96", 10, 30),
        ("80x48", Fraction(30_000, 1001), 9),
        ("64x64", 24, 50),
        ("112x64", 15, 20),
        ("98x66", Fraction(24_000, 1001), 31),
    ]
    samples = [
        (f"v{number}", make_clip(path / f"{number}.mp4", size=size, rate=rate, frames=frames), number % 2)
        for number, (size, rate, frames) in enumerate(looks)
    ]
    pack(path / "set", [samples[:4], samples[4:]])
    return path / "set"


REAL = {"global_batch_size": 3, "num_threads": 1, "decoder": "pyav", "dtype": torch.uint8, "seed": 2}


def real(folder, **options):
    standard = {"frames": AtFps(4, max_frames=5), "spatial": Native(16)}
    return clip_loader(Dataset(str(folder)), **REAL | standard | options)


@pytest.mark.parametrize("collate", ["pad", "list"])
@pytest.mark.parametrize("sampler", [AtFps(4, max_frames=5), Window(fps=5), Deltas([-0.3, 0.0])])
def test_threads_and_processes_deliver_the_same_clips_in_any_world(folder, sampler, collate):
    def epoch(world, **options):
        ranks = [real(folder, rank=rank, world_size=world, **options) for rank in range(world)]
        return [[row for part in parts for row in content(part)] for parts in zip(*ranks, strict=True)]

    options = {"frames": sampler, "collate": collate}
    expected = epoch(1, **options)
    assert len(expected) == 2
    assert epoch(2, **options) == expected
    assert epoch(1, workers="process", **options) == expected
    assert epoch(3, workers="process", **options) == expected


def test_clips_show_what_the_video_shows_at_those_times(folder):
    dataset = fastvid.open(str(folder))
    for batch in real(folder, frames=Dense(30, 1, jitter=False, short="clamp"), collate="list", spatial=Native()):
        for row, key in enumerate(batch.key):
            frames = batch.frame_index[row][batch.frame_index[row] >= 0]
            shown = dataset[key].frames(frames.tolist())
            assert np.array_equal(batch.video[row].permute(1, 2, 3, 0).numpy(), shown.data)
            assert batch.seconds[row][: len(frames)].tolist() == shown.seconds.tolist()


@pytest.mark.parametrize("layout", ["BCTHW", "BTCHW"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_padding_goes_with_every_layout_and_type(folder, layout, dtype):
    options = {"layout": layout, "dtype": dtype, "shuffle": False}
    both = (real(folder, collate=collate, **options) for collate in ("pad", "list"))
    for padded, listed in zip(*both, strict=True):
        assert padded.video.dtype == dtype
        for row, alone in zip(padded.video, listed.video, strict=True):
            both = (row, alone) if layout == "BCTHW" else (row.transpose(0, 1), alone.transpose(0, 1))
            frames, height, width = both[1].shape[1:]
            assert torch.equal(both[0][:, :frames, :height, :width], both[1])
            rest = both[0].clone()
            rest[:, :frames, :height, :width] = 0
            assert not rest.any()


def test_sizes_from_annotations_are_those_of_the_clips(folder):
    dataset = Dataset(str(folder))
    for sampler in SAMPLERS:
        for crop in CROPS:
            sizes = clip_sizes(dataset, ClipRules.of(dataset, sampler, crop))
            for batch in real(folder, frames=sampler, spatial=crop, collate="list", num_threads=2):
                for sample, clip in zip(batch.sample.tolist(), batch.video, strict=True):
                    expected = (sizes.frames[sample], sizes.heights[sample], sizes.widths[sample])
                    assert tuple(clip.shape[1:]) == expected


def test_facts_of_the_annotations_are_those_that_a_sampler_sees(folder):
    dataset, seen = Dataset(str(folder)), {}

    def choose(video, _):
        seen[video.key] = video
        return [0]

    list(real(folder, frames=Own(choose), spatial=CenterCrop(16)))
    for number, key in enumerate(dataset.keys.to_pylist()):
        video = seen[key]
        for name in ("fps", "duration", "width", "height", "num_frames"):
            # Equal to the last bit: batches are planned from one and drawn from the other.
            assert getattr(video, name) == dataset.column(name)[number].as_py() == dict(video.annotations)[name]
        assert set(video.annotations) == set(dataset.annotations.column_names)
        assert len(video.annotations) == len(dataset.annotations.column_names)
    assert seen["v2"].fps == 30_000 / 1001


def test_facts_are_delivered_and_select_samples_also_of_a_mixture(folder):
    fast = Dataset(str(folder), where="fps > 24.5 and width >= 80")
    assert fast.keys.to_pylist() == ["v0", "v2"]
    assert Dataset(str(folder), where="duration < 1 or height = 96").keys.to_pylist() == ["v1", "v2"]
    names = ("fps", "duration", "width", "height")
    both = Mixture([fast, Dataset(str(folder))])
    options = {"frames": Uniform(2), "spatial": CenterCrop(16), "fields": names, "global_batch_size": 4}
    options |= REAL | {"global_batch_size": 4}
    seen = 0
    for batch in clip_loader(both, **options):
        for row in range(batch.num_rows):
            height, width = batch.size[row].tolist()
            fps, frames = float(batch.fps[row]), both.part(int(batch.sample[row]))
            facts = [fps, frames[0].num_frames[frames[1]] / fps, width, height]
            assert [batch.fields[name][row] for name in names] == facts
            seen += 1
    assert seen == 8
    mixed = clip_loader(both, **options | {"frames": AtFps(4), "spatial": Native(16), "collate": "pad"})
    keys = sorted([*fast.keys.to_pylist(), *(f"v{n}" for n in range(6))])
    assert sorted(key for batch in mixed for key in batch.key) == keys


@pytest.mark.parametrize("collate", ["stack", "pad"])
def test_a_rank_with_empty_rows_alone_has_as_many_frames_as_the_others(collate):
    for rank in range(5):
        options = {"last": "mask", "collate": collate, "rank": rank, "world_size": 5}
        *_, batch = make(FakeDataset(16), global_batch_size=9, **options)
        shapes = [batch[name].shape for name in ("frame_index", "seconds", "mask") if name in batch]
        assert set(shapes) == {(len(batch.valid), 3)}, rank
        assert len(shapes) == (3 if collate == "pad" else 2)
        assert batch.video.shape[2] == 3
    assert not batch.valid.any()
