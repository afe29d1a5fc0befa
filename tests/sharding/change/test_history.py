"""The history of a dataset: when and why each generation was made, what differs, and tags that keep generations."""

from __future__ import annotations

import json
import threading

import pytest

import fastvid
from fastvid.cli.main import main
from fastvid.errors import ConflictError, StorageError, UsageError
from fastvid.format import generations, reason
from fastvid.format.generations import read_head
from fastvid.format.reason import because
from fastvid.sharding.change import history
from fastvid.sharding.change.compact import collect_garbage, compact_shards
from fastvid.sharding.change.edit import relabel_samples, remove_samples
from fastvid.sharding.change.history import compare_generations, delete_tag, list_generations, tag_generation
from fastvid.storage import open_storage
from tests.datasets import edit_record, make_clip, pack


@pytest.fixture
def store(tmp_path):
    """Four samples in two shards, with a caption each."""
    clip = make_clip(tmp_path / "clip.mp4", frames=6)
    samples = [(f"c/{n}", clip, n % 2) for n in range(4)]
    return pack(
        tmp_path / "d",
        [samples[:2], samples[2:]],
        classes=("jump", "run"),
        columns={"caption": [f"caption {n}" for n in range(4)], "words": [[str(n)] for n in range(4)]},
    )


def test_a_generation_records_when_what_and_why(store, capsys, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000001")
    assert main(["remove", store.url, "--keys", "c/1", "--reason", "blurred"]) == 0
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    with because("typo"):
        relabel_samples(store, {"c/0": {"caption": "new"}})
    third, second, first = list_generations(store)
    assert (first.number, first.samples, first.removed, first.reason) == (1, 4, 0, "")
    assert (second.time, second.note, second.reason) == (
        "2023-11-14T22:13:21Z",
        "take down 1 sample, receipt 1",
        "blurred",
    )
    assert (second.samples, second.removed) == (3, 1)
    assert (third.note, third.reason) == ("relabel", "typo")
    assert third.time > second.time
    capsys.readouterr()
    assert main(["log", store.url]) == 0
    out = capsys.readouterr().out
    assert "generation 2  2023-11-14T22:13:21Z  take down 1 sample, receipt 1\n    blurred\n" in out
    assert "    3 samples, 1 removed and hidden" in out
    assert main(["log", store.url, "--json"]) == 0
    assert [entry["number"] for entry in json.loads(capsys.readouterr().out)] == [3, 2, 1]


def test_a_reason_ends_with_its_block_and_has_a_limit(store):
    with pytest.raises(UsageError, match="1001 characters"), because("x" * 1001):
        pass
    with because("outer"):
        with because("inner"):
            pass
        assert reason.current_reason() == "outer"
    remove_samples(store, ["c/0"])
    assert list_generations(store)[0].reason == ""


def test_a_wrong_source_date_is_an_error_and_changes_nothing(store, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(UsageError, match="SOURCE_DATE_EPOCH is 'yesterday'"):
        remove_samples(store, ["c/0"])
    assert len(list_generations(store)) == 1


def test_a_record_without_time_and_reason_opens(store, capsys):
    remove_samples(store, ["c/0"])
    record = json.loads(store.read("generations/000001.json"))
    edit_record(store, "generations/000001.json", **dict.fromkeys(("time", "reason", "removed")))
    assert record["removed"] == 0
    old = list_generations(store)[-1]
    assert (old.samples, old.removed) == (None, None)
    assert main(["log", store.url]) == 0
    assert len(fastvid.open(store.url, generation=1)) == 4
    assert "2 shards" in capsys.readouterr().out


def test_an_interrupted_commit_is_resumed_at_another_time(store, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000001")
    monkeypatch.setattr(generations, "swap_head", interrupted)
    with pytest.raises(KeyboardInterrupt):
        remove_samples(store, ["c/0"])
    monkeypatch.undo()
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000009")
    assert remove_samples(store, ["c/0"]).generation == 2
    assert list_generations(store)[0].time == "2023-11-14T22:13:21Z"
    assert store.list("generations/") == ["generations/000001.json", "generations/000002.json"]


def interrupted(*_args, **_options):
    raise KeyboardInterrupt


def test_differences_are_by_sample_and_column(store, capsys):
    remove_samples(store, ["c/1"])
    relabel_samples(store, {"c/0": {"label": "swim", "caption": "new"}, "c/2": {"words": ["2", "3"]}}, new_classes=True)
    found = compare_generations(store, 1, 3)
    assert (found.added, found.removed, found.samples) == ((), ("c/1",), 2)
    assert {one.column: one.values for one in found.changed} == {
        "caption": (("c/0", "caption 0", "new"),),
        "words": (("c/2", ["2"], ["2", "3"]),),
        "class": (("c/0", "jump", "swim"),),
    }
    assert (found.classes, found.shards) == ((("swim",), ()), ((), ()))
    back = compare_generations(store, 3, 1)
    assert (back.added, back.removed) == (("c/1",), ())
    assert not compare_generations(store, 3).differs
    assert main(["diff", store.url, "1", "--keys"]) == 0
    out = capsys.readouterr().out
    assert "removed 1 sample\n        c/1\n" in out
    assert "c/0: 'caption 0' -> 'new'" in out
    assert "classes +swim" in out
    assert main(["diff", store.url, "1", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changed"]["class"] == {"c/0": {"old": "jump", "new": "swim"}}


def test_a_class_that_moved_to_another_number_is_no_difference(store):
    # Labels 0 and 1 change places together with the names.
    table = generations.read_annotations(store, generations.read_generation(store)[1])
    rows = table.to_pydict() | {"label": [1, 0, 1, 0]}
    record = generations.read_generation(store)[1]
    swapped = generations.replace(record, number=2, classes=("run", "jump"))
    generations.commit_generation(
        store, read_head(store).dataset_id, swapped, table.from_pydict(rows, schema=table.schema)
    )
    found = compare_generations(store, 1, 2)
    assert (found.changed, found.samples) == ((), 0)


def test_compaction_differs_in_shards_alone(store):
    remove_samples(store, ["c/3"])
    compact_shards(store)
    found = compare_generations(store, 2, 3)
    assert (found.added, found.removed, found.changed) == ((), (), ())
    assert [len(names) for names in found.shards] == [1, 1]


def test_a_tag_opens_its_generation_and_keeps_it(store, capsys):
    assert main(["tag", store.url, "paper"]) == 0
    remove_samples(store, ["c/0"])
    compact_shards(store)
    relabel_samples(store, {"c/1": {"caption": "later"}})
    collect_garbage(store)
    assert [(entry.number, entry.tags) for entry in list_generations(store)] == [(4, ()), (1, ("paper",))]
    kept = fastvid.open(store.url, generation="paper")
    assert len(kept) == 4
    assert kept["c/0"].frames([0]).data.shape[0] == 1
    assert compare_generations(store, "paper").removed == ("c/0",)
    for command in (["inspect", store.url], ["verify", store.url], ["diff", store.url, "1"]):
        name = [] if command[0] == "diff" else ["--generation"]
        assert main([*command, *name, "paper"]) == 0
    assert delete_tag(store, "paper") == 1
    collect_garbage(store)
    assert [entry.number for entry in list_generations(store)] == [4]
    with pytest.raises(UsageError, match="no generation has the tag 'paper'"):
        fastvid.open(store.url, generation="paper")
    capsys.readouterr()


def test_tags_survive_every_change(store):
    tag_generation(store, "first")
    remove_samples(store, ["c/0"])
    relabel_samples(store, {"c/1": {"caption": "later"}})
    compact_shards(store)
    assert read_head(store).tags == {"first": 1}


@pytest.mark.parametrize("name", ["", "3", "-x", "a b", "x" * 65, "a/b", "é"])
def test_a_name_that_could_be_taken_for_something_else_is_refused(store, name):
    with pytest.raises(UsageError, match="invalid tag"):
        tag_generation(store, name)


def test_a_tag_moves_only_on_request(store):
    tag_generation(store, "best")
    remove_samples(store, ["c/0"])
    with pytest.raises(UsageError, match=r"generation 1 has the tag 'best' already.*\n.*--move"):
        tag_generation(store, "best")
    assert tag_generation(store, "best", 1) == 1, "giving it again changes nothing"
    assert tag_generation(store, "best", move=True) == 2
    with pytest.raises(UsageError, match="did you mean 'best'"):
        delete_tag(store, "bset")
    with pytest.raises(StorageError, match="no generation 9"):
        tag_generation(store, "later", 9)


def test_a_generation_cannot_be_tagged_and_deleted_at_once(store, monkeypatch):
    """Garbage is collected between the look at the generation and the swap of the record that names it."""
    remove_samples(store, ["c/0"])
    swap, once = history.swap_head, [True]

    def late(*args, **options):
        if once.pop() if once else False:
            collect_garbage(store)
        return swap(*args, **options)

    monkeypatch.setattr(history, "swap_head", late)
    with pytest.raises(StorageError, match="no generation 1"):
        tag_generation(store, "old", 1)
    assert read_head(store).tags == {}


def test_garbage_collection_notices_a_new_tag(store, monkeypatch):
    remove_samples(store, ["c/0"])
    from fastvid.sharding.change import compact

    swap = compact.swap_head

    def late(*args, **options):
        tag_generation(store, "old", 1)
        return swap(*args, **options)

    monkeypatch.setattr(compact, "swap_head", late)
    with pytest.raises(ConflictError):
        collect_garbage(store)
    assert len(fastvid.open(store.url, generation="old")) == 4


def test_writers_of_different_tags_lose_none(store):
    names = [f"t{n}" for n in range(8)]
    threads = [threading.Thread(target=tag_generation, args=(store, name)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read_head(store).tags) == names


def test_tags_work_in_an_object_store(s3, store):
    folder = f"s3://{s3.bucket()}/tags"
    remote = open_storage(folder)
    for name in store.list():
        remote.write(name, store.read(name))
    tag_generation(remote, "paper")
    remove_samples(remote, ["c/2"])
    assert len(fastvid.open(folder, generation="paper")) == 4
    assert [entry.tags for entry in list_generations(remote)] == [(), ("paper",)]
