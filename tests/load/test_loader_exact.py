"""ClipLoader over a dataset in memory: exact epochs, elastic resume, batches for any world size."""

import json

import numpy as np
import pytest
import torch

from fastvid.errors import StateError, UsageError
from fastvid.load.after.augment import ColorJitter
from fastvid.load.batch.labels import MultiHot, Text
from fastvid.load.clips.crops import CenterCrop, HorizontalFlip, RandomCrop
from fastvid.load.clips.sampling import Dense, Segments
from fastvid.load.clips.views import Views
from fastvid.load.order.epoch import BlockShuffle, ClassBalanced
from fastvid.load.order.mixture import Mixture
from tests.load.fakes import FakeDataset, fake
from tests.load.tools import epoch_of, make, rows, until


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize(("decoder", "threads"), [("RgbDecoder", 1), ("RgbDecoder", 4), ("GroupDecoder", 2)])
def test_an_epoch_is_the_same_for_any_world_thread_count_and_decoder(world, decoder, threads):
    dataset = FakeDataset(61)
    alone = epoch_of(dataset, 1, num_threads=1, last="keep")
    assert epoch_of(dataset, world, decoder=fake(decoder), num_threads=threads, last="keep", prefetch=1) == alone
    assert sorted(row[1] for batch in alone for row in batch) == list(range(61))


def test_state_counts_what_was_delivered_not_what_was_prefetched():
    dataset = FakeDataset(80)
    loader = make(dataset, prefetch=4)
    iterator = iter(loader)
    first = next(iterator)
    until(lambda: loader._run.ready == 4)  # four batches are ready
    assert (first.start, first.stop) == (0, 8)
    assert loader.state_dict()["position"] == 8
    resumed = make(dataset)
    resumed.load_state_dict(loader.state_dict())
    assert next(iter(resumed)).start == 8
    assert next(iterator).start == 8
    assert loader.state_dict()["position"] == 16
    iterator.close()


def test_steps_left_are_the_batches_of_one_loop_and_the_length_those_of_an_epoch():
    loader = make(FakeDataset(43))
    assert (loader.steps_left, loader.steps_per_epoch, len(loader)) == (5, 5, 5)
    seen = []
    for number, _ in enumerate(loader):
        seen.append(loader.steps_left)
        if number == 1:
            break
    assert seen == [5, 5]
    assert (loader.steps_left, loader.steps_per_epoch, len(loader)) == (3, 5, 5)
    resumed = make(FakeDataset(43))
    resumed.load_state_dict(loader.state_dict())
    assert (resumed.steps_left, resumed.steps_per_epoch, len(resumed)) == (3, 5, 5)
    assert len(list(loader)) == 3
    assert (loader.steps_left, loader.epoch, loader.position) == (5, 1, 0)


def test_set_epoch_keeps_the_position_of_a_resumed_epoch():
    loader = make(FakeDataset(64))
    state = {**loader.state_dict(), "epoch": 3, "position": 16}
    loader.load_state_dict(state)
    loader.set_epoch(3)
    assert loader.position == 16
    loader.set_epoch(4)
    assert (loader.epoch, loader.position) == (4, 0)
    with pytest.raises(UsageError, match="epoch is -1"):
        loader.set_epoch(-1)


@pytest.mark.parametrize("last", ["drop", "mask", "keep"])
def test_a_state_taken_at_the_last_batch_resumes_with_the_next_epoch(last):
    dataset = FakeDataset(43)
    loader = make(dataset, last=last)
    for _ in loader:
        state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (0, 40 if last == "drop" else 43)
    resumed = make(dataset, last=last)
    resumed.load_state_dict(state)
    assert (resumed.steps_left, resumed.epoch, resumed.position) == (loader.steps_left, 1, 0)
    assert resumed.state_dict() == state
    resumed.set_epoch(1)
    assert [rows(batch) for batch in resumed] == [rows(batch) for batch in loader]
    assert resumed.epoch == 2
    resumed.load_state_dict(state)
    resumed.set_epoch(0)
    assert (next(iter(resumed)).epoch, resumed.epoch) == (0, 0)


def test_a_loop_that_stops_at_the_last_batch_gets_every_epoch_whole():
    """zip asks the range first, as Lightning counts batches: neither asks whether there is another batch."""
    dataset = FakeDataset(32)
    whole = make(dataset)
    expected = [[rows(batch) for batch in whole] for _ in range(3)]
    loader, found = make(dataset), []
    for epoch in range(3):
        found.append([rows(batch) for _, batch in zip(range(len(loader)), loader, strict=False)])
        assert loader.epoch == epoch + 1
    assert [len(batches) for batches in found] == [4, 4, 4]
    assert found == expected


def test_the_epoch_advances_only_after_the_body_of_the_last_batch():
    loader, seen = make(FakeDataset(32)), []
    for batch in loader:
        seen.append((batch.epoch, loader.epoch, loader.position))
        if batch.stop == 32:
            break
    assert seen == [(0, 0, stop) for stop in (8, 16, 24, 32)]
    assert (loader.epoch, loader.position) == (1, 0)


def test_a_smaller_batch_size_after_the_last_batch_delivers_the_rest_of_the_epoch():
    loader = make(FakeDataset(43))
    for batch in loader:
        if batch.stop == 40:
            break
    loader.set_batch_size(3)
    assert (loader.steps_left, loader.epoch) == (1, 0)
    assert [(batch.start, batch.stop, batch.epoch) for batch in loader] == [(40, 43, 0)]


@pytest.mark.parametrize("value", [1.0, None, "3", [3]])
def test_a_number_that_is_no_integer_is_refused_by_name(value):
    loader = make(FakeDataset(40))
    for name, call in (
        ("seed", lambda: make(FakeDataset(40), seed=value)),
        ("global_batch_size", lambda: make(FakeDataset(40), global_batch_size=value)),
        ("global_batch_size", lambda: loader.set_batch_size(value)),
        ("group_size", lambda: make(FakeDataset(40), group_size=value)),
        ("epoch", lambda: loader.set_epoch(value)),
    ):
        with pytest.raises(UsageError, match=rf"{name} is (missing|.*, expected an integer)") as caught:
            call()
        assert caught.value.hint
    with pytest.raises(UsageError, match="prefetch is '3', expected an integer"):
        make(FakeDataset(40), prefetch="3")


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor])
def test_integers_of_other_libraries_are_accepted(kind):
    loader = make(FakeDataset(40), seed=kind(3), global_batch_size=kind(8))
    loader.set_epoch(kind(2))
    same = make(FakeDataset(40), seed=3)
    same.set_epoch(2)
    assert loader.state_dict() == same.state_dict()
    assert json.loads(json.dumps(loader.state_dict())) == loader.state_dict()
    assert [rows(batch) for batch in loader] == [rows(batch) for batch in same]


def mixed(*weights, reverse=False, where=None):
    parts = [FakeDataset(40), FakeDataset(40, dataset_id="other", where=where)]
    return {"dataset": Mixture(parts[::-1] if reverse else parts, weights=weights or None)}


def noise(clip):
    return clip + torch.rand(())


TAGS = {"dataset": FakeDataset(40, extra={"tags": [["a"], ["b"]] * 20})}
VIEWED = {"frames": Segments(4, jitter=False), "spatial": CenterCrop(16)}


@pytest.mark.parametrize(
    ("part", "one", "other"),
    [
        ("dataset", {}, {"dataset": FakeDataset(40, dataset_id="other")}),
        ("dataset", mixed(1, 2), mixed(1, 2, reverse=True)),
        ("generation", {}, {"dataset": FakeDataset(40, generation=2)}),
        ("split", {}, {"dataset": FakeDataset(40, split="test")}),
        ("filter", {}, {"dataset": FakeDataset(40, where="num_frames > 8")}),
        ("filter", mixed(1, 2), mixed(1, 2, where="x > 1")),
        ("order", {}, {"shuffle": False}),
        ("order", {}, {"shuffle": BlockShuffle(10)}),
        ("order", {"shuffle": BlockShuffle(10)}, {"shuffle": BlockShuffle(11)}),
        ("order", {}, {"balance": ClassBalanced(num_samples=40)}),
        ("order", {"balance": ClassBalanced(0.25)}, {"balance": ClassBalanced(0.5)}),
        ("order", {}, {"clips_per_video": 2}),
        ("order", mixed(1, 2), mixed(1, 3)),
        ("order", mixed(1, 2), mixed()),
        ("sampler", {}, {"frames": Segments(4)}),
        ("sampler", {}, {"frames": Dense(3, 2)}),
        ("sampler", {"views": Views(2, 3), **VIEWED}, VIEWED),
        ("sampler", {"views": Views(2, 3), **VIEWED}, {"views": Views(3, 3), **VIEWED}),
        ("sampler", {"views": Views(2, 3), **VIEWED}, {"views": Views(2, 3, places=(0.5, 0.0)), **VIEWED}),
        ("augmentation", {}, {"spatial": RandomCrop(16)}),
        ("augmentation", {}, {"spatial": (RandomCrop(18), HorizontalFlip(0.5))}),
        ("text", {"text": Text("note")}, {"text": Text("note", drop=0.5)}),
        ("text", {"text": Text("note")}, {}),
        ("labels", {"labels": MultiHot("tags"), **TAGS}, {"labels": MultiHot("tags", ["b", "a"]), **TAGS}),
        ("labels", {"labels": MultiHot("tags"), **TAGS}, TAGS),
        ("after", {"after": (ColorJitter(0.4), noise)}, {}),
        ("after", {"after": (ColorJitter(0.4), noise)}, {"after": (ColorJitter(0.5), noise)}),
        ("after", {"after": (ColorJitter(0.4), noise)}, {"after": (noise, ColorJitter(0.4))}),
        ("after: None", {}, {"after": [noise]}),
    ],
)
def test_a_state_of_another_loader_is_refused_naming_the_part(part, one, other):
    standard = {"dataset": FakeDataset(40)}
    state = json.loads(json.dumps(make(**standard | one).state_dict()))
    assert sorted(state) == ["epoch", "fingerprint", "position", "seed", "version"]
    make(**standard | one).load_state_dict(state)
    with pytest.raises(StateError, match=rf"(?s)another {part}.*fastvid\.open\(DIR, generation=N\)"):
        make(**standard | other).load_state_dict(state)


def test_numbers_of_numpy_are_the_same_settings():
    settings = (np.float64(0.25), np.int64(18)), (0.25, 18)
    states = [make(FakeDataset(40), spatial=(RandomCrop(size), HorizontalFlip(p))).state_dict() for p, size in settings]
    assert states[0] == states[1]
    told = states[0]["fingerprint"]
    before = {**told, "augmentation": told["augmentation"].replace("0.25", "np.float64(0.25)")}
    make(FakeDataset(40), spatial=(RandomCrop(18), HorizontalFlip(0.25))).load_state_dict(
        {**states[0], "fingerprint": before}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "has version 3, expected 1 or 2"),
        ({"fingerprint": "abc"}, "fingerprint of the state is a str"),
        ({"position": 41}, "position of the state is 41"),
        ({"position": -1}, "position of the state is -1"),
        ({"epoch": "1"}, "epoch of the state is '1'"),
        ({"seed": True}, "seed of the state is True"),
    ],
)
def test_a_broken_state_is_refused(change, message):
    loader = make(FakeDataset(40))
    with pytest.raises(StateError, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})
    with pytest.raises(StateError, match="lacks version, fingerprint, seed"):
        loader.load_state_dict({"epoch": 1, "position": 0})
    for state in (None, 3, "state", []):
        with pytest.raises(StateError, match="not a loader state") as caught:
            loader.load_state_dict(state)
        assert "state_dict()" in caught.value.hint


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_masked_batch_keeps_its_shape_and_masked_rows_have_no_weight(world):
    loaders = [make(FakeDataset(21), last="mask", rank=rank, world_size=world) for rank in range(world)]
    for number, batches in enumerate(zip(*loaders, strict=True)):
        assert sum(batch.num_rows for batch in batches) == 8
        assert sum(float(batch.weight.sum()) for batch in batches) == pytest.approx(1)
        assert sum(int(batch.valid.sum()) for batch in batches) == (5 if number == 2 else 8)
        for batch in batches:
            masked = ~batch.valid
            assert (batch.video[masked] == 0).all()
            assert (batch.label[masked] == -100).all()
            assert (batch.weight[masked] == 0).all()
            assert (batch.position[masked] == -1).all()
            assert (batch.sample[masked] == -1).all()
            assert (batch.frame_index[masked] == -1).all()
            assert [key == "" for key in batch.key] == masked.tolist()
    assert number == 2


def test_the_weighted_sum_over_ranks_is_the_mean_over_the_global_batch():
    def loss(batch):
        return batch.video.float().flatten(1).mean(1)

    (alone,) = make(FakeDataset(13), last="keep", global_batch_size=13)
    for world in (2, 3, 5):
        options = {"last": "keep", "global_batch_size": 13, "world_size": world}
        ranks = [make(FakeDataset(13), rank=rank, **options) for rank in range(world)]
        (batches,) = zip(*ranks, strict=True)
        total = sum((loss(batch) * batch.weight).sum() for batch in batches)
        assert float(total) == pytest.approx(float(loss(alone).mean()), rel=1e-6)
