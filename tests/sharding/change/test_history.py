"""The history of a dataset: when and why each generation was made, and which garbage collection keeps."""

import json

import pytest

import fastvid
from fastvid.cli.main import main
from fastvid.errors import StorageError, UsageError
from fastvid.format import generations, reason
from fastvid.format.generations import read_head
from fastvid.format.reason import because
from fastvid.sharding.change.edit import relabel_samples, remove_samples
from fastvid.sharding.change.history import collect_garbage, list_generations
from fastvid.sharding.change.repack import compact_shards
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
    assert (first["number"], first["samples"], first["removed"], first["reason"]) == (1, 4, 0, "")
    assert (second["time"], second["note"], second["reason"]) == (
        "2023-11-14T22:13:21Z",
        "take down 1 sample, receipt 1",
        "blurred",
    )
    assert (second["samples"], second["removed"]) == (3, 1)
    assert (third["note"], third["reason"]) == ("relabel", "typo")
    assert third["time"] > second["time"]
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
    assert list_generations(store)[0]["reason"] == ""


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
    assert (old["samples"], old["removed"]) == (None, None)
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
    assert list_generations(store)[0]["time"] == "2023-11-14T22:13:21Z"
    assert store.list("generations/") == ["generations/000001.json", "generations/000002.json"]


def interrupted(*_args, **_options):
    raise KeyboardInterrupt


def test_garbage_collection_keeps_the_generations_that_are_named(store, capsys):
    remove_samples(store, ["c/0"])
    compact_shards(store)
    relabel_samples(store, {"c/1": {"caption": "later"}})
    relabel_samples(store, {"c/1": {"caption": "latest"}})
    assert main(["gc", store.url, "--keep", "1", "--yes"]) == 0
    assert "generations kept: 5, 1\n" in capsys.readouterr().out
    assert [entry["number"] for entry in list_generations(store)] == [5, 1]
    kept = fastvid.open(store.url, generation=1)
    assert len(kept) == 4
    assert kept["c/0"].frames([0]).data.shape[0] == 1
    for command in ("inspect", "verify"):
        assert main([command, store.url, "--generation", "1"]) == 0
    with pytest.raises(StorageError, match="no generation 3"):
        collect_garbage(store, keep=[3])
    collect_garbage(store, keep=[1])
    collect_garbage(store)
    assert [entry["number"] for entry in list_generations(store)] == [5]


def test_tags_of_earlier_versions_are_read_and_kept(s3, store, capsys):
    folder = f"s3://{s3.bucket()}/tags"
    remote = open_storage(folder)
    for name in store.list():
        remote.write(name, store.read(name))
    head = read_head(remote)
    generations.swap_head(remote, head, dataset_id=head.dataset_id, generation=1, tags={"paper": 1})
    remove_samples(remote, ["c/0"])
    relabel_samples(remote, {"c/1": {"caption": "later"}})
    compact_shards(remote)
    collect_garbage(remote)
    assert read_head(remote).tags == {"paper": 1}
    assert [(entry["number"], entry["tags"]) for entry in list_generations(remote)] == [(4, ()), (1, ("paper",))]
    assert len(fastvid.open(folder, generation="paper")) == 4
    assert main(["inspect", folder, "--generation", "paper"]) == 0
    with pytest.raises(UsageError, match="no generation has the tag 'thesis'"):
        fastvid.open(folder, generation="thesis")
