"""Changes of a dataset: removal, labels, compaction, garbage collection, concurrent changes, and their history."""

import io
import json
import os
from collections import Counter
from unittest.mock import Mock

import pytest

import fastvid
from fastvid.cli.main import main
from fastvid.errors import ConflictError, JobError, StorageError, UsageError
from fastvid.format import dataset as datasets
from fastvid.format import reason
from fastvid.format.dataset import Dataset, change
from fastvid.format.generations import read_generation, read_head
from fastvid.format.reason import because
from fastvid.format.shard import Shard
from fastvid.format.tar import read_members
from fastvid.runtime.processes import namespace
from fastvid.sharding.change import history, takedown
from fastvid.sharding.change.edit import match_annotations, read_labels, relabel_samples, remove_samples
from fastvid.sharding.change.history import collect_garbage, find_garbage, list_generations
from fastvid.sharding.change.repack import compact_shards
from fastvid.sharding.job import ledger
from fastvid.sharding.sources.tables import AnnotationRow, Annotations
from fastvid.storage import LocalStorage
from tests import forks
from tests.datasets import make_clip, pack, recommit
from tests.sharding.shardtools import contents


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return make_clip(tmp_path_factory.mktemp("clip") / "clip.mp4")


@pytest.fixture
def store(tmp_path, clip):
    """Three shards of three samples, keys c/0 to c/8."""
    shards = [[(f"c/{n}", clip, n % 2) for n in range(3 * s, 3 * s + 3)] for s in range(3)]
    return pack(tmp_path / "d", shards, columns={"split": ["train", "val", "test"] * 3})


def keys(store, **options):
    return Dataset(store.url, **options).keys.to_pylist()


def members(store, stem):
    view = store.map(f"{stem}.tar")
    return {m.name: bytes(view[m.offset : m.offset + m.size]) for m in read_members(view)}


class TestRemove:
    def test_hides_samples_from_the_next_open_and_touches_no_shard(self, store):
        before = contents(store)
        open_already = Dataset(store.url)
        done = remove_samples(store, ["c/1", "c/4", "c/1"])
        assert (done.generation, done.removed, done.already) == (2, 2, 0)
        assert keys(store) == ["c/0", "c/2", "c/3", "c/5", "c/6", "c/7", "c/8"]
        assert len(open_already) == 9
        assert keys(store, generation=1) == [f"c/{n}" for n in range(9)]
        after = contents(store)
        assert all(after[name] == before[name] for name in before if name != "dataset.json")
        # Again it makes no new generation.
        done = remove_samples(store, ["c/1"])
        assert (done.generation, done.removed, done.already) == (2, 0, 1)
        assert contents(store) == after
        assert remove_samples(store, ["c/1", "c/2"]) == type(done)(3, 1, 1)

    def test_is_all_or_nothing_when_a_key_is_unknown(self, store):
        before = contents(store)
        with pytest.raises(UsageError, match=r"(?s)2 of 3 keys are not in the dataset: 'c/9', 'C/1'.*mean 'c/"):
            remove_samples(store, ["c/1", "c/9", "C/1"])
        with pytest.raises(UsageError, match="no key"):
            remove_samples(store, [])
        assert contents(store) == before

    def test_all_samples_can_be_removed(self, store):
        remove_samples(store, [f"c/{n}" for n in range(9)])
        with pytest.raises(UsageError, match="no sample matches"):
            Dataset(store.url)
        assert compact_shards(store).rewritten == {f"data-00000{n}": None for n in range(3)}
        assert read_generation(store)[1].shards == ()


class TestRelabel:
    def test_changes_named_samples_only(self, store):
        rows = {"c/0": {"label": "right", "split": "val"}, "c/1": {"label": "0"}, "c/2": {"label": None}}
        done = relabel_samples(store, rows)
        assert (done.generation, done.samples, done.columns) == (2, 3, ("label", "split"))
        now = Dataset(store.url)
        assert now.labels.tolist() == [1, 0, -1, 1, 0, 1, 0, 1, 0]
        assert now.column("split").to_pylist()[:3] == ["val", "val", "test"]
        assert Dataset(store.url, generation=1).labels.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0]

    def test_new_column_is_null_for_unnamed_samples_and_keeps_its_type(self, store):
        relabel_samples(store, {"c/3": {"caption": "a box"}, "c/4": {"weight": 2}})
        now = Dataset(store.url)
        assert now.column("caption").to_pylist() == [None] * 3 + ["a box"] + [None] * 5
        assert Dataset(store.url, where="weight > 1").keys.to_pylist() == ["c/4"]
        with pytest.raises(UsageError, match="do not have its type int64"):
            relabel_samples(store, {"c/1": {"weight": "heavy"}})

    @pytest.mark.parametrize(
        ("old", "new", "fits"),
        [
            ([1, 2, 3], 0.25, True),
            ([[1, 2], [3], []], [0.5], True),
            ([None, None, None], "a box", True),
            ([None, None, None], 0.5, True),
            ([True, False, True], 3, False),
            ([0.5, 1.5, 2.5], 2**53 + 1, False),
            ([2**53 + 1, 2, 3], 0.5, False),
        ],
    )
    def test_a_value_keeps_its_digits_or_is_refused(self, old, new, fits, clip, tmp_path):
        store = pack(tmp_path / "d", [[(f"c/{n}", clip, 0) for n in range(3)]], columns={"score": old})
        if not fits:
            with pytest.raises(UsageError, match="values of column 'score' do not have its type"):
                relabel_samples(store, {"c/1": {"score": new}})
        else:
            relabel_samples(store, {"c/1": {"score": new}})
            old[1] = new
        assert Dataset(store.url).column("score").to_pylist() == old

    def test_invalid_changes_are_refused_and_same_values_make_no_generation(self, store):
        for rows in (
            {},
            {"c/0": {}},
            {"c/0": {"num_frames": 3}},
            {"c/0": {"class": "left"}},
            {"c/9": {"label": "left"}},
        ):
            with pytest.raises(UsageError):
                relabel_samples(store, rows)
        assert relabel_samples(store, {"c/0": {"label": "left"}}).columns == ()
        assert read_head(store).generation == 1

    def test_csv_is_parsed_to_rows(self, tmp_path):
        text = 'key,label,split,weight\nc/0,right,,1\n"c/1",left,"a,b",2\n'
        (tmp_path / "new.csv").write_text(text, encoding="utf-8-sig")
        assert read_labels(str(tmp_path / "new.csv")) == {
            "c/0": {"label": "right", "split": None, "weight": 1},
            "c/1": {"label": "left", "split": "a,b", "weight": 2},
        }

    def test_annotation_rows_find_samples_by_the_names_of_their_sources(self, tmp_path, clip):
        names = ["a/x.mp4", "b/x.mp4", "b/y.mp4", "b/z.mp4#1-2", "b/z.mp4#2-3", "y.mp4"]
        table = pack(tmp_path / "d", [[(f"k{n}", clip, 0) for n in range(6)]])
        table = Dataset(table.url).annotations.set_column(1, "source_id", [names])
        rows = (
            AnnotationRow("x.mp4", "left"),
            AnnotationRow("root/b/x.mp4", "left"),
            AnnotationRow("a/x", "right", {"split": "val"}),
            AnnotationRow("z", "right"),
            AnnotationRow("./y.mp4", "left"),
            AnnotationRow("z_000002_000003", "left", {}, 2.0, 3.0, "z"),
            AnnotationRow("gone.mp4", "left"),
        )
        found, unmatched, ambiguous = match_annotations(table, Annotations(rows, ("left", "right")))
        assert found == {
            "k0": {"label": "right", "split": "val"},
            "k3": {"label": "right"},
            "k4": {"label": "left"},
            "k5": {"label": "left"},
        }
        assert (ambiguous, unmatched) == (["x.mp4"], ["root/b/x.mp4", "gone.mp4"])


class TestCompact:
    def test_rewrites_only_shards_with_removed_samples(self, store):
        remove_samples(store, ["c/1", "c/6", "c/7", "c/8"])
        before, old = contents(store), members(store, "data-000000")
        done = compact_shards(store)
        assert done.rewritten == {"data-000000": "data-000000-2", "data-000002": None}
        assert (done.generation, done.samples) == (3, 4)
        assert all(contents(store)[name] == data for name, data in before.items() if name != "dataset.json")
        shards = read_generation(store)[1].shards
        assert [shard.name for shard in shards] == ["data-000000-2", "data-000001"]
        assert shards[0].profile == {"name": "compact"}
        new = members(store, "data-000000-2")
        videos = {name: data for name, data in old.items() if name.endswith(".mp4") and not name.startswith("c/1.")}
        assert {name: new[name] for name in new if name.endswith(".mp4")} == videos
        now = Dataset(store.url)
        assert now.keys.to_pylist() == ["c/0", "c/2", "c/3", "c/4", "c/5"]
        assert now.annotations.num_rows == 5
        assert [part.tolist() for part in now.locate([0, 1, 2])] == [[0, 0, 1], [0, 1, 0]]
        assert now.shard(0).info(1) == Shard(store, "data-000000").info(2)

    def test_compacting_again_replaces_what_an_earlier_compaction_wrote(self, store):
        relabel_samples(store, {"c/0": {"caption": "old", "note": "old"}})
        remove_samples(store, ["c/1"])
        compact_shards(store)
        relabel_samples(store, {"c/0": {"label": "right", "caption": None, "note": "new"}})
        remove_samples(store, ["c/2"])
        compact_shards(store)
        (name,) = (shard.name for shard in read_generation(store)[1].shards if shard.name.startswith("data-000000"))
        found = members(store, name)
        assert list(found) == ["c/0.json", "c/0.cls", "c/0.mp4"]
        meta = json.loads(found["c/0.json"])
        assert (found["c/0.cls"], meta["class"], meta["annotations"]) == (b"1", "right", {"note": "new"})
        assert "caption" not in meta

    def test_the_ledger_says_where_samples_are_now(self, store, monkeypatch):
        ledger.keep_ledger(store, read_generation(store)[1])
        remove_samples(store, ["c/1", "c/6", "c/7", "c/8"])
        monkeypatch.setattr(ledger, "follow_shards", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            compact_shards(store)
        monkeypatch.undo()
        compact_shards(store)
        remove_samples(store, ["c/3"])
        compact_shards(store)
        found = {row["key"]: row["shard"] for row in ledger.read_ledger(store)[0].to_pylist()}
        assert found == {f"c/{n}": None for n in (1, 3, 6, 7, 8)} | {
            "c/0": "data-000000-2", "c/2": "data-000000-2", "c/4": "data-000001-4", "c/5": "data-000001-4",
        }  # fmt: skip


class TestGarbage:
    def test_deletes_files_of_dropped_generations_only(self, store):
        remove_samples(store, ["c/1"])
        compact_shards(store)
        (store.root / "notes.txt").write_text("mine")
        (store.root / "data-000000.txt").write_text("mine too")
        expected = {f"data-000000.{suffix}" for suffix in ("tar", "idx", "parquet", "pkt")}
        expected |= {name for n in (1, 2) for name in (f"annotations-00000{n}.parquet", f"generations/00000{n}.json")}
        found = find_garbage(store)
        assert set(found.files) == expected
        assert (found.kept, found.dropped) == ((3,), (2, 1))
        assert found.bytes == sum(store.size(name) for name in expected)
        before = contents(store)
        assert collect_garbage(store) == found
        assert before.keys() - contents(store).keys() == expected
        assert keys(store) == [f"c/{n}" for n in range(9) if n != 1]
        with pytest.raises(StorageError, match="no generation 1"):
            Dataset(store.url, generation=1)
        assert not collect_garbage(store).files

    def test_keeps_the_requested_generations_and_the_shards_of_an_unfinished_job(self, store):
        remove_samples(store, ["c/1"])
        compact_shards(store)
        assert find_garbage(store, keep_generations=2).kept == (3, 2)
        assert not {name for name in find_garbage(store, keep_generations=2).files if name.startswith("data")}
        assert not find_garbage(store, keep_generations=9).files
        with pytest.raises(UsageError, match="keep_generations is 0"):
            find_garbage(store, keep_generations=0)
        store.write("ledger-parts/000000.parquet", b"")
        with pytest.raises(JobError, match="unfinished"):
            collect_garbage(store)

    def test_keeps_the_shards_of_a_job_that_begins_meanwhile(self, store, monkeypatch):
        def begin_and_list(prefix=""):
            if not prefix:
                store.write("ledger-parts/add/ledger-parts/job.json", b"{}")
                store.write("data-000009.tar", b"new")
            return listing(prefix)

        listing = store.list
        monkeypatch.setattr(store, "list", begin_and_list)
        with pytest.raises(JobError, match="unfinished"):
            collect_garbage(store)
        assert store.exists("data-000009.tar")

    def test_files_that_another_process_deletes_meanwhile_are_no_error(self, store, monkeypatch):
        listing = store.list
        monkeypatch.setattr(store, "list", lambda prefix="": [*listing(prefix), *["data-000009.tar"] * (not prefix)])
        assert not collect_garbage(store).files

    def test_a_name_that_was_given_again_while_it_was_stopped_is_kept(self, store, monkeypatch):
        def stop_meanwhile(*args, **more):
            swap(*args, **more)
            store.delete("data-000000.tar")
            store.write("data-000000.tar", b"of another change")

        remove_samples(store, ["c/1"])
        compact_shards(store)
        swap = history.swap_head
        monkeypatch.setattr(history, "swap_head", stop_meanwhile)
        assert "data-000000.tar" in collect_garbage(store).files
        assert store.read("data-000000.tar") == b"of another change"
        assert not store.exists("data-000000.pkt")

    def test_a_dataset_opens_while_its_generation_is_deleted(self, store, monkeypatch):
        def delete_first(*args):
            if read_generation(store)[1].number < 3:
                remove_samples(store, ["c/1"])
                compact_shards(store)
                collect_garbage(store)
            return opening(*args)

        opening = datasets.open_annotations
        monkeypatch.setattr(datasets, "open_annotations", delete_first)
        assert Dataset(store.url).generation.number == 3
        with pytest.raises(StorageError, match="no generation 1"):
            Dataset(store.url, generation=1)

    def test_a_change_that_began_before_fails_instead_of_referring_to_deleted_files(self, store):
        def collect_meanwhile(generation, table):
            if attempts.total() == 0:
                collect_garbage(store)
            attempts["edit"] += 1
            return generation, table

        attempts = Counter()
        recommit(store, note="two")
        made = change(store, collect_meanwhile)
        assert attempts["edit"] == 2, "the first attempt must have failed"
        assert (made.number, made.parent) == (4, 2)
        assert keys(store)


class TestConflicts:
    def test_a_condition_selects_from_the_rows_that_were_read(self, store, monkeypatch):
        def read_and_change(*args):
            table = read(*args)
            remove_samples(store, ["c/0"])
            compact_shards(store)
            return table

        read = takedown.read_annotations
        monkeypatch.setattr(takedown, "read_annotations", read_and_change)
        assert takedown.select_keys(store, takedown.SourceSelection(where="key = 'c/4'")) == ["c/4"]

    def test_compaction_never_overwrites_a_concurrent_change(self, store, monkeypatch):
        from fastvid.sharding.change import repack

        remove_samples(store, ["c/1"])
        write = repack.write_shard

        def write_and_lose(*args, **kwargs):
            remove_samples(store, ["c/5"])
            return write(*args, **kwargs)

        monkeypatch.setattr(repack, "write_shard", write_and_lose)
        with pytest.raises(ConflictError):
            compact_shards(store)
        monkeypatch.undo()
        assert keys(store) == ["c/0", "c/2", "c/3", "c/4", "c/6", "c/7", "c/8"]
        assert len(compact_shards(store).rewritten) == 2


def test_takedown_hides_then_deletes_samples(store, tmp_path, capsys, monkeypatch):
    (tmp_path / "keys.txt").write_text("c/1\n\n c/2 \n")
    monkeypatch.setattr("sys.stdin", io.StringIO("c/2\nc/3\n"))
    for words, said in (
        (["remove", "--keys", "c/0", "--keys-file", str(tmp_path / "keys.txt")], "generation 2: 3 samples removed\n"),
        (["remove", "--keys-file", "-"], "generation 3: 1 sample removed, 1 already removed\n"),
        (["compact"], "data-000000 -> no shard: it has no samples left\ndata-000001 -> data-000001-3\n"),
        (["gc"], "generations to delete: 3, 2, 1"),
        (["gc", "--yes"], "generations deleted: 3, 2, 1"),
        (["gc", "--yes"], "nothing to delete"),
        (["compact"], "no shard contains removed samples"),
    ):
        was_there = store.exists("data-000000.tar")
        assert main([words[0], store.url, *words[1:]]) == 0
        assert said in capsys.readouterr().out
        assert store.exists("data-000000.tar") == (was_there and "--yes" not in words), "without --yes it stays"
    for name in store.list():
        assert b"c/1" not in bytes(store.read(name)), f"{name} still knows the removed sample"


def test_relabel_command_changes_labels(store, tmp_path, capsys):
    (tmp_path / "labels.csv").write_text("key,label\nc/0,up\n")
    table = ["relabel", store.url, "--from", str(tmp_path / "labels.csv")]
    assert main(table) == 2
    assert "unknown class 'up'" in capsys.readouterr().err
    assert main([*table, "--new-classes"]) == 0
    assert capsys.readouterr().out == "generation 2: 1 sample changed in label\nnew classes: up\n"
    (tmp_path / "list.txt").write_text("videos/c/0.avi left\nc/1.avi left\nnone.avi left\n")
    for said in ("generation 3: 1 sample changed in label", "already have these values"):
        assert main(["relabel", store.url, "--annotations", f"list:{tmp_path / 'list.txt'}"]) == 0
        assert said in capsys.readouterr().out
    for name, *words in (["remove", "--keys-file", "none"], ["remove"], ["relabel", "--from", "none"]):
        assert main([name, store.url, *words]) == 2
        assert capsys.readouterr().err.startswith(f"fastvid {name}: ")


def test_file_creation_is_exclusive_without_hard_links(tmp_path, monkeypatch):
    monkeypatch.setattr("os.link", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    store = LocalStorage(tmp_path)
    assert [store.swap("x", data, None) for data in (b"one", b"two")] == [True, False]
    assert (store.read("x"), store.list()) == (b"one", ["x"])


def leftovers(store):
    return [path.name for path in store.root.rglob("*") if path.suffix in (".tmp", ".lock")]


KILLED = """
import os, signal, sys
from fastvid.storage import LocalStorage, local
from fastvid.sharding.change.repack import compact_shards
local.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
compact_shards(LocalStorage(sys.argv[1]))
"""


@pytest.mark.parametrize("change", [compact_shards, collect_garbage])
def test_files_of_a_killed_compaction_are_deleted_by_the_next_command(change, store):
    remove_samples(store, ["c/1"])
    before = contents(store)
    assert forks.run("-c", KILLED, store.url).returncode == -9
    assert leftovers(store)
    assert contents(store) == before, "what it was writing is not listed"
    writing = store.root / f"data-000007.tar.{namespace()}-{os.getpid()}-aa.tmp"
    writing.touch()
    change(store)
    assert leftovers(store) == [writing.name]


def test_a_generation_records_when_what_and_why(store, capsys, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000001")
    assert main(["remove", store.url, "--keys", "c/1", "--reason", "blurred"]) == 0
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    with because("typo"):
        relabel_samples(store, {"c/0": {"caption": "new"}})
    third, second, first = list_generations(store)
    assert (first["number"], first["samples"], first["removed"], first["reason"]) == (1, 9, 0, "")
    names = ("time", "note", "reason", "samples", "removed")
    said = ("2023-11-14T22:13:21Z", "take down 1 sample, receipt 1", "blurred", 8, 1)
    assert tuple(second[name] for name in names) == said
    assert (third["note"], third["reason"]) == ("relabel", "typo")
    assert third["time"] > second["time"]
    capsys.readouterr()
    assert main(["log", store.url]) == 0
    out = capsys.readouterr().out
    assert "generation 2  2023-11-14T22:13:21Z  take down 1 sample, receipt 1\n    blurred\n" in out
    assert "    8 samples, 1 removed and hidden" in out
    assert main(["log", store.url, "--json"]) == 0
    assert [entry["number"] for entry in json.loads(capsys.readouterr().out)] == [3, 2, 1]


def test_a_reason_ends_with_its_block_and_wrong_ones_change_nothing(store, monkeypatch):
    with pytest.raises(UsageError, match="1001 characters"), because("x" * 1001):
        pass
    with because("outer"):
        with because("inner"):
            pass
        assert reason.current_reason() == "outer"
    remove_samples(store, ["c/0"])
    assert list_generations(store)[0]["reason"] == ""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(UsageError, match="SOURCE_DATE_EPOCH is 'yesterday'"):
        remove_samples(store, ["c/1"])
    assert len(list_generations(store)) == 2


def test_garbage_collection_keeps_the_generations_that_are_named(store, capsys):
    remove_samples(store, ["c/0"])
    compact_shards(store)
    relabel_samples(store, {"c/1": {"caption": "later"}})
    relabel_samples(store, {"c/1": {"caption": "latest"}})
    assert main(["gc", store.url, "--keep", "1", "--yes"]) == 0
    assert "generations kept: 5, 1\n" in capsys.readouterr().out
    assert [entry["number"] for entry in list_generations(store)] == [5, 1]
    kept = fastvid.open(store.url, generation=1)
    assert len(kept) == 9
    assert kept["c/0"].frames([0]).data.shape[0] == 1
    for command in ("inspect", "verify"):
        assert main([command, store.url, "--generation", "1"]) == 0
    with pytest.raises(StorageError, match="no generation 3"):
        collect_garbage(store, keep=[3])
    collect_garbage(store, keep=[1])
    collect_garbage(store)
    assert [entry["number"] for entry in list_generations(store)] == [5]
