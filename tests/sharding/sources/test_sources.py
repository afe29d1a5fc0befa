"""Finding videos, and assigning their keys."""

import os
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastvid.errors import UsageError
from fastvid.format.schema import check_key
from fastvid.media.reasons import Reason
from fastvid.runtime.names import decode_name, encode_name
from fastvid.sharding.job.plan import list_identity, plan_shards
from fastvid.sharding.sources import spool, tables, tars
from fastvid.sharding.sources.sources import MAX_SOURCE_KEY_BYTES, Source, assign_keys, find_sources
from fastvid.sharding.sources.tables import AnnotationRow, Annotations

names = st.text(st.sampled_from("aB1_-./ é\udcff'\n"), min_size=1, max_size=120)


def touch(folder, *names):
    for name in names:
        path = os.path.join(os.fsencode(folder), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(b"x")


@given(st.sets(names, min_size=1, max_size=30))
def test_keys_are_valid_unique_and_never_a_folder_of_another(ids):
    keys = [source.key for source in assign_keys([Source(name, name) for name in ids])]
    assert len(set(keys)) == len(ids)
    for key in keys:
        check_key(key)
        assert len(key) <= MAX_SOURCE_KEY_BYTES
        # Parts are named key/0000: no other key may have that form.
        assert not any(other.startswith(f"{key}/") for other in keys)


@given(st.sets(names, min_size=2, max_size=20), st.randoms())
def test_keys_do_not_depend_on_listing_order(ids, random):
    sources = [Source(name, name) for name in sorted(ids)]
    shuffled = random.sample(sources, len(sources))
    assert {s.id: s.key for s in assign_keys(sources)} == {s.id: s.key for s in assign_keys(shuffled)}


def test_names_stay_readable_and_get_a_hash_only_if_two_would_be_one():
    ids = ["run/v_01.avi", "-dash.mp4", "a b.mp4", "twin.mp4", "twin.avi", "v1.2.mp4", "c d.mp4", "c_d.mp4"]
    keys = {source.id: source.key for source in assign_keys([Source(name, name) for name in ids])}
    assert keys["run/v_01.avi"] == "run/v_01"
    assert (keys["-dash.mp4"], keys["a b.mp4"], keys["v1.2.mp4"]) == ("_dash", "a_b", "v1_2")
    # A name that needs no change keeps its key, whatever other sources come.
    assert keys["c_d.mp4"] == "c_d"
    assert keys["c d.mp4"].startswith("c_d-")
    assert keys["twin.mp4"] != keys["twin.avi"]
    assert all(key.startswith("twin-") for key in (keys["twin.mp4"], keys["twin.avi"]))


def test_keys_of_clips_say_where_the_clip_is(tmp_path):
    touch(tmp_path, "my films/vidA.avi")
    places = [(3.2, 5.7), (5.7, 3600.25), (None, 1.5), (10, None), (1.0001, 2), (1.0002, 2)]
    clips = rows(*(AnnotationRow("my films/vidA.avi", "run", {}, *place) for place in places))
    found = find_sources([str(tmp_path)], clips).sources
    keys = [source.key for place in places for source in found if (source.start, source.end) == place]
    ends = ("00003200_00005700", "00005700_03600250", "00000000_00001500", "00010000_end")
    assert keys[:4] == [f"my_films/vidA_{end}" for end in ends]
    # Two clips within a millisecond would have one key.
    assert all(key.startswith("my_films/vidA_00001000_00002000-") for key in keys[4:])
    assert len(set(keys)) == len(keys)


@given(st.binary(min_size=1, max_size=40))
def test_names_of_any_bytes_round_trip_as_text(raw):
    name = os.fsdecode(raw.replace(b"\0", b"?"))
    text = encode_name(name)
    text.encode("utf-8")
    assert decode_name(text) == name
    assert decode_name(encode_name(text)) == text, "a name that looks encoded is encoded"


def test_the_class_is_the_folder_and_other_files_are_counted(tmp_path):
    touch(tmp_path, "run/a.mp4", "run/deep/b.avi", "jump/c.MKV", "d.mp4", "list.txt", "run/.hidden.mp4", "run/x")
    found = find_sources([str(tmp_path)])
    labels = {source.id: source.label for source in found.sources}
    assert labels == {"run/a.mp4": "run", "run/deep/b.avi": "run", "jump/c.MKV": "jump", "d.mp4": None}
    assert found.classes == ("jump", "run")
    assert found.ignored == {".txt file (list.txt)": 1, "hidden file": 1, "nameless ending file (x)": 1}


@pytest.mark.parametrize("roots", [["set"], ["set/train", "set/val"]])
def test_folders_named_after_splits_set_the_split(roots, tmp_path):
    touch(tmp_path, "set/train/run/a.mp4", "set/val/run/b.mp4", "set/val/jump/c.mp4")
    found = find_sources([str(tmp_path / root) for root in roots])
    assert {(source.id, source.label, source.columns["split"]) for source in found.sources} == {
        ("train/run/a.mp4", "run", "train"), ("val/run/b.mp4", "run", "val"), ("val/jump/c.mp4", "jump", "val"),
    }  # fmt: skip


def test_equal_names_in_two_roots_stay_distinct_and_clips_below_a_folder_are_of_one_file(tmp_path):
    touch(tmp_path, "x/set/a.mp4", "y/set/a.mp4")
    found = find_sources([str(tmp_path / "x" / "set"), str(tmp_path / "y" / "set")])
    assert [source.id for source in found.sources] == ["x/set/a.mp4", "y/set/a.mp4"]
    clip = Source("vidA.avi#1-2", "vidA.avi", start=1, end=2, parent="vidA.avi")
    (moved,) = assign_keys([clip.below("late")])
    assert (moved.id, moved.parent, moved.key) == ("late/vidA.avi#1-2", "late/vidA.avi", "late/vidA_00001000_00002000")


def test_links_out_of_the_folder_are_reported_but_not_followed(tmp_path):
    touch(tmp_path, "in/a.mp4", "outside/secret.mp4", "outside/more/b.mp4")
    (tmp_path / "in" / "out.mp4").symlink_to(tmp_path / "outside" / "secret.mp4")
    (tmp_path / "in" / "same.mp4").symlink_to(tmp_path / "in" / "a.mp4")
    (tmp_path / "in" / "folder").symlink_to(tmp_path / "outside" / "more")
    found = find_sources([str(tmp_path / "in")])
    problems = {source.id: source.problem and source.problem[0] for source in found.sources}
    assert problems == {"a.mp4": None, "out.mp4": Reason.OUTSIDE, "same.mp4": None}
    (annotated,) = find_sources([str(tmp_path / "in")], rows(AnnotationRow("out.mp4", "run"))).sources
    assert annotated.problem is not None
    assert annotated.problem[0] == Reason.OUTSIDE
    assert found.ignored == {"linked folder": 1}
    # The control: with follow_links the link is followed.
    followed = find_sources([str(tmp_path / "in")], follow_links=True)
    assert all(source.problem is None for source in followed.sources)


def rows(*items):
    return Annotations(tuple(items), ("jump", "run"))


def test_annotation_rows_are_sources_and_missing_files_are_reported(tmp_path):
    touch(tmp_path, "run/a.mp4", "b.webm", "extra.mp4")
    listed = [AnnotationRow(*row) for row in (("run/a.mp4", "run"), ("b", "jump"), ("gone.mp4", "run"))]
    found = find_sources([str(tmp_path)], rows(*listed))
    assert [(s.id, s.label, s.problem and s.problem[0]) for s in found.sources] == [
        ("b.webm", "jump", None), ("gone.mp4", "run", Reason.MISSING), ("run/a.mp4", "run", None),
    ]  # fmt: skip
    assert found.ignored == {"video without annotation (extra.mp4)": 1}
    # Equal rows are one, others contradict each other.
    assert len(find_sources([str(tmp_path)], rows(*listed, listed[0])).sources) == 3
    with pytest.raises(UsageError, match=r"(?s)has two annotations.*--columns start=COLUMN,end=COLUMN"):
        find_sources([str(tmp_path)], rows(*listed, AnnotationRow("run/a.mp4", "jump")))


def test_name_without_folder_is_looked_up_in_its_class_and_never_guessed(tmp_path):
    touch(tmp_path, "riding_a_bike/1.mp4", "running/1.mp4")
    for name, label, there in (
        ("1", "riding a bike", "riding_a_bike/1.mp4"), ("1", "swimming", None), ("swimming/1.mp4", "swimming", None)
    ):  # fmt: skip
        (source,) = find_sources([str(tmp_path)], rows(AnnotationRow(name, label))).sources
        assert (source.problem is None) == (there is not None)
        assert there in (None, source.id)


def test_absolute_names_of_another_machine_are_matched_by_stripping_folders(tmp_path):
    touch(tmp_path, "train/run/1.mp4", "train/jump/2.mp4", "val/run/3.mp4")
    names = ("train/run/1.mp4", "train/jump/2.mp4", "val/run/1.mp4")
    found = find_sources([str(tmp_path)], rows(*(AnnotationRow(f"/data/k400/{name}", "run") for name in names)))
    # val/run/1.mp4 does not exist, and train/run/1.mp4 is another video.
    wrong = {source.id: source.problem is not None for source in found.sources}
    assert wrong == {"train/run/1.mp4": False, "train/jump/2.mp4": False, "/data/k400/val/run/1.mp4": True}


def test_trimmed_clips_are_used_whole_and_uncut_videos_are_trimmed(tmp_path):
    row = AnnotationRow("vid_000010_000020", "run", {}, 10, 20, "vid")
    touch(tmp_path / "cut", "run/vid_000010_000020.mp4")
    (cut,) = find_sources([str(tmp_path / "cut")], rows(row)).sources
    assert (cut.start, cut.end) == (None, None)
    touch(tmp_path / "uncut", "vid.mp4")
    other = AnnotationRow("vid_000040_000050", "run", {}, 40, 50, "vid")
    uncut = find_sources([str(tmp_path / "uncut")], rows(row, other)).sources
    assert [(one.id, one.start, one.end) for one in uncut] == [("vid.mp4#10-20", 10, 20), ("vid.mp4#40-50", 40, 50)]


def test_no_video_raises_and_lists_the_ignored_files(tmp_path):
    touch(tmp_path, "notes.txt")
    with pytest.raises(UsageError, match=r"this has 1 \.txt file"):
        find_sources([str(tmp_path)])
    with pytest.raises(UsageError, match="does not exist"):
        find_sources([str(tmp_path / "absent")])


def test_a_long_list_of_videos_takes_as_little_memory_as_a_short_one(tmp_path, monkeypatch):
    monkeypatch.setattr(spool, "_BLOCK", 16)
    for module, name in ((spool, "_RUN"), (tables, "_AT_ONCE"), (tars, "_AT_ONCE")):
        monkeypatch.setattr(module, name, 300)

    def peak(count, use):
        rows = [{"path": f"s3://bucket/{i % 70}/video {i}.mp4", "label": f"{i % 9}", "n": i} for i in range(count)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "list.parquet")
        del rows
        tracemalloc.start()
        found = tars.gather_sources([], f"parquet:{tmp_path}/list.parquet")
        list_identity(found, ((one.id, one.key) for one in found.tried), seed=0, samples_per_shard=100)
        shards = plan_shards(found.tried, samples=100)
        assert sum(map(len, shards)) == len(use(found.sources)) == count
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    peak(10, list)  # imports and caches
    short, long, objects = peak(1000, lambda found: found), peak(4000, lambda found: found), peak(4000, list)
    assert objects > 2 * long, "objects in memory would be seen"
    assert long - short < (objects - long) / 4
