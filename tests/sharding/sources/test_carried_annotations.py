"""Annotations survive encoding a dataset again, and clips know the file that they come from."""

from __future__ import annotations

import fastvid
from fastvid.sharding.change.edit import remove_samples
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.job.job import run_job
from fastvid.storage import open_storage
from tests.sharding.shardtools import ledger, make

SMALL = PROFILES["intra"].changed(short_side=64)
ROWS = """path,label,start,end,split,caption,score
a.mp4,walk,0,0.4,train,a dog,0.5
a.mp4,run,0.4,9,val,"a cat, running",0.25
b.mp4,jump,,,train,,
"""


def rows(folder):
    return {row["key"]: row for row in fastvid.open(folder).annotations.to_pylist()}


def packed(tmp_path):
    for name in "ab":
        make(tmp_path / "raw" / f"{name}.mp4", frames=20)
    (tmp_path / "rows.csv").write_text(ROWS)
    run_job([str(tmp_path / "raw")], tmp_path / "old", annotations=f"csv:{tmp_path / 'rows.csv'}", profile=SMALL)
    return tmp_path / "old"


def test_parent_of_a_clip_is_its_file_with_the_seconds_asked_and_got(tmp_path):
    folder = packed(tmp_path)
    first, second, whole = sorted(rows(folder).values(), key=lambda row: (row["label"] is None, row["source_id"]))[:3]
    assert [row["parent"] for row in (first, second, whole)] == ["a.mp4", "a.mp4", None]
    assert (second["asked_start_seconds"], second["asked_end_seconds"]) == (0.4, 9.0)
    assert (second["start_seconds"], second["end_seconds"]) == (0.4, 0.8)
    warnings = {row["source_id"]: row["warnings"] for row in ledger(folder)}
    assert "clip-cut-short" in warnings["a.mp4#0.4-9"]
    assert "clip-cut-short" not in warnings["a.mp4#0-0.4"]


def test_encoding_a_dataset_again_keeps_its_annotations(tmp_path):
    old = packed(tmp_path)
    run_job([str(old)], tmp_path / "new", profile=SMALL.changed(short_side=32))
    before, after = rows(old), rows(tmp_path / "new")
    assert fastvid.open(tmp_path / "new").classes == fastvid.open(old).classes
    assert before.keys() == after.keys()
    kept = ("label", "split", "caption", "score", "start_seconds", "end_seconds", "num_frames")
    for key, row in before.items():
        assert [after[key][name] for name in kept] == [row[name] for name in kept]
        assert after[key]["parent"] == (row["parent"] or row["source_id"])
    # The facts in the tar's JSON are no annotations, and the facts among the annotations are those of the new videos.
    extra = {"conforms", "pix_fmt", "source", "source_source_id", "source_fps", "source_height", "source_width"}
    assert not extra & set(after[key])
    assert {fastvid.open(tmp_path / "new")[key].info.height for key in after} == {32}
    assert {row["height"] for row in after.values()} == {32} != {row["height"] for row in before.values()}


def test_removed_samples_are_not_encoded_again(tmp_path):
    old = packed(tmp_path)
    gone = next(iter(rows(old)))
    remove_samples(open_storage(old), [gone])
    run_job([str(old)], tmp_path / "new", profile=SMALL)
    assert rows(tmp_path / "new").keys() == rows(old).keys() - {gone}
