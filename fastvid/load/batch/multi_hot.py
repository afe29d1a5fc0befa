"""`MultiHot`: several labels per sample, as a row of zeros and ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.load.order.mixture import Mixture, parts_of
from fastvid.runtime.arrays import BoolArray, Float32Array, IntArray
from fastvid.runtime.hashing import sha256

_LABELS: Final = "labels"
"""The column whose values are classes of the dataset, as those of ``label`` are."""


@dataclass(frozen=True, repr=False)
class MultiHot:
    """Several labels per sample, from an annotation column of lists: `Batch.labels`, float32 [B, C].

    An element is 1 if the sample has the class and 0 if not. A sample without labels has a row of zeros and stays
    valid: it has none of the classes. Masked rows are zeros too; use `Batch.valid` or `Batch.weight` to ignore them.

    Args:
        column: A column of lists, either of class names or of class numbers.
        classes: Class names, at least one; C is their number, and the class number is the index. By default those of
            the dataset for the column ``labels`` if it has any, otherwise all values of the column in the dataset,
            whatever its split or filter: names in alphabetical order, or numbers from 0 to the largest.

    Raises:
        UsageError: If the classes are invalid.
    """

    column: str
    classes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.classes is None:
            return
        classes = tuple(self.classes)
        if not classes or len(set(classes)) < len(classes) or not all(isinstance(name, str) for name in classes):
            raise UsageError(
                f"classes of MultiHot are {classes}", hint="give the names of all classes, each once, as strings"
            )
        object.__setattr__(self, "classes", classes)

    def __repr__(self) -> str:
        # Part of a loader's fingerprint, so it must be short: a dataset may have thousands of classes.
        if self.classes is None:
            return f"MultiHot({self.column!r})"
        digest = sha256("\n".join(self.classes).encode())[:16]
        return f"MultiHot({self.column!r}, {len(self.classes)} classes {digest})"


class MultiHotLabels:
    """The labels of a dataset's samples.

    `dataset`: the samples.
    """

    def __init__(self, labels: MultiHot, dataset: Dataset | Mixture) -> None:
        column = dataset.column(labels.column) if labels.column in dataset.column_names else None
        if column is None or not _contains_labels(column.type):
            found = "does not exist" if column is None else f"contains {column.type}, not lists"
            others = [other for other in dataset.column_names if _contains_labels(dataset.column(other).type)]
            raise UsageError(
                f"column {labels.column!r} of MultiHot {found}",
                hint=f"use one of {', '.join(others)}"
                if others
                else "add a column with a list of class names to the annotations",
            )
        classes = labels.classes or _default_classes(labels.column, dataset)
        self.labels = replace(labels, classes=classes)
        samples, values = _pairs(column)
        if pa.types.is_integer(values.type):
            numbers = values.to_numpy().astype(np.int64)
            known = (numbers >= 0) & (numbers < len(classes))
        else:
            found = pc.index_in(values, pa.array(classes, values.type))
            known = found.is_valid().to_numpy(zero_copy_only=False)
            numbers = found.fill_null(-1).to_numpy().astype(np.int64)
        if not known.all():
            first = int(np.flatnonzero(~known)[0])
            value = values[first].as_py()
            raise UsageError(
                f"column {labels.column!r} contains {value!r}, which is none of the {len(classes)} classes",
                key=dataset.key(int(samples[first])),
                hint="add it to MultiHot(classes=...), or correct the annotations",
            )
        self._numbers = numbers.astype(np.int32)
        self._stops = np.cumsum(np.bincount(samples, minlength=len(column)))

    def rows(self, samples: IntArray, valid: BoolArray) -> Float32Array:
        """Return the labels of a batch's rows, float32 [B, C].

        `samples`: sample of each row, int64 [B]. `valid`: which rows are not masked, bool [B].
        """
        assert self.labels.classes is not None
        made = np.zeros((len(samples), len(self.labels.classes)), dtype=np.float32)
        for row in np.flatnonzero(valid).tolist():
            sample = int(samples[row])
            start = self._stops[sample - 1] if sample else 0
            made[row, self._numbers[start : self._stops[sample]]] = 1
        return made


def _default_classes(column: str, dataset: Dataset | Mixture) -> tuple[str, ...]:
    if column == _LABELS and dataset.classes:
        return dataset.classes
    parts = parts_of(dataset)
    # Of all rows, not only the selected ones: the splits of a dataset must have the same classes.
    tables = [part.annotations for part in parts if column in part.annotations.column_names]
    found = {value for table in tables for value in pc.unique(_pairs(table[column])[1]).to_pylist()}
    if not found:
        raise UsageError(f"column {column!r} has no labels at all", hint="give MultiHot(classes=...)")
    numbers = [value for value in found if isinstance(value, int)]
    if not numbers:
        return tuple(sorted(found))
    if min(numbers) < 0:
        raise UsageError(f"column {column!r} contains class number {min(numbers)}", hint="number classes from 0")
    return tuple(str(number) for number in range(max(numbers) + 1))


def _pairs(column: pa.ChunkedArray) -> tuple[IntArray, pa.Array]:
    """Return the row and the value of each element of a column of lists that is not null."""
    rows, values = [np.empty(0, dtype=np.int64)], []
    start = 0
    for chunk in column.chunks:
        flat = pc.list_flatten(chunk)
        if pa.types.is_dictionary(flat.type):
            flat = flat.cast(flat.type.value_type)
        present = flat.is_valid()
        rows.append(start + np.asarray(pc.list_parent_indices(chunk).filter(present), dtype=np.int64))
        values.append(flat.filter(present))
        start += len(chunk)
    if not values:
        return rows[0], pa.array([], pa.string())
    return np.concatenate(rows), pa.concat_arrays(values)


def _contains_labels(kind: pa.DataType) -> bool:
    types = pa.types
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return False
    kind = kind.value_type
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind))
