"""Metadata of LeRobot datasets that is wrong or hostile: single episodes are rejected, or a clear error says what."""

import json
import math
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fastvid
from fastvid.cli.main import main
from fastvid.sharding.lerobot.read import UNNAMED
from tests.sharding.lerobot.tools import CAMERAS, LENGTHS, ORACLE, as_version_2, copied, digest, loader
from tests.sharding.shardtools import ledger

EPISODES, DATA = "meta/episodes/chunk-000/file-000.parquet", "data/chunk-000/file-000.parquet"
FILM = f"videos/{CAMERAS[0]}/chunk-000/file-000.mp4"
FROM, TO = (f"videos/{CAMERAS[0]}/{name}_timestamp" for name in ("from", "to"))
ITEMS = {(item["episode_index"], item["frame_index"]): item for item in ORACLE["items"]}


def edit(root, name, change):
    """Change what a file says: JSON, or the rows of a table."""
    path = root / name
    if name.endswith(".json"):
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
    else:
        table = pq.read_table(path)
        rows = change(table.to_pylist())
        try:
            changed = pa.Table.from_pylist(rows, schema=table.schema)
        except pa.ArrowInvalid:
            changed = pa.Table.from_pylist(rows)
        pq.write_table(changed, path)


def info(**fields):
    return lambda root: edit(root, "meta/info.json", lambda old: old | fields)


def rows(name, change):
    return lambda root: edit(root, name, lambda old: [change(row) for row in old])


def without(*left_out):
    """Leave out episodes, as whoever filters the metadata does."""

    def change(root):
        edit(root, EPISODES, lambda rows: [row for row in rows if row["episode_index"] not in left_out])
        gone = sum(LENGTHS[number] for number in left_out)
        info(total_episodes=len(LENGTHS) - len(left_out), total_frames=sum(LENGTHS) - gone)(root)

    return change


def shortened(number, by):
    """Let an episode end earlier: the rest of its frames are a discarded take."""

    def shorter(row):
        if row["episode_index"] != number:
            return row
        seconds = {name: value - by / 10 for name, value in row.items() if name.endswith("/to_timestamp")}
        return row | {"length": row["length"] - by} | seconds

    def kept(row):
        return row["episode_index"] != number or row["frame_index"] < LENGTHS[number] - by

    def change(root):
        rows(EPISODES, shorter)(root)
        edit(root, DATA, lambda rows: [row for row in rows if kept(row)])
        info(total_frames=sum(LENGTHS) - by)(root)

    return change


def moved(number, by, *names):
    def later(row):
        return row | {name: row[name] + by / 10 for name in names or (FROM, TO) if row["episode_index"] == number}

    return rows(EPISODES, later)


# What is changed, the episodes that are rejected or gone, and the frames that are counted as no episode's.
FILMS = {
    "as it was": (lambda _: None, (), 0),
    "first removed": (without(0), (0,), 2 * 7),
    "gap": (without(2, 3), (2, 3), 2 * 21),
    "orphans": (shortened(2, 3), (), 2 * 3),
    "rounded": (moved(3, 0.2), (), 0),
    "drift": (moved(3, 0.6), (3,), 0),
    "drift back": (moved(3, -0.6), (3,), 1),
    "of two": (moved(3, -2), (2, 3), 2),
    "not a number": (moved(3, math.nan), (3,), 9),
    "negative": (moved(0, -5), (0,), 7),
    "other length": (moved(4, 5, TO), (4,), 0),
}


@pytest.mark.parametrize("name", FILMS)
def test_episodes_are_where_their_seconds_say_and_only_wrong_ones_are_rejected(name, tmp_path, capsys):
    change, gone, unnamed = FILMS[name]
    change(copied(tmp_path / "source"))
    code = index(tmp_path / "source", tmp_path / "set")
    rejected = [row for row in ledger(tmp_path / "set") if row["status"] == "rejected"]
    assert code == (3 if rejected else 0)
    assert all(row["reason"] == "out-of-range" and row["message"] for row in rejected)
    told = [line for line in capsys.readouterr().out.splitlines() if UNNAMED in line]
    assert told == ([f"{unnamed:8} ignored: {UNNAMED}"] if unnamed else [])
    seen = set()
    for batch in loader(fastvid.open(tmp_path / "set")):
        episode, frame = int(batch.key[0][-6:]), int(batch.frame_index[0, -1])
        item = ITEMS[episode, frame]
        for camera in CAMERAS:
            assert [digest(one) for one in batch[camera][0]] == item[camera]
        assert np.allclose(batch["observation.state"][0], item["observation.state"])
        seen.add(episode)
    assert seen == set(range(len(LENGTHS))) - set(gone)


def feature(name, **fields):
    def change(old):
        return old | {"features": old["features"] | {name: old["features"].get(name, {}) | fields}}

    return lambda root: edit(root, "meta/info.json", change)


def written(name, text):
    return lambda root: (root / name).write_text(text)


def replaced(name, make):
    def change(root):
        (root / name).unlink()
        make(root / name)

    return change


def outside(path):
    shutil.copytree(path.parents[3], path.parents[4] / "outside")
    path.symlink_to(path.parents[4] / "outside" / FILM.removeprefix("videos/"))


def second(root):
    info(video_path="videos/film-{file_index:03d}.mp4")(root)


NAN = float("nan")
LIES = {
    "traversal": (info(video_path="../outside/{video_key}.mp4"), "leads outside its folder"),
    "traversal inside": (info(video_path="videos/{video_key}/../../../o/{file_index}.mp4"), "leads outside its folder"),
    "absolute": (info(video_path="/etc/passwd"), "leads outside its folder"),
    "traversal of data": (info(data_path="../{chunk_index}.parquet"), "leads outside its folder"),
    "NUL": (info(video_path="videos/a\0b.mp4"), "contains a NUL byte"),
    "huge width": (info(video_path="{chunk_index:0999999999d}"), "a field that is not known"),
    "huge text": (info(video_path="{video_key:>4000000000}"), "a field that is not known"),
    "huge width of data": (info(data_path="{chunk_index:0999999999d}"), "a field that is not known"),
    "other field": (info(video_path="{x}"), "has the field {x}"),
    "number": (info(video_path="{0}"), "has the field {0}"),
    "attribute": (info(video_path="{video_key.__class__}"), "a field that is not known"),
    "open": (info(video_path="{"), "a field that is not known"),
    "width of text": (info(video_path="{video_key:03d}"), "has the field {video_key:03d}"),
    "camera in data": (info(data_path="{video_key}"), "has the field {video_key}"),
    "path 5": (info(video_path=5), "Expected `str | null`, got `int` - at `$.video_path`"),
    "path list": (info(video_path=["a"]), "got `array` - at `$.video_path`"),
    "one film": (second, "names one file for several videos"),
    "no features": (info(features=None), "got `null` - at `$.features`"),
    "text": (info(features="all"), "got `str` - at `$.features`"),
    "null feature": (info(features={"a": None}), "at `$.features[...]`"),
    "shape": (feature("action", shape=[2.5]), "at `$.features[...].shape[0]`"),
    "no shape": (feature("action", shape=None), "at `$.features[...].shape`"),
    "other shape": (feature("action", shape=[3]), "signal 'action' has 2 values in a row, its shape is (3,)"),
    "missing signal": (feature("force", dtype="float32", shape=[1]), "no column 'force'"),
    "no camera": (feature("side", dtype="video", shape=[8, 8, 3]), "no column 'videos/side/chunk_index'"),
    "camera's name": (feature("../x", dtype="video", shape=[8, 8, 3]), "a name that a stream cannot have"),
    "depth": (
        feature(CAMERAS[0], info={"is_depth_map": True, "video.depth_min": "near"}),
        "a scale of depth does not parse",
    ),
    "fps nan": (info(fps=NAN), "Expected `float` > 0.0 - at `$.fps`"),
    "fps text": (info(fps="30"), "Expected `float`, got `str` - at `$.fps`"),
    "fps fraction": (info(fps="30000/1001"), "Expected `float`, got `str` - at `$.fps`"),
    "fps 0": (info(fps=0), "at `$.fps`"),
    "fps inf": (info(fps=math.inf), "at `$.fps`"),
    "other fps": (info(fps=20), "none of 12 sources could be packed: 12 out-of-range"),
    "version": (info(codebase_version="v1.6"), "LeRobot dataset has version 'v1.6'"),
    "total": (info(total_frames=55), "lists 6 episodes of 54 frames, meta/info.json says 6 of 55"),
    "list": (written("meta/info.json", "[]"), "Expected `object`, got `array`"),
    "nested": (written("meta/info.json", "[" * 200_000), "cannot parse JSON"),
    "nested stats": (written("meta/stats.json", '{"a":' * 200_000), "cannot parse JSON"),
    "FIFO": (replaced("meta/info.json", os.mkfifo), "is no regular file"),
    "device": (replaced("meta/info.json", lambda path: path.symlink_to("/dev/zero")), "is a link to /dev/zero"),
    "FIFO of data": (replaced(DATA, os.mkfifo), "is no regular file"),
    "FIFO as film": (replaced(FILM, os.mkfifo), "none of 12 sources could be packed: 12 not-video"),
    "film elsewhere": (replaced(FILM, outside), "none of 12 sources could be packed: 12 outside"),
    "length": (rows(EPISODES, lambda row: row | {"length": None}), "got `null` - at `$[0].length`"),
    "length -1": (rows(EPISODES, lambda row: row | {"length": -1}), "at `$[0].length`"),
    "twice": (rows(EPISODES, lambda row: row | {"episode_index": 1}), "lists episode 1 twice"),
    "task": (rows(EPISODES, lambda row: row | {"tasks": ["fly"]}), "the task 'fly', which the list of tasks lacks"),
    "tasks": (rows("meta/tasks.parquet", lambda row: row | {"task_index": None}), "got `null` - at `$[0].task_index`"),
    "no table": (written(EPISODES, "no table"), "cannot parse the Parquet file"),
    "ragged": (
        rows(DATA, lambda row: row | {"action": row["action"][: 1 + row["frame_index"] % 2]}),
        "signal 'action' has lists of several lengths",
    ),
    "words": (rows(DATA, lambda row: row | {"next.reward": "much"}), "signal 'next.reward' is not float32"),
    "order": (rows(DATA, lambda row: row | {"frame_index": 99 - row["frame_index"]}), "or they are not in order"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_a_clear_error_and_nothing_is_made(name, tmp_path, capfd):
    change, message = LIES[name]
    change(copied(tmp_path / "source"))
    code = index(tmp_path / "source", tmp_path / "set")
    error = capfd.readouterr().err
    assert code in (1, 2)
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "set/dataset.json").exists()


def test_the_hub_cache_may_link_to_its_blobs(tmp_path):
    """As `huggingface_hub.snapshot_download` lays files out."""
    source = copied(tmp_path / "repo/snapshots/0123")
    (tmp_path / "repo/blobs").mkdir()
    for number, path in enumerate(sorted(path for path in source.rglob("*") if path.is_file())):
        path.rename(tmp_path / f"repo/blobs/{number}")
        path.symlink_to(os.path.relpath(tmp_path / f"repo/blobs/{number}", path.parent))
    assert index(source, tmp_path / "set") == 0


def index(source, out):
    return main(["index", f"lerobot:{source}", "--out", str(out), "--workers", "1"])


def test_features_that_are_not_kept_are_named_and_counted(tmp_path, capsys):
    source = copied(tmp_path / "source")
    feature("note", dtype="string", shape=[1])(source)
    feature("side", dtype="image", shape=[8, 8, 3])(source)
    assert index(source, tmp_path / "set") == 0
    told = capsys.readouterr().out
    for name, kind in (("note", "string"), ("side", "image")):
        assert f"54 ignored: frame of the feature {name} ({kind}), which is not kept" in told


def test_a_dataset_that_has_grown_is_noticed(tmp_path, capsys):
    source, out = as_version_2(tmp_path / "old"), str(tmp_path / "set")
    info(fps=29.97)(source)
    assert index(source, tmp_path / "exact") == 0
    assert fastvid.open(tmp_path / "exact").generation.extras["lerobot"]["info"]["fps"] == 29.97
    source = copied(tmp_path / "source")
    without(5)(source)
    assert index(source, out) == 0
    assert main(["index", out]) == 0
    assert "episodes in" not in capsys.readouterr().out
    shutil.rmtree(source)
    copied(source)
    assert main(["index", out]) == 0
    assert f"+1 episodes in {source} since" in capsys.readouterr().out
    assert index(source, out) == 2
    assert "has 6 episodes, the dataset here was made of 5" in capsys.readouterr().err
