"""Checks a shard that another tool wrote: indexing its videos again must reproduce the sidecar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fastvid.errors import FastvidError
from fastvid.format.schema import StreamFlag
from fastvid.format.shard import Shard
from fastvid.format.tar import read_members
from fastvid.media.check_sample import check_packets
from fastvid.media.limits import Limits
from fastvid.media.prove import index_video
from fastvid.sharding.verify.check_shard import Findings, ShardAudit, ShardTask, index_row


def check_foreign(task: ShardTask) -> Findings:
    """Run a task on a shard that `fastvid index` made of a foreign tar; all problems are in the findings."""
    return _ForeignAudit(task).run()


class _ForeignAudit(ShardAudit):
    def look(self, view: memoryview) -> None:
        """Check the contents of the tar."""
        task, samples = self.task, self.task.record.samples
        if task.files:
            self.tar_index(list(read_members(view)))
        shard, facts = self.sidecar(samples), self.facts()
        self.findings.checked["parquet"] += task.files or task.alone
        if facts is not None and facts.num_rows != samples:
            self.note("parquet", f"facts have {facts.num_rows} rows, the generation {samples}")
        elif shard is not None and facts is not None:
            rows = facts.to_pylist()
            for row in task.rows:
                self._sample(view, shard, rows[row], row)

    def _sample(self, view: memoryview, shard: Shard, fact: Mapping[str, Any], row: int) -> None:
        key, (offset, size) = fact["key"], shard.member(row)
        self.findings.facts[row] = (key, fact["source_id"], fact["num_frames"])
        self.findings.samples += 1
        self.findings.checked.update(("index", "packets", "decode", "plan"))
        stored = index_row(shard, row, "rgb")
        if isinstance(stored, str):
            self.note("index", f"index row is broken: {stored}", key, "rgb")
            return
        info, table = stored.info, stored.table
        if (fact["member_offset"], fact["member_size"], fact["num_frames"]) != (offset, size, info.num_frames):
            self.note("parquet", "facts and index row differ", key, "rgb")
        data = view[offset : offset + size]
        broken = list(check_packets(data, table))
        self.note_all(broken, key, "rgb")
        if broken:
            return
        try:
            found = index_video(bytes(data), Limits())
        except FastvidError as error:
            self.note("decode", error.message, key, "rgb")
            return
        if found.info != info or not np.array_equal(found.records, table.records):
            self.note("index", "indexing the video again gives a different index", key, "rgb")
        if found.info.flags & StreamFlag.WHOLE and not info.flags & StreamFlag.WHOLE:
            self.note("plan", "a part of the stream cannot be decoded on its own", key, "rgb")
