"""Annotations from the file to the dataset and the batch: classes, splits, clips, captions and several labels."""

import json
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset

import fastvid
from fastvid.cli.main import main
from fastvid.errors import StorageError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.media.reasons import Reason
from fastvid.sharding.change.add import add_sources
from fastvid.sharding.change.edit import read_labels
from fastvid.sharding.in_place import index_videos
from fastvid.sharding.job.job import run_job
from fastvid.sharding.sources.annotations import read_annotations
from fastvid.sharding.sources.tars import gather_sources
from fastvid.storage import open_storage
from tests.sharding.shardtools import SMALL, ledger, make, tar_of, tars

JOB = {"profile": SMALL, "workers": 1}


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return make(tmp_path_factory.mktemp("clip") / "clip.mp4", frames=5).read_bytes()


def rows_of(out):
    return {row["key"]: row for row in Dataset(str(out)).annotations.to_pylist()}


@pytest.fixture
def foreign(tmp_path, clip):
    """Two tars in webdataset format; the second has a sample without a video and one with an invalid video."""
    folder = tmp_path / "tars"
    folder.mkdir()
    with webdataset.TarWriter(str(folder / "00000.tar")) as writer:
        writer.write({"__key__": "000000", "mp4": clip, "txt": "a dog runs", "cls": 1})
        writer.write({"__key__": "000001", "mp4": clip, "json": {"caption": "a cat", "fps": 25}, "cls": 0})
    tar_of(folder / "00001.tar", [("one/000000.mp4", clip), ("none.txt", "words"), ("bad.mp4", "no video")])
    return folder


def test_tars_of_other_tools_are_reencoded(foreign, tmp_path):
    out, names = tmp_path / "out", ["cat", "dog"]
    report = run_job(str(foreign), str(out), **JOB, class_names=names)
    assert (report.packed, dict(report.rejected)) == (3, {Reason.NO_VIDEO_STREAM: 1, Reason.NOT_VIDEO: 1})
    found = fastvid.open(out)
    columns = (found.column(name).to_pylist() for name in ("source_id", "label", "caption"))
    assert found.classes == ("cat", "dog")
    assert sorted(zip(*columns, strict=True)) == [
        ("000000", 1, "a dog runs"), ("000001", 0, "a cat"), ("one/000000", None, None),
    ]  # fmt: skip
    assert all((video.num_frames, video.height) == (5, 64) for video in found)
    assert run_job([str(foreign / f"0000{n}.tar") for n in (0, 1)], str(out), **JOB, class_names=names).packed == 3


def test_broken_tars_are_in_the_ledger_and_unnamed_labels_are_positions(foreign, tmp_path):
    (foreign / "00002.tar").write_bytes((foreign / "00000.tar").read_bytes()[:3000])
    report = run_job(str(foreign), str(tmp_path / "out"), profile="copy", workers=1)
    assert report.rejected[Reason.BROKEN_CONTAINER] == 1
    assert Dataset(str(tmp_path / "out")).classes == ("0", "1")
    (foreign / "list.txt").write_text("a.mp4 1\n")
    for sources, options, message in (
        (str(foreign), {"class_names": ["one"]}, "label 1 has no name"),
        (str(foreign), {"annotations": f"list:{foreign}/list.txt"}, "annotations cannot be used with tars"),
        ([str(foreign), str(tmp_path)], {}, "cannot be in one job"),
    ):
        with pytest.raises(UsageError, match=message):
            run_job(sources, str(tmp_path / "other"), profile="copy", **options)


def test_a_hostile_sample_does_not_stop_a_job_of_tars(clip, tmp_path):
    samples = {
        "nested.json": b"[" * 200_000,
        "label.cls": b"999999999",
        "field.json": b'{"label": 888888888}',
        "reserved.json": json.dumps(
            {"__row": 7, "half": "\ud800", "long": 10**30, "caption": "kept", "class": "theirs"}
        ).encode(),
        "good.cls": b"1",
    }
    members = {}
    for name, data in samples.items():
        members |= {f"{name.split('.')[0]}.mp4": clip, name: data}
    tar_of(tmp_path / "raw.tar", members.items())
    found = gather_sources(tmp_path / "raw.tar")
    assert found.classes == ("0", "1")
    assert sum(len(source.notes) for source in found.sources) == 3  # nested, label, field
    run_job([str(tmp_path / "raw.tar")], tmp_path / "out")
    assert len(fastvid.open(tmp_path / "out")) == 5
    row = rows_of(tmp_path / "out")["reserved"]
    assert (row["source_class"], "class" in row) == ("theirs", False)
    assert (row["caption"], row["source___row"], row["half"], row["long"]) == ("kept", 7, "?", str(10**30))


def test_clips_of_a_film_have_its_name_and_their_asked_and_got_seconds(tmp_path):
    make(tmp_path / "raw" / "my film.mp4", frames=50)  # two seconds
    table = (
        "videoID,url,timestamp,caption,matching_score\n"
        "my film,u,\"[['0:00:00.110', '0:00:01.000'], ['0:00:01.000', '0:00:09.000']]\","
        "\"['one', 'two']\",\"[0.5, 1]\"\n"
    )
    (tmp_path / "panda.csv").write_text(table)
    out = tmp_path / "out"
    run_job(tmp_path / "raw", out, annotations=f"panda70m:{tmp_path / 'panda.csv'}", **JOB)
    rows = rows_of(out)
    assert sorted(rows) == ["my_film_00000110_00001000", "my_film_00001000_00009000"]
    shown = ("parent", "caption", "matching_score", "asked_start_seconds", "asked_end_seconds")
    assert [tuple(rows[key][name] for name in shown) for key in sorted(rows)] == [
        ("my film.mp4", "one", 0.5, 0.11, 1.0), ("my film.mp4", "two", 1.0, 1.0, 9.0),
    ]  # fmt: skip
    # Cut at frames of 40 ms; the second clip ends with the film, and says so.
    got = [[rows[key][f"{name}_seconds"] for name in ("start", "end")] for key in sorted(rows)]
    assert got == [[pytest.approx(0.12), 1.0], [1.0, 2.0]]
    warnings = {row["source_id"]: "clip-cut-short" in (row["warnings"] or []) for row in ledger(out)}
    assert warnings == {"my film.mp4#0.11-1": False, "my film.mp4#1-9": True}
    index_videos(tmp_path / "raw", tmp_path / "here", annotations=f"panda70m:{tmp_path / 'panda.csv'}", workers=1)
    assert {row["source_id"]: row["warnings"] == ["clip-cut-short"] for row in ledger(tmp_path / "here")} == warnings
    facts = {row["key"]: row for row in pq.read_table(next(out.glob("data-*.parquet"))).to_pylist()}
    for name in tars(out):
        with tarfile.open(out / name) as tar:
            for member in (one for one in tar.getmembers() if one.name.endswith(".json")):
                key, told = member.name[:-5], json.load(tar.extractfile(member))
                for column in ("parent", "start_seconds", "end_seconds"):
                    assert told[column] == facts[key][column] == rows[key][column]
    # Two clips that begin at almost the same time, and one that is the whole film: all are of one file.
    clips = ("0.1000001,0.3", "0.10000013,0.3", "0,9")
    (tmp_path / "near.csv").write_text("path,start,end\n" + "".join(f"my film.mp4,{clip}\n" for clip in clips))
    for name, profile in (("near", SMALL), ("copied", "copy")):
        near = tmp_path / name
        run_job(tmp_path / "raw", near, annotations=f"csv:{tmp_path / 'near.csv'}", profile=profile, workers=1)
        rows = sorted(rows_of(near).values(), key=lambda row: row["asked_start_seconds"])
        assert len({row["source_id"] for row in rows}) == len(clips)
        assert {row["parent"] for row in rows} == {"my film.mp4"}
        assert (rows[0]["start_seconds"], rows[0]["end_seconds"]) == (0, 2)


@pytest.fixture
def several(tmp_path):
    """Three videos with 2, 1 and 0 classes of four, as Charades publishes them; the dataset's folder."""
    for name in ("AAAAA", "BBBBB", "CCCCC"):
        make(tmp_path / "raw" / f"{name}.mp4", frames=8)
    actions = "AAAAA,c002 0.00 0.10;c000 0.00 0.30\nBBBBB,c001 0.00 0.30\nCCCCC,\n"
    (tmp_path / "Charades_v1_train.csv").write_text(f"id,actions\n{actions}")
    (tmp_path / "Charades_v1_classes.txt").write_text("c000 Hold\nc001 Sit\nc002 Eat\nc003 Run\n")
    spec = f"charades:{tmp_path / 'Charades_v1_train.csv'}"
    run_job(tmp_path / "raw", tmp_path / "out", annotations=spec, **JOB)
    return tmp_path / "out"


def multi_hot(out):
    loader = fastvid.ClipLoader(
        fastvid.open(str(out)), frames=fastvid.Segments(2), spatial=fastvid.CenterCrop(64),
        labels=fastvid.MultiHot("labels"), global_batch_size=1, seed=0,
    )  # fmt: skip
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
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), table)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        table.write_text(lines if form == "jsonl" else "clip,labels,score\nBBBBB,Run;Fly,2\nCCCCC,Hold,3\n")
    arguments = ["relabel", str(several), "--from", str(table), "--columns", "key=clip"]
    assert main(arguments) == 2
    assert "unknown class 'Fly'" in capsys.readouterr().err
    assert main([*arguments, "--new-classes"]) == 0
    classes, hot = multi_hot(several)
    assert classes == ("Hold", "Sit", "Eat", "Run", "Fly")
    assert hot == {"AAAAA": [1, 0, 1, 0, 0], "BBBBB": [0, 0, 0, 1, 1], "CCCCC": [1, 0, 0, 0, 0]}
    assert rows_of(several)["BBBBB"]["score"] == 2


RELABEL_REFUSED = {
    "a.jsonl": (b'{"key": "a", "x": 1}\n{"key": "a", "x": 2}\n', "duplicate key 'a'", {"row": 2}),
    "b.json": (b'[{"x": 1}]', "row has no key", {"row": 1, "column": "key"}),
    "c.parquet": (b"none", "Parquet does not parse", {}),
    "d.csv": (b"key,label\n,b\n", r"row has no key[\s\S]*--columns key=COLUMN", {"row": 2, "column": "key"}),
    "e.csv": (b"key,label\na,b,c\n", "more fields than the header", {"row": 2}),
    "f.csv": (b'key,label\n"a', "fewer fields than the header", {"row": 2}),
    "g.csv": (b"key,label,label\na,b,c\n", "duplicate column", {"row": 1}),
    "h.csv": (b"key,label\na,\xff\n", "not UTF-8", {}),
}


@pytest.mark.parametrize("name", RELABEL_REFUSED)
def test_relabel_tables_that_do_not_fit_are_refused_at_their_row(name, tmp_path):
    text, message, where = RELABEL_REFUSED[name]
    (tmp_path / name).write_bytes(text)
    with pytest.raises(UsageError, match=message) as caught:
        read_labels(str(tmp_path / name))
    assert caught.value.where == {"file": str(tmp_path / name), **where}


def test_added_videos_bring_their_labels_and_unused_keys(several, tmp_path):
    for name in ("AA AAA", "AA_AAA"):
        make(tmp_path / "more" / f"{name}.mp4", frames=8)
    rows = [{"name": "AA AAA", "labels": ["Run", "Fly"]}, {"name": "AA_AAA", "labels": ["Sit"]}]
    (tmp_path / "more.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = f"jsonl:{tmp_path / 'more.jsonl'}"
    add_sources(str(several), str(tmp_path / "more"), annotations=spec, columns="path=name", workers=1)
    classes, hot = multi_hot(several)
    assert classes == ("Hold", "Sit", "Eat", "Run", "Fly")
    (changed,) = [key for key in hot if key.startswith("AA_AAA-")]
    assert (hot["AA_AAA"], hot[changed]) == ([0, 1, 0, 0, 0], [0, 0, 0, 1, 1])


def test_annotation_files_are_read_from_an_object_store(s3, monkeypatch):
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
