"""Datasets made with annotation files as published have the right classes and splits."""

from __future__ import annotations

import json

import numpy as np
import pytest
import webdataset

import fastvid
from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.media.reasons import Reason
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.job.job import run_job
from tests.sharding.shardtools import ledger, make, tar_of


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A video of five frames."""
    return make(tmp_path_factory.mktemp("clip") / "clip.mp4", frames=5).read_bytes()


@pytest.fixture
def dataset(tmp_path, clip):
    """Make videos, annotation files and a dataset of them; return its folder and the job's report."""

    def make_dataset(spec, videos, files, **options):
        for name in videos:
            path = tmp_path / "raw" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(clip)
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        kind, _, place = spec.partition(":")
        out = tmp_path / "out"
        report = run_job(
            str(tmp_path / "raw"),
            str(out),
            annotations=[f"{kind}:{tmp_path / part}" for part in place.split("+")],
            profile="copy",
            workers=1,
            **options,
        )
        return out, report

    return make_dataset


def counts(out, split):
    """Return the samples of a split by class name."""
    found = Dataset(str(out), split=split)
    numbers = np.bincount(found.labels[found.labels >= 0], minlength=len(found.classes))
    return {name: int(number) for name, number in zip(found.classes, numbers, strict=True) if number}


def missing(out):
    """Return sources that are annotated but do not exist."""
    return [row["source_id"] for row in ledger(out) if row["reason"] == Reason.MISSING]


def test_kinetics(dataset):
    header = "label,youtube_id,time_start,time_end,split,is_cc\n"
    out, report = dataset(
        "kinetics:train.csv+val.csv+test.csv",
        [
            "riding_a_bike/-aBcDeFgHiJ_000010_000020.mp4",
            "abseiling/0347ZoDXyP0_000095_000105.mp4",
            "zumba/xyz_000000_000010.mp4",
            "test_one_000003_000013.mp4",
        ],
        {
            "train.csv": header
            + "riding a bike,-aBcDeFgHiJ,10,20,train,0\nzumba,xyz,0,10,train,1\nzumba,gone,0,10,train,0\n",
            "val.csv": header + "abseiling,0347ZoDXyP0,95,105,validate,0\n",
            "test.csv": "youtube_id,time_start,time_end,split\ntest_one,3,13,test\n",
        },
    )
    assert Dataset(str(out)).classes == ("abseiling", "riding a bike", "zumba")
    assert counts(out, "train") == {"riding a bike": 1, "zumba": 1}
    assert counts(out, "val") == {"abseiling": 1}
    assert len(Dataset(str(out), split="test")) == 1
    assert missing(out) == ["gone_000000_000010"]
    assert (report.packed, dict(report.rejected)) == (4, {Reason.MISSING: 1})


def test_ucf101_has_its_three_splits_in_one_set_of_shards(dataset):
    videos = [f"{label}/v_{label}_g0{group}_c01.avi" for label in ("ApplyEyeMakeup", "Archery") for group in (1, 2, 3)]
    lists = {}
    for number in (1, 2, 3):
        train = [name for name in videos if f"_g0{number}_" not in name]
        test = [name for name in videos if f"_g0{number}_" in name]
        lists[f"ucf/trainlist0{number}.txt"] = "".join(f"{name} {1 + ('Archery' in name)}\r\n" for name in train)
        lists[f"ucf/testlist0{number}.txt"] = "".join(f"{name}\r\n" for name in test)
    out, report = dataset("ucf101:ucf", videos, {"ucf/classInd.txt": "1 ApplyEyeMakeup\r\n2 Archery\r\n", **lists})
    assert (report.packed, len(list(out.glob("*.tar")))) == (6, 1)
    for number in (1, 2, 3):
        assert counts(out, f"split{number}:train") == {"ApplyEyeMakeup": 2, "Archery": 2}
        assert counts(out, f"split{number}:test") == {"ApplyEyeMakeup": 1, "Archery": 1}
        (first, second) = Dataset(str(out), split=f"split{number}:test").keys.to_pylist()
        assert f"_g0{number}_" in first
        assert f"_g0{number}_" in second


def test_hmdb51(dataset):
    out, _ = dataset(
        "hmdb51:splits",
        ["brush_hair/A#[1]&x_goo_0.avi", "brush_hair/b_goo_1.avi", "cartwheel/c_goo_0.avi"],
        {
            "splits/brush_hair_test_split1.txt": "A#[1]&x_goo_0.avi 1 \nb_goo_1.avi 2 \n",
            "splits/brush_hair_test_split2.txt": "A#[1]&x_goo_0.avi 2 \nb_goo_1.avi 0 \n",
            "splits/cartwheel_test_split1.txt": "c_goo_0.avi 2 \n",
            "splits/cartwheel_test_split2.txt": "c_goo_0.avi 1 \n",
        },
    )
    assert Dataset(str(out)).classes == ("brush_hair", "cartwheel")
    assert counts(out, "split1:train") == {"brush_hair": 1}
    assert counts(out, "split1:test") == {"brush_hair": 1, "cartwheel": 1}
    assert counts(out, "split2:unused") == {"brush_hair": 1}


def test_something_something_v2(dataset):
    def record(number, template, *things):
        caption = template
        for thing in things:
            caption = caption.replace("[something]", thing, 1)
        return {"id": number, "label": caption, "template": template, "placeholders": list(things)}

    out, _ = dataset(
        "sthv2:labels",
        ["78687.mp4", "42326.mp4", "1420.mp4"],
        {
            "labels/labels.json": json.dumps({"Holding something": "0", "Dropping something onto something": "1"}),
            "labels/train.json": json.dumps(
                [
                    record("78687", "Dropping [something] onto [something]", "a pen", "a bed"),
                    record("5", "Holding [something]", "x"),
                ]
            ),
            "labels/validation.json": json.dumps([record("42326", "Holding [something]", "a cup")]),
            "labels/test.json": json.dumps([{"id": "1420"}]),
        },
    )
    found = Dataset(str(out))
    assert found.classes == ("Holding something", "Dropping something onto something")
    assert counts(out, "train") == {"Dropping something onto something": 1}
    assert counts(out, "val") == {"Holding something": 1}
    by_source = dict(zip(found.column("source_id").to_pylist(), found.annotations.to_pylist(), strict=True))
    assert by_source["78687.mp4"]["caption"] == "Dropping a pen onto a bed"
    assert by_source["78687.mp4"]["placeholders"] == ["a pen", "a bed"]
    assert by_source["1420.mp4"]["label"] is None
    assert missing(out) == ["5"]


def test_list_separates_path_and_label(dataset):
    out, _ = dataset(
        "list:train.csv+val.csv",
        ["videos/a b.mp4", "videos/c.mp4", "videos/d.mp4"],
        {"train.csv": "/data/k/videos/a b.mp4 2\n/data/k/videos/c.mp4 0\n", "val.csv": "/data/k/videos/d.mp4 1\n"},
        class_names=["jump", "run", "swim"],
    )
    assert Dataset(str(out)).classes == ("jump", "run", "swim")
    assert (counts(out, "train"), counts(out, "val")) == ({"jump": 1, "swim": 1}, {"run": 1})


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_csv_table_keeps_every_column(kind, dataset):
    records = [
        {"path": "a.mp4", "label": "run", "split": "train", "camera": 3, "note": "dark"},
        {"path": "b.mp4", "label": "jump", "split": "val", "camera": 4, "note": ""},
        {"path": "gone.mp4", "label": "run", "split": "val", "camera": 5, "note": "x"},
    ]
    lines = ["path,label,split,camera,note", *(",".join(map(str, record.values())) for record in records)]
    text = json.dumps(records) if kind == "json" else "\n".join(lines)
    out, _ = dataset(f"{kind}:table.{kind}", ["a.mp4", "b.mp4", "extra.mp4"], {f"table.{kind}": text})
    assert (counts(out, "train"), counts(out, "val")) == ({"run": 1}, {"jump": 1})
    found = Dataset(str(out))
    assert dict(zip(found.column("source_id").to_pylist(), found.column("camera").to_pylist(), strict=True)) == {
        "a.mp4": 3,
        "b.mp4": 4,
    }
    assert missing(out) == ["gone.mp4"]


@pytest.fixture
def tars(tmp_path, clip):
    """Two tars in webdataset format; the second has a sample without a video and one with an invalid video."""
    folder = tmp_path / "tars"
    folder.mkdir()
    with webdataset.TarWriter(str(folder / "00000.tar")) as writer:
        writer.write({"__key__": "000000", "mp4": clip, "txt": "a dog runs", "cls": 1})
        writer.write({"__key__": "000001", "mp4": clip, "json": {"caption": "a cat", "fps": 25}, "cls": 0})
    tar_of(folder / "00001.tar", [("one/000000.mp4", clip), ("none.txt", "words"), ("bad.mp4", "no video")])
    return folder


def test_tars_of_other_tools_are_reencoded(tars, tmp_path):
    small = PROFILES["compact"].changed(short_side=64)
    out = tmp_path / "out"
    report = run_job(str(tars), str(out), profile=small, workers=1, class_names=["cat", "dog"])
    assert (report.packed, dict(report.rejected)) == (3, {Reason.NO_VIDEO_STREAM: 1, Reason.NOT_VIDEO: 1})
    found = fastvid.open(out)
    by_source = dict(zip(found.column("source_id").to_pylist(), found, strict=True))
    assert set(by_source) == {"000000", "000001", "one/000000"}
    assert found.classes == ("cat", "dog")
    assert [by_source[name].label for name in ("000000", "000001", "one/000000")] == [1, 0, -1]
    captions = dict(zip(found.column("source_id").to_pylist(), found.column("caption").to_pylist(), strict=True))
    assert captions == {"000000": "a dog runs", "000001": "a cat", "one/000000": None}
    assert all((video.num_frames, video.height) == (5, 64) for video in found)
    again = run_job(
        [str(tars / "00000.tar"), str(tars / "00001.tar")], str(out), profile=small, class_names=["cat", "dog"]
    )
    assert again.packed == 3


def test_broken_tars_are_in_the_ledger_and_unnamed_labels_are_positions(tars, tmp_path):
    (tars / "00002.tar").write_bytes((tars / "00000.tar").read_bytes()[:3000])
    report = run_job(str(tars), str(tmp_path / "out"), profile="copy", workers=1)
    assert report.rejected[Reason.BROKEN_CONTAINER] == 1
    assert Dataset(str(tmp_path / "out")).classes == ("0", "1")
    for options, message in (
        ({"class_names": ["one"]}, "label 1 has no name"),
        ({"annotations": f"list:{tars}/list.txt"}, "annotations cannot be used with tars"),
    ):
        (tars / "list.txt").write_text("a.mp4 1\n")
        with pytest.raises(UsageError, match=message):
            run_job(str(tars), str(tmp_path / "other"), profile="copy", **options)
    with pytest.raises(UsageError, match="cannot be in one job"):
        run_job([str(tars), str(tmp_path)], str(tmp_path / "other"), profile="copy")
