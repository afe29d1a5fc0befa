"""The ledger says of every source what became of it, and its parts say enough to resume."""

from dataclasses import replace

import pytest

from fastvid.errors import FormatError, StorageError
from fastvid.format.schema import LEDGER, LEDGER_SCHEMA, to_parquet
from fastvid.format.tar import TarDigest
from fastvid.media.reasons import Reason
from fastvid.sharding.job.ledger import (
    PackedSample,
    Part,
    edit_ledger,
    ledger_row,
    part_name,
    part_stems,
    problem_row,
    read_ledger,
    read_part,
    rows_table,
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
    for content in (b"", bytes(good[:-9]), to_parquet(broken)):
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
