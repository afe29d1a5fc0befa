"""Annotations that cannot be stored are refused at their row before anything is encoded; others keep their values."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

import fastvid
from fastvid.errors import UsageError
from fastvid.sharding.job.job import run_job
from fastvid.sharding.sources.annotations import read_annotations
from fastvid.sharding.sources.tars import gather_sources
from tests.sharding.shardtools import make, tar_of

REFUSED = {
    "huge-label": ("csv", b"path,label\na.mp4,0\nb.mp4,3000000000\n", "label 3000000000 is larger", 3),
    "latin-1": ("csv", b"path,note\na.mp4,fine\nb.mp4,caf\xe9\n", "'note' is not UTF-8", 3),
    "latin-1-label": ("csv", b"path,label\na.mp4,caf\xe9\n", "'label' is not UTF-8", 2),
    "reserved": ("csv", b"path,__row\na.mp4,1\n", "'__row' has a reserved name", None),
    "reserved-json": ("json", b'[{"path": "a.mp4", "__row": 1}]', "'__row' has a reserved name", None),
    "duplicate": ("csv", b"path,note,note\na.mp4,1,2\n", "duplicate column 'note'", 1),
    "nan": ("csv", b"path,start\na.mp4,0\nb.mp4,nan\n", "start is 'nan', not a number of seconds", 3),
    "inf": ("csv", b"path,start,end\na.mp4,0,inf\n", "end is 'inf', not a number of seconds", 2),
    "words": ("json", b'[{"path": "a.mp4", "end": "soon"}]', "end is 'soon', not a number of seconds", 1),
    "long-field": ("csv", b"path,note\na.mp4,1\nb.mp4," + b"x" * 200_000 + b"\n", "field larger than field limit", 3),
    "path-number": ("json", b'[{"path": "a.mp4"}, {"path": 5}]', "no text in the column path", 2),
    "nested": ("json", b"[" * 200_000, "do not parse as json", None),
    "kinetics": ("kinetics", b"label,youtube_id,time_start,time_end,split\na,b,0,10,train,more\n", "more fields", 2),
    "kinetics-nan": ("kinetics", b"label,youtube_id,time_start,time_end\na,b,0,nan\n", "time_end is 'nan'", 2),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_annotations_that_cannot_be_stored_are_refused_at_their_row(name, tmp_path):
    kind, data, message, row = REFUSED[name]
    path = tmp_path / f"a.{kind}"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=message) as caught:
        read_annotations([f"{kind}:{path}"])
    assert caught.value.where["file"] == str(path)
    assert caught.value.where.get("row") == row


def annotations_of(tmp_path, text, kind="csv"):
    make(tmp_path / "raw" / "a.mp4", frames=10)
    path = tmp_path / f"rows.{kind}"
    path.write_text(text)
    run_job([str(tmp_path / "raw")], tmp_path / "out", annotations=f"{kind}:{path}")
    return pq.read_table(tmp_path / "out" / "annotations-000001.parquet")


def test_numbers_in_annotations_keep_every_digit(tmp_path):
    columns = "path,zeros,under,long,whole,real,word"
    table = annotations_of(tmp_path, f"{columns}\na.mp4,0022,1_000,12345678901234567890,-7,2.5e1,nan\n")
    (row,) = table.to_pylist()
    assert (row["zeros"], row["under"], row["long"]) == ("0022", "1_000", "12345678901234567890")
    assert (row["whole"], row["real"], row["word"]) == (-7, 25.0, "nan")


def test_huge_integers_of_json_annotations_are_kept_as_text(tmp_path):
    table = annotations_of(tmp_path, '[{"path": "a.mp4", "id": 12345678901234567890}]', "json")
    assert table["id"].to_pylist() == ["12345678901234567890"]


def test_near_clips_of_a_video_are_two_sources(tmp_path):
    table = annotations_of(tmp_path, "path,start,end\na.mp4,0.1000001,0.3\na.mp4,0.10000013,0.3\n")
    assert len(set(table["source_id"].to_pylist())) == 2
    assert table.num_rows == 2


def test_a_hostile_sample_does_not_stop_a_job_of_tars(tmp_path):
    video = make(tmp_path / "a.mp4", frames=10).read_bytes()
    samples = {
        "nested.json": b"[" * 200_000,
        "label.cls": b"999999999",
        "field.json": b'{"label": 888888888}',
        "reserved.json": json.dumps({"__row": 7, "half": "\ud800", "long": 10**30, "caption": "kept"}).encode(),
        "good.cls": b"1",
    }
    members = {}
    for name, data in samples.items():
        members |= {f"{name.split('.')[0]}.mp4": video, name: data}
    tar_of(tmp_path / "raw.tar", members.items())
    found = gather_sources(tmp_path / "raw.tar")
    assert found.classes == ("0", "1")
    assert sum(len(source.notes) for source in found.sources) == 3  # nested, label, field
    run_job([str(tmp_path / "raw.tar")], tmp_path / "out")
    dataset = fastvid.open(tmp_path / "out")
    assert len(dataset) == 5
    row = next(row for row in dataset.annotations.to_pylist() if row["caption"] == "kept")
    assert (row["source___row"], row["half"], row["long"]) == (7, "?", str(10**30))
