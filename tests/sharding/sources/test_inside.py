"""Videos inside tars, tables and folders of pictures."""

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fastvid
from fastvid.cli.main import main
from fastvid.runtime.names import picture_order
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
    folder = tmp_path_factory.mktemp("videos")
    return [make(folder / f"{count}.mp4", size="64x48", frames=count).read_bytes() for count in (5, 6, 7)]


def table(path, rows, features=FEATURES):
    """Write rows as `datasets` does, one row in each group but the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = pa.Table.from_pylist(rows)
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    pq.write_table(made.replace_schema_metadata(metadata), path, row_group_size=2)


def made_of(source, out, *options):
    code = main(["shard", str(source), "--out", str(out), *SMALL, *options])
    found = {}
    for row in fastvid.open(out).annotations.to_pylist():
        found[row["key"]] = (row["num_frames"], row["label"], row.get("caption"), row.get("split"))
    return code, found


def test_videos_in_the_cells_of_parquet_are_sources_and_other_columns_annotations(tmp_path, videos, capsys):
    image, names, labels = {"bytes": b"jpeg", "path": None}, ["a/one.mp4", None, "three.mp4", "none.mp4"], [1, 0, -1, 0]
    rows = [
        {"video": {"bytes": data, "path": path}, "label": label, "caption": f"text {number}", "thumb": image}
        | {"thumbs": [image, image]}
        for number, (data, path, label) in enumerate(zip([*videos, b""], names, labels, strict=True))
    ]
    table(tmp_path / "set/data/train-00000-of-00002.parquet", rows[:2])
    table(tmp_path / "set/data/test-00001-of-00002.parquet", rows[2:])
    code, found = made_of(tmp_path / "set", tmp_path / "out", "--columns", "path=video")
    assert code == 3
    assert found == {
        "a/one": (5, 1, "text 0", "train"),
        "train-00000-of-00002/000002": (6, 0, "text 1", "train"),
        "three": (7, None, "text 2", "test"),
    }
    assert fastvid.open(tmp_path / "out").classes == ("run", "jump")
    (none,) = [row for row in ledger(tmp_path / "out") if row["reason"]]
    assert (none["source_id"], none["reason"]) == ("none.mp4", "empty")
    told = capsys.readouterr().out
    assert all(f"4 ignored: cell of the column {name}, which is not kept" in told for name in ("thumb", "thumbs"))
    assert main(["index", str(tmp_path / "set"), "--out", str(tmp_path / "in"), "--columns", "path=video"]) == 2
    assert "not indexed in place" in capsys.readouterr().err


def test_cells_of_bytes_may_be_cut_by_seconds(tmp_path, videos):
    rows = [{"path": "film", "mp4": videos[2], "start": start, "end": start + 0.12, "text": "x"} for start in (0, 0.12)]
    table(tmp_path / "films.parquet", rows, {})
    code, found = made_of(tmp_path / "films.parquet", tmp_path / "out", "--columns", "caption=text")
    names = {"film_00000000_00000120", "film_00000120_00000240"}
    assert (code, found) == (0, dict.fromkeys(names, (3, None, "x", None)))


WRONG = {
    "several": ({"a": b"x", "b": b"y"}, "", "table has 2 columns of videos"),
    "none": ({"file_name": "a.mp4"}, "", "use --annotations parquet:FILE"),
    "other": ({"a": b"x"}, "--columns path=b", "table has 0 columns of videos"),
    "annotations": (
        {"a": b"x"}, "--annotations parquet:set/a.parquet --columns path=a", "are read without --annotations"
    ),
    "metadata": ({"a": b"x"}, "--annotations hf:set", "are read without --annotations"),
    "damaged": (None, "", "Parquet does not parse"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_tables_without_one_column_of_videos_are_refused(name, tmp_path, capsys, monkeypatch):
    row, options, message = WRONG[name]
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "set/a.parquet"
    table(path, [row or {"video": b"x"}], {})
    path.write_bytes(path.read_bytes()[: None if row else -20])
    assert main(["shard", "set", "--out", "out", *options.split()]) in (1, 2)
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def pictures(folder, count, kind="jpg", first=8):
    """Write pictures that get brighter, numbered from `first` without leading zeros."""
    folder.mkdir(parents=True)
    grey = "nullsrc=size=64x48,geq=lum='(20+25*N)*219/255+16':cb=128:cr=128"
    ffmpeg("-f", "lavfi", "-i", grey, "-frames:v", str(count), "-start_number", str(first), f"{folder}/frame_%d.{kind}")


def levels(out):
    return {
        video.key: [round(float(np.asarray(frame).mean()) / 25 - 0.8) for frame in video.frames(range(len(video))).data]
        for video in fastvid.open(out)
    }


def test_pictures_of_a_folder_or_a_tar_are_the_frames_of_a_video(tmp_path, capsys):
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
    members = [(f"in/{path.name}", path.read_bytes()) for path in sorted((tmp_path / "raw/jump/two").iterdir())]
    tar_of(tmp_path / "tars/film.tar", members)
    assert "if pictures are its frames, use --fps" in gather_sources(tmp_path / "tars").sources[0].problem[1]
    code, found = made_of(tmp_path / "tars", tmp_path / "other", "--fps", "30000/1001")
    assert (code, found) == (0, {"film": (4, None, None, None)})
    assert levels(tmp_path / "other") == {"film": [0, 1, 2, 3]}


def test_pictures_are_in_the_order_of_numbers_of_any_length():
    names = ["f_9.jpg", "f_010.png", "f_11.jpg", f"f_{'1' * 5000}.jpg", f"f_{'2' * 5000}.jpg", "²5.jpg"]
    assert picture_order([*reversed(names), "notes.txt"]) == names


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


SHARED = "one of several videos of a key"


def clips(*names):
    """Members of videos, with a label, a caption and fields of their own."""
    own = (("mp4", "video"), ("cls", "{}"), ("txt", "text {}"), ("json", '{{"x": {}}}'))
    return [(f"{name}.{end}", text.format(number)) for number, name in enumerate(names) for end, text in own]


def own(name, number, parent=None, **extra):
    shared = {} if parent is None else {"parent": parent}
    return {name: (str(number), {**shared, "caption": f"text {number}", "x": number, **extra})}


# Members, and label and columns of each source by its key; rejected sources have a reason instead.
CASES = {
    "plain": (clips("a/22.0/k0", "a/22.0/k1"), own("a/22_0/k0", 0) | own("a/22_0/k1", 1)),
    "a dot": (clips("v0.clip", "v1.clip"), own("v0", 0) | own("v1", 1)),
    "several": (
        clips("v0.clip0", "v0.clip1", "v0.clip2"),
        {key: one for n in range(3) for key, one in own(f"v0_clip{n}", n, "v0").items()},
    ),
    "dates": (
        [("v.2024-01-02.mp4", b"v"), ("v.2024-01-02.json", '{"x": 2}'), ("v.2024-01-03.mp4", b"v"),
         ("v.2024-01-03.json", '{"x": 3}')],
        {"v_2024-01-02": (None, {"parent": "v", "x": 2}), "v_2024-01-03": (None, {"parent": "v", "x": 3})},
    ),
    "cameras": (
        [("s0.cam_left.mp4", b"v"), ("s0.cam_right.mp4", b"v"), ("s0.json", '{"a": 1}'),
         ("s0.cam_right.json", '{"a": 2, "b": 3}')],
        {"s0_cam_left": (None, {"parent": "s0", "a": 1}), "s0_cam_right": (None, {"parent": "s0", "a": 2, "b": 3})},
    ),
    "numbered": (
        [("s.0.mp4", b"v"), ("s.1.mp4", b"v"), ("s.txt", "both")],
        {"s_0": (None, {"parent": "s", "caption": "both"}), "s_1": (None, {"parent": "s", "caption": "both"})},
    ),
    "beside": (
        [("k.mp4", b"v"), ("k.flow.mp4", b"v"), ("k.meta.json", '{"a": 1}'), ("k.flow.cls", "4"), ("k.cls.txt", "3")],
        {"k": ("3", {"parent": "k", "a": 1}), "k_flow": ("4", {"parent": "k"})},
    ),
    "endings": (
        [("./x/c1.MP4", b"v"), ("./x/c1.Txt", "one"), ("./x/c2.video.mp4", b"v"), ("./x/c2.txt", "two"),
         ("./x/c2.meta.json", '{"a": 1}')],
        {"_/x/c1": (None, {"caption": "one"}), "_/x/c2": (None, {"caption": "two", "a": 1})},
    ),
    "closer": (
        [("k.clip.mp4", b"v"), ("k.cls", "1"), ("k.clip.cls", "2"), ("k.clip.txt", "near"), ("k.txt", "far")],
        {"k": ("2", {"caption": "near"})},
    ),
    "others'": (
        [("k.clip0.mp4", b"v"), ("k.clip1.txt", "no"), ("k.clip1.json", '{"a": 1}'), ("k.clip1.cls", "1")],
        {"k": (None, {})},
    ),
    "no video": ([("k0.mp4", b"v"), ("k1.txt", "words")], {"k0": (None, {}), "k1": "no-video-stream"}),
    "twice": (
        [("k0.mp4", b"v"), ("k0.txt", "zero"), ("k0.mp4", b"w"), ("k0.txt", "one"), ("k1.mp4", b"v")],
        {"k0": (None, {"caption": "zero"}), "k0_mp4_2": "duplicate-name", "k0_txt_2": "duplicate-name",
         "k1": (None, {})},
    ),
    "twice apart": (
        [("k0.mp4", b"v"), ("k1.mp4", b"v"), ("k0.mp4", b"w"), ("k0.txt", "late")],
        {"a/k0": (None, {}), "k1": (None, {}), "k0_mp4_2": "duplicate-name", "a/k0_2": "no-video-stream"},
    ),
    "no object": (
        [("a.mp4", b"v"), ("a.json", '["words"]'), ("b.mp4", b"v"), ("b.json", '{"x": 1}')],
        {"a": (None, {}), "b": (None, {"x": 1})},
    ),
    "labels": (
        [("a.mp4", b"v"), ("a.json", '{"labels": "jump;run"}'), ("b.mp4", b"v"),
         ("b.json", '{"labels": [[1]], "x": 1}'), ("c.mp4", b"v"), ("c.json", '{"labels": ""}'), ("d.mp4", b"v"),
         ("d.json", '{"labels": ["run", 7, "run"]}')],
        {"a": (None, {"labels": ["jump", "run"]}), "b": (None, {"x": 1}), "c": (None, {"labels": None}),
         "d": (None, {"labels": ["run", "7"]})},
    ),
    "as in tables": (
        [("a.mp4", b"v"), ("a.cls", ""),
         ("a.json", '{"tags": ["x", "y"], "split": "validation", "score": Infinity, "label": 3.0}')],
        {"a": ("3", {"tags": ["x", "y"], "split": "val", "score": float("inf")})},
    ),
    "two formats": ([("k.mp4", b"v"), ("k.webm", b"v")], None),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CASES))
def test_fields_belong_to_the_video_of_their_name(name, tmp_path):
    members, expected = CASES[name]
    found = gather_sources(tar_of(tmp_path / "a.tar", members)).sources
    videos = [member for member in members if member[0].lower().endswith((".mp4", ".webm"))]
    assert sum(source.member is not None or source.problem is not None for source in found) >= len(videos)
    assert len({source.member for source in found if source.member}) == sum(source.problem is None for source in found)
    if expected is not None:
        got = {
            source.key: source.problem[0].value if source.problem else (source.label, dict(source.columns))
            for source in found
        }
        assert got == expected


def test_what_no_video_takes_and_what_was_shared_is_noted(tmp_path):
    for name, notes in (
        ("others'", [("left aside: clip1.txt", "left aside: clip1.json", "left aside: clip1.cls")]),
        ("numbered", [(SHARED,), (SHARED,)]),
        ("plain", [(), ()]),
    ):
        sources = gather_sources(tar_of(tmp_path / f"{name}.tar", CASES[name][0])).sources
        assert [source.notes for source in sources] == notes, name


@pytest.mark.parametrize("command", ["index", "shard"])
def test_every_video_of_a_tar_has_a_row_of_the_ledger(command, tmp_path, videos, capsys):
    a, b, c = videos
    tar_of(
        tmp_path / "tars/0.tar",
        [("v.clip0.mp4", a), ("v.clip0.cls", "0"), ("v.clip1.mp4", b), ("v.clip1.cls", "1"), ("w.mp4", c),
         ("w.mp4", a)],
    )  # fmt: skip
    out = tmp_path / "set"
    assert main([command, str(tmp_path / "tars"), "--out", str(out), "--workers", "1"]) == 3
    dataset = fastvid.open(out)
    got = {video.key: (len(video.frames(range(video.num_frames)).data), video.label) for video in dataset}
    assert got == {"v_clip0": (5, 0), "v_clip1": (6, 1), "w": (7, -1)}
    rows = {row["source_id"]: (row["status"], row["reason"], SHARED in row["warnings"]) for row in ledger(out)}
    assert rows == {
        "v.clip0": ("packed", None, True),
        "v.clip1": ("packed", None, True),
        "w": ("packed", None, False),
        "w.mp4#2": ("rejected", "duplicate-name", False),
    }
    assert f"2   {SHARED}" in capsys.readouterr().out
    assert main(["split", str(out), "0.5,0.5", "--seed", "1"]) == 0
    splits = dict(zip(dataset.keys.to_pylist(), fastvid.open(out).column("split").to_pylist(), strict=True))
    assert splits["v_clip0"] == splits["v_clip1"]
    if command == "index":
        assert main(["index", str(out), "--workers", "1"]) == 0
        assert main(["verify", str(out), "--workers", "1"]) == 0
