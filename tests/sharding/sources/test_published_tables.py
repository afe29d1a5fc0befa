"""Tables of captions and labels become rows in the form in which each data set was published."""

from __future__ import annotations

import csv
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastvid.errors import UsageError
from fastvid.sharding.sources.annotations import read_annotations
from fastvid.sharding.sources.tables import Columns


@pytest.fixture
def read(tmp_path):
    """Write files, and read the first as annotations."""

    def read(kind, files, **options):
        for name, data in files.items():
            (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
        return read_annotations([f"{kind}:{tmp_path / next(iter(files))}"], **options)

    return read


def places(parsed):
    return [(row.name, row.start, row.end, row.columns.get("caption")) for row in parsed.rows]


def parquet(rows):
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def table_of(rows):
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


PANDA = """videoID,url,timestamp,caption,matching_score,desirable_filtering,shot_boundary_detection
--7sYkC2,https://www.youtube.com/watch?v=--7sYkC2,"[['0:00:08.475', '0:00:16.849'], ['1:02:03.5', '1:02:13.5']]",\
"['A man\\'s car, red.', ""It's a dog.""]","[0.4355, 0.61]","['desirable', '2_tiny_camera_movement']",\
"[[['0:00:08.475', '0:00:16.849']], [['1:02:03.5', '1:02:09.0'], ['1:02:09.0', '1:02:13.5']]]"
"""


def test_panda70m_has_a_row_for_each_clip(read):
    parsed = read("panda70m", {"panda70m_training_2m.csv": PANDA})
    assert places(parsed) == [
        ("--7sYkC2", 8.475, 16.849, "A man's car, red."),
        ("--7sYkC2", 3723.5, 3733.5, "It's a dog."),
    ]
    first, second = (row.columns for row in parsed.rows)
    assert (first["matching_score"], second["desirable_filtering"]) == (0.4355, "2_tiny_camera_movement")
    assert json.loads(second["shot_boundary_detection"])[1] == ["1:02:09.0", "1:02:13.5"]
    assert first["split"] == "train"
    # The files before October 2024 have five columns.
    old = table_of([{"videoID": "a", "url": "u", "timestamp": "[['0:00:01.0', '0:00:02.0']]", "caption": "['b']",
                     "matching_score": "[0.5]"}])  # fmt: skip
    assert places(read("panda70m", {"old.csv": old})) == [("a", 1.0, 2.0, "b")]


def test_webvid_names_files_by_their_number(read):
    text = (
        "videoid,contentUrl,duration,page_dir,name\n"
        '21179416,https://ak.picdn.net/shutterstock/videos/a.mp4,PT00H00M11S,006001_006050,"Rain, wet."\n'
    )
    (row,) = read("webvid", {"results_2M_val.csv": text}).rows
    assert (row.name, row.start, row.columns["caption"], row.columns["split"]) == (
        "21179416",
        None,
        "Rain, wet.",
        "val",
    )
    assert (row.columns["page_dir"], row.columns["duration"]) == ("006001_006050", "PT00H00M11S")


def test_activitynet_captions_has_a_row_for_each_sentence(read):
    found = {"v_QOlSCBRmfWY": {"duration": 82.73, "timestamps": [[0.83, 19.86], [17.37, 60.81]],
                               "sentences": ["A young woman.", " She dances."]}}  # fmt: skip
    parsed = read("activitynet_captions", {"val_1.json": json.dumps(found)})
    assert places(parsed) == [
        ("v_QOlSCBRmfWY", 0.83, 19.86, "A young woman."),
        ("v_QOlSCBRmfWY", 17.37, 60.81, " She dances."),
    ]
    assert [row.columns["split"] for row in parsed.rows] == ["val", "val"]
    assert parsed.rows[0].columns["duration"] == 82.73


def test_youcook2_has_a_row_for_each_step(read):
    steps = [{"segment": [90, 102], "id": 0, "sentence": "spread butter"}, {"segment": [114, 127], "id": 1, "sentence": "flip"}]  # fmt: skip  # noqa: E501
    film = {
        "duration": 241.62,
        "subset": "training",
        "recipe_type": "113",
        "video_url": "https://y",
        "annotations": steps,
    }
    parsed = read("youcook2", {"youcookii_annotations_trainval.json": json.dumps({"database": {"GLd3aX16zBg": film}})})
    assert places(parsed) == [("GLd3aX16zBg", 90, 102, "spread butter"), ("GLd3aX16zBg", 114, 127, "flip")]
    assert [(row.columns["split"], row.columns["id"], row.columns["recipe_type"]) for row in parsed.rows] == [
        ("train", 0, "113"),
        ("train", 1, "113"),
    ]


CHARADES = """id,subject,scene,quality,relevance,verified,script,objects,descriptions,actions,length
46GP8,HR43,Kitchen,6,7,Yes,A person cooks.,food;stove,"A person cooks, slowly.",c092 11.90 21.20;c147 0.00 12.60;c092 0.00 3.00,24.83
N11GT,HR43,Stairs,6,5,Yes,Nobody.,,,,18.33
"""  # noqa: E501


def test_charades_has_the_classes_of_all_actions(read):
    first, second = read("charades", {"Charades_v1_train.csv": CHARADES}).rows
    assert (first.name, first.label, first.columns["labels"]) == ("46GP8", None, ["c092", "c147"])
    assert (first.columns["split"], first.columns["length"]) == ("train", 24.83)
    assert second.columns["labels"] == []
    names = "c092 Watching/looking at something\nc146 Someone is awakening\nc147 Someone is cooking something\n"
    parsed = read("charades", {"Charades_v1_test.csv": CHARADES, "Charades_v1_classes.txt": names})
    assert parsed.rows[0].columns["labels"] == ["Watching/looking at something", "Someone is cooking something"]
    assert len(parsed.classes) == 3
    with pytest.raises(UsageError, match="action 'c147' is not in the list of classes") as caught:
        read("charades", {"Charades_v1_test.csv": CHARADES, "Charades_v1_classes.txt": "c092 x\n"})
    assert (caught.value.where["row"], caught.value.where["column"]) == (2, "actions")


AVA = """-5KQ66BBWC4,0902,0.077,0.151,0.283,0.811,80,1
-5KQ66BBWC4,0902,0.077,0.151,0.283,0.811,9,1
-5KQ66BBWC4,0902,0.226,0.032,0.366,0.497,12,0
-5KQ66BBWC4,0903,0.071,0.142,0.279,0.806,12,1
"""
ACTIONS = "".join(
    f'item {{\n  name: "{name}"\n  id: {number}\n}}\n'
    for number, name in ((9, "read"), (12, "stand"), (80, "watch (a person)"))
)


def test_ava_has_a_clip_of_three_seconds_around_each_annotated_second(read):
    parsed = read("ava", {"ava_train_v2.2.csv": AVA, "ava_action_list_v2.2.pbtxt": ACTIONS})
    first, second = parsed.rows
    assert (first.name, first.start, first.end, first.columns["timestamp"]) == ("-5KQ66BBWC4", 900.5, 903.5, 902.0)
    assert first.columns["labels"] == ["watch (a person)", "read", "stand"]
    assert json.loads(first.columns["boxes"])[2] == [0.226, 0.032, 0.366, 0.497]
    assert json.loads(first.columns["box_actions"]) == ["watch (a person)", "read", "stand"]
    assert (json.loads(first.columns["person_ids"]), second.columns["split"]) == ([1, 1, 0], "train")
    assert parsed.classes == ("read", "stand", "watch (a person)")
    with pytest.raises(UsageError, match="line has 3 fields") as caught:
        read("ava", {"bad.csv": AVA + "a,b,c\n"})
    assert caught.value.where["row"] == 5


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_hf_metadata_names_files_by_file_name(kind, read, tmp_path):
    rows = [{"file_name": "train/a.mp4", "text": "one"}, {"file_name": "train/b.mp4", "text": "two"}]
    data = {"csv": table_of(rows), "jsonl": "\n".join(map(json.dumps, rows)), "parquet": parquet(rows)}[kind]
    parsed = read("hf", {f"metadata.{kind}": data}, columns="caption=text")
    assert [(row.name, row.columns) for row in parsed.rows] == [
        ("train/a.mp4", {"caption": "one"}),
        ("train/b.mp4", {"caption": "two"}),
    ]
    assert read_annotations([f"hf:{tmp_path}"]).rows[1].columns == {"text": "two"}


SEGMENTS = [
    {
        "videoid": "a",
        "meta": {"title": "x"},
        "t0": [0, 2.5],
        "t1": [2.5, "00:00:04.250"],
        "text": ["one", "two"],
        "n": 7,
    },
    {"videoid": "b", "meta": {"title": "y"}, "t0": [1], "t1": [3], "text": ["three"], "n": 8},
]
WANTED = [("a", 0, 2.5, "one"), ("a", 2.5, 4.25, "two"), ("b", 1, 3, "three")]


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet"])
def test_columns_of_any_table_may_be_renamed_and_hold_lists_of_segments(kind, read):
    rows = [row | {"t1": [2.5, 4.25]} if row["videoid"] == "a" else row for row in SEGMENTS]
    data = {
        "json": lambda: json.dumps(SEGMENTS),
        "jsonl": lambda: "\n".join(map(json.dumps, SEGMENTS)) + "\n\n",
        "csv": lambda: table_of([{name: json.dumps(value) if isinstance(value, list | dict) else value
                                  for name, value in row.items()} for row in SEGMENTS]),
        "parquet": lambda: parquet(rows),
    }[kind]()  # fmt: skip
    columns = "path=videoid,start=t0,end=t1,caption=text,title=meta.title"
    parsed = read(kind, {f"rows.{kind}": data}, columns=columns)
    assert places(parsed) == WANTED
    assert [(row.columns["title"], row.columns["n"]) for row in parsed.rows] == [("x", 7), ("x", 7), ("y", 8)]


def test_segments_may_be_pairs_or_objects(read):
    pairs = [{"path": "a", "segments": [[0, 2.5], [2.5, 4.25]], "caption": ["one", "two"]}]
    assert places(read("json", {"a.json": json.dumps(pairs)})) == WANTED[:2]
    objects = [
        {"path": "a", "cuts": [{"start": 0, "end": 2.5, "note": "one"}, {"start": 2.5, "end": 4.25, "note": "two"}]}
    ]
    parsed = read("json", {"b.json": json.dumps(objects)}, columns="segments=cuts,caption=note")
    assert places(parsed) == WANTED[:2]
    deep = [{"path": "a", "cuts": [{"from": 0, "to": 2.5, "note": "one"}, {"from": 2.5, "to": 4.25, "note": "two"}]}]
    parsed = read("json", {"c.json": json.dumps(deep)}, columns="start=cuts.from,end=cuts.to,caption=cuts.note")
    assert places(parsed) == WANTED[:2]


REFUSED = {
    "unequal": ("jsonl", '{"path": "a", "start": [0, 1], "end": [1, 2]}\n{"path": "b", "start": [0], "end": [1, 2]}',
                None, "different lengths: start 1, end 2", {"row": 2}),
    "unequal-caption": ("json", '[{"path": "a", "start": [0, 1], "end": [1, 2], "caption": ["one"]}]', None,
                        "different lengths", {"row": 1}),
    "no-column": ("csv", "path,label\na,b\n", "caption=text", "table has no column 'text'", {}),
    "no-path": ("jsonl", '{"video": "a"}', None, "table has no column path", {}),
    "taken": ("csv", "path,caption,text\na,b,c\n", "caption=text", "column 'caption' exists", {"row": 2}),
    "mapping": ("csv", "path\na\n", "caption", "invalid column 'caption'", {}),
    "twice": ("csv", "path\na\n", "a=b,a=c", "named twice", {}),
    "not-a-table": ("list", "a.mp4 1\n", "path=b", "columns of 'list' cannot be renamed", {}),
    "line": ("jsonl", '{"path": "a"}\n{"path": \n', None, "line is not JSON", {"row": 2}),
    "array": ("jsonl", '[{"path": "a"}]', None, "line is not a JSON object", {"row": 1}),
    "no-parquet": ("parquet", "PAR1", None, "Parquet does not parse", {}),
    "clock": ("csv", "path,start\na,00:00:75\n", None, "start is '00:00:75'", {"row": 2, "column": "start"}),
    "segment": ("json", '[{"path": "a", "segments": [[1, 2, 3]]}]', None, "is no segment", {"row": 1}),
    "labels": ("json", '[{"path": "a", "labels": {"x": 1}}]', None, "labels are", {"row": 1, "column": "labels"}),
    "label": ("json", '[{"path": "a", "label": ["x"]}]', None, "label is", {"row": 1, "column": "label"}),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_tables_that_do_not_fit_are_refused_at_their_row(name, read, tmp_path):
    kind, text, columns, message, where = REFUSED[name]
    with pytest.raises(UsageError, match=message) as caught:
        read(kind, {f"rows.{kind}": text}, columns=columns)
    assert caught.value.hint
    assert {key: value for key, value in caught.value.where.items() if key != "file"} == where
    if columns is None:
        assert caught.value.where["file"] == str(tmp_path / f"rows.{kind}")


def test_binary_columns_are_refused_by_name(read):
    with pytest.raises(UsageError, match="value is binary") as caught:
        read("parquet", {"a.parquet": parquet([{"path": "a", "blob": b"x"}])})
    assert caught.value.where["column"] == "blob"


def test_a_small_table_of_many_equal_rows_is_refused_before_it_is_unpacked(read):
    rows = pa.table({"path": pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), ["a.mp4"])})
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, rows.schema) as writer:
        for _ in range(30):
            writer.write_table(rows)
    with pytest.raises(UsageError, match="has 3,000,000 rows, which name no videos"):
        read("parquet", {"bomb.parquet": sink.getvalue()})


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
        (None, ["jump", "swim"]),
        (None, ["run"]),
        (None, None),
    ]
    assert parsed.classes == ("jump", "run", "swim")
    assert read(kind, {f"a.{kind}": text}).classes == ("0", "1", "2")
    with pytest.raises(UsageError, match="label 2 has no name"):
        read(kind, {f"a.{kind}": text}, class_names=["jump", "run"])


values = st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)
segments = st.tuples(st.floats(0, 1e5), st.floats(0, 1e5), st.text(max_size=5))
films = st.tuples(st.dictionaries(st.sampled_from("uvwxyz"), values), st.lists(segments, min_size=1, max_size=4))


@given(st.lists(films, min_size=1, max_size=5), st.sampled_from(["lists", "pairs", "objects", "dotted"]))
def test_renaming_and_taking_segments_apart_loses_nothing(found, form):
    records, columns = [], {}
    for number, (other, cuts) in enumerate(found, 1):
        record = {"id": f"film{number}", **other}
        starts, ends, texts = map(list, zip(*cuts, strict=True))
        if form == "lists":
            record |= {"t0": starts, "t1": ends, "said": texts}
            columns = {"start": "t0", "end": "t1", "caption": "said"}
        elif form == "pairs":
            record |= {"cuts": [list(pair) for pair in zip(starts, ends, strict=True)], "said": texts}
            columns = {"segments": "cuts", "caption": "said"}
        else:
            record["cuts"] = [{"start": start, "end": end, "said": text} for start, end, text in cuts]
            columns = {"segments": "cuts", "caption": "said"}
            if form == "dotted":
                columns = {"start": "cuts.start", "end": "cuts.end", "caption": "cuts.said"}
        records.append((number, record))
    rows = Columns({"path": "id", **columns}).rows(records)
    assert [(number, row["path"], row["start"], row["end"], row["caption"]) for number, row in rows] == [
        (number, f"film{number}", *cut) for number, (_, cuts) in enumerate(found, 1) for cut in cuts
    ]
    for number, row in rows:
        assert found[number - 1][0].items() <= row.items()
