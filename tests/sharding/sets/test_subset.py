"""Subsets and merges: the same bytes, annotations and classes in a new dataset; a killed run resumes."""

import json
import os

import numpy as np
import pyarrow.parquet as pq
import pytest

from fastvid.cli.main import main
from fastvid.errors import FastvidError, FormatError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.generations import read_annotations, read_generation
from fastvid.format.tar import read_members
from fastvid.sharding.change.edit import relabel_samples, remove_samples
from fastvid.sharding.change.export import export_samples
from fastvid.sharding.change.repack import compact_shards
from fastvid.sharding.change.takedown import SourceSelection, take_down
from fastvid.sharding.job.ledger import block, write_ledger
from fastvid.sharding.sets import Selection, make_subset, merge_datasets
from fastvid.sharding.verify.verify import verify_dataset
from fastvid.storage import LocalStorage
from tests.datasets import make_clip, pack, recommit


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    return [make_clip(folder / f"{number}.mp4", frames=3 + number) for number in range(3)]


@pytest.fixture
def store(clips, tmp_path):
    """Twelve samples of six files and two classes, in three shards, with a ledger."""
    samples = [(f"f{n // 2}/{n % 2}", clips[n % 3], n % 2) for n in range(12)]
    columns = {"parent": [f"f{n // 2}.mp4" for n in range(12)], "caption": [f"text {n}" for n in range(12)],
               "split": ["train"] * 8 + ["val"] * 4}  # fmt: skip
    store = pack(tmp_path / "d", [samples[:4], samples[4:8], samples[8:]], columns=columns)
    rows = [row_of(f"f{n // 2}/{n % 2}.avi", f"f{n // 2}/{n % 2}", f"data-{n // 4:06d}", 3 + n % 3) for n in range(12)]
    bad = {**row_of("bad.avi", None, None, None), "status": "rejected", "reason": "damaged"}
    write_ledger(store, [*rows, bad], {})
    return store


def row_of(source, key, shard, frames):
    return {
        "source_id": source, "path": f"/raw/{source}", "status": "packed", "reason": None, "message": None, "key": key,
        "shard": shard, "bytes_in": 100, "bytes_out": 50, "num_frames": frames, "seconds": 0.1, "warnings": [],
    }  # fmt: skip


def videos(url):
    found = {}
    for shard in Dataset(url).generation.shards:
        view = LocalStorage(url).map(f"{shard.name}.tar")
        found |= {m.key: bytes(view[m.offset : m.offset + m.size]) for m in read_members(view) if m.suffix == "mp4"}
    return found


def rows(url):
    return {row["key"]: row for row in Dataset(url).annotations.to_pylist()}


def check(url):
    assert not verify_dataset(str(url)).problems


def test_subset_contains_the_selected_samples_with_their_bytes_and_annotations(store, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["subset", store.url, "--out", str(out), "--split", "train", "--where", "class = 'right'"]) == 0
    assert rows(out) == {key: row for key, row in rows(store.url).items() if row["split"] == "train" and row["label"]}
    assert videos(out) == {key: data for key, data in videos(store.url).items() if key in rows(out)}
    dataset = Dataset(str(out))
    assert dataset.classes == ("left", "right")
    # The samples of two shards are in one, because they fit.
    assert [shard.samples for shard in dataset.generation.shards] == [4]
    assert "subset of made generation 1: split train; where class = 'right'" in dataset.generation.note
    ledger = pq.read_table(out / "ledger.parquet").to_pylist()
    assert {row["source_id"]: row["shard"] for row in ledger} == {f"{key}.avi": "data-000000" for key in rows(out)}
    check(out)
    assert "4 samples in 1 shard" in capsys.readouterr().out
    assert not (out / "ledger-parts").exists()


def test_whole_shards_are_linked(store, tmp_path):
    made = make_subset(store.url, tmp_path / "out", Selection(keys=[f"f{n // 2}/{n % 2}" for n in range(9)]))
    assert made.linked == 2
    assert [shard.samples for shard in made.generation.shards] == [4, 4, 1]
    assert os.path.samefile(store.root / "data-000001.tar", tmp_path / "out" / "data-000001.tar")
    check(tmp_path / "out")


def test_a_share_takes_whole_files_by_a_seed_and_more_per_class_contain_fewer(store, tmp_path):
    made = make_subset(store.url, tmp_path / "a", Selection(share=0.5, seed=3))
    parents = [row["parent"] for row in rows(tmp_path / "a").values()]
    assert made.generation.num_samples == 6
    assert made.generation.note.endswith("share 0.5 by parent, seed 3")
    assert str(Selection(share=0.5, stratify="label")) == "share 0.5 by parent, stratified by label, seed 0"
    assert all(parents.count(parent) == 2 for parent in parents)
    drawn = set()
    for seed in range(6):
        make_subset(store.url, tmp_path / f"s{seed}", Selection(share=0.5, seed=seed))
        drawn.add(frozenset(rows(tmp_path / f"s{seed}")))
    assert len(drawn) > 1
    for number in (2, 4):
        make_subset(store.url, tmp_path / str(number), Selection(per_class=number))
        assert np.bincount(Dataset(str(tmp_path / str(number))).labels).tolist() == [number, number]
    assert rows(tmp_path / "2").keys() < rows(tmp_path / "4").keys()
    make_subset(store.url, tmp_path / "4", Selection(per_class=4))
    with pytest.raises(UsageError, match="contains a dataset made by a job that differs in samples"):
        make_subset(store.url, tmp_path / "4", Selection(per_class=2))


def test_removed_samples_are_neither_in_a_subset_nor_merged(store, other, tmp_path):
    remove_samples(store, ["f0/0"])
    make_subset(store.url, tmp_path / "out", Selection(where="num_frames > 0"))
    assert "f0/0" not in rows(tmp_path / "out")
    assert b"f0/0" not in (tmp_path / "out" / "data-000000.tar").read_bytes()
    with pytest.raises(FastvidError, match="f0/0"):
        make_subset(store.url, tmp_path / "other", Selection(keys=["f0/0"]))
    remove_samples(other, ["g1"])
    merge_datasets([store.url, other.url], tmp_path / "both")
    assert not {"f0/0", "g1"} & set(rows(tmp_path / "both"))
    assert all(b"g1.mp4" not in path.read_bytes() for path in (tmp_path / "both").glob("*.tar"))


ONE, TWO = "1" * 64, "2" * 64


def held(folder, clip, digest, **changes):
    """A dataset whose only source is called x.avi and has bytes with a SHA-256."""
    store = pack(folder, [[("x", clip, 0)]], meta={"source_sha256": digest})
    row = row_of("x.avi", "x", "data-000000", len(digest)) | {"path": f"{folder.name}/x.avi", "source_sha256": digest}
    write_ledger(store, [row | changes], {})
    return store


def removed(folder):
    store = LocalStorage(folder)
    return read_annotations(store, read_generation(store)[1])["removed"].to_pylist()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("status", ["packed", "removed", "rejected"])
def test_a_name_in_two_datasets_means_the_source_whose_sample_is_merged(clips, tmp_path, status, turned):
    gone, here = held(tmp_path / "a", clips[0], ONE, status=status), held(tmp_path / "b", clips[1], TWO)
    remove_samples(gone, ["x"])
    urls = [store.url for store in ((here, gone) if turned else (gone, here))]
    for blocked, name in (([], "x.avi"), ([ONE], "x.avi"), ([TWO], f"removed:{TWO[:16]}")):
        block(gone, blocked)
        merge_datasets(urls, tmp_path / str(blocked))
        (row,) = pq.read_table(tmp_path / str(blocked) / "ledger.parquet").to_pylist()
        assert (row["source_id"], row["source_sha256"]) == (name, TWO)
        assert row["path"] == ("b/x.avi" if name == "x.avi" else "")
        assert removed(tmp_path / str(blocked)) == [name != "x.avi"]


def test_of_an_old_generation_only_what_was_taken_down_since_is_hidden(other, clips, tmp_path):
    store = held(tmp_path / "a", clips[0], ONE)
    remove_samples(store, ["x"])
    before = store.read("ledger.parquet")
    done = take_down(store, SourceSelection(sources=["x.avi"]), reason="ticket 1")
    make_subset(store.url, tmp_path / "old", Selection(keys=["x"]), generation=1)
    merge_datasets([store.url, other.url], tmp_path / "both", prefixes=["a", "b"])
    for made in ("old", "both"):
        (row,) = [row for row in pq.read_table(tmp_path / made / "ledger.parquet").to_pylist() if row["source_sha256"]]
        assert (row["source_id"], row["message"]) == (f"removed:{ONE[:16]}", done.receipt.message)
    assert removed(tmp_path / "old") == [True]
    # A source that the ledger no longer names, or whose file was rejected later, is the sample's own.
    store.delete("blocked.json")
    for number, changes in enumerate(([], [{"status": "rejected", "source_sha256": TWO}])):
        store.write("ledger.parquet", before)
        (row,) = pq.read_table(store.root / "ledger.parquet").to_pylist()
        write_ledger(store, [row | one for one in changes], {})
        make_subset(store.url, tmp_path / f"{number}", Selection(keys=["x"]), generation=1)
        (row,) = pq.read_table(tmp_path / f"{number}" / "ledger.parquet").to_pylist()
        assert (row["source_id"], row["status"], row["source_sha256"]) == ("x.avi", "packed", ONE)
        assert removed(tmp_path / f"{number}") == [False]


@pytest.mark.parametrize(
    "copy",
    [
        lambda url, out: make_subset(url, out, Selection(share=0.3)),
        lambda url, out: merge_datasets([url, url], out, prefixes=["a", "b"]),
        lambda url, out: export_samples(url, out),
        lambda url, _: compact_shards(LocalStorage(url)),
    ],
    ids=["subset", "merge", "export", "compact"],
)
def test_damaged_shards_are_not_copied(copy, store, tmp_path):
    remove_samples(store, ["f0/1"])
    path = store.root / "data-000000.tar"
    data = bytearray(path.read_bytes())
    data[3000] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match="differs from its checksum"):
        copy(store.url, str(tmp_path / "out"))
    assert not {"dataset.json", "export.json"} & set(LocalStorage(tmp_path / "out").list())
    assert Dataset(store.url).generation.number == 2


def test_wrong_selections_make_nothing(store, tmp_path):
    for selection, message in (
        (Selection(), "nothing says which"),
        (Selection(share=1.5), "not between 0 and 1"),
        (Selection(per_class=0), "0 samples of each class"),
        (Selection(keys=[]), "no keys given"),
        (Selection(share=0.1, by="who"), "no column 'who'"),
        (Selection(share=0.1, stratify="who"), "no column 'who'"),
        (Selection(share=0.01), "no sample is selected"),
    ):
        with pytest.raises(UsageError, match=message):
            make_subset(store.url, tmp_path / "out", selection)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def other(clips, tmp_path):
    samples = [(f"g{n}", clips[n], n % 2) for n in range(3)]
    return pack(tmp_path / "e", [samples], classes=("right", "up"), meta={"label": 0},
                columns={"caption": ["a", None, "c"], "score": [1, 2, None]})  # fmt: skip


def test_merge_unites_samples_classes_and_columns(store, other, tmp_path, capsys):
    assert main(["merge", store.url, other.url, "--out", str(tmp_path / "out")]) == 0
    dataset = Dataset(str(tmp_path / "out"))
    assert dataset.classes == ("left", "right", "up")
    found = rows(tmp_path / "out")
    assert [found[f"g{n}"]["label"] for n in range(3)] == [1, 2, 1]
    assert videos(tmp_path / "out") == videos(store.url) | videos(other.url)
    assert found["g0"]["split"] is None
    assert found["f0/0"]["score"] is None
    assert (found["g1"]["score"], found["f5/1"]["caption"]) == (2, "text 11")
    assert "3 of the shards are linked" in capsys.readouterr().out
    ledger = {row["source_id"]: row for row in pq.read_table(tmp_path / "out" / "ledger.parquet").to_pylist()}
    assert (ledger["bad.avi"]["status"], ledger["g0.avi"]["shard"]) == ("rejected", "data-000003")
    # A label in the tar follows the new classes, because other tools read it.
    with LocalStorage(tmp_path / "out").map("data-000003.tar") as view:
        texts = [bytes(view[m.offset : m.offset + m.size]) for m in read_members(view) if m.suffix == "json"]
    assert [json.loads(text)["label"] for text in texts] == [1, 2, 1]
    check(tmp_path / "out")


def test_equal_keys_are_refused_unless_there_is_a_prefix(store, tmp_path):
    with pytest.raises(UsageError, match=r"12 keys in more than one dataset: 'f0/0', .* and 2 more"):
        merge_datasets([store.url, store.url], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    merge_datasets([store.url, store.url], tmp_path / "out", prefixes=["", "lab"])
    before = rows(store.url)
    assert rows(tmp_path / "out").keys() == before.keys() | {f"lab/{key}" for key in before}
    assert rows(tmp_path / "out")["lab/f0/1"]["parent"] == "lab/f0.mp4"
    assert videos(tmp_path / "out")["lab/f0/1"] == videos(store.url)["f0/1"]
    check(tmp_path / "out")


def test_numbers_become_decimals_and_other_types_text(store, other, tmp_path, caplog):
    relabel_samples(store, {"f0/0": {"score": 0.5}})
    merge_datasets([store.url, other.url], tmp_path / "out")
    assert [rows(tmp_path / "out")[key]["score"] for key in ("f0/0", "g1")] == [0.5, 2.0]
    relabel_samples(store, {"f0/0": {"tag": 1}})
    relabel_samples(other, {"g0": {"tag": "x"}})
    merge_datasets([store.url, other.url], tmp_path / "more")
    assert [rows(tmp_path / "more")[key]["tag"] for key in ("f0/0", "g0")] == ["1", "x"]
    assert "column 'tag' becomes text: it had values of type int64, and the new ones are string" in caplog.text
    check(tmp_path / "more")


def test_samples_without_labels_are_merged_with_those_of_classes(store, clips, tmp_path, caplog):
    caplog.set_level("INFO")
    plain = pack(tmp_path / "p", [[("p", clips[0], None)]], classes=())
    merge_datasets([plain.url, store.url], tmp_path / "out")
    found = {key: row["label"] for key, row in rows(tmp_path / "out").items()}
    assert found == {"p": None} | {key: row["label"] for key, row in rows(store.url).items()}
    assert Dataset(str(tmp_path / "out")).classes == ("left", "right")
    assert "0 videos" not in caplog.text
    check(tmp_path / "out")


def test_datasets_that_do_not_fit_are_refused(store, other, clips, tmp_path):
    with pytest.raises(UsageError, match="1 dataset to merge"):
        merge_datasets([store.url], tmp_path / "out")
    with pytest.raises(UsageError, match="1 prefixes for 2 datasets"):
        merge_datasets([store.url, other.url], tmp_path / "out", prefixes=["a"])
    plain = pack(tmp_path / "p", [[("p", clips[0], 0)]], classes=())
    with pytest.raises(UsageError, match="p has labels without class names"):
        merge_datasets([store.url, plain.url], tmp_path / "out")
    recommit(other, streams=("rgb", "flow"))
    with pytest.raises(UsageError, match="d has the streams rgb, e has rgb,flow"):
        merge_datasets([store.url, other.url], tmp_path / "out")


def test_subset_and_merge_on_an_object_store(s3, store, other, tmp_path):
    sub, both = (f"s3://{s3.bucket()}/{name}" for name in ("sub", "both"))
    make_subset(store.url, sub, Selection(where="key not in ('f0/1')"))
    merge_datasets([sub, other.url], both)
    assert len(Dataset(both)) == 14
    assert not verify_dataset(both).problems
    one = pack(tmp_path / "n", [[("n", videos(other.url)["g0"], 0)]])
    merge_datasets([both, one.url], tmp_path / "h")
    assert len(Dataset(str(tmp_path / "h"))) == 15
