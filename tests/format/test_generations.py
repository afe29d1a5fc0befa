"""Generations: records are what was committed, one of two rival commits wins, and damaged files are named."""

import json
from dataclasses import replace

import pyarrow as pa
import pytest

from fastvid.errors import ConflictError, FormatError, StorageError, UsageError, VersionError
from fastvid.format.annotations import annotation_table
from fastvid.format.dataset import Dataset
from fastvid.format.generations import (
    Generation,
    Head,
    ShardRecord,
    check_annotations,
    commit_generation,
    history,
    read_annotations,
    read_generation,
    read_head,
    swap_head,
)
from fastvid.format.in_place import Root
from fastvid.format.schema import DATASET_JSON
from fastvid.runtime.values import sha256
from fastvid.storage import LocalStorage
from tests.datasets import edit_record

SHARDS = (
    ShardRecord("data-000000", 10_240, "ab" * 32, 2, {"name": "compact", "crf": 23}, {"ffmpeg": "8"}),
    ShardRecord("data-000003", 20_480, "cd" * 32, 1),
)
FIRST = Generation(
    1, SHARDS, streams=("rgb", "flow"), classes=("left", "right"), note="fastvid shard", extras={"audio": {"rate": 16}}
)
RECORD = "generations/000001.json"
LABELS = (0, 1, None)


def annotations(labels=LABELS, **changes):
    rows = [
        {"key": f"k{n}", "source_id": f"{n}.avi", "label": label, "num_frames": 7, "removed": False} | changes
        for n, label in enumerate(labels)
    ]
    return annotation_table(rows)


@pytest.fixture
def store(tmp_path):
    store = LocalStorage(tmp_path)
    commit_generation(store, "made", FIRST, annotations())
    return store


def commit(store, number, note="", **options):
    return commit_generation(store, "made", replace(FIRST, number=number, note=note), annotations(), **options)


def test_a_generation_is_read_as_it_was_committed(store):
    dataset_id, found = read_generation(store)
    assert dataset_id == "made"
    made = {"annotations_sha256": sha256(store.read("annotations-000001.parquet")), "time": "2023-11-14T22:13:20Z"}
    assert found == replace(FIRST, **made, removed=sum(annotations()["removed"].to_pylist()))
    assert (found.parent, found.revision, found.num_samples) == (0, 0, 3)
    assert read_annotations(store, found).equals(annotations())
    assert read_head(store) == Head("made", 1, 1, bytes(store.read(DATASET_JSON)))


def test_each_generation_names_its_parent_and_the_revision_it_started_from(store):
    second = commit(store, 2, "second")
    third = commit(store, 3, "third")
    assert [(g.number, g.parent, g.revision) for g in (second, third)] == [(2, 1, 1), (3, 2, 2)]
    head = read_head(store)
    assert (head.generation, head.revision) == (3, 3)
    assert [g.note for g in history(store, head)] == ["third", "second", "fastvid shard"]
    assert read_generation(store, 2)[1] == second
    assert read_generation(store)[1] == third
    store.delete("generations/000002.json")
    assert [g.number for g in history(store, head)] == [3]


def test_tags_name_generations_and_are_all_that_is_left_of_old_ones(store):
    for number in range(2, 6):
        commit(store, number)
    with pytest.raises(UsageError, match="no generation has the tag 'good'") as caught:
        read_generation(store, "good")
    assert "fastvid log" in caught.value.hint
    head = swap_head(store, read_head(store), dataset_id="made", generation=5, tags={"good": 2, "best": 3, "last": 5})
    assert read_head(store).tags == head.tags == {"good": 2, "best": 3, "last": 5}
    assert read_generation(store, "good")[1].number == 2
    assert commit(store, 6).number == 6
    assert read_head(store).tags == head.tags
    with pytest.raises(UsageError, match="no generation has the tag 'bad'") as caught:
        read_generation(store, "bad")
    assert "best, good, last" in caught.value.hint
    for number in (1, 4):
        store.delete(f"generations/00000{number}.json")
    assert [g.number for g in history(store, read_head(store))] == [6, 5, 3, 2]


def test_shards_of_videos_in_place_have_other_files_and_a_root(store):
    packed, listed = SHARDS[0], replace(SHARDS[1], profile={"name": "in-place"}, signals="ef" * 32)
    assert (packed.suffixes, packed.data) == (("tar", "idx", "parquet", "pkt"), "data-000000.tar")
    assert listed.suffixes == ("files", "parquet", "pkt", "signals.parquet")
    assert listed.data == "data-000003.files"
    record = json.loads(store.read(RECORD))["shards"]
    assert ["signals" in shard for shard in record] == [False, False]
    commit_generation(store, "made", replace(FIRST, number=2, shards=(packed, listed)), annotations())
    assert read_generation(store)[1].shards == (packed, listed)
    placed = replace(FIRST, shards=(packed, listed), extras={"in-place": {"root": "/films"}})
    assert placed.root_of(packed) is None
    assert placed.root_of(listed) == Root("/films", "/films")
    with pytest.raises(FormatError, match="does not say where its videos are"):
        FIRST.root_of(listed)


def test_numbers_that_were_not_committed_do_not_exist(store):
    commit(store, 2)
    store.write("generations/000003.json", store.read("generations/000002.json"))  # of an interrupted commit
    for number in (0, 3, 4):
        with pytest.raises(StorageError, match=f"no generation {number}") as caught:
            read_generation(store, number)
        assert "up to 2" in caught.value.hint
    assert read_generation(store, 1)[1].number == 1


def test_a_number_that_is_taken_is_refused_and_nothing_is_written(store):
    before = {name: store.read(name) for name in store.list("")}
    for number in (0, 1):
        with pytest.raises(ConflictError, match=f"generation {number} already exists.*\n.*current generation is 1"):
            commit(store, number)
    assert {name: store.read(name) for name in store.list("")} == before


def test_of_two_commits_from_one_record_the_second_changes_nothing(store):
    head = read_head(store)
    winner = commit(store, 2, "winner", head=head)
    record = store.read(DATASET_JSON)
    with pytest.raises(ConflictError, match="another process changed the dataset"):
        commit(store, 2, "loser", head=head)
    assert store.read(DATASET_JSON) == record
    assert read_generation(store)[1] == winner


def test_a_folder_that_became_a_dataset_in_the_meantime_is_not_overwritten(store):
    record = store.read(DATASET_JSON)
    with pytest.raises(ConflictError):
        swap_head(store, None, dataset_id="other", generation=1)
    assert store.read(DATASET_JSON) == record
    head = read_head(store)
    moved = swap_head(store, head, dataset_id="made", generation=1)
    assert moved == read_head(store)
    assert moved.revision == head.revision + 1


def test_an_interrupted_commit_of_the_same_change_is_resumed(store, monkeypatch):
    def die(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fastvid.format.generations.swap_head", die)
        with pytest.raises(KeyboardInterrupt):
            commit(store, 2, "change")
    assert read_generation(store)[1].number == 1
    # Another change takes the next number, because the files of the first may be about to be deleted.
    content = store.read("generations/000002.json")
    head = read_head(store)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000009")
    assert commit(store, 2, "change").number == 2, "at another time"
    assert store.read("generations/000002.json") == content
    store.write(DATASET_JSON, head.content)
    assert commit(store, 2, "another").number == 3
    assert store.read("generations/000002.json") == content
    found = read_generation(store)[1]
    assert (found.number, found.note, found.parent) == (3, "another", 1)
    assert read_annotations(store, found).equals(annotations())


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (annotations((0, 1)), "2 annotations for 3 samples"),
        (annotations((0, 1, 0, 1)), "4 annotations for 3 samples"),
        (annotations().drop_columns(["label", "removed"]), "no columns label, removed"),
        (annotations(key="same"), r"duplicate key.*key=same"),
        (annotations().set_column(3, "num_frames", pa.array([7, 7, 7], pa.int64())), "'num_frames' has type int64"),
    ],
)
def test_annotations_that_do_not_fit_are_not_committed(store, table, message):
    before = store.list("")
    with pytest.raises(FormatError, match=message):
        commit_generation(store, "made", replace(FIRST, number=2), table)
    assert store.list("") == before
    check_annotations(FIRST, annotations().append_column("caption", pa.array(["a", "b", "c"])))


def test_a_duplicate_is_named_even_if_other_keys_come_first():
    rows = [{"key": key, "source_id": key, "num_frames": 1, "removed": False} for key in ("first", "twice", "twice")]
    with pytest.raises(FormatError, match="key=twice"):
        check_annotations(FIRST, annotation_table(rows))


def test_a_generation_may_have_more_samples_than_small_integers(store):
    large = replace(FIRST, number=2, shards=(replace(SHARDS[0], samples=300),))
    commit_generation(store, "made", large, annotations(LABELS * 100))
    assert read_annotations(store, read_generation(store)[1]).num_rows == 300


def test_annotations_of_another_dataset_are_an_error(store):
    other = annotations((1, 0, 1))
    commit_generation(store, "made", replace(FIRST, number=2), other)
    store.write("annotations-000002.parquet", store.read("annotations-000001.parquet"))
    store.write("annotations-000001.parquet", b"anything else")
    for number in (1, 2):  # the hash of one comes before that of the other
        with pytest.raises(FormatError, match=f"annotations-00000{number}.parquet differs"):
            read_annotations(store, read_generation(store, number)[1])
    store.delete("annotations-000001.parquet")
    with pytest.raises(StorageError):
        read_annotations(store, read_generation(store, 1)[1])


def test_every_field_of_both_records_is_sealed(store):
    for name in (DATASET_JSON, RECORD):
        good = json.loads(store.read(name))
        for field in good:
            other = good[field] + [1] if isinstance(good[field], list) else "2.9" if field == "version" else "else"
            store.write(name, json.dumps(good | {field: other}).encode())
            with pytest.raises(FormatError, match=f"{name} is malformed"):
                read_generation(store)
            store.write(name, json.dumps({key: value for key, value in good.items() if key != field}).encode())
            with pytest.raises(FormatError, match=f"{name} is malformed"):
                read_generation(store)
        for other in (b"[" * 200_000, b'{"format": ' * 100_000, b"\xff", b"null", b'"text"'):
            store.write(name, other)
            with pytest.raises(FormatError, match=f"{name} is malformed") as caught:
                read_generation(store)
            assert caught.value.hint.startswith("restore")
        store.write(name, json.dumps(good).encode())
    assert read_generation(store)[1].note == FIRST.note


def test_a_record_of_another_generation_is_an_error(store):
    commit(store, 2)
    store.write("generations/000002.json", store.read(RECORD))
    with pytest.raises(FormatError, match="record of generation 1"):
        read_generation(store)


def test_fields_that_a_later_minor_version_adds_are_ignored(store):
    shards = [{**json.loads(store.read(RECORD))["shards"][0], "colour": "new"}]
    edit_record(store, RECORD, shards=shards, later={"a": 1})
    edit_record(store, DATASET_JSON, version="2.7", later=1)
    assert read_generation(store)[1].shards == SHARDS[:1]


def test_other_major_versions_and_formats_are_refused(store):
    for version in ("3.0", "1.0"):
        edit_record(store, DATASET_JSON, version=version)
        with pytest.raises(VersionError, match=rf"version {version} is not 2\.x"):
            read_head(store)
    edit_record(store, DATASET_JSON, version="2.0", format="parquet")
    with pytest.raises(FormatError, match="format 'parquet' is not 'fastvid'"):
        read_head(store)
    with pytest.raises(StorageError, match=r"dataset\.json is missing") as caught:
        Dataset(str(store.path("empty")))
    assert caught.value.__context__ is None, "it was read once"


def test_a_generation_that_is_its_own_parent_is_refused(store):
    edit_record(store, "generations/000001.json", parent=1)
    with pytest.raises(FormatError, match="its parent is generation 1, which is not an earlier one"):
        read_generation(store)
