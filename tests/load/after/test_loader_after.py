"""Transforms in a loader: the same batches for any world, worker kind and resume, and no change without transforms."""

import threading

import numpy as np
import pytest
import torch

from fastvid.decode import pixels
from fastvid.decode.colours import Pixels
from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.after.augment import ColorJitter, Erasing, GaussianBlur, Grayscale, RandAugment
from fastvid.load.after.chain import TransformChain
from fastvid.load.after.transform import TransformDraws
from fastvid.load.batch.assemble import TransformStage
from fastvid.load.batch.spec import VideoSpec
from fastvid.load.clips.crops import CenterCrop
from fastvid.load.clips.sampling import Segments
from fastvid.load.clips.views import Views
from fastvid.load.device import LoaderStream
from fastvid.load.order.draws import Draws
from tests import fake_cuda
from tests.datasets import make_clip, pack
from tests.load.fakes import FakeDataset, fake
from tests.load.loaders import clip_loader
from tests.load.tools import Own, channels_are_neighbours, make, rows

SAMPLES = 17


def noise(clip):
    return clip * 0.9 + 0.1 * torch.rand(clip.shape[-2:])


def unchanged(clip):
    return clip


BUILT_IN = [ColorJitter(0.4, 0.4, 0.4, 0.2, p=0.7), RandAugment(2, 15), GaussianBlur(3), Erasing(0.5), Grayscale(0.2)]
EVERY = [noise, *BUILT_IN]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("after")
    clips = [make_clip(path / f"clip{n}.mp4", frames=20, size="96x72") for n in range(2)]
    pack(path / "data", [[(f"clip{n}", clips[n % 2], n % 2) for n in range(SAMPLES)]])
    return path / "data"


def epoch(folder, world, **options):
    """Return the bytes of each valid row of each global batch."""
    standard = {"frames": Segments(4), "spatial": CenterCrop(40), "global_batch_size": 8, "last": "mask"}
    standard |= {"num_threads": 1, "after": EVERY, "world_size": world}
    ranks = [clip_loader(Dataset(str(folder)), rank=rank, **standard | options) for rank in range(world)]
    return [[row for batch in step for row in rows(batch)] for step in zip(*ranks, strict=True)]


@pytest.fixture(scope="module")
def alone(folder):
    return epoch(folder, 1)


@pytest.mark.parametrize(
    ("world", "workers"), [(1, "process"), (2, "thread"), (3, "thread"), (3, "process"), (5, "thread"), (7, "thread")]
)
def test_clips_have_the_same_bits_for_any_world_and_worker_kind(folder, alone, world, workers):
    assert sum(map(len, alone)) == SAMPLES
    assert epoch(folder, world, workers=workers) == alone
    assert len({row[-1] for batch in alone for row in batch}) == SAMPLES


def test_two_epochs_and_two_seeds_are_transformed_differently(folder, alone):
    others = {row[1]: row[-1] for batch in epoch(folder, 1, seed=1) for row in batch}
    loader = clip_loader(
        Dataset(str(folder)), frames=Segments(4, jitter=False), spatial=CenterCrop(40), global_batch_size=SAMPLES,
        after=[ColorJitter(0.5)], shuffle=False, rank=0, world_size=1,
    )  # fmt: skip
    (first,), (second,) = list(loader), list(loader)
    assert not any(torch.equal(a, b) for a, b in zip(first.video, second.video, strict=True))
    assert not any(others[row[1]] == row[-1] for batch in alone for row in batch)


@pytest.mark.parametrize("layout", ["BCTHW", "BTCHW"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_transforms_that_change_nothing_leave_the_batch_as_it_is(layout, dtype, channels_last):
    options = {"layout": layout, "dtype": dtype, "channels_last": channels_last, "last": "mask"}
    plain = make(FakeDataset(20), **options)
    changed = make(FakeDataset(20), after=[ColorJitter(0.5, p=0), unchanged], **options)
    for one, other in zip(plain, changed, strict=True):
        assert other.video.shape == one.video.shape
        assert other.video.dtype is dtype
        assert channels_are_neighbours(other.video, layout) == channels_are_neighbours(one.video, layout)
        assert other.video.stride() == one.video.stride()
        if dtype is torch.uint8:
            assert torch.equal(one.video, other.video)
        else:  # normalised in one step without transforms, in two with them
            torch.testing.assert_close(other.video, one.video, rtol=2**-7 if dtype is torch.bfloat16 else 0, atol=1e-6)


def test_transforms_see_rgb_in_0_to_1_before_normalisation():
    seen = []

    def look(clip):
        seen.append(clip.clone())
        return clip

    def levels(**options):
        return next(iter(make(FakeDataset(20), global_batch_size=4, seed=3, **options))).video

    made = levels(after=[look], dtype=torch.float32, mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 2.0))
    expected = levels().transpose(1, 2).float() / 255
    torch.testing.assert_close(torch.stack(seen), expected)
    mean, std = (torch.tensor(values)[:, None, None] for values in ((0.1, 0.2, 0.3), (0.5, 0.25, 2.0)))
    torch.testing.assert_close(made.transpose(1, 2), (expected - mean) / std)


def test_skipped_and_padded_rows_stay_zero_and_are_not_transformed():
    calls = []

    def brighten(clip):
        calls.append(1)
        return clip * 0 + 1

    dataset = FakeDataset(21)
    dataset.damage(3)
    loader = make(dataset, after=[brighten, Erasing(1.0, value=0.5)], last="mask", on_error="skip", dtype=torch.float32)
    for batch in loader:
        assert (batch.video[~batch.valid] == 0).all()
        assert (batch.video[batch.valid] != 0).all()
    assert len(calls) == 20


def test_a_rank_without_clips_gets_zeros_of_the_shape_that_the_others_get():
    options = {"global_batch_size": 3, "after": [lambda clip: clip[..., ::2, ::2]], "last": "mask"}
    ranks = [make(FakeDataset(4), rank=rank, world_size=3, **options) for rank in range(3)]
    *_, last = zip(*ranks, strict=True)
    assert [int(batch.valid.sum()) for batch in last] == [1, 0, 0]
    assert {tuple(batch.video.shape) for batch in last} == {(1, 3, 3, 8, 8)}
    assert not last[1].video.any()


def test_each_view_of_a_sample_has_its_own_numbers():
    options = {"frames": Segments(3, jitter=False), "spatial": CenterCrop(16), "views": Views(1, 3)}
    loader = make(FakeDataset(20), after=[Erasing(1.0, scale=(0.2, 0.4), value=1.0)], dtype=torch.float32, **options)
    video = next(iter(loader)).video
    assert video.shape == (8, 3, 3, 3, 16, 16)
    holes = (video[:, :, 0, 0] == (1 - 0.485) / 0.229).numpy()
    assert all(len({view.tobytes() for view in sample}) == 3 for sample in holes)


SHAPES = [(3, 8, 6), (1, 4, 10), (0, 0, 0), (5, 8, 10)]


def stage(collate, *after, **output):
    stream = LoaderStream(torch.device("cpu"))
    spec = VideoSpec(None, output.get("layout", "BCTHW"), Pixels(**output), stream, collate=collate)
    return TransformStage(TransformChain.of(after, ("rgb",)), spec)


def parts():
    """Return clips of different shapes, the third row masked: tensors, shapes and random numbers."""
    generator = torch.Generator().manual_seed(4)
    video = [torch.rand(3, *shape, generator=generator) for shape in SHAPES]
    return video, np.array(SHAPES), [(Draws(1, 0, row), 0) if shape[0] else None for row, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("layout", ["BCTHW", "BTCHW"])
def test_clips_of_different_shapes_are_transformed_one_by_one(layout):
    pixels = {"layout": layout, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    source, clips, draws = parts()
    jitter = ColorJitter(0.5, 0.5, 0.5)
    listed = stage("list", jitter, **pixels).finish([one.clone() for one in source], clips, None, draws)
    axes = (0, 1, 2, 3) if layout == "BCTHW" else (1, 0, 2, 3)
    assert [tuple(one.permute(axes).shape[1:]) for one in listed] == SHAPES
    for made, one, place in zip(listed, source, draws, strict=True):
        if place is not None:
            alone = jitter.apply(one[None].clone(), [jitter.draw(TransformDraws(*place))])[0]
            torch.testing.assert_close(made.permute(axes), (alone - 0.5) / 0.5)
    padded = stage("pad", jitter, **pixels).finish(source, clips, None, draws)
    padded = padded if layout == "BCTHW" else padded.transpose(1, 2)
    assert padded.shape == (4, 3, 5, 8, 10)
    for row, ((t, h, w), made) in enumerate(zip(SHAPES, listed, strict=True)):
        assert torch.equal(padded[row, :, :t, :h, :w], made.permute(axes))
        assert int((padded[row] != 0).sum()) <= made.numel()  # zeros beyond the clip


def test_listed_clips_may_be_resized_and_padded_ones_may_not():
    def halve(clip):
        return clip[..., ::2, ::2]

    listed = stage("list", halve).finish(*parts()[:2], None, parts()[2])
    assert [tuple(one.shape[1:]) for one in listed] == [(3, 4, 3), (1, 2, 5), (0, 0, 0), (5, 4, 5)]
    with pytest.raises(UsageError, match=r"resized a clip of \[8, 6\] to \[4, 3\] pixels") as caught:
        stage("pad", halve).finish(*parts()[:2], None, parts()[2])
    assert "collate='list'" in caught.value.hint


@pytest.mark.parametrize("collate", ["list", "pad"])
def test_clips_of_different_lengths_have_the_same_bits_for_any_world(collate):
    after = [ColorJitter(0.4, hue=0.1), noise, RandAugment(2, 20), Erasing(0.5)]
    frames = Own(lambda video, _: range(min(4, video.num_frames)), count=lambda count, _: np.minimum(4, count))
    options = {"frames": frames, "collate": collate, "last": "mask", "dtype": torch.float32, "after": after}

    def clips(world):
        found = {}
        for rank in range(world):
            for batch in make(FakeDataset(21), rank=rank, world_size=world, **options):
                columns = batch.position.tolist(), batch.video, batch.frame_index
                for position, video, frames in zip(*columns, strict=True):
                    count = int((frames >= 0).sum())
                    assert not video[:, count:].any()
                    found[position] = video[:, :count].numpy().tobytes()
        return {position: found[position] for position in range(21)}

    alone = clips(1)
    assert len({len(video) for video in alone.values()}) == 4
    for world in (2, 3, 5, 7):
        assert clips(world) == alone


@pytest.mark.parametrize("collate", ["list", "pad"])
def test_clips_of_one_shape_are_the_same_in_any_collation(collate):
    options = {"after": [ColorJitter(0.4, hue=0.1), noise, Erasing()], "dtype": torch.float32, "last": "mask"}
    stacked, collated = make(FakeDataset(21), **options), make(FakeDataset(21), collate=collate, **options)
    for one, other in zip(stacked, collated, strict=True):
        for row, valid in enumerate(one.valid.tolist()):
            assert torch.equal(one.video[row], other.video[row]) if valid else not other.video[row].any()


@pytest.fixture
def cuda(monkeypatch):
    cuda = fake_cuda.install(monkeypatch)
    monkeypatch.setattr(pixels, "_fused", lambda *_: None)  # a kernel needs a real device
    return cuda


@pytest.mark.parametrize("decoder", ["RgbDecoder", "PlanesDecoder"])
def test_transforms_on_a_gpu_are_ordered_and_never_make_the_host_wait(cuda, decoder):
    options = {"decoder": fake(decoder), "after": BUILT_IN, "dtype": torch.float32, "last": "mask"}
    expected = [batch.video for batch in make(FakeDataset(21), **options)]
    stream, made = torch.cuda.Stream(torch.device("cuda", 1)), []
    with torch.cuda.stream(stream):
        for batch in make(FakeDataset(21), device="cuda:1", **options):
            assert batch.video.device == torch.device("cuda", 1)
            made.append(batch.video.clone())
    assert not cuda.races
    assert not cuda.syncs
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=1e-5, rtol=0)


def test_callables_run_in_the_thread_of_the_consumer_whose_generators_they_seed(cuda, monkeypatch):
    threads = []

    def note(clip):
        threads.append(threading.current_thread())
        return clip

    # The fake has no generators.
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda _seed: None)
    for _ in make(FakeDataset(20), device="cuda", after=[note]):
        pass
    assert set(threads) == {threading.current_thread()}
    assert len(threads) == 16
    assert not cuda.races


def test_flow_is_not_transformed_and_motions_are_refused_with_it():
    dataset = FakeDataset(20)
    dataset.streams = ("rgb", "flow")
    with pytest.raises(UsageError, match="moves pixels, but not the optical flow"):
        make(dataset, streams=("rgb", "flow"), after=[RandAugment()])
