"""Changes of a dataset: removal, new labels, compaction, garbage collection, and concurrent changes."""

import io
import json
import os
import subprocess
import sys
from collections import Counter

import pyarrow as pa
import pytest

from fastvid.cli.main import main
from fastvid.errors import ConflictError, JobError, StorageError, UsageError
from fastvid.format.dataset import Dataset, change
from fastvid.format.generations import (
    read_generation,
    read_head,
)
from fastvid.format.shard import Shard
from fastvid.format.tar import read_members
from fastvid.runtime.processes import namespace
from fastvid.sharding.change.edit import match_annotations, read_labels, relabel_samples, remove_samples
from fastvid.sharding.change.history import collect_garbage, find_garbage
from fastvid.sharding.change.repack import compact_shards
from fastvid.sharding.sources.tables import AnnotationRow, Annotations
from fastvid.storage import LocalStorage
from tests.datasets import make_clip, pack, recommit


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


def contents(store):
    """Return every file of the folder that belongs to a dataset, by name."""
    return {name: store.read(name) for name in store.list()}


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

    def test_is_all_or_nothing_when_a_key_is_unknown(self, store):
        before = contents(store)
        with pytest.raises(UsageError, match="2 of 3 keys are not in the dataset: 'c/9', 'C/1'"):
            remove_samples(store, ["c/1", "c/9", "C/1"])
        with pytest.raises(UsageError, match="no key"):
            remove_samples(store, [])
        assert contents(store) == before

    def test_removing_twice_makes_no_new_generation(self, store):
        remove_samples(store, ["c/1"])
        before = contents(store)
        done = remove_samples(store, ["c/1"])
        assert (done.generation, done.removed, done.already) == (2, 0, 1)
        assert contents(store) == before
        assert remove_samples(store, ["c/1", "c/2"]) == type(done)(3, 1, 1)

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

    def test_new_column_is_null_for_unnamed_samples(self, store):
        relabel_samples(store, {"c/3": {"caption": "a box"}, "c/4": {"weight": 2.5}})
        now = Dataset(store.url)
        assert now.column("caption").to_pylist() == [None] * 3 + ["a box"] + [None] * 5
        assert Dataset(store.url, where="weight > 2").keys.to_pylist() == ["c/4"]

    @pytest.mark.parametrize("rows", [{}, {"c/0": {}}, {"c/0": {"num_frames": 3}}, {"c/9": {"label": "left"}}])
    def test_invalid_changes_are_refused(self, store, rows):
        with pytest.raises(UsageError):
            relabel_samples(store, rows)
        assert read_head(store).generation == 1

    def test_a_value_of_another_type_is_refused(self, store):
        relabel_samples(store, {"c/0": {"weight": 1}})
        with pytest.raises(UsageError, match="do not have its type int64"):
            relabel_samples(store, {"c/1": {"weight": "heavy"}})

    def test_same_values_make_no_new_generation(self, store):
        assert relabel_samples(store, {"c/0": {"label": "left"}}).columns == ()
        assert read_head(store).generation == 1

    def test_csv_is_parsed_to_rows(self, tmp_path):
        text = 'key,label,split,weight\nc/0,right,,1\n"c/1",left,"a,b",2\n'
        file = tmp_path / "new.csv"
        file.write_bytes(text.encode("utf-8-sig"))
        rows = read_labels(str(file))
        assert rows == {
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
        assert done.generation == 3
        assert done.rewritten == {"data-000000": "data-000000-2", "data-000002": None}
        assert done.samples == 4
        assert all(contents(store)[name] == data for name, data in before.items() if name != "dataset.json")
        generation = read_generation(store)[1]
        assert [shard.name for shard in generation.shards] == ["data-000000-2", "data-000001"]
        assert generation.shards[0].profile == {"name": "compact"}
        new = members(store, "data-000000-2")
        assert {name: new[name] for name in new if name.endswith(".mp4")} == {
            name: data for name, data in old.items() if name.endswith(".mp4") and not name.startswith("c/1.")
        }
        now = Dataset(store.url)
        assert now.keys.to_pylist() == ["c/0", "c/2", "c/3", "c/4", "c/5"]
        assert now.annotations.num_rows == 5
        shards, rows = now.locate([0, 1, 2])
        assert (shards.tolist(), rows.tolist()) == ([0, 0, 1], [0, 1, 0])
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

    def test_compaction_without_removed_samples_makes_no_generation(self, store):
        assert compact_shards(store).rewritten == {}
        assert read_head(store).generation == 1

    def test_names_stay_short_over_many_rounds(self, store):
        for key in ("c/0", "c/1"):
            remove_samples(store, [key])
            compact_shards(store)
        assert read_generation(store)[1].shards[0].name == "data-000000-4"


class TestGarbage:
    def test_deletes_files_of_dropped_generations_only(self, store):
        remove_samples(store, ["c/1"])
        compact_shards(store)
        (store.root / "notes.txt").write_text("mine")
        (store.root / "data-000000.txt").write_text("mine too")
        expected = {f"data-000000.{suffix}" for suffix in ("tar", "idx", "parquet", "pkt")}
        expected |= {
            f"{part}" for n in (1, 2) for part in (f"annotations-00000{n}.parquet", f"generations/00000{n}.json")
        }
        found = find_garbage(store)
        assert set(found.files) == expected
        assert (found.kept, found.dropped) == ((3,), (2, 1))
        assert found.bytes == sum(store.size(name) for name in expected)
        before = contents(store)
        assert collect_garbage(store) == found
        after = contents(store)
        assert set(before) - set(after) == expected
        assert {"notes.txt", "data-000000.txt"} < set(after)
        assert keys(store) == [f"c/{n}" for n in range(9) if n != 1]
        with pytest.raises(StorageError, match="no generation 1"):
            Dataset(store.url, generation=1)
        assert not collect_garbage(store).files

    def test_keeps_the_requested_number_of_generations(self, store):
        remove_samples(store, ["c/1"])
        compact_shards(store)
        assert find_garbage(store, keep_generations=2).kept == (3, 2)
        assert not {name for name in find_garbage(store, keep_generations=2).files if name.startswith("data")}
        assert not find_garbage(store, keep_generations=9).files
        with pytest.raises(UsageError, match="keep_generations is 0"):
            find_garbage(store, keep_generations=0)

    def test_an_unfinished_job_keeps_its_shards(self, store):
        store.write("ledger-parts/000000.parquet", b"")
        remove_samples(store, ["c/1"])
        with pytest.raises(JobError, match="unfinished"):
            collect_garbage(store)

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
    def test_change_is_retried_on_the_generation_of_another_one(self, store):
        def other(generation, table):
            if read_head(store).generation == 1:
                remove_samples(store, ["c/0"])
            return relabel(generation, table)

        def relabel(generation, table):
            return generation, table.set_column(2, table.schema.field(2), pa.array([1] * 9, pa.int32()))

        assert change(store, other).parent == 2
        assert "c/0" not in keys(store)
        assert set(Dataset(store.url).labels.tolist()) == {1}

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


class TestCommands:
    """The commands and their output."""

    def test_takedown_hides_then_deletes_samples(self, store, tmp_path, capsys, monkeypatch):
        (tmp_path / "keys.txt").write_text("c/1\n\n c/2 \n")
        assert main(["remove", store.url, "--keys", "c/0", "--keys-file", str(tmp_path / "keys.txt")]) == 0
        assert capsys.readouterr().out == "generation 2: 3 samples removed\n"
        monkeypatch.setattr("sys.stdin", io.StringIO("c/2\nc/3\n"))
        assert main(["remove", store.url, "--keys-file", "-"]) == 0
        assert capsys.readouterr().out == "generation 3: 1 sample removed, 1 already removed\n"
        assert main(["compact", store.url]) == 0
        out = capsys.readouterr().out
        assert "data-000000 -> no shard: it has no samples left\ndata-000001 -> data-000001-3\n" in out
        assert "generation 4: dropped 4 removed samples" in out
        assert main(["gc", store.url]) == 0
        assert "generations to delete: 3, 2, 1" in capsys.readouterr().out
        assert store.exists("data-000000.tar"), "without --yes nothing is deleted"
        assert main(["gc", store.url, "--yes"]) == 0
        assert "generations deleted: 3, 2, 1" in capsys.readouterr().out
        assert not store.exists("data-000000.tar")
        for name in store.list():
            assert b"c/1" not in bytes(store.read(name)), f"{name} still knows the removed sample"
        assert main(["gc", store.url, "--yes"]) == 0
        assert "nothing to delete" in capsys.readouterr().out
        assert main(["compact", store.url]) == 0
        assert "no shard contains removed samples" in capsys.readouterr().out

    def test_relabel_command_changes_labels(self, store, tmp_path, capsys):
        (tmp_path / "labels.csv").write_text("key,label\nc/0,up\n")
        assert main(["relabel", store.url, "--from", str(tmp_path / "labels.csv")]) == 2
        assert "unknown class 'up'" in capsys.readouterr().err
        assert main(["relabel", store.url, "--from", str(tmp_path / "labels.csv"), "--new-classes"]) == 0
        assert capsys.readouterr().out == "generation 2: 1 sample changed in label\nnew classes: up\n"
        (tmp_path / "list.txt").write_text("videos/c/0.avi left\nc/1.avi left\nnone.avi left\n")
        arguments = ["relabel", store.url, "--annotations", f"list:{tmp_path / 'list.txt'}"]
        assert main(arguments) == 0
        assert "generation 3: 1 sample changed in label" in capsys.readouterr().out
        assert main(arguments) == 0
        assert "already have these values" in capsys.readouterr().out

    @pytest.mark.parametrize(
        "arguments", [["remove", "--keys-file", "none"], ["remove"], ["relabel", "--from", "none"]]
    )
    def test_wrong_usage_is_explained(self, store, arguments, capsys):
        assert main([arguments[0], store.url, *arguments[1:]]) == 2
        assert capsys.readouterr().err.startswith(f"fastvid {arguments[0]}: ")


def test_file_creation_is_exclusive_without_hard_links(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    store = LocalStorage(tmp_path)
    assert store.swap("x", b"one", None)
    assert not store.swap("x", b"two", None)
    assert store.read("x") == b"one"
    assert store.list() == ["x"]


def leftovers(store):
    return [path.name for path in store.root.rglob("*") if path.suffix in (".tmp", ".lock")]


@pytest.mark.parametrize("change", [compact_shards, collect_garbage])
def test_files_of_a_killed_compaction_are_deleted_by_the_next_command(change, store):
    # "write" is passed for each file of the new shard: some of them are half written.
    remove_samples(store, ["c/1"])
    code = (
        "import os, signal, sys\n"
        "from fastvid.storage import LocalStorage, local\n"
        "from fastvid.sharding.change.repack import compact_shards\n"
        "local.os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "compact_shards(LocalStorage(sys.argv[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", code, store.url], check=False).returncode == -9
    assert leftovers(store)
    writing = store.root / f"data-000007.tar.{namespace()}-{os.getpid()}-aa.tmp"
    writing.touch()
    change(store)
    assert leftovers(store) == [writing.name]
