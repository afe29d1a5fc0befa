"""Annotation files in their published formats."""

from __future__ import annotations

import json

import pytest

from fastvid.errors import UsageError
from fastvid.format.annotations import annotation_table
from fastvid.sharding.sources.annotations import parse_kinetics, parse_list, read_annotations
from fastvid.sharding.sources.sources import split_of


@pytest.fixture
def parse(tmp_path):
    """Write a file and read it as annotations."""

    def parse(kind, text, name="rows", **options):
        path = tmp_path / f"{name}.{kind}"
        path.write_text(text)
        return read_annotations([f"{kind}:{path}"], **options)

    return parse


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("a/b.mp4 3\nc.avi 0\n", [("a/b.mp4", "3"), ("c.avi", "0")]),
        ("my holiday video.mp4 7\n", [("my holiday video.mp4", "7")]),
        ("clips.mp4 of 2020/run.mp4 1\n", [("clips.mp4 of 2020/run.mp4", "1")]),
        ("x.mp4 riding a bike\ny.mp4 running\n", [("x.mp4", "riding a bike"), ("y.mp4", "running")]),
        ("no_ending 4\nother 5\n", [("no_ending", "4"), ("other", "5")]),
        ("path with spaces\triding a bike\n", [("path with spaces", "riding a bike")]),
        ("p q.mp4::2\nr.mp4::1\n", [("p q.mp4", "2"), ("r.mp4", "1")]),
        ("\ufeff# comment\n\nA.MP4 2\n", [("A.MP4", "2")]),
        ("unlabelled.mp4\n", [("unlabelled.mp4", None)]),
    ],
)
def test_list_separates_path_and_label(text, rows):
    assert [(row.name, row.label) for row in parse_list(text.removeprefix("\ufeff")).rows] == rows


def test_integer_labels_are_positions_and_names_are_sorted():
    assert parse_list("a.mp4 3\nb.mp4 0\n").classes == ("0", "1", "2", "3")
    assert parse_list("a.mp4 run\nb.mp4 jump\n").classes == ("jump", "run")


def test_several_integers_become_a_multi_label_column():
    (row,) = parse_list("a b.mp4 1 5 9\n").rows
    assert (row.name, row.label, row.columns) == ("a b.mp4", None, {"labels": ["1", "5", "9"]})


def test_csv_keeps_every_column_with_its_type(parse):
    text = "path,label,split,texture,score,who,start,end\na.mp4,left,train,3,0.5,me,,\nb.mp4,,test,4,1,,1.5,2\n"
    parsed = parse("csv", text)
    first, second = parsed.rows
    assert first.columns == {"texture": 3, "score": 0.5, "who": "me", "split": "train"}
    assert second.columns == {"texture": 4, "score": 1.0, "who": None, "split": "test"}
    assert (second.label, second.start, second.end) == (None, 1.5, 2.0)
    assert parsed.classes == ("left",)
    with pytest.raises(UsageError, match="no column path"):
        parse("csv", "file,label\na.mp4,1\n")


def test_kinetics_names_files_and_keeps_the_clip_for_uncut_videos():
    text = (
        "label,youtube_id,time_start,time_end,split,is_cc\n"
        "abseiling,0347ZoDXyP0,95,105,train,0\n"
        "zumba,-AbC_dEfGhI,0,10,validate,1\n"
    )
    parsed = parse_kinetics(text.replace("validate", "val"))
    first, second = parsed.rows
    assert (first.name, first.whole_name, first.start, first.end) == (
        "0347ZoDXyP0_000095_000105",
        "0347ZoDXyP0",
        95,
        105,
    )
    assert second.name == "-AbC_dEfGhI_000000_000010"
    assert second.columns == {"split": "val", "is_cc": "1"}
    assert parsed.classes == ("abseiling", "zumba")
    (test,) = parse_kinetics("youtube_id,time_start,time_end,split\nx,1,11,test\n").rows
    assert test.label is None


def test_several_files_are_concatenated_with_splits_and_class_names(tmp_path):
    (tmp_path / "train.csv").write_text("a b.mp4 1\n")
    (tmp_path / "kinetics_val_list.txt").write_text("c.mp4 0\n")
    specs = [f"list:{tmp_path}/train.csv", f"list:{tmp_path}/kinetics_val_list.txt"]
    parsed = read_annotations(specs, ["jump", "run", "swim"])
    assert [(row.label, row.columns["split"]) for row in parsed.rows] == [("run", "train"), ("jump", "val")]
    assert parsed.classes == ("jump", "run", "swim")
    with pytest.raises(UsageError, match="label 1 has no name"):
        read_annotations(specs, ["only one"])


def test_json_is_read_like_csv(parse):
    records = [
        {
            "path": "a.mp4",
            "label": 3,
            "start": 1,
            "end": 2.5,
            "tags": ["x", "y"],
            "box": [1, 2],
            "score": 0.5,
            "poses": [[0.5, 1], [2, 3]],
            "odd": [1e999],
        },
        {"path": "b.mp4", "label": 0, "split": "test", "score": None},
    ]
    parsed = parse("json", json.dumps(records), "train")
    first, second = parsed.rows
    assert (first.label, first.start, first.end) == ("3", 1.0, 2.5)
    assert first.columns == {
        "tags": ["x", "y"], "box": [1, 2], "score": 0.5, "split": "train", "poses": [[0.5, 1], [2, 3]],
        "odd": "[Infinity]",
    }  # fmt: skip
    table = annotation_table([dict(row.columns) for row in parsed.rows])
    assert str(table.schema.field("box").type) == "list<item: int64>"
    assert table["poses"].to_pylist() == [[[0.5, 1.0], [2.0, 3.0]], None]
    assert second.columns == {"score": None, "split": "test"}
    assert parsed.classes == ("0", "1", "2", "3")
    with pytest.raises(UsageError, match="not a list of objects"):
        parse("json", '{"a.mp4": 1}')
    with pytest.raises(UsageError, match="no column path"):
        parse("json", '[{"file": "a.mp4"}]')


def test_diving48_is_a_table(tmp_path):
    dives = [{"vid_name": "dLYFZVZeD_g_00127", "label": 2, "start_frame": 0, "end_frame": 84}]
    (tmp_path / "Diving48_V2_train.json").write_text(json.dumps(dives))
    place = tmp_path / "Diving48_V2_train.json"
    parsed = read_annotations([f"json:{place}"], ["Back", "Inward", "Forward"], columns="path=vid_name")
    (row,) = parsed.rows
    assert (row.name, row.label, row.start, row.end) == ("dLYFZVZeD_g_00127", "Forward", None, None)
    assert row.columns == {"start_frame": 0, "end_frame": 84, "split": "train"}
    with pytest.raises(UsageError, match=r"unknown annotations.*\n.*--columns path=vid_name"):
        read_annotations([f"diving48:{place}"])


def test_labels_of_several_lists_are_positions_among_all_sorted_names(tmp_path):
    header = "label,youtube_id,time_start,time_end,split\n"
    (tmp_path / "train.csv").write_text(f"{header}zumba,a,0,10,train\nbowling,b,0,10,train\n")
    (tmp_path / "val.csv").write_text(f"{header}abseiling,c,0,10,validate\n")
    parsed = read_annotations([f"kinetics:{tmp_path}/train.csv", f"kinetics:{tmp_path}/val.csv"])
    assert parsed.classes == ("abseiling", "bowling", "zumba")
    assert [row.columns["split"] for row in parsed.rows] == ["train", "train", "val"]


def test_kinetics_split_comes_from_the_file_name_without_a_split_column(tmp_path):
    (tmp_path / "kinetics400_test.csv").write_text("youtube_id,time_start,time_end\n-a,3,13\n")
    (row,) = read_annotations([f"kinetics:{tmp_path}/kinetics400_test.csv"]).rows
    assert (row.name, row.columns) == ("-a_000003_000013", {"split": "test"})


def test_row_longer_than_the_header_raises(parse):
    with pytest.raises(UsageError, match="more fields") as caught:
        parse("csv", "path,label\na.mp4,1\nb,c.mp4,2\n")
    assert caught.value.where["row"] == 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("list.txt", "unknown annotations"),
        ("nonsense:list.txt", "formats activitynet_captions, ava, charades, csv"),
        ("list:absent.txt", "No such file"),
        ("list:empty.txt", "name no video"),
        ("kinetics:wrong.csv", "do not parse as kinetics"),
        ("sthv2:.", "no labels.json"),
        ("ucf101:ucf", "class 'Cricket' is not in the list"),
        ("json:wrong.csv", "do not parse as json"),
    ],
)
def test_invalid_annotations_raise_clear_errors(spec, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "wrong.csv").write_text("label,video\na,b\n")
    (tmp_path / "ucf").mkdir()
    (tmp_path / "ucf" / "classInd.txt").write_text("1 Archery\n")
    (tmp_path / "ucf" / "trainlist01.txt").write_text("Cricket/v_1.avi 2\n")
    with pytest.raises(UsageError, match=message):
        read_annotations([spec])


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.csv", "train"),
        ("hmdb51_train_split_1_videos.txt", "train"),
        ("validation", "val"),
        ("something-test.json", "test"),
        ("latest.txt", None),
        ("train_and_val.txt", None),
    ],
)
def test_split_is_found_in_file_names(name, split):
    assert split_of(name) == split
