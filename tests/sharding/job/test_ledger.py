"""The ledger says of every source what became of it, and its parts say enough to resume."""

import json
from dataclasses import replace
from unittest.mock import patch

import pytest

from fastvid.errors import ConflictError, FormatError, StorageError, UsageError
from fastvid.format.annotations import annotation_table
from fastvid.format.generations import Generation, ShardRecord, commit_generation
from fastvid.format.schema import BLOCKED, LEDGER, LEDGER_SCHEMA, to_parquet
from fastvid.format.tar import TarDigest
from fastvid.media.reasons import Reason
from fastvid.sharding.job.ledger import (
    PackedSample,
    Part,
    block,
    edit_ledger,
    follow_shards,
    is_nameless,
    ledger_row,
    ledger_rows,
    part_name,
    part_stems,
    problem_row,
    read_blocked,
    read_ledger,
    read_part,
    removed_row,
    rows_table,
    settle_rows,
    write_ledger,
    write_part,
)
from fastvid.sharding.sources.sources import Source
from fastvid.sharding.work.tasks import EncodedSample, Outcome
from fastvid.storage import LocalStorage

SOURCE = Source("a/one.avi", "/videos/a/one.avi", size=1000, key="a/one")
PACKED = Outcome(
    3,
    samples=(
        EncodedSample("a/one/0", {"num_frames": 7}, {"rgb": b"x" * 10, "flow": b"y" * 5}),
        EncodedSample("a/one/1", {"num_frames": 4}, {"rgb": b"x" * 100}),
    ),
    seconds=1.5,
    warnings=("hdr",),
    bytes_in=900,
)
REJECTED = Outcome(0, reason=Reason.EMPTY, message="no bytes", seconds=0.5)


@pytest.fixture
def store(tmp_path):
    return LocalStorage(tmp_path)


@pytest.mark.parametrize(
    ("outcome", "what"),
    [
        (PACKED, ("packed", None, None, "a/one", "data-000002", 900, 115, 11, 1.5, ["hdr"])),
        (REJECTED, ("rejected", "empty", "no bytes", None, None, 1000, None, None, 0.5, [])),
    ],
)
def test_a_source_has_a_key_a_shard_and_what_it_became_or_a_reason(outcome, what):
    names = ["status", "reason", "message", "key", "shard", "bytes_in", "bytes_out"]
    names += ["num_frames", "seconds", "warnings"]
    source = {"source_id": "a/one.avi", "path": "/videos/a/one.avi", "source_sha256": None, "source_tag": None}
    assert ledger_row(SOURCE, outcome, "data-000002") == source | dict(zip(names, what, strict=True))
    # The size is that which was read, else that of the listing.
    assert ledger_row(SOURCE, replace(PACKED, bytes_in=0), "s")["bytes_in"] == 1000


def test_a_source_that_was_not_processed_is_rejected_with_its_problem():
    row = problem_row(SOURCE, Reason.MISSING, "it is gone")
    assert row == ledger_row(SOURCE, Outcome(0, reason=Reason.MISSING, message="it is gone"), None)
    assert (row["status"], row["reason"], row["message"]) == ("rejected", "missing", "it is gone")


@pytest.mark.parametrize("digest", [TarDigest(10_240, "ab" * 32, 2), None])
def test_a_part_is_read_as_it_was_written(store, digest):
    facts = ("30000/1001", 320, 240)
    samples = [PackedSample("a", "a/0", 7, *facts), PackedSample("a", "a/1", 4, *facts, "parent", 1.5, 2.25)]
    samples = samples if digest else []
    part = Part("data-000004", [ledger_row(SOURCE, PACKED, "data-000004")], samples, digest, {"ffmpeg": "8"})
    write_part(store, part)
    assert store.list("") == [part_name("data-000004")] == ["ledger-parts/data-000004.parquet"]
    assert read_part(store, "data-000004") == part
    # The finished shards are those with a part.
    store.write("ledger-parts/notes.txt", b"")
    assert part_stems(store) == {"data-000004"}


def test_the_ledger_has_every_row_once_sorted_by_source_and_the_job(store):
    rows = [ledger_row(replace(SOURCE, id=name), PACKED, "data-000000") for name in ("b", "c", "a")]
    written = write_ledger(store, iter(rows), {"profile": "compact", "seconds": 3})
    table, job = read_ledger(store)
    assert table.to_pylist() == [rows[2], rows[0], rows[1]] == written.to_pylist()
    assert job == {"profile": "compact", "seconds": 3}
    content = store.read(LEDGER)
    write_ledger(store, iter(rows), {"seconds": 3, "profile": "compact"})
    assert store.read(LEDGER) == content
    assert rows_table(iter(rows)).to_pylist() == table.to_pylist()
    assert table.schema.equals(LEDGER_SCHEMA)
    # That of another tool has no job.
    store.write(LEDGER, to_parquet(table.replace_schema_metadata(None)))
    assert [part if part == {} else part.to_pylist() for part in read_ledger(store)] == [table.to_pylist(), {}]


def test_a_missing_or_broken_ledger_is_an_error_that_names_it(store):
    with pytest.raises(StorageError, match=LEDGER):
        read_ledger(store)
    write_ledger(store, [ledger_row(SOURCE, PACKED, "data-000000")], {})
    good = store.read(LEDGER)
    broken = rows_table([]).replace_schema_metadata({b"fastvid": b"{not json"})
    garbled = to_parquet(rows_table([row_of("q" * 9, None)])).replace(b"q" * 9, b"\xff" * 9)
    for content in (b"", bytes(good[:-9]), to_parquet(broken), garbled):
        store.write(LEDGER, content)
        with pytest.raises(FormatError, match=LEDGER):
            read_ledger(store)
    row, names = ledger_row(SOURCE, PACKED, "data-000000") | {"num_frames": 2**40}, store.list("")
    with pytest.raises((ValueError, OverflowError)):
        write_part(store, Part("data-000000", [row], [], None))
    assert store.list("") == names


def test_two_edits_of_a_ledger_at_once_both_stay(store):
    names = ("a", "b", "c")
    write_ledger(store, [ledger_row(Source(name, name), REJECTED, None) for name in names], {"seed": 1})
    others = ["b"]

    def without(name):
        def edit(rows):
            if others:
                edit_ledger(store, without(others.pop()))
            return [row for row in rows if row["source_id"] != name]

        return edit

    edit_ledger(store, without("a"))
    table, identity = read_ledger(store)
    assert (table["source_id"].to_pylist(), identity) == (["c"], {"seed": 1})


def row_of(name, digest, **changes):
    return ledger_row(Source(name, name), replace(PACKED, source_sha256=digest), "data-000000") | changes


@pytest.mark.parametrize("drop", [False, True])
def test_of_sources_with_the_same_bytes_the_first_by_name_is_the_original(drop):
    one, two = "1" * 64, "2" * 64
    rows = [
        row_of("d", one), row_of("c", one), row_of("x", ""), row_of("y", ""), row_of("m", two), row_of("n", two),
        row_of("bad", one) | {"status": "rejected"},
    ]  # fmt: skip
    settled, hidden = settle_rows(
        rows, (), before=[row_of("z", two), row_of("a", two) | {"status": "removed"}], drop_duplicates=drop
    )
    said = {row["source_id"]: row["message"] for row in settled if "duplicate" in row["warnings"]}
    assert said == {"d": "the same bytes as c", "m": "the same bytes as z", "n": "the same bytes as z"}
    assert hidden == (said.keys() if drop else set())
    assert {row["source_id"] for row in settled if row["status"] == "removed"} == hidden
    assert sorted(row["source_id"] for row in settled) == ["bad", "c", "d", "m", "n", "x", "y"]


def test_a_source_that_was_blocked_or_taken_down_loses_its_name_and_keeps_its_hash():
    digest = "ab" * 32
    (row,), hidden = settle_rows([row_of("secret.avi", digest)], {digest})
    assert hidden == {"secret.avi"}
    refused = ledger_row(SOURCE, Outcome(0, reason=Reason.BLOCKED, source_sha256=digest, seconds=1.5), None)
    assert row == refused
    assert (row["status"], row["reason"], row["seconds"], row["source_sha256"]) == ("rejected", "blocked", 1.5, digest)
    gone = [removed_row(digest, "taken down"), *(removed_row(None, "taken down", number=n) for n in (0, 1))]
    assert [one["status"] for one in gone] == ["removed"] * 3
    assert len({one["source_id"] for one in gone}) == 3
    assert removed_row(None, "taken down")["source_id"].endswith("-0")
    assert all(map(is_nameless, [row, *gone]))
    assert "secret" not in str([row, *gone])
    assert settle_rows([row_of("a.avi", digest), gone[0]], {digest}) == ([gone[0]], {"a.avi"})
    assert not is_nameless(row_of("a.avi", digest))
    assert len(rows_table([row, *gone])) == 4


def test_a_dataset_without_a_ledger_has_the_rows_that_its_annotations_tell(store):
    rows = [
        {"key": f"k{n}", "source_id": source, "num_frames": frames, "removed": False}
        for n, (source, frames) in enumerate([("a.avi", 7), ("b.avi", 5), ("a.avi", 4)])
    ]
    shards = (ShardRecord("data-000000", 10_240, "ab" * 32, 2), ShardRecord("data-000001", 10_240, "cd" * 32, 1))
    made = commit_generation(store, "made", Generation(1, shards), annotation_table(rows))
    told = ledger_rows(store, made)
    assert [(row["source_id"], row["key"], row["shard"], row["num_frames"]) for row in told] == [
        ("a.avi", "k0", "data-000000", 11), ("b.avi", "k1", "data-000000", 5),
    ]  # fmt: skip
    assert {row["status"] for row in told} == {"packed"}
    write_ledger(store, [row_of("c.avi", None)], {})
    assert ledger_rows(store, made) == [row_of("c.avi", None)]


def test_rows_name_the_shards_where_samples_are_and_are_left_alone_otherwise(store):
    rows = [{"key": name, "source_id": name, "num_frames": 1, "removed": False} for name in "ab"]
    shards = (ShardRecord("data-000000-2", 10_240, "ab" * 32, 1), ShardRecord("data-000001", 10_240, "cd" * 32, 1))
    commit_generation(store, "made", Generation(1, shards), annotation_table(rows))
    follow_shards(store)
    assert not store.exists(LEDGER)
    known = {"a": "data-000000", "b": "data-000001", "gone": "data-000000", "hidden": "data-000001", "bad": None}
    write_ledger(store, [row_of(name, None) | {"shard": shard} for name, shard in known.items()], {})
    follow_shards(store)
    content = store.read(LEDGER)
    found = {row["source_id"]: row["shard"] for row in read_ledger(store)[0].to_pylist()}
    assert found == known | {"a": "data-000000-2", "gone": None}
    with patch.object(type(store), "swap", side_effect=AssertionError):
        follow_shards(store)
    assert store.read(LEDGER) == content


def test_what_is_blocked_stays_blocked_and_a_damaged_list_is_an_error(store, monkeypatch):
    assert read_blocked(store) == ()
    later, first = "f" * 64, "0" * 64
    assert block(store, [later]) == read_blocked(store) == (later,)
    assert block(store, [first, first]) == read_blocked(store) == (first, later)
    content = store.read(BLOCKED)
    assert json.loads(content)["revision"] == 2
    assert block(store, [later]) == (first, later)
    assert store.read(BLOCKED) == content
    with pytest.raises(UsageError, match="'F' is not a SHA-256"):
        block(store, ["F"])
    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "swap", lambda *_: False)
        with pytest.raises(ConflictError, match="kept being changed"):
            block(store, ["a" * 64])
    for damaged in (b"", b"[" * 9999, content.replace(b"f" * 64, b"g" * 64), content.replace(b"1,", b"2,")):
        store.write(BLOCKED, damaged)
        with pytest.raises(FormatError, match="block list is damaged"):
            block(store, ["a" * 64])
        assert store.read(BLOCKED) == damaged
