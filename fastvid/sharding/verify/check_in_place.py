"""Checks a shard of videos in place: its list must be the committed one, and its index must lead to the same frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastvid.errors import FastvidError
from fastvid.format.in_place import read_files
from fastvid.format.shard import Shard
from fastvid.media.check_sample import Indexed
from fastvid.media.in_place.file_reader import FileReader
from fastvid.media.in_place.index_video import check_index
from fastvid.media.limits import Limits
from fastvid.runtime.hashing import sha256
from fastvid.sharding.verify.check_shard import Findings, ShardAudit, ShardTask, index_row
from fastvid.storage.urls import open_file


def check_in_place(task: ShardTask) -> Findings:
    """Run a task on a shard of videos in place; all problems are in the findings."""
    return _InPlaceAudit(task).run()


class _InPlaceAudit(ShardAudit):
    def run(self) -> Findings:
        """Return the findings; raises only if the storage cannot be opened."""
        task, record = self.task, self.task.record
        try:
            listed = self.storage.read(record.data)
            self.findings.checked["files"] += task.files
            if len(listed) != record.bytes or sha256(listed) != record.sha256:
                self.note("files", "list of files differs from its SHA-256")
            else:
                self._rows(len(read_files(listed, file=record.data)))
        except FastvidError as error:
            self.note("files", error.message)
        return self.findings

    def _rows(self, files: int) -> None:
        task, record = self.task, self.task.record
        if files != record.samples * len(task.streams):
            self.note("files", f"list has {files} files for {record.samples} samples")
            return
        shard, facts = self.sidecar(record.samples), self.facts()
        self.findings.checked["parquet"] += task.files or task.alone
        if facts is not None and facts.num_rows != files:
            self.note("parquet", f"facts have {facts.num_rows} rows, the list {files}")
        elif shard is not None and facts is not None:
            rows = facts.to_pylist()
            for row in task.rows:
                for place, stream in enumerate(task.streams):
                    self._sample(shard, rows[row * len(task.streams) + place], row, stream)

    def _sample(self, shard: Shard, fact: Mapping[str, Any], row: int, stream: str) -> None:
        key = fact["key"]
        self.findings.facts.setdefault(row, (key, fact["source_id"], fact["num_frames"]))
        self.findings.samples += stream == self.task.streams[0]
        self.findings.checked.update(("index", "decode", "plan"))
        stored: str | Indexed = index_row(shard, row, stream)
        if isinstance(stored, str):
            self.note("index", f"index row is broken: {stored}", key, stream)
            return
        listed = shard.file(row, stream)
        if (listed.key, listed.stream, stored.info.num_frames) != (key, stream, fact["num_frames"]):
            self.note("parquet", "facts, list and index row differ", key, stream)
            return
        try:
            assert shard.root is not None
            file = FileReader(*open_file(shard.root.locate(listed.file)), listed.version)
            for problem in check_index(file, stored.info, stored.table.records, Limits()):
                self.note("plan", problem, key, stream)
        except FastvidError as error:
            self.note("decode", error.message, key, stream)
