"""Texts, multi-hot labels, several clips of a video and mixtures are the same for every world, worker and resume."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastvid
from fastvid.errors import StateError, UsageError
from fastvid.load.batch.labels import Extras, MultiHot, MultiHotLabels, Text
from fastvid.load.batch.spec import RowAnnotations
from fastvid.load.clips.clip import ClipRules, clip_sizes
from fastvid.load.clips.crops import CenterCrop, RandomCrop
from fastvid.load.clips.sampling import Dense, Segments, Uniform
from fastvid.load.order.draws import BatchDraws
from fastvid.load.order.epoch import MASKED
from fastvid.load.order.mixture import Mixture
from tests.datasets import make_clip, pack
from tests.load.fakes import FakeDataset
from tests.load.tools import make, walk

WORLDS = (1, 2, 3, 5, 7)
TAGS = [["b", "a"], [], None, ["c", None, "a"], ["c"]]
CAPTIONS = [["one", "two", "three"], [], None, ["", None], ["only"]]


def dataset(size, name="fake"):
    """Return a dataset with captions, a title for some samples, and tags."""
    extra = {
        "captions": pa.array([CAPTIONS[n % 5] for n in range(size)], pa.list_(pa.string())),
        "title": pa.array([f"{name}{n}" if n % 3 else None for n in range(size)], pa.string()),
        "tags": pa.array([TAGS[n % 5] for n in range(size)], pa.list_(pa.string())),
        "numbers": pa.array([[n % 4, 6] if n % 2 else [] for n in range(size)], pa.list_(pa.int32())),
    }
    return FakeDataset(size, dataset_id=name, extra=extra)


def entries(batch):
    """Return all that a batch says about its valid rows, comparable."""
    found = []
    for row in np.flatnonzero(batch.valid.numpy()).tolist():
        frames = [frame for frame in batch.frame_index[row].tolist() if frame >= 0]
        video = batch.video[row][:, : len(frames)]  # without padding, which depends on the other rows
        one = {"video": video.numpy().tobytes(), "shape": tuple(video.shape), "frames": frames}
        one |= {name: batch[name][row] for name in ("key", "text", "dataset") if name in batch}
        one |= {name: batch[name][row].tolist() for name in ("position", "sample", "label")}
        one["labels"] = batch.labels[row].tolist() if "labels" in batch else None
        one["fields"] = {name: values[row] for name, values in batch.fields.items()}
        found.append(one)
    return found


def kinds(size):
    """Return a dataset with loader options for every kind of batch."""
    one, other = dataset(size), dataset(size + 3, "other")
    mixed = Mixture({"one": one, "other": other}, weights={"other": 1, "one": 2}, num_samples=2 * size + 1)
    rules = {
        "frames": {"other": Dense(5, 2), "one": Segments(3)},
        "spatial": {"one": CenterCrop(16), "other": [RandomCrop((24, 16)), fastvid.HorizontalFlip(0.5)]},
    }
    return {
        "text": (one, {"text": Text(("captions", "title"), drop=0.3, weights=(1, 2))}),
        "multi-hot": (one, {"labels": MultiHot("tags")}),
        "pairs": (one, {"clips_per_video": 2, "text": Text("captions")}),
        "triples": (mixed, {"clips_per_video": 3}),
        "mixture": (mixed, {**rules, "collate": "list", "text": Text("title"), "labels": MultiHot("numbers")}),
        "padded mixture": (
            mixed,
            {**rules, "spatial": CenterCrop(16), "collate": "pad", "fields": ("title",), "last": "mask"},
        ),
    }


@pytest.mark.parametrize("kind", list(kinds(1)))
@settings(max_examples=8, deadline=None)
@given(
    size=st.integers(3, 30),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 5),
    legs=st.lists(st.tuples(st.sampled_from(WORLDS), st.integers(0, 9), st.integers(0, 4)), min_size=2, max_size=5),
)
def test_batches_are_the_same_for_any_world_and_resume(kind, size, seed, epoch, legs):
    data, chosen = kinds(size)[kind]
    options = {"seed": seed, "last": "keep", **chosen}
    clips = options.get("clips_per_video", 1)
    alone = make(data, global_batch_size=6, **options)
    alone.set_epoch(epoch)
    expected = [row for batch in alone for row in entries(batch)]
    delivered = walk(data, legs, epoch=epoch, unit=clips, of=entries, **options)
    assert delivered == expected
    assert sorted(row["position"] for row in delivered) == list(range(len(expected)))


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    """Two real datasets of clips of two sizes."""
    folder = tmp_path_factory.mktemp("kinds")
    for name, frames, size in (("one", 12, "96x64"), ("two", 20, "64x96")):
        data = make_clip(folder / f"{name}.mp4", frames=frames, size=size)
        columns = {"captions": [CAPTIONS[n % 5] for n in range(6)], "tags": [TAGS[n % 5] for n in range(6)]}
        shards = [[(f"{name}{n}", data, n % 2) for n in range(first, first + 3)] for first in (0, 3)]
        pack(folder / name, shards, classes=("a", "b"), columns=columns)
    return Mixture({name: fastvid.open(folder / name) for name in ("one", "two")})


def test_worker_processes_deliver_the_same_as_threads_in_any_world(films):
    chosen = {"frames": {"one": Segments(4), "two": Dense(4, 3)}, "text": Text("captions", drop=0.2)}
    chosen |= {"spatial": {"one": RandomCrop(48), "two": fastvid.RandomResizedCrop(48)}, "labels": MultiHot("tags")}
    chosen |= {"decoder": "pyav", "global_batch_size": 6, "seed": 5, "clips_per_video": 2, "resize": "fast"}
    expected = [row for batch in make(films, **chosen) for row in entries(batch)]
    assert len(expected) == 24
    assert len({row["video"] for row in expected}) == len(expected)
    loader = make(films, workers="process", **chosen)
    first = entries(next(iter(loader)))
    state = loader.state_dict()
    ranks = [make(films, workers="process", rank=rank, world_size=3, **chosen) for rank in range(3)]
    for rank in ranks:
        rank.load_state_dict(state)
    rest = [row for batches in zip(*ranks, strict=True) for batch in batches for row in entries(batch)]
    assert first + rest == expected
    exact = make(films, **{**chosen, "resize": "exact"})
    assert [row["video"] for batch in exact for row in entries(batch)] != [row["video"] for row in expected]
    with pytest.raises(StateError, match="another resize: fast"):
        exact.load_state_dict(state)


def test_clips_of_a_video_are_neighbours_and_differ():
    loader = make(FakeDataset(64), clips_per_video=2, global_batch_size=16, frames=Segments(8))
    seen, different = [], 0
    for batch in loader:
        pairs = batch.video.unflatten(0, (-1, 2))
        assert batch.key[::2] == batch.key[1::2]
        assert batch.position.tolist() == list(range(batch.start, batch.stop))
        seen += batch.key[::2]
        different += sum(not torch.equal(one, other) for one, other in pairs)
    assert sorted(seen) == sorted(f"key{n}" for n in range(64))
    assert different > 60  # a video of one frame, cropped and flipped alike


def test_a_kept_batch_has_whole_videos_on_every_rank():
    # 5 videos of 2 clips: the second batch has one video for 4 ranks.
    options = {"clips_per_video": 2, "global_batch_size": 8, "last": "keep", "world_size": 4}
    last = [list(make(FakeDataset(5), rank=rank, **options))[-1] for rank in range(4)]
    assert [batch.position.tolist() for batch in last] == [[MASKED] * 2] * 3 + [[8, 9]]
    assert sum(float(batch.weight.sum()) for batch in last) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 9}, "global_batch_size is 9 with group_size=1 and clips_per_video=2"),
        ({"global_batch_size": 6, "group_size": 3, "clips_per_video": 4}, "choose a multiple of 12"),
        ({"world_size": 5}, "global_batch_size 8 in groups of 2 is smaller than the world of 5"),
    ],
)
def test_batches_that_would_split_a_video_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        make(FakeDataset(40), **{"clips_per_video": 2} | options)
    loader = make(FakeDataset(40), clips_per_video=2)
    with pytest.raises(StateError, match="position 3 is between the 2 clips of a video"):
        loader.load_state_dict(loader.state_dict() | {"position": 3})
    with pytest.raises(UsageError, match="choose a multiple of 2"):
        loader.set_batch_size(7)


def texts(text, data, samples, epoch=0):
    """Return the texts of rows at the positions 0, 1, 2, ... of an epoch."""
    draws = BatchDraws(1, epoch, np.arange(len(samples)))
    return RowAnnotations(data, Extras(text=text)).on_host(np.array(samples), draws)["text"]


def test_a_text_is_chosen_among_all_that_a_sample_has():
    data = FakeDataset(4, extra={"long": ["l0", "l1", None, ""], "short": [["a", "b"], [], None, ["c", ""]]})

    def chosen(sample, draws=2000, **options):
        return Counter(texts(Text(("long", "short"), **options), data, [sample] * draws))

    plain = chosen(0)
    assert set(plain) == {"l0", "a", "b"}
    assert all(580 < count < 760 for count in plain.values())
    weighted = chosen(0, weights=(2, 1))
    assert 1240 < weighted["l0"] < 1430
    assert abs(weighted["a"] - weighted["b"]) < 120
    assert chosen(1, weights=(1, 9)) == {"l1": 2000}
    assert chosen(2, empty="?") == {"?": 2000}
    assert chosen(3) == {"c": 2000}
    assert chosen(0, choose="first") == {"l0": 2000}
    dropped = chosen(0, drop=0.25, empty="?")
    assert 430 < dropped["?"] < 570
    assert chosen(0, drop=1.0) == {"": 2000}
    assert texts(Text("long", empty="?"), data, [MASKED]) == ("?",)
    # Dropping does not change what is chosen, and epochs choose independently.
    one, other = (texts(Text(("long", "short"), drop=drop), data, [0] * 200) for drop in (0.0, 0.5))
    assert set(other) > {""}
    assert all(second in (first, "") for first, second in zip(one, other, strict=True))
    assert one != texts(Text(("long", "short")), data, [0] * 200, epoch=1)


def test_dictionary_columns_are_text():
    data = FakeDataset(3, extra={"word": pa.array(["x", None, "y"]).dictionary_encode()})
    assert texts(Text("word"), data, range(3)) == ("x", "", "y")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: make(d, text=Text("capton")), r"column 'capton' of Text does not exist\n.*captions, title, tags"),
        (lambda d: make(d, text=Text("numbers")), "column 'numbers' of Text contains list"),
        (lambda d: make(FakeDataset(8, extra={"note": range(8)}), text=Text("note")), "add captions"),
        (lambda d: Text(()), "give one column or more"),
        (lambda d: Text(("a", "a")), "give one column or more"),
        (lambda d: Text("a", drop=1.1), "drop is 1.1"),
        (lambda d: Text("a", choose="last"), "use one of random, first"),
        (lambda d: Text(("a", "b"), weights=(1,)), "give one positive number for each column"),
        (lambda d: Text("a", weights=(0,)), "give one positive number for each column"),
        (lambda d: Text("a", weights=(1,), choose="first"), "use choose='random'"),
        (lambda d: make(d, labels=MultiHot("tag")), r"column 'tag' of MultiHot does not exist\n.*tags, numbers"),
        (lambda d: make(d, labels=MultiHot("title")), "column 'title' of MultiHot contains string, not lists"),
        (lambda d: make(d, labels=MultiHot("tags", ["a", "b"])), r"(?s)contains 'c', which is none of the 2.*key3"),
        (lambda d: make(d, labels=MultiHot("numbers", ["a"])), r"(?s)contains 1, which is none of the 1.*key1"),
        (lambda d: MultiHot("tags", ["a", "a"]), "each once"),
        (lambda d: MultiHot("tags", []), "give the names of all classes"),
        (lambda d: Mixture(d), "datasets is .*\n.*use a list of datasets"),
        (lambda d: Mixture({"x": d, "y": Mixture([d])}), "'y' is a mixture itself\n.*products of the weights"),
        (lambda d: Mixture({"": d}), "'' is not the name of a dataset"),
        (lambda d: Mixture({"x": d, "y": d}, weights={"x": 1}), "weights has no entry for y\n.*each of x, y"),
        (lambda d: Mixture({"x": d}, weights={"x": 1, "z": 1}), "weights has an entry for z"),
        (lambda d: make(Mixture({"x": d, "y": d}), frames={"x": Segments(2)}), "frames has no entry for y"),
        (lambda d: make(Mixture({"x": d}), spatial={"z": CenterCrop(16)}), "spatial has no entry for x and an entry"),
        (lambda d: make(d, frames={"x": Segments(2)}), "frames is a mapping, but the dataset is not a mixture"),
        (lambda d: make(d, spatial={"x": CenterCrop(16)}), "spatial is a mapping, but the dataset is not a mixture"),
    ],
)
def test_invalid_texts_labels_and_mixtures_are_refused(call, message):
    with pytest.raises(UsageError, match=message):
        call(dataset(10))


def test_multi_hot_rows_have_ones_for_the_labels_of_the_sample():
    data = dataset(12)
    loader = make(data, labels=MultiHot("tags"), last="mask", shuffle=False, global_batch_size=10)
    assert loader.labels.classes == ("a", "b", "c")
    first, last = loader
    assert first.labels.dtype == torch.float32
    assert first.labels.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 0], [1, 0, 1], [0, 0, 1]] * 2
    assert first.valid.all()
    assert last.labels.tolist() == [[1, 1, 0], [0, 0, 0]] + [[0, 0, 0]] * 8
    assert last.valid.tolist() == [True] * 2 + [False] * 8
    numbers = make(data, labels=MultiHot("numbers"), shuffle=False, global_batch_size=4)
    assert numbers.labels.classes == ("0", "1", "2", "3", "4", "5", "6")
    assert next(iter(numbers)).labels.nonzero().tolist() == [[1, 1], [1, 6], [3, 3], [3, 6]]


def test_skipped_clips_have_no_labels():
    data = dataset(8)
    data.damage(3)
    options = {"labels": MultiHot("tags"), "on_error": "skip", "max_skip_rate": 1.0, "shuffle": False}
    batch = next(iter(make(data, **options)))
    assert batch.valid.tolist() == [n != 3 for n in range(8)]
    assert batch.labels[3].tolist() == [0, 0, 0]


def test_classes_do_not_depend_on_split_or_filter(tmp_path):
    data = make_clip(tmp_path / "a.mp4")
    columns = {"tags": [["x"], ["z"], ["y", "x"]], "split": ["train", "val", "train"], "labels": [["b"], [], ["a"]]}
    pack(tmp_path / "set", [[(f"s{n}", data, n % 2) for n in range(3)]], classes=("b", "a"), columns=columns)
    for split in ("train", "val"):
        whole = fastvid.open(tmp_path / "set", split=split)
        assert MultiHotLabels(MultiHot("tags"), whole).labels.classes == ("x", "y", "z")
        # The column `labels` has the classes of the dataset.
        assert MultiHotLabels(MultiHot("labels"), whole).labels.classes == ("b", "a")


def test_rows_of_a_mixture_say_their_dataset():
    mixture = Mixture({"kinetics": FakeDataset(4), "mine": FakeDataset(5)}, weights={"mine": 3, "kinetics": 1})
    assert mixture.weights == (1, 3)
    batches = list(make(mixture, last="mask"))
    for batch in batches:
        expected = ["" if s == MASKED else "kinetics" if s < 4 else "mine" for s in batch.sample.tolist()]
        assert list(batch.dataset) == expected
    assert Counter(name for batch in batches for name in batch.dataset) == {"kinetics": 2, "mine": 7, "": 7}
    assert set(next(iter(make(Mixture([FakeDataset(4), FakeDataset(5)])))).dataset) == {"0", "1"}
    with pytest.raises(AttributeError, match="ask for it by a Mixture"):
        _ = next(iter(make(FakeDataset(8)))).dataset


def test_a_dataset_without_labels_can_be_mixed_with_labelled_ones():
    plain = FakeDataset(3, classes=())
    plain.labels = np.full(3, -1)
    mixture = Mixture([plain, FakeDataset(3)])
    assert mixture.classes == ("a", "b", "c")
    assert mixture.labels.tolist() == [-1, -1, -1, 0, 1, 2]


def test_columns_that_a_dataset_of_a_mixture_lacks_are_none():
    parts = {"one": FakeDataset(3, extra={"caption": ["x", "y", "z"]}), "two": FakeDataset(2)}
    parts["none"] = FakeDataset(1, extra={"caption": [None]})
    options = {"fields": ("caption", "note"), "text": Text("caption", empty="-")}
    (batch,) = make(Mixture(parts), shuffle=False, last="keep", **options)
    assert batch.fields["caption"] == ("x", "y", "z", None, None, None)
    assert batch.fields["note"] == ("note-0", "note-1", "note-2", "note-0", "note-1", "note-0")
    assert batch.text == ("x", "y", "z", "-", "-", "-")
    with pytest.raises(UsageError, match=r"no dataset of the mixture has a column 'size'\n.*note, caption"):
        make(Mixture(parts), fields=("size",), last="keep")
    parts["two"].extra["caption"] = [1, 2]
    with pytest.raises(UsageError, match="different types in the datasets: string, int64"):
        make(Mixture(parts), fields=("caption",), last="keep")


def test_clips_of_each_dataset_follow_its_rules_and_are_part_of_the_state():
    mixture = Mixture({"one": FakeDataset(20), "two": FakeDataset(20)})
    options = {"frames": {"one": Uniform(2), "two": Uniform(3)}, "collate": "list"}
    spatial = {"one": CenterCrop(16), "two": CenterCrop((8, 24))}
    loader = make(mixture, **options, spatial=spatial)
    for batch in loader:
        for name, video in zip(batch.dataset, batch.video, strict=True):
            assert video.shape == ((3, 2, 16, 16) if name == "one" else (3, 3, 8, 24))
    state = loader.state_dict()
    swapped = {"frames": {"one": Uniform(3), "two": Uniform(2)}, "collate": "list"}
    with pytest.raises(StateError, match="another sampler"):
        make(mixture, **swapped, spatial=spatial).load_state_dict(state)
    with pytest.raises(StateError, match="another augmentation"):
        make(mixture, **options, spatial=CenterCrop(16)).load_state_dict(state)
    # Equal rules for all datasets are the same clips as one rule.
    same = make(mixture, frames={"one": Uniform(2), "two": Uniform(2)}, spatial=CenterCrop(16)).state_dict()
    make(mixture, frames=Uniform(2), spatial=CenterCrop(16)).load_state_dict(same)


def test_sizes_of_clips_follow_the_rules_of_each_dataset():
    mixture = Mixture({"one": FakeDataset(3), "two": FakeDataset(3)})
    rules = ClipRules.of(mixture, {"one": Uniform(2), "two": Uniform(3)}, {"one": CenterCrop(16), "two": CenterCrop(8)})
    sizes = clip_sizes(mixture, rules)
    assert sizes.frames.tolist() == [2] * 3 + [3] * 3
    assert sizes.heights.tolist() == sizes.widths.tolist() == [16] * 3 + [8] * 3
    assert clip_sizes(mixture, ClipRules.of(mixture, Uniform(2), CenterCrop(16))).frames.tolist() == [2] * 6
