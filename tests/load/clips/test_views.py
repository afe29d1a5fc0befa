"""Views and several clips of a video, decoded together, equal clips decoded separately."""

import numpy as np
import pytest
import torch

from fastvid.decode.request import Box
from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.clips.crops import CenterCrop, HorizontalFlip, RandomCrop, RandomResizedCrop, Spatial
from fastvid.load.clips.sampling import Dense, Segments, Uniform
from fastvid.load.clips.views import Views, check_views
from tests.datasets import make_clip, pack
from tests.load.fakes import HEIGHT, WIDTH, FakeDataset, fake, picture
from tests.load.loaders import clip_loader
from tests.load.tools import FixedCrop, FixedFrames, make, rows, video, views_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("views")
    sizes = {"wide": ("112x64", 40), "tall": ("64x112", 40), "short": ("96x64", 9)}
    clips = [(key, make_clip(path / f"{key}.mp4", size=size, frames=count)) for key, (size, count) in sizes.items()]
    pack(path / "set", [[(*clip, n) for n, clip in enumerate(clips)]], classes=("a", "b", "c"))
    return path / "set"


def load(folder, **options):
    standard = {"global_batch_size": 3, "shuffle": False, "last": "keep", "num_threads": 2, "dtype": torch.uint8}
    loader = clip_loader(Dataset(str(folder)), **standard | options)
    return loader, list(loader)


@pytest.mark.parametrize(
    "sampler", [Dense(6, 2, jitter=False), Segments(4, jitter=False), Segments(3, False, length=2)]
)
@pytest.mark.parametrize("crop", [CenterCrop(48), CenterCrop(40, short_side=48)])
@pytest.mark.parametrize("layout", ["BCTHW", "BTCHW"])
def test_every_view_equals_the_clip_decoded_separately(folder, sampler, crop, layout):
    views = Views(num_clips=2, num_crops=3)
    loader, (batch,) = load(folder, frames=sampler, spatial=crop, views=views, layout=layout)
    side = crop.output[0]
    axes = (3, sampler.num_frames) if layout == "BCTHW" else (sampler.num_frames, 3)
    assert batch.video.shape == (3, 6, *axes, side, side)
    assert batch.frame_index.shape == (3, 6, sampler.num_frames)
    assert (batch.key, batch.label.tolist()) == (("wide", "tall", "short"), [0, 1, 2])
    separate = 0
    for clip in range(2):
        for number in range(3):
            frames, spatial = FixedFrames(sampler, clip, 2), FixedCrop(Spatial.of(crop), views, number)
            alone, (expected,) = load(folder, frames=frames, spatial=spatial, layout=layout)
            assert torch.equal(batch.video[:, clip * 3 + number], expected.video)
            assert torch.equal(batch.frame_index[:, clip * 3 + number], expected.frame_index)
            separate += alone.stats.total.packets
    total = loader.stats.total
    shard = Dataset(str(folder)).shard(0)
    wanted = [np.unique(shown) for shown in batch.frame_index.numpy()]
    assert total.packets == sum(len(shard.table(row).plan(frames).packets) for row, frames in enumerate(wanted))
    assert total.packets < separate / 3
    assert total.clips == 3


def test_ten_crops_are_corners_and_centre_then_mirrored(folder):
    crop = CenterCrop(48)
    cuts = views_of(Spatial.of(crop), 64, 112, views=Views(num_crops=10))
    boxes = [Box(0, 0, 48, 48), Box(0, 64, 48, 48), Box(16, 0, 48, 48), Box(16, 64, 48, 48), Box(8, 32, 48, 48)]
    assert [cut.box for cut in cuts] == boxes * 2
    assert [cut.flip for cut in cuts] == [False] * 5 + [True] * 5
    _, (batch,) = load(folder, frames=Segments(4, jitter=False), spatial=crop, views=Views(num_crops=10))
    assert torch.equal(batch.video[:, 5:], batch.video[:, :5].flip(-1))
    _, (single,) = load(folder, frames=Segments(4, jitter=False), spatial=crop)
    assert torch.equal(batch.video[:, 4], single.video)


@pytest.mark.parametrize("count", [1, 2, 7, 10])
@pytest.mark.parametrize("sampler", [Dense(4, 8, jitter=False), Segments(4, jitter=False), Segments(3, False, 2)])
def test_clips_are_where_the_formulas_of_single_views_place_them(sampler, count):
    """The trainer once placed each view by formulas of its own; scores must stay comparable."""
    for num_frames in range(1, 301):
        if isinstance(sampler, Dense):
            spare = max(0, num_frames - ((sampler.num_frames - 1) * sampler.stride + 1))
            starts = np.linspace(0, spare, count).astype(int) if count > 1 else [spare // 2]
            expected = [(start + np.arange(sampler.num_frames) * sampler.stride) % num_frames for start in starts]
        else:
            tick, last = (num_frames - sampler.length + 1) / sampler.num_segments, num_frames - 1
            places = [(number + 0.5) / count for number in range(count)]
            starts = [(tick * place + tick * np.arange(sampler.num_segments)).astype(int) for place in places]
            expected = [np.minimum(np.add.outer(some, np.arange(sampler.length)).ravel(), last) for some in starts]
        spread = sampler.spread(video(num_frames), count).tolist()
        assert spread == [clip.tolist() for clip in expected]
        # A single clip is the one that the sampler draws.
        assert spread == [clip.tolist() for clip in Views(count).clips(sampler, video(num_frames))]


@pytest.mark.parametrize("crop", [CenterCrop(48), CenterCrop((112, 176), short_side=128), CenterCrop(224, 256)])
def test_crops_are_where_the_formulas_of_single_views_place_them(crop):
    corners = [(0, 0), (0, 2), (2, 0), (2, 2), (1, 1)]
    for height in range(16, 400, 23):
        for width in range(17, 400, 23):
            box = crop.draw(height, width, None)
            free_y, free_x = height - box.height, width - box.width
            along = [(1, end) if width >= height else (end, 1) for end in range(3)]
            for views, halves in ((Views(1, 3), along), (Views(1, 5), corners), (Views(1, 10), corners * 2)):
                expected = [(free_y * down // 2 & ~1, free_x * right // 2 & ~1) for down, right in halves]
                found = [cut.box for cut in views_of(Spatial.of(crop), height, width, views=views)]
                assert [(one.y, one.x) for one in found] == expected
                assert {(one.height, one.width) for one in found} == {(box.height, box.width)}


def test_single_clip_or_crop_may_be_random_and_equals_the_loaders():
    options = {"frames": Segments(3), "spatial": [RandomCrop(16), HorizontalFlip(0.5)], "seed": 4}
    dataset = FakeDataset(40)
    for viewed, single in zip(make(dataset, views=Views(), **options), make(dataset, **options), strict=True):
        assert torch.equal(viewed.video[:, 0], single.video)
    still = {"frames": Segments(3, jitter=False), "views": Views(2)}
    for clips, single in zip(make(dataset, **options | still), make(dataset, **options), strict=True):
        # Both clips show what is drawn for the row: column 2 of a fake picture identifies the crop.
        assert torch.equal(clips.video[:, 0, 2, :1], single.video[:, 2, :1])
        assert torch.equal(clips.video[:, 1, 2, :1], single.video[:, 2, :1])


def test_places_select_positions_in_segments():
    views = Views(2, places=(0.5, 0.0))
    assert [clip.tolist() for clip in views.clips(Segments(4, jitter=False), video(10))] == [[1, 3, 6, 8], [0, 2, 5, 7]]
    clips = views.clips(Segments(2, length=3), video(10))
    assert [clip.tolist() for clip in clips] == [[2, 3, 4, 6, 7, 8], [0, 1, 2, 4, 5, 6]]


def test_views_are_decoded_separately_without_planes():
    options = {"frames": Segments(3, jitter=False), "spatial": CenterCrop(16), "shuffle": False, "views": Views(2, 3)}
    dataset = FakeDataset(16)
    dataset.damage(5)
    loader = make(dataset, on_error="skip", **options)
    for batch in loader:
        for row, (sample, good) in enumerate(zip(batch.sample.tolist(), batch.valid.tolist(), strict=True)):
            assert good == (sample != 5)
            assert batch.video[row].any() == good
            for view in range(6 * good):
                frames = batch.frame_index[row, view].tolist()
                box = views_of(Spatial.of(CenterCrop(16)), HEIGHT, WIDTH, views=options["views"])[view % 3].box
                for t, frame in enumerate(frames):
                    assert batch.video[row, view, :, t, 0, 0].tolist() == list(picture(sample, frame, box, False))
    assert loader.stats.total.skips == {"ChecksumError": 1}


def test_samplers_need_only_what_the_views_ask_for():
    class Spreads:
        def spread(self) -> None: ...

    check_views(Views(1, 3), object(), Spatial(CenterCrop(16)))
    check_views(Views(2, 3), Spreads(), Spatial(CenterCrop(16)))
    with pytest.raises(UsageError, match="makes one clip of a video"):
        check_views(Views(2, 3), object(), Spatial(CenterCrop(16)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spatial": RandomCrop(16)}, "crops need a CenterCrop"),
        ({"spatial": [CenterCrop(16), HorizontalFlip(0.5)]}, "crops need a CenterCrop"),
        ({"frames": Uniform(4)}, "makes one clip of a video"),
        ({"frames": Segments(4)}, "jitter=False"),
        ({"frames": Dense(4, 2, jitter=False), "views": Views(2, places=(0.5, 0.0))}, "no segments"),
        ({"clips_per_video": 2}, "views= was given with clips_per_video=2"),
    ],
)
def test_invalid_views_are_refused(options, message):
    standard = {"frames": Segments(4, jitter=False), "spatial": CenterCrop(16), "decoder": fake("PlanesDecoder")}
    with pytest.raises(UsageError, match=message):
        make(FakeDataset(40), **standard | {"views": Views(2, 3)} | options)


def test_views_out_of_range_are_refused_and_places_are_a_part_of_their_text():
    for wrong, message in (((1, 4), "num_crops is 4"), ((0,), "num_clips is 0")):
        with pytest.raises(UsageError, match=message):
            Views(*wrong)
    assert repr(Views(2, 3)) != repr(Views(2, 3, (0.5, 0.0))) == repr(Views(2, 3, np.array([0.5, 0])))  # in states
    for places in ((0.5,), (0.5, 1.0), (0.5, 1.5), (-0.1, 0.5), ("a", "b"), 0.5):
        with pytest.raises(UsageError, match="places are"):
            Views(2, places=places)


@pytest.mark.parametrize("threads", [1, 2])
def test_clips_of_a_video_decoded_together_equal_separate_ones(folder, threads, monkeypatch):
    options = {"frames": Dense(6, 2), "spatial": [RandomResizedCrop(32), HorizontalFlip(0.5)], "seed": 3}
    options |= {"clips_per_video": 4, "global_batch_size": 4, "num_threads": threads}
    together, batches = load(folder, **options)
    monkeypatch.setattr("fastvid.load.clips.plan.can_cut", lambda info: False)
    alone, expected = load(folder, **options)
    assert len(batches) == 3
    for one, other in zip(batches, expected, strict=True):
        assert rows(one) == rows(other)
    assert together.stats.total.packets < 0.7 * alone.stats.total.packets
    assert together.stats.total.requests <= alone.stats.total.requests
    assert together.stats.total.clips == 12


def test_a_damaged_video_is_skipped_with_all_its_clips():
    dataset = FakeDataset(16)
    dataset.damage(5)
    options = {"clips_per_video": 3, "shuffle": False, "global_batch_size": 12, "decoder": fake("PlanesDecoder")}
    loader = make(dataset, on_error="skip", max_skip_rate=1.0, **options)
    skipped = [p for batch in loader for p in batch.position[~batch.valid].tolist()]
    assert skipped == [15, 16, 17]
    assert loader.stats.total.skips == {"ChecksumError": 3}
