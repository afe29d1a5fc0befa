"""Make a dataset of some of the samples of another one, without encoding."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.runtime.arrays import IntArray
from fastvid.sharding.sets.groups import divide, group_names, make_groups
from fastvid.sharding.sets.repack import Made, Piece, Recipe, arrange, make_dataset, old_ledger


@dataclass(frozen=True, slots=True)
class Selection:
    """Which samples a subset contains: those that meet every condition given.

    Attributes:
        split: A split, as for `fastvid.open`.
        where: A condition, as for `fastvid.open`.
        keys: Keys of samples.
        share: Share of the samples, drawn by groups; more than 0 and less than 1.
        by: Column whose values are the groups of `share`, see `fastvid.sharding.sets.split.split_samples`.
        stratify: Column whose values keep their proportions in the share; None for none.
        per_class: Maximum number of samples of each label, drawn by sample.
        seed: Seed of both draws.
    """

    split: str | None = None
    where: str | None = None
    keys: Sequence[str] | None = None
    share: float | None = None
    by: str = "parent"
    stratify: str | None = None
    per_class: int | None = None
    seed: int = 0

    def __str__(self) -> str:
        parts = [f"{name} {value}" for name, value in (("split", self.split), ("where", self.where)) if value]
        if self.keys is not None:
            parts.append(f"{len(self.keys)} keys")
        if self.share is not None:
            parts.append(f"share {self.share:g} by {self.by}, seed {self.seed}")
        if self.per_class is not None:
            parts.append(f"{self.per_class} samples of each class, seed {self.seed}")
        return "; ".join(parts)


def make_subset(
    dataset: str | os.PathLike[str],
    out: str | os.PathLike[str],
    selection: Selection,
    *,
    generation: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Made:
    """Make a dataset of the selected samples, with their bytes, annotations, classes and ledger rows.

    A shard that is selected whole is hard-linked on a local disk, and copied otherwise; of the others, the members of
    selected samples are packed into shards of up to the largest old size. Samples keep their order. The ledger contains
    the sources of the samples, and those that were removed; rejected sources stay behind. Removed samples cannot be
    selected. The new generation's note names dataset, generation and selection. Run again, it resumes.

    The draws depend on the seed and on names, not on the order of samples; `per_class` is nested: the samples drawn for
    a smaller number are among those for a larger one.

    Args:
        dataset: Folder of the dataset.
        out: Folder of the new one.
        selection: Which samples.
        generation: Number of the generation to take them from; the current one by default.
        progress: Called before each shard with the number of finished shards and the total number.

    Raises:
        UsageError: If nothing is selected, a key is unknown, a shard to rewrite is another tool's tar, or another
            dataset is in the folder.
        JobError: If another job is running or unfinished in the folder.
        FormatError: If a shard is damaged.
        StorageError: If a file cannot be read or written.
    """
    if not str(selection):
        raise UsageError("nothing says which samples to take", hint="use --share, --where, --split, --keys-file, ...")
    source = Dataset(os.fspath(dataset), split=selection.split, where=selection.where, generation=generation)
    number, shards = source.generation.number, source.generation.shards
    rows = np.sort(_selected(source, selection))
    keep = np.zeros(source.generation.num_samples, dtype=bool)
    keep[rows] = True
    masks = np.split(keep, np.cumsum([shard.samples for shard in shards])[:-1])
    pieces = [Piece(source.storage, shard, mask) for shard, mask in zip(shards, masks, strict=True)]
    table = source.annotations.take(pa.array(rows))
    names = set(table["source_id"].to_pylist())
    ledger = old_ledger(source.storage)
    recipe = Recipe(
        identity={
            "subset": {"dataset": source.dataset_id, "generation": number},
            "samples": {"number": len(rows), "sha256": hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()},
        },
        shards=arrange(
            pieces, samples=max(shard.samples for shard in shards), size=max(shard.bytes for shard in shards)
        ),
        table=table,
        ledger={row["source_id"]: row for row in ledger if row["source_id"] in names or row["status"] == "removed"},
        streams=source.streams,
        classes=source.classes,
        extras=source.generation.extras,
        note=f"subset of {source.dataset_id} generation {number}: {selection}",
    )
    return make_dataset(os.fspath(out), recipe, progress=progress)


def _selected(source: Dataset, selection: Selection) -> IntArray:
    """Return the rows of the annotations that are selected."""
    rows = source.rows
    if selection.keys is not None:
        if not selection.keys:
            raise UsageError("no keys given", hint="write one key in each line")
        rows = source.select(list(dict.fromkeys(selection.keys))).rows
    table = source.annotations
    if selection.share is not None:
        if not 0 < selection.share < 1:
            raise UsageError(f"share {selection.share:g} is not between 0 and 1", hint="use a share such as 0.05")
        some = table.take(pa.array(rows))
        if selection.stratify is not None and selection.stratify not in some.column_names:
            raise UsageError(
                f"dataset has no column {selection.stratify!r} to stratify by",
                hint=f"use one of {', '.join(some.column_names)}",
            )
        groups = group_names(some, selection.by)
        strata: list[Any] = [0] * len(groups)
        if selection.stratify is not None:
            strata = some[selection.stratify].to_pylist()
        sides = divide(make_groups(groups, strata), (selection.share, 1 - selection.share), seed=selection.seed)
        rows = rows[np.array([sides[group] == 0 for group in groups], dtype=bool)]
    if selection.per_class is not None:
        rows = _per_class(table.take(pa.array(rows)), rows, selection)
    if not len(rows):
        raise UsageError("no sample is selected", file=source.storage.url, hint="select at least one")
    return rows


def _per_class(table: pa.Table, rows: IntArray, selection: Selection) -> IntArray:
    if selection.per_class is None or selection.per_class < 1:
        raise UsageError(f"{selection.per_class} samples of each class", hint="use at least 1")
    by_label: dict[Any, list[tuple[bytes, int]]] = {}
    for row, key, label in zip(rows.tolist(), table["key"].to_pylist(), table["label"].to_pylist(), strict=True):
        rank = hashlib.blake2b(f"fastvid-subset-1:{selection.seed}:{key}".encode(), digest_size=8).digest()
        by_label.setdefault(label, []).append((rank, row))
    by_label.pop(None, None)  # samples without a label are of no class
    return np.array(
        [row for found in by_label.values() for _, row in sorted(found)[: selection.per_class]], dtype=np.int64
    )
