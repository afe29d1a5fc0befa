"""Signals: what each batch has is computed by hand from what was written."""

import numpy as np
import pyarrow as pa
import pytest
import torch

import fastvid
from fastvid.errors import FormatError, UsageError
from fastvid.format import annotations as signals_module
from fastvid.format.annotations import SIGNALS, signals_file, write_signals
from fastvid.format.dataset import change
from fastvid.storage import LocalStorage
from tests.datasets import make_clip, pack

LENGTHS = (9, 1, 14, 6, 20)
OUTPUT = fastvid.Output(dtype=torch.uint8)


def action(sample, frame):
    return [sample + frame / 100, -sample, frame]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two shards of episodes with an action of three values, and a reward."""
    from dataclasses import replace

    folder = tmp_path_factory.mktemp("signals")
    episodes = [
        (f"episode{number}", make_clip(folder / f"{number}.mp4", frames=frames), -1)
        for number, frames in enumerate(LENGTHS)
    ]
    store = pack(folder / "set", [episodes[:2], episodes[2:]], classes=())

    def with_signals(generation, table):
        shards = []
        for shard, samples in zip(generation.shards, ([0, 1], [2, 3, 4]), strict=True):
            rows = [(sample, frame) for sample in samples for frame in range(LENGTHS[sample])]
            values = [value for row in rows for value in action(*row)]
            columns = {
                "action": pa.FixedSizeListArray.from_arrays(pa.array(values, pa.float32()), 3),
                "reward": pa.array([sample * 100 + frame for sample, frame in rows], pa.int64()),
            }
            shards.append(replace(shard, signals=write_signals(store, shard.name, pa.table(columns))))
        known = {"action": {"names": ["x", "y", "z"], "stats": {"mean": [0.0, 1.0, 2.0]}}, "reward": {}}
        return replace(generation, shards=tuple(shards), extras={SIGNALS: known}), table

    change(store, with_signals)
    return store


def make(url, items=True, **options):
    dataset = fastvid.open(url)
    standard = {"spatial": fastvid.Resize(32), "global_batch_size": 6, "output": OUTPUT, "decoder": "pyav"}
    standard |= {"last": "mask", "frames": fastvid.Deltas([0.0]) if items else fastvid.Segments(3)}
    return fastvid.ClipLoader(fastvid.EveryFrame(dataset) if items else dataset, **standard | options)


def test_items_are_balanced_by_the_class_of_their_sample_and_stand_alone(store):
    dataset = fastvid.open(store.url)
    items = fastvid.EveryFrame(dataset)
    with pytest.raises(UsageError, match="no sample has a label"):
        make(store.url, order=fastvid.Order(balance=fastvid.ClassBalanced()))
    with pytest.raises(UsageError, match="a part of the mixture is an EveryFrame") as caught:
        fastvid.ClipLoader(
            fastvid.Mixture([items, dataset]), frames=fastvid.Deltas([0.0]), spatial=32, global_batch_size=4
        )
    assert caught.value.hint


@pytest.mark.parametrize("mapped", [False, True])
def test_signals_around_items_and_their_pads(store, mapped, monkeypatch, tmp_path):
    monkeypatch.setenv("FASTVID_CACHE", str(tmp_path))
    monkeypatch.setattr(signals_module, "MAPPED_FRAMES", 1 if mapped else 10**9)
    deltas = fastvid.Deltas([-0.08, 0.0, 0.04, 0.2], tolerance=1e-4)
    seen = 0
    for batch in make(store.url, signals={"action": deltas, "reward": fastvid.Deltas([0.0])}):
        assert (batch["action"].dtype, batch["action"].shape) == (torch.float32, (6, 4, 3))
        items = fastvid.EveryFrame(fastvid.open(store.url))
        for row in range(6):
            if not batch.valid[row]:
                assert not batch["action"][row].any()
                assert batch["action_is_pad"][row].all()
                continue
            sample, frame = (int(part) for part in items.place(batch.sample[row]))
            wanted = frame + np.array([-2, 0, 1, 5])
            inside = wanted.clip(0, LENGTHS[sample] - 1)
            assert torch.equal(batch["action"][row], torch.tensor([action(sample, one) for one in inside.tolist()]))
            assert batch["action_is_pad"][row].tolist() == (wanted != inside).tolist()
            assert batch["reward"][row].tolist() == [100 * sample + frame]
            seen += 1
    assert seen == sum(LENGTHS)
    assert bool(list(tmp_path.glob("??/[0-9a-f]*"))) == mapped


def test_signals_at_the_frames_that_a_clip_shows(store):
    for batch in make(store.url, items=False, global_batch_size=2, signals=["reward"]):
        for row, key in enumerate(batch.key):
            if key:
                assert batch["reward"][row].tolist() == (100 * int(key[-1]) + batch.frame_index[row]).tolist()
        assert "reward_is_pad" not in batch


def test_a_row_of_a_clip_dataset_has_the_signals_of_its_own_frames_alone(store):
    clips = fastvid.ClipDataset(
        fastvid.open(store.url), frames=fastvid.AtFps(25), spatial=fastvid.Resize(32), signals=["gain=reward"]
    )
    for row, count in zip(clips.__getitems__(range(5)), LENGTHS, strict=True):
        assert row["gain"].tolist() == [100 * row["sample"] + frame for frame in range(count)]
        assert row["frame_index"].tolist() == list(range(count))


def test_a_signal_may_have_another_name_and_replaces_no_entry(store):
    named, same = (make(store.url, items=False, signals=[one]) for one in ("gain=reward", "reward"))
    for one, other in zip(named, same, strict=True):
        assert torch.equal(one["gain"], other["reward"])
        assert "reward" not in one
    for wrong in (["weight=reward"], ["label=reward"], ["rgb=reward"], ["a=reward", "a=action"]):
        with pytest.raises(UsageError, match=r"(?s)signal '\w+' would replace the entry '\w+'.*my_\w+=\w+"):
            make(store.url, items=False, signals=wrong)
    with pytest.raises(UsageError, match="would replace the entry 'video'"):
        make(store.url, signals={"video=action": fastvid.Deltas([0.0])})


def test_what_is_known_of_signals(store):
    dataset = fastvid.open(store.url)
    assert list(dataset.signals) == ["action", "reward"]
    assert dataset.signals["action"]["stats"]["mean"] == [0.0, 1.0, 2.0]
    with pytest.raises(UsageError, match="no signal 'actoin'") as error:
        dataset.signals["actoin"]
    assert "action" in error.value.hint


def test_selected_samples_have_their_own_signals(store):
    chosen = fastvid.EveryFrame(fastvid.open(store.url).select([4, 1]))
    options = {"frames": fastvid.Deltas([0.0]), "signals": {"reward": fastvid.Deltas([0.0])}}
    loader = fastvid.ClipLoader(chosen, spatial=fastvid.Resize(32), global_batch_size=3, **options)
    for batch in loader:
        frame = torch.tensor(chosen.place(batch.sample)[1])
        assert torch.equal(batch["reward"][:, 0], 100 * torch.tensor([int(key[-1]) for key in batch.key]) + frame)


def test_items_have_the_texts_and_labels_of_their_samples(store):
    def told(generation, table):
        texts = pa.array([f"pick {key}" for key in table["key"].to_pylist()])
        tags = pa.array([[f"tag{number % 2}"] for number in range(len(table))])
        return generation, table.append_column("task", texts).append_column("tags", tags)

    change(store, told)
    extras = fastvid.Extras(text=fastvid.Text("task"), labels=fastvid.MultiHot("tags"))
    for batch in make(store.url, extras=extras):
        for row in np.flatnonzero(batch.valid).tolist():
            assert batch["text"][row] == f"pick {batch.key[row]}"
            assert batch["labels"][row].argmax() == int(batch.key[row][-1]) % 2
        assert all(not batch["labels"][row].any() for row in np.flatnonzero(~batch.valid).tolist())


def test_damage_and_wrong_uses_are_told(store, tmp_path):
    with pytest.raises(UsageError, match="no sample of the dataset has sound"):
        make(store.url, items=False, audio=fastvid.Audio(16_000))
    with pytest.raises(UsageError, match="no items to count from"):
        make(store.url, items=False, signals={"action": fastvid.Deltas([0.0])})
    options = {"frames": fastvid.Segments(2), "spatial": fastvid.Resize(32), "global_batch_size": 2}
    with pytest.raises(UsageError, match="signals and EveryFrame cannot be used with a mixture"):
        fastvid.ClipLoader(fastvid.Mixture([fastvid.open(store.url)]), signals=["reward"], **options)
    with pytest.raises(FormatError, match="signal 'a' has 1 nulls"):
        write_signals(LocalStorage(tmp_path), "x", pa.table({"a": pa.array([1.0, None])}))
    with pytest.raises(FormatError, match="signal 'a' has type string"):
        write_signals(LocalStorage(tmp_path), "x", pa.table({"a": ["text"]}))
    name = signals_file("data-000000")
    content = store.read(name)
    try:
        store.write(name, content[:-1] + b"x")
        with pytest.raises(FormatError, match="not those of the generation") as error:
            list(make(store.url, signals={"action": fastvid.Deltas([0.0])}))
        assert name in str(error.value)
    finally:
        store.write(name, content)
