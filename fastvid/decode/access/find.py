"""Find where samples of a dataset are: shard, row, bytes in the tar, source, and whether they were removed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import SampleNotFoundError, UsageError
from fastvid.format.annotations.annotations import GenerationRows, open_annotations
from fastvid.format.commit_record import read_head
from fastvid.format.dataset import Dataset
from fastvid.format.generations import history, read_annotations, read_generation
from fastvid.format.parquet import from_parquet
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.near_names import near_names
from fastvid.storage import Storage, open_storage


def find_samples(
    url: str,
    text: str | None = None,
    *,
    source: str | None = None,
    where: str | None = None,
    generation: int | None = None,
) -> list[dict[str, Any]]:
    """Return where samples are, one dict per sample in the order of the shards. Removed samples are found by key or
    source, not by a condition.

    `source`: A source id, or the name of a file of which the samples are segments. Returns ``key``, ``shard``,
    ``row`` in the shard, ``member`` with ``member_offset`` and ``member_size`` in bytes in the tar, ``parent`` and
    ``start_seconds`` in it, ``class``, the columns of the annotations, and ``removed_in``: the oldest known
    generation that hides the sample, None if it is not removed.
    """
    if (text is not None) + (source is not None) + (where is not None) != 1:
        raise UsageError("expected one of a key, a source and a condition", hint="give `KEY`, `--source` or `--where`")
    storage = open_storage(url)
    _, current = read_generation(storage, generation)
    if where is not None:
        dataset = Dataset(url, where=where, generation=current.number)
        table, rows = dataset.annotations, dataset.rows
    else:
        annotations = open_annotations(storage, current)
        table = annotations.table
        rows = _matching(annotations, text) if text is not None else _of_source(table, str(source))
    if not len(rows):
        names = table["key"] if text is not None else pc.drop_null(table["source_id"])
        near = ", ".join(map(repr, near_names(names, str(text if text is not None else source))))
        raise SampleNotFoundError(
            f"no sample has the key {text!r}" if text is not None else f"no sample has the source {source!r}",
            file=storage.url,
            hint=f"did you mean {near}?" if near else "list keys with `fastvid find DIR --where true`",
        )
    ends = np.cumsum([shard.samples for shard in current.shards])
    removed_in = _removed_in(storage, table, rows, current.number)
    facts: dict[str, dict[str, dict[str, Any]]] = {}
    found = []
    for row in rows.tolist():
        index = int(np.searchsorted(ends, row, side="right"))
        shard = current.shards[index]
        values = {name: table[name][row].as_py() for name in table.column_names}
        if shard.name not in facts:
            facts[shard.name] = _facts(storage, shard.name, current.streams[0])
        label, key = values["label"], values["key"]
        named = label is not None and 0 <= label < len(current.classes)
        place = {"key": key, "shard": shard.name, "row": int(row - ends[index] + shard.samples)}
        place |= facts[shard.name].get(key, {}) | {"class": current.classes[label] if named else None}
        found.append(place | {k: v for k, v in values.items() if v is not None} | {"removed_in": removed_in.get(key)})
    return found


def _matching(annotations: GenerationRows, text: str) -> IntArray:
    exact, table = annotations.row(text), annotations.table
    if exact is not None:
        return np.array([exact], dtype=np.int64)
    return _rows(pc.or_kleene(*(pc.match_substring(table[name], text) for name in ("key", "source_id"))))


def _of_source(table: pa.Table, source: str) -> IntArray:
    """Return samples of a source; the id of a segment is that of its file, ``#`` and its seconds."""
    mask = pc.or_kleene(pc.equal(table["source_id"], source), pc.starts_with(table["source_id"], f"{source}#"))
    if "parent" in table.column_names:
        mask = pc.or_kleene(mask, pc.equal(table["parent"], source))
    return _rows(mask)


def _rows(mask: pa.ChunkedArray) -> IntArray:
    return np.flatnonzero(mask.fill_null(False).to_numpy()).astype(np.int64)


def _facts(storage: Storage, stem: str, stream: str) -> dict[str, dict[str, Any]]:
    name = f"{stem}.parquet"
    wanted = ["member", "member_offset", "member_size", "parent", "start_seconds"]
    table = from_parquet(storage.read(name), file=name, columns=["key", "stream", *wanted])
    rows = table.filter(pc.equal(table["stream"], stream)).select(["key", *wanted]).to_pylist()
    return {row["key"]: {name: row[name] for name in wanted} for row in rows}


def _removed_in(storage: Storage, table: pa.Table, rows: IntArray, number: int) -> dict[str, int]:
    """Return for each removed sample the oldest known generation of an unbroken line that hides it."""
    hidden = table.take(pa.array(rows)).filter(table["removed"].take(pa.array(rows)))["key"].to_pylist()
    found = dict.fromkeys(hidden, number)
    pending = set(hidden)
    for generation in history(storage, read_head(storage)) if pending else ():
        if generation.number >= number:
            continue
        older = read_annotations(storage, generation)
        pending &= set(older.filter(older["removed"])["key"].to_pylist())
        found |= dict.fromkeys(pending, generation.number)
        if not pending:
            break
    return found
