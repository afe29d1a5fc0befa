"""What must hold of a shard that another tool wrote: its videos, indexed again, give what the sidecar says."""

from __future__ import annotations

from typing import Final

import numpy as np

from fastvid.errors import FastvidError
from fastvid.format.parquet import from_parquet
from fastvid.format.schema import StreamFlag
from fastvid.format.shard import Shard
from fastvid.format.tar import read_members, wds2idx
from fastvid.media.check_sample import check_packets
from fastvid.media.limits import Limits
from fastvid.media.prove import index_video
from fastvid.runtime.hashing import sha256
from fastvid.sharding.verify.check_shard import Findings, Problem, ShardTask
from fastvid.storage import open_storage

FOREIGN: Final = "foreign"
"""Name of the profile that a generation records for a shard of another tool."""


def check_foreign(task: ShardTask) -> Findings:
    """Does a task on a shard that `fastvid index` made of a foreign tar. Whatever is wrong is in the findings."""
    findings = Findings()
    try:
        _check(task, findings)
    except FastvidError as error:
        findings.problems.append(Problem("tar", error.message, task.record.name))
    return findings


def _check(task: ShardTask, findings: Findings) -> None:
    record = task.record
    storage = open_storage(task.url)
    view = storage.map(f"{record.name}.tar")

    def note(check: str, message: str, key: str = "") -> None:
        findings.problems.append(Problem(check, message, record.name, key, "rgb" if key else ""))

    if task.files:
        findings.checked.update(("tar", "idx"))
        if (len(view), sha256(view)) != (record.bytes, record.sha256):
            note("tar", "tar differs from its size or its SHA-256")
        try:
            listed = bytes(storage.read(f"{record.name}.idx"))
        except FastvidError as error:
            note("idx", error.message)
        else:
            if listed != wds2idx(read_members(view)):
                note("idx", "tar index differs from the tar")
    findings.checked.update(("pkt", "parquet"))
    try:
        shard = Shard(storage, record.name)
        shard.check()
        facts = from_parquet(storage.read(f"{record.name}.parquet"), file=f"{record.name}.parquet").to_pylist()
    except FastvidError as error:
        note("pkt", f"sidecars cannot be read: {error}")
        return
    if not shard.num_samples == len(facts) == record.samples:
        note("pkt", f"sidecars hold {shard.num_samples} and {len(facts)} samples, the generation {record.samples}")
        return
    for row in task.rows:
        fact = facts[row]
        key, (offset, size) = fact["key"], shard.member(row)
        findings.facts[row] = (key, fact["source_id"], fact["num_frames"])
        findings.samples += 1
        findings.checked.update(("index", "packets", "decode", "plan"))
        try:
            info, table = shard.info(row), shard.table(row)
        except (FastvidError, ValueError, ZeroDivisionError) as error:
            note("index", f"index row is broken: {error}", key)
            continue
        if (fact["member_offset"], fact["member_size"], fact["num_frames"]) != (offset, size, info.num_frames):
            note("parquet", "facts and index row differ", key)
        data = view[offset : offset + size]
        broken = list(check_packets(data, table))
        for check, message in broken:
            note(check, message, key)
        if broken:
            continue
        try:
            found = index_video(bytes(data), Limits())
        except FastvidError as error:
            note("decode", error.message, key)
            continue
        if found.info != info or not np.array_equal(found.records, table.records):
            note("index", "the video gives another index", key)
        if found.info.flags & StreamFlag.WHOLE and not info.flags & StreamFlag.WHOLE:
            note("plan", "a part of the stream cannot be decoded alone", key)
