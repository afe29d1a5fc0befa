"""Restoring a dataset from its tars alone."""

import datetime
import json
import math
import shutil
from dataclasses import replace

import pytest

from fastvid.cli.main import main
from fastvid.errors import StorageError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.generations import read_generation
from fastvid.format.tar import read_members
from fastvid.sharding.change.add import add_sources
from fastvid.sharding.change.edit import relabel_samples, remove_samples
from fastvid.sharding.change.history import collect_garbage
from fastvid.sharding.change.repack import compact_shards
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.job.index import are_own, restore_dataset
from fastvid.sharding.job.job import run_job
from fastvid.storage import LocalStorage
from tests.sharding.shardtools import make

SMALL = replace(PROFILES["compact"], short_side=64)
DAY = datetime.date(2026, 3, 4)
TIME = datetime.datetime(2026, 3, 4, 5, 6, 7, 891011, tzinfo=datetime.UTC)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Four videos in two shards, one of them cut into segments, with columns of every type and an unused class."""
    folder = tmp_path_factory.mktemp("made")
    for number in range(4):
        make(folder / "raw" / f"v{number}.mp4", frames=60 if number == 2 else 20)
    rows = {
        "path": [f"v{number}.mp4" for number in range(4)],
        "label": ["wave", "run", None, "run"],
        "caption": ["eine Möwe", None, "c", "d"],
        "text": ["t", "only text", "c", None],
        "split": ["train", "val", "train", None],
        "labels": [["wave", "run"], None, ["run"], []],
        "count": [1, None, 3, 4],
        "whole": [1.0, 2.0, math.nan, None],
        "endless": [math.inf, -math.inf, None, 0.5],
        "good": [True, False, None, True],
    }
    lines = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    (folder / "rows.json").write_text(json.dumps(lines))
    shard(folder, annotations=f"json:{folder / 'rows.json'}", class_names=["never", "run", "wave"], max_seconds=1.2)
    return folder / "d"


def shard(folder, profile=SMALL, **options):
    run_job(str(folder / "raw"), str(folder / "d"), profile=profile, workers=1, samples_per_shard=2, **options)
    return folder / "d"


@pytest.fixture
def copy(made, tmp_path):
    return LocalStorage(shutil.copytree(made, tmp_path / "copy"))


def only_tars(store, folder):
    folder.mkdir()
    for path in store.root.glob("*.tar"):
        shutil.copy(path, folder)
    return folder


def plain(table):
    """Return a table as values that compare equal if they are, NaN too."""
    return {
        name: (str(table[name].type), [repr(value) for value in table[name].to_pylist()]) for name in table.column_names
    }


def assert_equal(old, new):
    before, after = Dataset(str(old)), Dataset(str(new))
    assert plain(after.annotations) == plain(before.annotations)
    for name in ("shards", "classes", "streams", "extras"):
        assert getattr(after.generation, name) == getattr(before.generation, name), name
    assert after.generation.shards[0].profile["name"] == "compact"
    assert after.generation.shards[0].encoder


def test_tars_alone_restore_an_equal_dataset(copy, tmp_path, capsys):
    folder = only_tars(copy, tmp_path / "tars")
    assert main(["index", str(folder)]) == 0
    assert "restored" in capsys.readouterr().out
    assert_equal(copy.url, folder)
    assert Dataset(str(folder)).classes[0] == "never"
    assert main(["verify", str(folder)]) == 0
    for name in ("idx", "parquet", "pkt"):
        assert (folder / f"data-000000.{name}").read_bytes() == copy.read(f"data-000000.{name}")
    # Lost annotations say how to restore them; samples that were removed come back.
    remove_samples(copy, Dataset(copy.url).keys.to_pylist()[:1])
    for path in copy.root.glob("annotations-*.parquet"):
        path.unlink()
    with pytest.raises(StorageError, match=r"annotations-000002\.parquet are missing") as raised:
        Dataset(copy.url)
    assert "fastvid index DIR/*.tar --out NEW" in str(raised.value)
    tars = sorted(map(str, copy.root.glob("*.tar")))
    assert main(["index", *tars, "--out", str(tmp_path / "new")]) == 0
    assert_equal(folder, tmp_path / "new")


def test_compaction_writes_current_values_and_types(copy, tmp_path):
    keys = Dataset(copy.url).keys.to_pylist()
    relabel_samples(
        copy,
        {key: {"label": "new", "note": None, "day": DAY, "time": TIME, "blob": b"\x00\xff"} for key in keys[1:]},
        new_classes=True,
    )
    remove_samples(copy, [sample_of(copy, 0, 0), sample_of(copy, 1, 0)])
    compact_shards(copy)
    # The replaced tars are there until the garbage is collected; later ones win.
    both = only_tars(copy, tmp_path / "both")
    assert len(restore_dataset([str(both)]).replaced) == 2
    assert_equal(copy.url, both)
    collect_garbage(copy)
    assert_equal(copy.url, only(copy, tmp_path / "tars"))


def test_compaction_of_annotations_rewrites_only_tars_that_tell_others(copy, tmp_path):
    first = read_generation(copy)[1].shards
    assert compact_shards(copy, annotations=True).rewritten == {}
    relabel_samples(copy, {sample_of(copy, 1, 0): {"label": "new", "note": "blurred"}}, new_classes=True)
    assert compact_shards(copy).rewritten == {}
    assert main(["compact", copy.url, "--annotations"]) == 0
    shards = read_generation(copy)[1].shards
    assert [old == new for old, new in zip(first, shards, strict=True)] == [at != 1 for at in range(len(first))]
    assert compact_shards(copy, annotations=True).rewritten == {}
    assert main(["verify", copy.url]) == 0
    collect_garbage(copy)
    assert_equal(copy.url, only(copy, tmp_path / "tars"))


@pytest.mark.parametrize("prefix", [[], ["--prefix", "one,two"]])
def test_a_merged_dataset_is_restored_from_its_tars(prefix, copy, tmp_path):
    for number in range(3):
        make(tmp_path / "raw" / ("jump", "run")[number % 2] / f"w{number}.mp4")
    assert main(["merge", copy.url, str(shard(tmp_path)), "--out", str(tmp_path / "both"), *prefix]) == 0
    both = LocalStorage(tmp_path / "both")
    assert Dataset(both.url).classes == ("never", "run", "wave", "jump")
    assert_equal(both.url, only(both, tmp_path / "tars"))


def sample_of(store, shard, row):
    counts = [one.samples for one in read_generation(store)[1].shards]
    return Dataset(store.url).annotations["key"][sum(counts[:shard]) + row].as_py()


def only(store, folder):
    restore_dataset([str(only_tars(store, folder))])
    return folder


def test_the_tar_of_the_newest_generation_says_the_classes(copy, tmp_path):
    key = Dataset(copy.url).keys[0].as_py()
    relabel_samples(copy, {key: {"label": "later"}}, new_classes=True)
    make(tmp_path / "more" / "jump" / "w.mp4")
    add_sources(copy.url, [str(tmp_path / "more")], workers=1)
    folder = only(copy, tmp_path / "tars")
    before, after = Dataset(copy.url), Dataset(str(folder))
    assert after.classes == before.classes == ("never", "run", "wave", "later", "jump")
    assert after.labels[1:].tolist() == before.labels[1:].tolist()
    # A relabel alone is not in a tar.
    assert before.labels[0] == 3
    assert after.labels[0] in (-1, 1, 2)


def test_copies_are_restored_and_grow_with_any_build(tmp_path):
    make(tmp_path / "raw" / "run" / "a.mp4")
    folder = only(LocalStorage(shard(tmp_path, "copy")), tmp_path / "tars")
    assert Dataset(str(folder)).generation.shards[0].profile == PROFILES["copy"].to_json()
    make(tmp_path / "more" / "run" / "b.mp4")
    assert add_sources(str(folder), [str(tmp_path / "more")], workers=1).report.packed == 1


def test_other_tars_beside_are_refused(copy, tmp_path):
    folder = only_tars(copy, tmp_path / "tars")
    shutil.copy(folder / "data-000000.tar", folder / "zz.tar")
    data = (folder / "zz.tar").read_bytes()
    view = memoryview(data)
    first = next(iter(read_members(view)))
    meta = json.loads(data[first.offset : first.offset + first.size])
    del meta["dataset"]
    text = json.dumps(meta).encode().ljust(first.size)
    (folder / "zz.tar").write_bytes(data[: first.offset] + text + data[first.offset + first.size :])
    with pytest.raises(UsageError, match="1 of 3 tars were not written by fastvid"):
        are_own([str(folder)])
