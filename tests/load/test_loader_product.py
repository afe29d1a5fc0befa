"""Batches of ClipLoader: pixels, dtypes, layouts, memory; and refused arguments."""

import itertools

import pytest
import torch

from fastvid.decode.colours import IMAGENET_MEAN, IMAGENET_STD
from fastvid.errors import UsageError
from fastvid.load.after.augment import ColorJitter
from fastvid.load.batch.batch import Batch
from fastvid.load.batch.labels import Extras, MultiHot, Text
from fastvid.load.clip_dataset import ClipDataset, ExactSampler
from fastvid.load.clips.crops import CenterCrop, HorizontalFlip, Native, RandomResizedCrop
from fastvid.load.clips.sampling import Dense, Segments, Uniform
from fastvid.load.clips.timed_sampling import AtFps, Deltas, Window
from fastvid.load.clips.views import Views
from fastvid.load.loader import ClipLoader
from fastvid.load.options import Output, Skip, Workers
from fastvid.load.order.buckets import Buckets
from fastvid.load.order.epoch import BlockShuffle, ClassBalanced, Order
from fastvid.load.order.mixture import Mixture
from tests.load.fakes import FakeDataset, fake
from tests.load.tools import channels_are_neighbours, make, rows


def test_missing_labels_are_ignored_by_cross_entropy():
    dataset = FakeDataset(8)
    dataset.labels[:4] = -1
    (batch,) = make(dataset)
    samples = batch.sample.tolist()
    assert batch.label.tolist() == [-100 if sample < 4 else sample % 3 for sample in samples]
    assert batch.key == tuple(f"key{sample}" for sample in samples)
    assert batch.valid.all()


def test_requested_columns_are_in_the_batch():
    (*_, batch) = make(FakeDataset(13), fields=("note", "width"), last="mask")
    wanted = tuple(f"note-{sample}" if sample >= 0 else None for sample in batch.sample.tolist())
    assert batch.fields["note"] == wanted
    assert set(batch.fields) == {"note", "width"}


def test_a_batch_that_is_kept_never_changes():
    loader = make(FakeDataset(64), prefetch=1, dtype=torch.float32)
    kept = list(loader) + list(loader)
    copies = [batch.video.clone() for batch in kept]
    for _ in range(3):
        list(loader)
    assert all(torch.equal(batch.video, copy) for batch, copy in zip(kept, copies, strict=True))


def test_memory_of_released_batches_is_reused():
    loader = make(FakeDataset(640), dtype=torch.float32)
    places = {batch.video.data_ptr() for batch in loader}
    assert len(places) <= 5  # 80 batches


def test_floats_are_normalised_levels():
    dataset = FakeDataset(16)
    own = {"mean": (0.0, 0.5, 1.0), "std": (1.0, 0.5, 2.0)}
    for numbers in ({"mean": IMAGENET_MEAN, "std": IMAGENET_STD}, own):
        mean, std = (torch.tensor(numbers[name]).view(3, 1, 1, 1) for name in ("mean", "std"))
        given = own if numbers is own else {}  # the default is ImageNet's
        for raw, batch in zip(make(dataset), make(dataset, dtype=torch.float32, **given), strict=True):
            assert batch.video.dtype == torch.float32
            assert torch.allclose(batch.video, (raw.video / 255 - mean) / std, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decoder", ["RgbDecoder", "PlanesDecoder"])
def test_layouts_differ_only_in_the_order_of_axes_or_in_memory(dtype, decoder):
    options = {"decoder": fake(decoder), "last": "mask", "on_error": "skip", "max_skip_rate": 1.0}
    dataset = FakeDataset(21)
    dataset.damage(5)
    # Half precision is rounded once, from float32.
    expected = list(make(dataset, dtype=torch.float32 if dtype is torch.bfloat16 else dtype, **options))
    for layout, channels_last in itertools.product(("BCTHW", "BTCHW"), (False, True)):
        made = make(dataset, dtype=dtype, layout=layout, channels_last=channels_last, **options)
        for plain, batch in zip(expected, made, strict=True):
            wanted = plain.video.to(dtype) if layout == "BCTHW" else plain.video.to(dtype).transpose(1, 2)
            assert (batch.video.shape, batch.video.dtype) == ((8, 3, 3, 16, 16), dtype)
            assert torch.equal(batch.video, wanted)
            assert channels_are_neighbours(batch.video, layout) if channels_last else batch.video.is_contiguous()


def test_planes_give_the_same_tensor_layout_and_levels():
    dataset = FakeDataset(21)
    dataset.damage(5)
    loader = make(dataset, decoder=fake("PlanesDecoder"), last="mask", on_error="skip")
    for batch in loader:
        for row in range(batch.num_rows):
            frames = batch.frame_index[row].tolist()
            # Limited range: 16 is black, 235 is white.
            grey = [round(10 * frame * 255 / 219) if batch.valid[row] else 0 for frame in frames]
            assert batch.video[row, :, :, 7, 7].tolist() == [grey] * 3
    assert loader.stats.total.skips == {"ChecksumError": 1}


def test_options_work_in_their_group_and_beside_it():
    """As all of them were in version 0.2."""
    dataset = FakeDataset(21)
    common = {"frames": Segments(3), "spatial": CenterCrop(16), "rank": 0, "world_size": 1}
    grouped = ClipLoader(
        dataset,
        **common,
        global_batch_size=8,
        order=Order(shuffle=False, last="keep"),
        extras=Extras(fields=("note",)),
        output=Output(dtype=torch.uint8, collate="list"),
        workers=Workers(num_threads=1, decoder=fake(), on_error=Skip(0.5)),
    )
    options = {"shuffle": False, "last": "keep", "fields": ("note",), "dtype": torch.uint8, "collate": "list"}
    options |= {"num_threads": 1, "decoder": fake(), "on_error": Skip(0.5)}
    for beside in (ClipLoader(dataset, **common, batch_size=8, **options), make(dataset, **common, **options)):
        grouped.set_epoch(0)
        assert beside.state_dict() == grouped.state_dict()
        for one, other in zip(beside, grouped, strict=True):
            assert (one.key, one.fields) == (other.key, other.fields)
            assert all(map(torch.equal, one.video, other.video))


def test_buckets_are_a_batch_size():
    common = {"frames": Window(fps=25), "spatial": CenterCrop()}
    buckets = Buckets([(1, 16, 16), (4, 16, 16)], 3)
    one = make(FakeDataset(40), **common, global_batch_size=buckets)
    other = make(FakeDataset(40), **common, global_batch_size=None, batches=buckets)
    assert [rows(batch) for batch in one] == [rows(batch) for batch in other]


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"on_error": "ignore"}, "use 'raise' or Skip"),
        ({"on_error": "skip", "max_skip_rate": 1.5}, "max_rate is 1.5"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"prefetch": 0}, "prefetch is 0"),
        ({"num_fetchers": -1}, "num_fetchers is -1"),
        ({"workers": "fibre"}, "kind is 'fibre'"),
        ({"collate": "concat"}, "collate is 'concat'"),
        ({"timeout": 0}, "timeout is 0"),
        ({"clip_timeout": 0}, "clip_timeout is 0"),
        ({"timeout": float("inf")}, "timeout is inf"),
        ({"seed": -1}, "seed is -1"),
        ({"layout": "THWC", "dtype": torch.float32}, "unknown layout 'THWC'"),
        ({"layout": "THWC"}, "unknown layout 'THWC'"),
        ({"dtype": torch.int32}, "dtype torch.int32"),
        ({"last": "pad"}, "last is 'pad'"),
        ({"global_batch_size": 41}, "40 samples do not fill one batch of 41"),
        ({"num_workers": 4}, "Workers(num_threads=n)"),
        ({"transform": abs}, "after="),
        ({"shufle": False}, "order.shuffle"),
        ({"batch_size": 4, "global_batch_size": None, "world_size": 2}, "use global_batch_size=8"),
        ({"frames": 8}, "Segments(8)"),
        ({"frames": None}, "frames=Segments(8)"),
        ({"spatial": None}, "spatial=RandomResizedCrop(224)"),
        ({"global_batch_size": None}, "the clips of a step over all ranks"),
        ({"spatial": 224}, "CenterCrop(224)"),
        ({"order": "random"}, "Order(shuffle=False)"),
        ({"text": "caption"}, 'Text("caption")'),
        ({"labels": "tags"}, 'MultiHot("labels")'),
        ({"audio": 16_000}, "Audio(16_000)"),
        ({"signals": {"action": [0.0]}}, "Deltas([0.0, 0.1])"),
        ({"drop_last": True}, "Order(last='drop')"),
        ({"pin_memory": True}, "leave it out"),
        ({"frames_per_clip": 16}, "Dense(n, stride=...)"),
        ({"prefech": 4}, "did you mean prefetch?"),
        ({"order": Output()}, "Order(shuffle=False)"),
        ({"fields": 5}, "fields=['action']"),
        ({"shuffle": "yes"}, "True, False or BlockShuffle()"),
        ({"balance": "label"}, "ClassBalanced()"),
        ({"stats_file": 1}, "the path of a file"),
        ({"dtype": torch.int64}, "uint8 for levels"),
        ({"mean": 127.5}, "divide levels by 255"),
        ({"device": "gpu"}, "use 'cuda', 'cuda:1' or 'cpu'"),
        ({"streams": 5}, '"rgb", or a list of names'),
        ({"views": (10, 3)}, "Views(num_clips, num_crops)"),
        ({"after": [ColorJitter]}, "ColorJitter(...)"),
        ({"after": [0.5]}, "pass a callable"),
        ({"spatial": CenterCrop}, "CenterCrop(224)"),
        ({"spatial": torch.nn.Identity()}, "others go to after="),
        ({"frames": [0, 8]}, "Segments(8)"),
        ({"global_batch_size": "8"}, "give global_batch_size as an int"),
        ({"rank": "0", "world_size": "2"}, "give rank as an int"),
    ],
)
def test_other_words_are_answered_with_the_right_one(options, hint):
    with pytest.raises(UsageError) as caught:
        make(FakeDataset(40), **options)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Output(dtype="uint9"), "dtype is 'uint9'"),
        (lambda: ClipLoader(FakeDataset(4), frames=Segments(1), spatial=CenterCrop(), workers=4), "workers is 4"),
        (lambda: Views(10, 3, 64), "places are 64, expected a tuple"),
        (lambda: ClassBalanced(column="country"), "column is 'country'"),
        (lambda: ExactSampler(FakeDataset(4), global_batch_size=2), "clips is a FakeDataset, expected a ClipDataset"),
        (lambda: make(FakeDataset(4), frames=Segments), "which is no sampler"),
        (lambda: Segments("8"), "num_segments is '8', expected an integer"),
        (lambda: Segments(8, jitter="no"), "jitter is 'no', expected bool"),
        (lambda: Window(seconds=2, fps=4, jitter=0), "jitter is 0, expected bool"),
        (lambda: Dense(8.5, 2), "num_frames is 8.5, expected an integer"),
        (lambda: Uniform(float("nan")), "num_frames is nan, expected an integer"),
        (lambda: Window(fps="24"), "fps is '24'"),
        (lambda: AtFps(float("nan")), "fps is nan"),
        (lambda: AtFps(2, multiple=1.5), "multiple is 1.5"),
        (lambda: Deltas(0.1), "seconds are 0.1, expected a list"),
        (lambda: CenterCrop(22.5), "size is 22.5"),
        (lambda: RandomResizedCrop(8, scale=0.5), "scale is 0.5, expected 0 < low <= high <= 1"),
        (lambda: HorizontalFlip("0.5"), "p is '0.5', expected 0 to 1"),
        (lambda: Output(mean="imagenet"), "mean is 'imagenet', expected one or three numbers"),
        (lambda: Output(std=(0.2, 0.2)), r"std is \(0.2, 0.2\), expected one or three numbers"),
        (lambda: Output(channels_last="false"), "channels_last is 'false', expected bool"),
        (lambda: Output(flow_stack=2.5), "flow_stack is 2.5, expected an integer"),
        (lambda: Order(clips_per_video=2.5), "clips_per_video is 2.5, expected an integer"),
        (lambda: Order(balance="class"), "balance is 'class', expected ClassBalanced or None\n"),
        (lambda: BlockShuffle("100"), "window is '100', expected an integer"),
        (lambda: ClassBalanced("0.5"), "power is '0.5', expected 0 to 1"),
        (lambda: Skip("0.1"), "max_rate is '0.1', expected 0 to 1"),
        (lambda: Workers(num_threads=2.5), "num_threads is 2.5, expected an integer"),
        (lambda: Workers(show_stats="no"), "show_stats is 'no', expected bool"),
        (lambda: Workers(decoder=5), "decoder is 5, expected str or Backend"),
        (lambda: Segments(None), "num_segments is None, expected an integer"),
        (lambda: Native(None), "multiple is None, expected an integer"),
        (lambda: Workers(prefetch=None), "prefetch is None, expected an integer"),
        (lambda: Text(5), "columns of Text is 5"),
        (lambda: MultiHot(5), "column of MultiHot is 5"),
        (lambda: MultiHot("labels", "abc"), "classes of MultiHot are 'abc'"),
        (lambda: Mixture([FakeDataset(4)], weights=["1"]), "expected a list of numbers"),
        (lambda: ClipDataset(FakeDataset(4), frames=Segments(1), spatial=CenterCrop(8))["a"], "index is 'a'"),
    ],
)
def test_values_of_a_wrong_kind_are_refused_where_they_are_given(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_one_number_is_the_mean_or_deviation_of_all_channels():
    made = (make(FakeDataset(16), dtype=torch.float32, mean=mean, std=0.5) for mean in (0.25, [0.25] * 3))
    for one, other in zip(*made, strict=True):
        assert torch.equal(one.video, other.video)


def test_a_stream_with_two_names_stays_one_tensor_when_a_batch_is_moved_or_cut():
    video = torch.ones(4, 3)
    batch = Batch({"video": video, "rgb": video, "label": torch.ones(4)})
    for made, rows_ in ((batch.to("meta"), 4), (batch.rows(slice(1, 3)), 2)):
        assert made.video is made["rgb"]
        assert made.video is not video
        assert len(made.label) == len(made.video) == rows_


def test_reprs_describe_the_loader_and_its_batches():
    loader = make(FakeDataset(21), last="mask", rank=1, world_size=2)
    assert all(part in repr(loader) for part in ("21 samples", "rank 1 of 2"))
    (*_, last) = loader
    assert repr(Batch(video=[], valid=torch.ones(0))) == "Batch(0 of 0 rows valid)"  # of `rows`, with collate="list"
    assert repr(last).startswith("Batch(video=4x3x3x16x16 torch.uint8 on cpu, 1 of 4 rows valid, epoch 0, positions 16")
    assert last.num_rows == 4
