"""Tables of captions and of several labels, from the file to a batch: clips, keys, places, classes."""

from __future__ import annotations

import json
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fastvid
from fastvid.cli.main import main
from fastvid.errors import StorageError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.sharding.change.add import add_sources
from fastvid.sharding.change.edit import read_labels
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.job.job import run_job
from fastvid.sharding.sources.annotations import read_annotations
from fastvid.storage import open_storage
from tests.sharding.shardtools import ledger, make, tar_of, tars

SMALL = {"profile": PROFILES["compact"].changed(short_side=64), "workers": 1}


def rows_of(out):
    """Return the annotations of a dataset by key."""
    return {row["key"]: row for row in Dataset(str(out)).annotations.to_pylist()}


def json_of(out):
    """Return the JSON of each sample by key."""
    found = {}
    for name in tars(out):
        with tarfile.open(out / name) as tar:
            for member in tar.getmembers():
                if member.name.endswith(".json"):
                    found[member.name[:-5]] = json.load(tar.extractfile(member))
    return found


def test_clips_of_a_film_have_its_name_and_their_asked_and_got_seconds(tmp_path):
    make(tmp_path / "raw" / "my film.mp4", frames=50)  # two seconds
    table = (
        "videoID,url,timestamp,caption,matching_score\n"
        "my film,u,\"[['0:00:00.110', '0:00:01.000'], ['0:00:01.000', '0:00:09.000']]\","
        "\"['one', 'two']\",\"[0.5, 1]\"\n"
    )
    (tmp_path / "panda.csv").write_text(table)
    run_job(tmp_path / "raw", tmp_path / "out", annotations=f"panda70m:{tmp_path / 'panda.csv'}", **SMALL)
    rows = rows_of(tmp_path / "out")
    assert sorted(rows) == ["my_film_00000110_00001000", "my_film_00001000_00009000"]
    first, second = (rows[key] for key in sorted(rows))
    assert {row["parent"] for row in rows.values()} == {"my film.mp4"}
    assert [(row["caption"], row["matching_score"]) for row in (first, second)] == [("one", 0.5), ("two", 1.0)]
    assert (first["asked_start_seconds"], first["asked_end_seconds"]) == (0.11, 1.0)
    assert (second["asked_start_seconds"], second["asked_end_seconds"]) == (1.0, 9.0)
    # Cut at frames of 40 ms; the second clip ends with the film, and says so.
    assert (first["start_seconds"], first["end_seconds"]) == (pytest.approx(0.12), 1.0)
    assert (second["start_seconds"], second["end_seconds"]) == (1.0, 2.0)
    warnings = {row["source_id"]: row["warnings"] for row in ledger(tmp_path / "out")}
    assert (
        warnings["my film.mp4#1-9"] == ["clip-cut-short", "enlarged"] or "clip-cut-short" in warnings["my film.mp4#1-9"]
    )
    assert "clip-cut-short" not in (warnings["my film.mp4#0.11-1"] or [])
    members = json_of(tmp_path / "out")
    facts = pq.read_table(next((tmp_path / "out").glob("data-*.parquet"))).to_pylist()
    for place in (members, {row["key"]: row for row in facts}):
        for key, row in rows.items():
            assert [place[key][name] for name in ("parent", "start_seconds", "end_seconds")] == [
                row["parent"],
                row["start_seconds"],
                row["end_seconds"],
            ]


def test_parts_of_a_long_film_have_its_name_and_their_seconds(tmp_path):
    make(tmp_path / "raw" / "film.mp4", frames=50)
    run_job(tmp_path / "raw", tmp_path / "out", max_seconds=1.0, **SMALL)
    rows = rows_of(tmp_path / "out")
    assert {key: (row["parent"], row["start_seconds"], row["end_seconds"]) for key, row in rows.items()} == {
        "film/0000": ("film.mp4", 0.0, 1.0),
        "film/0001": ("film.mp4", 1.0, 2.0),
    }


@pytest.fixture
def several(tmp_path):
    """Three videos with 2, 1 and 0 classes of four, as Charades publishes them; the dataset's folder."""
    for name in ("AAAAA", "BBBBB", "CCCCC"):
        make(tmp_path / "raw" / f"{name}.mp4", frames=8)
    header = "id,subject,scene,quality,relevance,verified,script,objects,descriptions,actions,length\n"
    lines = [f"{name},S,Kitchen,6,7,Yes,text,,,{actions},0.3\n" for name, actions in (
        ("AAAAA", "c002 0.00 0.10;c000 0.00 0.30"), ("BBBBB", "c001 0.00 0.30"), ("CCCCC", ""))]  # fmt: skip
    (tmp_path / "Charades_v1_train.csv").write_text(header + "".join(lines))
    (tmp_path / "Charades_v1_classes.txt").write_text("c000 Hold\nc001 Sit\nc002 Eat\nc003 Run\n")
    spec = f"charades:{tmp_path / 'Charades_v1_train.csv'}"
    run_job(tmp_path / "raw", tmp_path / "out", annotations=spec, **SMALL)
    return tmp_path / "out"


def multi_hot(out):
    """Return the multi-hot labels of a loader's batch by key."""
    loader = fastvid.ClipLoader(
        fastvid.open(str(out)),
        frames=fastvid.Segments(2),
        spatial=fastvid.CenterCrop(64),
        labels=fastvid.MultiHot("labels"),
        global_batch_size=1,
        seed=0,
    )
    return loader.labels.classes, {batch.key[0]: batch.labels[0].tolist() for batch in loader}


def test_several_labels_of_a_video_reach_the_batch_as_multi_hot(several):
    dataset = Dataset(str(several))
    assert dataset.classes == ("Hold", "Sit", "Eat", "Run")
    assert dataset.annotations.schema.field("labels").type == pa.list_(pa.string())
    classes, hot = multi_hot(several)
    assert classes == dataset.classes
    assert hot == {"AAAAA": [1, 0, 1, 0], "BBBBB": [0, 1, 0, 0], "CCCCC": [0, 0, 0, 0]}


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_relabel_takes_several_labels_from_any_table(form, several, tmp_path, capsys):
    table = tmp_path / f"new.{form}"
    rows = [{"clip": "BBBBB", "labels": ["Run", "Fly"], "score": 2}, {"clip": "CCCCC", "labels": ["Hold"], "score": 3}]
    if form == "csv":
        table.write_text("clip,labels,score\nBBBBB,Run;Fly,2\nCCCCC,Hold,3\n")
    elif form == "jsonl":
        table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), table)
    arguments = ["relabel", str(several), "--from", str(table), "--columns", "key=clip"]
    assert main(arguments) == 2
    assert "unknown class 'Fly'" in capsys.readouterr().err
    assert main([*arguments, "--new-classes"]) == 0
    classes, hot = multi_hot(several)
    assert classes == ("Hold", "Sit", "Eat", "Run", "Fly")
    assert hot == {"AAAAA": [1, 0, 1, 0, 0], "BBBBB": [0, 0, 0, 1, 1], "CCCCC": [1, 0, 0, 0, 0]}
    assert rows_of(several)["BBBBB"]["score"] == 2


def test_relabel_table_errors_name_the_row(tmp_path):
    for name, text, message, where in (
        ("a.jsonl", '{"key": "a", "x": 1}\n{"key": "a", "x": 2}\n', "duplicate key 'a'", {"row": 2}),
        ("b.json", '[{"x": 1}]', "row has no key", {"row": 1, "column": "key"}),
        ("c.parquet", "none", "Parquet does not parse", {}),
        ("d.csv", "key,x\na,1\n", "no column 'text'", {}),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match=message) as caught:
            read_labels(str(tmp_path / name), "caption=text" if name == "d.csv" else None)
        assert caught.value.where == {"file": str(tmp_path / name), **where}


def test_added_videos_bring_their_labels_and_unused_keys(several, tmp_path):
    make(tmp_path / "more" / "AA AAA.mp4", frames=8)
    make(tmp_path / "more" / "AA_AAA.mp4", frames=8)
    make(tmp_path / "late" / "AA-AAA.mp4", frames=8)
    (tmp_path / "more.jsonl").write_text(
        '{"name": "AA AAA", "labels": ["Run", "Fly"]}\n{"name": "AA_AAA", "labels": ["Sit"]}\n'
    )
    columns, spec = "path=name", f"jsonl:{tmp_path / 'more.jsonl'}"
    add_sources(str(several), str(tmp_path / "more"), annotations=spec, columns=columns, workers=1)
    classes, hot = multi_hot(several)
    assert classes == ("Hold", "Sit", "Eat", "Run", "Fly")
    (changed,) = [key for key in hot if key.startswith("AA_AAA-")]
    assert (hot["AA_AAA"], hot[changed]) == ([0, 1, 0, 0, 0], [0, 0, 0, 1, 1])


def test_tars_of_samples_with_several_labels_are_encoded_with_them(several, tmp_path):
    video = (tmp_path / "raw" / "AAAAA.mp4").read_bytes()
    members = [("a.mp4", video), ("a.json", '{"labels": ["run", "jump"]}')]
    tar_of(tmp_path / "tars" / "0.tar", [*members, ("b.mp4", video), ("b.json", '{"labels": ["swim"]}')])
    run_job(tmp_path / "tars", tmp_path / "again", **SMALL)
    classes, hot = multi_hot(tmp_path / "again")
    assert classes == ("jump", "run", "swim")
    assert hot == {"a": [1, 1, 0], "b": [0, 0, 1]}


def test_annotation_files_are_read_from_an_object_store(s3, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    url = f"s3://{s3.bucket()}/lists"
    store = open_storage(url)
    store.write("long.csv", b"videoid,t0,t1\nfilm,0.5,1.5\n")
    store.write("ucf/classInd.txt", b"1 Archery\n")
    store.write("ucf/trainlist01.txt", b"Archery/v_1.avi 1\n")
    (row,) = read_annotations([f"csv:{url}/long.csv"], columns="path=videoid,start=t0,end=t1").rows
    assert (row.name, row.start, row.end) == ("film", 0.5, 1.5)
    (row,) = read_annotations([f"ucf101:{url}/ucf"]).rows
    assert (row.label, row.columns) == ("Archery", {"split1": "train"})
    with pytest.raises(StorageError, match="does not exist") as caught:
        read_annotations([f"csv:{url}/absent.csv"])
    assert str(caught.value.where["file"]) == f"{url}/absent.csv"
