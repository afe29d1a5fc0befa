"""Annotation files, as published or as tables of any columns, become rows; what does not fit is refused at its row."""

import csv
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastvid.errors import FormatError, UsageError
from fastvid.format.annotations import annotation_table
from fastvid.format.schema import from_parquet
from fastvid.sharding.sources.annotations import parse_list, read_annotations
from fastvid.sharding.sources.tables import Columns, split_of

SCENES = "Scene Number,Start Frame,Start Time (seconds),End Time (seconds)\n"


@pytest.fixture
def read(tmp_path):
    """Write files, and read the first, or the folder if there is none of its name, as annotations."""

    def read(kind, files, place=None, **options):
        for name, data in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
        return read_annotations([f"{kind}:{tmp_path / (place or next(iter(files)))}"], **options)

    return read


def parquet(rows):
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def table_of(rows):
    buffer = io.StringIO()
    csv.writer(buffer).writerows([list(rows[0]), *(row.values() for row in rows)])
    return buffer.getvalue()


STEPS = [{"segment": [90, 102], "id": 0, "sentence": "flip"}]
FILM = {"duration": 241.62, "subset": "training", "recipe_type": "113", "annotations": STEPS}
KINETICS = "label,youtube_id,time_start,time_end,split,is_cc\n"
CHARADES = (
    "id,subject,actions,length\n46GP8,HR43,c092 11.90 21.20;c147 0.00 12.60;c092 0.00 3.00,24.83\nN11GT,HR43,,1\n"
)
AVA = "v,0902,0.1,0.2,0.3,0.8,80,1\nv,0902,0.1,0.2,0.3,0.8,9,1\nv,0902,0.2,0.0,0.4,0.5,12,0\nv,0903,0,0,1,1,12,1\n"
ACTIONS = "".join(
    f'item {{\n  name: "{name}"\n  id: {number}\n}}\n'
    for number, name in ((9, "read"), (12, "stand"), (80, "watch (a)"))
)

# By kind: files, rows as (name, label, start, end, some columns), and classes if there are any.
PUBLISHED = {
    "panda70m": (
        {"panda70m_training_2m.csv": """videoID,url,timestamp,caption,matching_score,desirable_filtering
--7s,https://y,"[['0:00:08.475', '0:00:16.849'], ['1:02:03.5', '1:02:13.5']]",\
"['A man\\'s car, red.', ""It's a dog.""]","[0.4355, 0.61]","['desirable', '2_tiny']"
"""},
        [("--7s", None, 8.475, 16.849, {"caption": "A man's car, red.", "matching_score": 0.4355, "split": "train"}),
         ("--7s", None, 3723.5, 3733.5, {"caption": "It's a dog.", "desirable_filtering": "2_tiny"})],
    ),
    "webvid": (
        {"results_2M_val.csv": 'videoid,contentUrl,page_dir,name\n21179416,https://a,006001_006050,"Rain, wet."\n'},
        [("21179416", None, None, None, {"caption": "Rain, wet.", "split": "val", "page_dir": "006001_006050"})],
    ),
    "activitynet_captions": (
        {"val_1.json": '{"v_Q": {"duration": 8.7, "timestamps": [[0.8, 9], [7, 8.5]], "sentences": ["a", " b"]}}'},
        [("v_Q", None, 0.8, 9, {"caption": "a", "split": "val", "duration": 8.7}),
         ("v_Q", None, 7, 8.5, {"caption": " b"})],
    ),
    "youcook2": (
        {"youcookii_annotations_trainval.json": json.dumps({"database": {"GLd": FILM}})},
        [("GLd", None, 90, 102, {"caption": "flip", "split": "train", "id": 0, "recipe_type": "113"})],
    ),
    "kinetics": (
        {"kinetics400_train.csv": f"{KINETICS}zumba,-AbC_dEfGhI,0,10,validate,1\nabseiling,0347,95,105,train,0\n"},
        [("-AbC_dEfGhI_000000_000010", "zumba", 0, 10, {"split": "val", "is_cc": "1"}),
         ("0347_000095_000105", "abseiling", 95, 105, {"split": "train"})],
        ("abseiling", "zumba"),
    ),
    "kinetics without labels": (
        {"kinetics400_test.csv": "youtube_id,time_start,time_end\n-a,3,13\n"},
        [("-a_000003_000013", None, 3, 13, {"split": "test"})],
    ),
    "scenedetect": (
        {"a.b-Scenes.csv": f"Timecode List:,00:00:02.000\n{SCENES}1,0,0.000,2.000\n2,50,2.000,3.960\n",
         "c-Scenes.csv": f"{SCENES}1,0,0.000,2.000\n", "notes.csv": "x\n"},
        [("a.b", None, 0, 2, {"scene": 1}), ("a.b", None, 2, 3.96, {"scene": 2}), ("c", None, 0, 2, {"scene": 1})],
    ),
    "charades": (
        {"Charades_v1_train.csv": CHARADES},
        [("46GP8", None, None, None, {"labels": ["c092", "c147"], "split": "train", "length": 24.83}),
         ("N11GT", None, None, None, {"labels": []})],
        ("c092", "c147"),
    ),
    "charades with names": (
        {"Charades_v1_test.csv": CHARADES, "Charades_v1_classes.txt": "c092 Looking\nc146 Waking\nc147 Cooking it\n"},
        [("46GP8", None, None, None, {"labels": ["Looking", "Cooking it"]}), ("N11GT", None, None, None, {})],
        ("Looking", "Waking", "Cooking it"),
    ),
    "ava": (
        {"ava_train_v2.2.csv": AVA, "ava_action_list_v2.2.pbtxt": ACTIONS},
        [("v", None, 900.5, 903.5, {"timestamp": 902.0, "labels": ["watch (a)", "read", "stand"], "split": "train",
                                    "boxes": "[[0.1, 0.2, 0.3, 0.8], [0.1, 0.2, 0.3, 0.8], [0.2, 0.0, 0.4, 0.5]]",
                                    "box_actions": '["watch (a)", "read", "stand"]', "person_ids": "[1, 1, 0]"}),
         ("v", None, 901.5, 904.5, {"labels": ["stand"]})],
        ("read", "stand", "watch (a)"),
    ),
    "ucf101": (
        {"ucf/classInd.txt": "1 Eye\r\n2 Archery\r\n", "ucf/trainlist01.txt": "Archery/v_1.avi 2\r\n",
         "ucf/testlist01.txt": "Eye/v_2.avi\r\n", "ucf/testlist02.txt": "Archery/v_1.avi\r\n"},
        [("Archery/v_1.avi", "Archery", None, None, {"split1": "train", "split2": "test"}),
         ("Eye/v_2.avi", "Eye", None, None, {"split1": "test"})],
        ("Eye", "Archery"),
    ),
    "hmdb51": (
        {"h/brush_hair_test_split1.txt": "A#[1]&x.avi 1 \nb.avi 2 \n", "h/brush_hair_test_split2.txt": "b.avi 0 \n",
         "h/cartwheel_test_split1.txt": "c.avi 2 \n"},
        [("brush_hair/A#[1]&x.avi", "brush_hair", None, None, {"split1": "train"}),
         ("brush_hair/b.avi", "brush_hair", None, None, {"split1": "test", "split2": "unused"}),
         ("cartwheel/c.avi", "cartwheel", None, None, {"split1": "test"})],
        ("brush_hair", "cartwheel"),
    ),
    "sthv2": (
        {"s/labels.json": '{"Holding something": "0", "Dropping something": "1"}', "s/test.json": '[{"id": "9"}]',
         "s/train.json": '[{"id": "7", "label": "Dropping a pen", "template": "Dropping [something]",'
                         ' "placeholders": ["a pen"]}]',
         "s/something-something-v2-validation.json": '[{"id": "5", "label": "x", "template": "Holding [something]"}]'},
        [("9", None, None, None, {"split": "test"}),
         ("7", "Dropping something", None, None,
          {"split": "train", "caption": "Dropping a pen", "placeholders": ["a pen"]}),
         ("5", "Holding something", None, None, {"split": "val"})],
        ("Holding something", "Dropping something"),
    ),
    "csv": (
        {"rows.csv": "path,label,split,n,score,who,start,end\na.mp4,left,train,3,0.5,me,,\nb.mp4,,test,4,1,,1.5,2\n"},
        [("a.mp4", "left", None, None, {"n": 3, "score": 0.5, "who": "me", "split": "train"}),
         ("b.mp4", None, 1.5, 2.0, {"n": 4, "score": 1.0, "who": None, "split": "test"})],
        ("left",),
    ),
    "json": (
        {"train.json": '[{"path": "a", "label": 3, "box": [1, 2], "poses": [[0.5, 1], [2, 3]], "odd": [1e999]},'
                       ' {"path": "b", "label": 0.0, "split": "test", "score": null}]'},
        [("a", "3", None, None, {"box": [1, 2], "poses": [[0.5, 1], [2, 3]], "odd": "[Infinity]", "split": "train"}),
         ("b", "0", None, None, {"score": None, "split": "test"})],
        ("0", "1", "2", "3"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_files_as_published_become_rows(name, read):
    (files, rows, *classes), kind = PUBLISHED[name], name.split()[0]
    parsed = read(kind, files, "." if kind == "scenedetect" else next(iter(files)).split("/")[0])
    assert [(row.name, row.label, row.start, row.end) for row in parsed.rows] == [row[:4] for row in rows]
    for row, (*_, columns) in zip(parsed.rows, rows, strict=True):
        assert {column: row.columns.get(column) for column in columns} == columns
    assert [parsed.classes] == (classes or [()])
    assert annotation_table([dict(row.columns) for row in parsed.rows]).num_rows == len(rows)


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
        ("# comment\n\nA.MP4 2\n", [("A.MP4", "2")]),
        ("unlabelled.mp4\n", [("unlabelled.mp4", None)]),
    ],
)
def test_list_separates_path_and_label(text, rows):
    assert [(row.name, row.label) for row in parse_list(text).rows] == rows


@pytest.mark.parametrize("labels", [("²", "³"), ("٣", "٤"), ("001", "010")])
def test_labels_that_only_look_like_numbers_of_classes_are_names(labels, read):
    assert read("list", {"a.list": "a.mp4 {}\nb.mp4 {}\n".format(*labels)}).classes == labels


def test_several_files_are_concatenated_with_splits_and_class_names(tmp_path):
    (tmp_path / "train.csv").write_text("a b.mp4 1\n")
    (tmp_path / "kinetics_val_list.txt").write_text("c.mp4 0\n")
    specs = [f"list:{tmp_path}/train.csv", f"list:{tmp_path}/kinetics_val_list.txt"]
    parsed = read_annotations(specs, ["jump", "run", "swim"])
    assert [(row.label, row.columns["split"]) for row in parsed.rows] == [("run", "train"), ("jump", "val")]
    assert parsed.classes == ("jump", "run", "swim")
    # Names of several lists are sorted together.
    (tmp_path / "a.csv").write_text(f"{KINETICS}zumba,a,0,10,train,0\nbowling,b,0,10,train,0\n")
    (tmp_path / "b.csv").write_text(f"{KINETICS}abseiling,c,0,10,train,0\n")
    assert read_annotations([f"kinetics:{tmp_path}/{name}.csv" for name in "ab"]).classes == (
        "abseiling", "bowling", "zumba",
    )  # fmt: skip
    for name, split in (
        ("train.csv", "train"), ("hmdb51_train_split_1_videos.txt", "train"), ("validation", "val"),
        ("something-test.json", "test"), ("latest.txt", None), ("train_and_val.txt", None),
    ):  # fmt: skip
        assert split_of(name) == split


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_hf_metadata_names_files_by_file_name(kind, read, tmp_path):
    rows = [{"file_name": "train/a.mp4", "text": "one"}, {"file_name": "train/b.mp4", "text": "two"}]
    data = {"csv": table_of(rows), "jsonl": "\n".join(map(json.dumps, rows)), "parquet": parquet(rows)}[kind]
    parsed = read("hf", {f"metadata.{kind}": data}, columns="caption=text")
    assert [(row.name, row.columns) for row in parsed.rows] == [
        ("train/a.mp4", {"caption": "one"}), ("train/b.mp4", {"caption": "two"}),
    ]  # fmt: skip
    assert read_annotations([f"hf:{tmp_path}"]).rows[1].columns == {"text": "two"}


SEGMENTS = [
    {"videoid": "a", "meta": {"title": "x"}, "t0": [0, 2.5], "t1": [2.5, "00:00:04.250"], "text": ["one", "two"]},
    {"videoid": "b", "meta": {"title": "y"}, "t0": [1], "t1": [3], "text": ["three"]},
]
WANTED = [("a", 0, 2.5, "one"), ("a", 2.5, 4.25, "two"), ("b", 1, 3, "three")]


def places(parsed):
    return [(row.name, row.start, row.end, row.columns.get("caption")) for row in parsed.rows]


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet"])
def test_columns_of_any_table_may_be_renamed_and_hold_lists_of_segments(kind, read):
    cells = [{name: v if name == "videoid" else json.dumps(v) for name, v in row.items()} for row in SEGMENTS]
    data = {
        "json": json.dumps(SEGMENTS),
        "jsonl": "\n".join(map(json.dumps, SEGMENTS)) + "\n\n",
        "csv": table_of(cells),
        "parquet": parquet([SEGMENTS[0] | {"t1": [2.5, 4.25]}, SEGMENTS[1]]),
    }[kind]
    columns = "path=videoid,start=t0,end=t1,caption=text,title=meta.title"
    parsed = read(kind, {f"rows.{kind}": data}, columns=columns)
    assert places(parsed) == WANTED
    assert [row.columns["title"] for row in parsed.rows] == ["x", "x", "y"]


def test_segments_may_be_pairs_or_objects(read):
    texts = [(0, 2.5, "one"), (2.5, 4.25, "two")]
    pairs = {"segments": [[start, end] for start, end, _ in texts], "caption": ["one", "two"]}
    objects = {"cuts": [{"from": start, "to": end, "note": note} for start, end, note in texts]}
    named = {"cuts": [{"start": start, "end": end, "note": note} for start, end, note in texts]}
    for cuts, columns in (
        (pairs, None),
        (named, "segments=cuts,caption=note"),
        (objects, "start=cuts.from,end=cuts.to,caption=cuts.note"),
        (objects, "segments=cuts,start=from,end=to,caption=note"),
    ):
        assert places(read("json", {"a.json": json.dumps([{"path": "a", **cuts}])}, columns=columns)) == WANTED[:2]


# Kind, content, --columns, the message, and where it is besides the file.
REFUSED = {
    "unequal": ("jsonl", '{"path": "a", "start": [0, 1], "end": [1, 2]}\n{"path": "b", "start": [0], "end": [1, 2]}',
                None, "different lengths: start 1, end 2", {"row": 2}),
    "unequal-caption": ("json", '[{"path": "a", "start": [0, 1], "end": [1, 2], "caption": ["one"]}]', None,
                        "different lengths", {"row": 1}),
    "no-column": ("csv", "path,is\na,b\n", "label=is,caption=text", "(?s)table has no column 'text'.*path, is$", {}),
    "no-path": ("jsonl", '{"video": "a"}', None, "table has no column path", {}),
    "taken": ("csv", "path,caption,text\na,b,c\n", "caption=text", "column 'caption' exists", {"row": 2}),
    "mapping": ("csv", "path\na\n", "caption", "invalid column 'caption'", {}),
    "twice": ("csv", "path\na\n", "a=b,a=c", "named twice", {}),
    "not-a-table": ("list", "a.mp4 1\n", "path=b", "columns of 'list' cannot be renamed", {}),
    "line": ("jsonl", '{"path": "a"}\n{"path": \n', None, "line is not JSON", {"row": 2}),
    "array": ("jsonl", '[{"path": "a"}]', None, "line is not a JSON object", {"row": 1}),
    "object": ("json", '{"a.mp4": 1}', None, "not a list of objects", {}),
    "nested": ("json", b"[" * 200_000, None, "do not parse as json", {}),
    "no-parquet": ("parquet", "PAR1", None, "Parquet does not parse", {}),
    "binary": ("parquet", parquet([{"path": "a", "no": b"x"}]), None, "value is binary", {"row": 1, "column": "no"}),
    "clock": ("csv", "path,start\na,00:00:75\n", None, "start is '00:00:75'", {"row": 2, "column": "start"}),
    "nan": ("csv", "path,end\na.mp4,0\nb.mp4,nan\n", None, "end is 'nan', not a number", {"row": 3, "column": "end"}),
    "words": ("json", '[{"path": "a", "end": "soon"}]', None, "end is 'soon'", {"row": 1, "column": "end"}),
    "segment": ("json", '[{"path": "a", "segments": [[1, 2, 3]]}]', None, "is no segment", {"row": 1}),
    "labels": ("json", '[{"path": "a", "labels": {"x": 1}}]', None, "labels are", {"row": 1, "column": "labels"}),
    "label": ("json", '[{"path": "a", "label": ["x"]}]', None, "label is", {"row": 1, "column": "label"}),
    "huge-label": ("csv", "path,label\na.mp4,0\nb.mp4,3000000000\n", None, "label 3000000000 is larger", {"row": 3}),
    "latin-1": ("csv", b"path,note\na.mp4,fine\nb.mp4,caf\xe9\n", None, "'note' is not UTF-8", {"row": 3}),
    "latin-1-label": ("csv", b"path,label\na.mp4,caf\xe9\n", None, "'label' is not UTF-8", {"row": 2}),
    "reserved": ("csv", "path,__row\na.mp4,1\n", None, "'__row' has a reserved name", {}),
    "duplicate": ("csv", "path,note,note\na.mp4,1,2\n", None, "duplicate column 'note'", {"row": 1}),
    "long-row": ("csv", "path,label\na.mp4,1\nb,c.mp4,2\n", None, "more fields", {"row": 3}),
    "long-field": ("csv", "path,note\na.mp4,1\nb.mp4," + "x" * 200_000, None, "field larger than field", {"row": 3}),
    "path-number": ("json", '[{"path": "a.mp4"}, {"path": 5}]', None, "no text in the", {"row": 2, "column": "path"}),
    "kinetics": ("kinetics", "label,youtube_id,time_start,time_end\na,b,0,10,more\n", None, "more fields", {"row": 2}),
    "kinetics-nan": ("kinetics", "youtube_id,time_start,time_end\nb,0,nan\n", None, "time_end is 'nan'",
                     {"row": 2, "column": "time_end"}),
    "kinetics-columns": ("kinetics", "label,video\na,b\n", None, "do not parse as kinetics", {}),
    "ava": ("ava", AVA + "a,b,c\n", None, "line has 3 fields", {"row": 5}),
    "empty": ("list", "\n", None, "name no video", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_files_that_do_not_fit_are_refused_at_their_row(name, read, tmp_path):
    kind, text, columns, message, where = REFUSED[name]
    with pytest.raises(UsageError, match=message) as caught:
        read(kind, {f"rows.{kind}": text}, columns=columns)
    assert caught.value.hint or name == "empty"
    assert {key: value for key, value in caught.value.where.items() if key != "file"} == where
    if columns is None:
        assert caught.value.where["file"] == str(tmp_path / f"rows.{kind}")


def test_files_that_do_not_belong_together_are_refused(read):
    other = {"s/classInd.txt": "1 Archery\n", "s/trainlist01.txt": "Cricket/v_1.avi 2\n"}
    for kind, files, place, message in (
        ("nonsense", {"a": ""}, "s", "formats activitynet_captions, ava, charades, csv"),
        ("diving48", {"a": ""}, "s", r"unknown annotations.*\n.*--columns path=vid_name"),
        ("list", {}, "s", "No such file"),
        ("sthv2", {"s/a": ""}, "s", "no labels.json"),
        ("ucf101", other, "s", "class 'Cricket' is not"),
        ("charades", {"s.csv": CHARADES, "s_classes.txt": "c092 x\n"}, "s.csv", "action 'c147' is not in the list of"),
    ):
        with pytest.raises(UsageError, match=message):
            read(kind, files, place)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("list", "a.mp4 0 2\nb.mp4 1\nc.mp4\n"),
        ("csv", "path,labels\na.mp4,0;2\nb.mp4,1\nc.mp4,\n"),
        ("csv", 'path,labels\na.mp4,"[0, 2]"\nb.mp4,"[""1""]"\nc.mp4,\n'),
        ("json", '[{"path": "a.mp4", "labels": [0, 2]}, {"path": "b.mp4", "labels": ["1"]}, {"path": "c.mp4"}]'),
        ("jsonl", '{"path": "a.mp4", "labels": [0, 2]}\n{"path": "b.mp4", "labels": [1]}\n{"path": "c.mp4"}'),
    ],
)
def test_several_labels_are_lists_of_class_names_in_every_format(kind, text, read):
    parsed = read(kind, {f"a.{kind}": text}, class_names=["jump", "run", "swim"])
    assert [(row.label, row.columns.get("labels")) for row in parsed.rows] == [
        (None, ["jump", "swim"]), (None, ["run"]), (None, None),
    ]  # fmt: skip
    assert parsed.classes == ("jump", "run", "swim")
    assert read(kind, {f"a.{kind}": text}).classes == ("0", "1", "2")
    with pytest.raises(UsageError, match="label 2 has no name"):
        read(kind, {f"a.{kind}": text}, class_names=["jump", "run"])


def test_numbers_keep_every_digit(read):
    text = "path,zeros,under,long,whole,real,word\na.mp4,0022,1_000,12345678901234567890,-7,2.5e1,nan\n"
    (row,) = read("csv", {"a.csv": text}).rows
    long = "12345678901234567890"
    assert row.columns == {"zeros": "0022", "under": "1_000", "long": long, "whole": -7, "real": 25.0, "word": "nan"}
    (row,) = read("json", {"a.json": f'[{{"path": "a.mp4", "id": {long}}}]'}).rows
    assert row.columns["id"] == long


def test_a_small_table_of_many_equal_rows_is_refused_before_it_is_unpacked(read):
    rows = pa.table({"path": repeated(["a.mp4"], [0] * 100_000)})
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, rows.schema) as writer:
        for _ in range(30):
            writer.write_table(rows)
    with pytest.raises(UsageError, match="has 3,000,000 rows, which name no videos"):
        read("parquet", {"bomb.parquet": sink.getvalue()})


def repeated(texts, places):
    return pa.DictionaryArray.from_arrays(pa.array(places, pa.int32()), texts)


def packed(column):
    """A Parquet file of one column of texts, each stored once."""
    sink = io.BytesIO()
    pq.write_table(pa.table({"path": column}), sink, compression="zstd", store_schema=False)
    return sink.getvalue()


@pytest.mark.parametrize("nested", [False, True])
def test_text_that_repeats_without_end_is_refused_before_it_is_unpacked(read, nested):
    """A million rows refer to one text of 100 kB: 100 GB in a file of 100 kB."""
    texts = repeated(["x" * 100_000], [0] * 1_000_000)
    data = packed(pa.ListArray.from_arrays(pa.array(range(1_000_001), pa.int32()), texts) if nested else texts)
    with pytest.raises(UsageError, match="unpacks to 100,"):
        read("parquet", {"bomb.parquet": data})
    with pytest.raises(FormatError, match=r"unpacks to 100,.*file=facts"):
        from_parquet(data, file="facts", columns=["path"])
    often = ["a.mp4", "x" * 3000]
    data = packed(repeated(often, [0, 1] * 100_000))
    assert from_parquet(data, file="facts")["path"].to_pylist() == often * 100_000, "which is read"


values = st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)
segments = st.tuples(st.floats(0, 1e5), st.floats(0, 1e5), st.text(max_size=5))
films = st.tuples(st.dictionaries(st.sampled_from("uvwxyz"), values), st.lists(segments, min_size=1, max_size=4))


@given(st.lists(films, min_size=1, max_size=5), st.sampled_from(["lists", "pairs", "objects", "dotted"]))
def test_renaming_and_taking_segments_apart_loses_nothing(found, form):
    records, columns = [], {"segments": "cuts", "caption": "said"}
    for number, (other, cuts) in enumerate(found, 1):
        starts, ends, texts = map(list, zip(*cuts, strict=True))
        record = {"id": f"film{number}", **other}
        if form == "lists":
            record |= {"t0": starts, "t1": ends, "said": texts}
            columns = {"start": "t0", "end": "t1", "caption": "said"}
        elif form == "pairs":
            record |= {"cuts": [list(pair) for pair in zip(starts, ends, strict=True)], "said": texts}
        else:
            record["cuts"] = [{"start": start, "end": end, "said": text} for start, end, text in cuts]
            if form == "dotted":
                columns = {"start": "cuts.start", "end": "cuts.end", "caption": "cuts.said"}
        records.append((number, record))
    rows = Columns({"path": "id", **columns}).rows(records)
    assert [(number, row["path"], row["start"], row["end"], row["caption"]) for number, row in rows] == [
        (number, f"film{number}", *cut) for number, (_, cuts) in enumerate(found, 1) for cut in cuts
    ]
    for number, row in rows:
        assert found[number - 1][0].items() <= row.items()
