"""Videos that are no files: in cells of Parquet tables, and as pictures in folders and tars."""

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fastvid
from fastvid.cli.main import main
from fastvid.sharding.sources.tars import gather_sources
from tests.sharding.shardtools import ffmpeg, ledger, make, tar_of

SMALL = ("--short-side", "64", "--workers", "1")
FEATURES = {
    "video": {"_type": "Video"},
    "label": {"names": ["run", "jump"], "_type": "ClassLabel"},
    "caption": {"dtype": "string", "_type": "Value"},
}


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Videos with 5, 6 and 7 frames."""
    folder = tmp_path_factory.mktemp("videos")
    return [make(folder / f"{count}.mp4", size="64x48", frames=count).read_bytes() for count in (5, 6, 7)]


def table(path, rows, features=FEATURES):
    """Write rows as `datasets` does, one row in each group but the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = pa.Table.from_pylist(rows)
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    pq.write_table(made.replace_schema_metadata(metadata), path, row_group_size=2)


def made_of(source, out, *options):
    """Shard; return the exit code, and frames, label and caption of each sample by its key."""
    code = main(["shard", str(source), "--out", str(out), *SMALL, *options])
    found = {}
    for row in fastvid.open(out).annotations.to_pylist():
        found[row["key"]] = (row["num_frames"], row["label"], row.get("caption"), row.get("split"))
    return code, found


def test_videos_in_the_cells_of_parquet_are_sources_and_other_columns_annotations(tmp_path, videos, capsys):
    image = {"bytes": b"jpeg", "path": None}
    rows = [
        {"video": {"bytes": data, "path": path}, "label": label, "caption": f"text {number}", "thumb": image}
        for number, (data, path, label) in enumerate(
            zip([*videos, b""], ["a/one.mp4", None, "three.mp4", "none.mp4"], [1, 0, -1, 0], strict=True)
        )
    ]
    table(tmp_path / "set/data/train-00000-of-00002.parquet", rows[:2])
    table(tmp_path / "set/data/test-00001-of-00002.parquet", rows[2:])
    code, found = made_of(tmp_path / "set", tmp_path / "out", "--columns", "path=video")
    assert (code, found) == (
        3,
        {
            "a/one": (5, 1, "text 0", "train"),
            "train-00000-of-00002/000002": (6, 0, "text 1", "train"),
            "three": (7, None, "text 2", "test"),
        },
    )
    assert fastvid.open(tmp_path / "out").classes == ("run", "jump")
    (none,) = [row for row in ledger(tmp_path / "out") if row["reason"]]
    assert (none["source_id"], none["reason"]) == ("none.mp4", "empty")
    told = capsys.readouterr().out
    assert "4 ignored: cell of the column thumb, which is not kept" in told
    assert main(["index", str(tmp_path / "set"), "--out", str(tmp_path / "in"), "--columns", "path=video"]) == 2
    assert "not indexed in place" in capsys.readouterr().err


def test_cells_of_bytes_may_be_cut_by_seconds(tmp_path, videos):
    rows = [{"path": "film", "mp4": videos[2], "start": start, "end": start + 0.12, "text": "x"} for start in (0, 0.12)]
    table(tmp_path / "films.parquet", rows, {})
    code, found = made_of(tmp_path / "films.parquet", tmp_path / "out", "--columns", "caption=text")
    names = {"film_00000000_00000120", "film_00000120_00000240"}
    assert (code, found) == (0, dict.fromkeys(names, (3, None, "x", None)))


WRONG = {
    "several": ({"a": b"x", "b": b"y"}, (), "table has 2 columns of videos"),
    "none": ({"file_name": "a.mp4"}, (), "use --annotations parquet:FILE"),
    "other": ({"a": b"x"}, ("--columns", "path=b"), "table has 0 columns of videos"),
    "annotations": (
        {"a": b"x"},
        ("--annotations", "parquet:set/a.parquet", "--columns", "path=a"),
        "are read without --annotations",
    ),
    "metadata": ({"a": b"x"}, ("--annotations", "hf:set"), "are read without --annotations"),
}


@pytest.mark.parametrize("name", WRONG)
def test_tables_without_one_column_of_videos_are_refused(name, tmp_path, capsys, monkeypatch):
    row, options, message = WRONG[name]
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "set/a.parquet", [row], {})
    assert main(["shard", "set", "--out", "out", *options]) in (1, 2)
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_damaged_table_is_refused(tmp_path, videos, capsys):
    table(tmp_path / "set/a.parquet", [{"video": videos[0]}], {})
    data = (tmp_path / "set/a.parquet").read_bytes()
    (tmp_path / "set/a.parquet").write_bytes(data[:-20])
    assert main(["shard", str(tmp_path / "set"), "--out", str(tmp_path / "out")]) == 2
    assert "Parquet does not parse" in capsys.readouterr().err


def pictures(folder, count, kind="jpg", first=8):
    """Write pictures that get brighter, numbered from `first` without leading zeros."""
    folder.mkdir(parents=True)
    for number in range(count):
        grey = f"color=c=0x{20 + 25 * number:02x}{20 + 25 * number:02x}{20 + 25 * number:02x}:size=64x48"
        ffmpeg("-f", "lavfi", "-i", grey, "-frames:v", "1", str(folder / f"frame_{first + number}.{kind}"))


def levels(out):
    """The mean level of each frame of each sample."""
    return {
        video.key: [round(float(np.asarray(frame).mean()) / 25 - 0.8) for frame in video.frames(range(len(video))).data]
        for video in fastvid.open(out)
    }


def test_pictures_of_a_folder_are_the_frames_of_a_video(tmp_path, capsys):
    pictures(tmp_path / "raw/run/one", 5)
    pictures(tmp_path / "raw/jump/two", 4, "png")
    (tmp_path / "raw/run/one/notes.txt").write_text("words")
    (tmp_path / "raw/run/one/frame_1.jpg").symlink_to("/etc/passwd")
    assert main(["shard", str(tmp_path / "raw"), "--out", str(tmp_path / "none")]) == 2
    assert "give the rate to `fastvid shard` by --fps" in capsys.readouterr().err
    code, found = made_of(tmp_path / "raw", tmp_path / "out", "--fps", "10")
    assert (code, found) == (0, {"run/one": (5, 1, None, None), "jump/two": (4, 0, None, None)})
    dataset = fastvid.open(tmp_path / "out")
    assert (dataset.classes, set(dataset.column("fps").to_pylist())) == (("jump", "run"), {10.0})
    assert levels(tmp_path / "out") == {"run/one": [0, 1, 2, 3, 4], "jump/two": [0, 1, 2, 3]}


def test_pictures_of_a_tar_are_the_frames_of_a_video(tmp_path):
    pictures(tmp_path / "a", 5)
    members = [(f"in/{path.name}", path.read_bytes()) for path in sorted((tmp_path / "a").iterdir())]
    tar_of(tmp_path / "tars/film.tar", members)
    assert "if pictures are its frames, use --fps" in gather_sources(tmp_path / "tars").sources[0].problem[1]
    code, found = made_of(tmp_path / "tars", tmp_path / "out", "--fps", "30000/1001")
    assert (code, found) == (0, {"film": (5, None, None, None)})
    assert levels(tmp_path / "out") == {"film": [0, 1, 2, 3, 4]}


def test_what_is_no_picture_rejects_its_video_alone(tmp_path):
    pictures(tmp_path / "raw/good", 3)
    pictures(tmp_path / "raw/mixed", 2)
    pictures(tmp_path / "raw/broken", 2)
    os.replace(tmp_path / "raw/mixed/frame_9.jpg", tmp_path / "raw/mixed/frame_7.jpg")
    ffmpeg("-f", "lavfi", "-i", "color=size=64x48", "-frames:v", "1", str(tmp_path / "raw/mixed/frame_10.png"))
    (tmp_path / "raw/broken/frame_8.jpg").write_bytes(b"\xff\xd8\xff no picture")
    code, found = made_of(tmp_path / "raw", tmp_path / "out", "--fps", "10")
    assert (code, list(found)) == (3, ["good"])
    reasons = {row["source_id"]: row["reason"] for row in ledger(tmp_path / "out") if row["reason"]}
    assert reasons == {"mixed": "not-video", "broken": "damaged"}


def test_videos_beside_pictures_are_the_sources(tmp_path, videos, capsys):
    pictures(tmp_path / "raw/thumbs", 2)
    (tmp_path / "raw/a.mp4").write_bytes(videos[0])
    (tmp_path / "raw/moving.webp").write_bytes(b"RIFF")
    code, found = made_of(tmp_path / "raw", tmp_path / "out", "--fps", "25")
    assert (code, list(found)) == (0, ["a"])
    told = capsys.readouterr().out
    assert "1 ignored: .webp file (moving.webp)" in told
    assert "2 ignored: .jpg file (frame_8.jpg, frame_9.jpg)" in told
