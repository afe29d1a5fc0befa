"""Write a split column for the samples of a dataset: groups stay together, classes keep their proportions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import UsageError
from fastvid.format.generations import Generation, read_annotations, read_generation
from fastvid.runtime.units import things
from fastvid.sharding.change.edit import relabel_samples
from fastvid.sharding.sets.groups import divide, group_names, make_groups
from fastvid.storage import Storage

_NAMES: Final = {2: ("train", "val"), 3: ("train", "val", "test")}
_SHOWN: Final = 5  # values that a message lists


@dataclass(frozen=True, slots=True)
class SplitCount:
    """What one split contains.

    Attributes:
        samples: Number of samples by class name; None is the name of samples without a label.
        seconds: Their duration in seconds by class name.
        groups: Number of groups.
    """

    samples: Mapping[str | None, int]
    seconds: Mapping[str | None, float]
    groups: int


@dataclass(frozen=True, slots=True)
class SplitReport:
    """The result of `split_samples`.

    Attributes:
        generation: Number of the current generation.
        column: The split column.
        placed: Number of samples that got a split now.
        kept: Number of samples that had one and keep it.
        splits: What each split contains, in the order of the shares.
    """

    generation: int
    column: str
    placed: int
    kept: int
    splits: Mapping[str, SplitCount]


def split_samples(
    storage: Storage,
    shares: Sequence[float],
    *,
    names: Sequence[str] = (),
    by: str = "parent",
    stratify: str | None = None,
    seed: int = 0,
    column: str = "split",
    replace: bool = False,
) -> SplitReport:
    """Give every sample without a split one, and commit that as a new generation.

    All samples of a group are in one split. With k splits and a largest group of G samples, each split has its share of
    the samples, and of each value of `stratify`, to within (k - 1) * G samples; a group with several values counts as
    its most frequent one. The result depends on the names of the groups and the seed, not on the order of samples.

    Samples that have a split keep it, and new samples of their group join them. So splitting again after `add_sources`
    assigns only new groups, and fills the splits up to their shares.

    Args:
        storage: The dataset's folder.
        shares: Share of the samples of each split; their sum is one.
        names: Names of the splits; by default train and val, or train, val and test.
        by: Column whose values are groups. ``parent`` is the file that segments were cut from; a whole file is a group
            of its own. ``key`` divides single samples.
        stratify: Column whose values keep their proportions in each split, such as ``label``; None for none.
        seed: Seed of the division.
        column: Name of the split column; it begins with ``split``.
        replace: Whether to assign all samples anew, also those that have a split.

    Raises:
        UsageError: If an argument is wrong, the column has other values, a group is in two splits already, or there are
            too few groups; nothing is changed.
        StorageError: If there is no dataset.
        ConflictError: If other changes kept winning the race to commit.
    """
    names = _checked(shares, names, column)
    _, generation = read_generation(storage)
    every = read_annotations(storage, generation)
    table = every.filter(pc.invert(every["removed"]))
    if stratify is not None and stratify not in table.column_names:
        raise UsageError(
            f"dataset has no column {stratify!r} to stratify by", hint=f"use one of {', '.join(table.column_names)}"
        )
    groups = group_names(table, by)
    strata = [None] * len(groups) if stratify is None else table[stratify].to_pylist()
    before: list[Any] = [None] * len(groups)
    if column in table.column_names and not replace:
        before = table[column].to_pylist()
    placed = _placed(groups, before, names, column)
    sides = divide(make_groups(groups, strata), shares, seed=seed, placed=placed)
    empty = [name for side, name in enumerate(names) if side not in sides.values()]
    if empty:
        raise UsageError(
            f"split {empty[0]!r} would be empty: there are {things(len(sides), 'group')} by {by!r}",
            file=storage.url,
            hint="give larger shares, or another column with --by",
        )
    keys = table["key"].to_pylist()
    rows = {
        key: {column: names[sides[group]]}
        for key, group, value in zip(keys, groups, before, strict=True)
        if value is None
    }
    number = generation.number
    if rows:
        text = ",".join(f"{name}={share:g}" for name, share in zip(names, shares, strict=True))
        number = relabel_samples(
            storage, rows, note=f"split {text} by {by}" + (f", stratified by {stratify}" if stratify else "")
        ).generation
    counts = _count(table, generation, [sides[group] for group in groups], groups, names)
    return SplitReport(number, column, len(rows), len(keys) - len(rows), counts)


def _checked(shares: Sequence[float], names: Sequence[str], column: str) -> tuple[str, ...]:
    """Return the names of the splits."""
    if len(shares) < 2 or not all(0 < share < 1 for share in shares) or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise UsageError(
            f"shares {','.join(map(str, shares))} have the sum {sum(shares):g}",
            hint="give at least two positive shares with the sum 1, such as 0.9,0.1",
        )
    found = tuple(names) or _NAMES.get(len(shares), ())
    if len(set(found)) != len(shares) or not all(found):
        raise UsageError(
            f"{things(len(shares), 'share')} with the names {','.join(found) or 'none'}",
            hint="give one distinct name for each share with --names",
        )
    if not column.startswith("split"):
        raise UsageError(
            f"{column!r} is no name of a split column", hint="begin it with 'split', such as split2, to open it by"
        )
    return found


def _placed(groups: Sequence[str], values: Sequence[Any], names: Sequence[str], column: str) -> dict[str, int]:
    """Return the sides of groups that have a split."""
    other = sorted({str(value) for value in values if value is not None and value not in names})
    if other:
        raise UsageError(
            f"column {column!r} has the values {', '.join(other[:_SHOWN])}, not {', '.join(names)}",
            hint="name them with --names, write another column with --column, or assign all samples with --replace",
        )
    placed: dict[str, int] = {}
    for group, value in zip(groups, values, strict=True):
        if value is not None and placed.setdefault(group, names.index(value)) != names.index(value):
            raise UsageError(
                f"group {group!r} is in the splits {names[placed[group]]!r} and {value!r} of column {column!r}",
                hint="write another column with --column, or assign all samples with --replace",
            )
    return placed


def _count(
    table: pa.Table, generation: Generation, sides: Sequence[int], groups: Sequence[str], names: Sequence[str]
) -> dict[str, SplitCount]:
    labels, classes = table["label"].to_pylist(), generation.classes
    seconds = table["duration"].to_pylist() if "duration" in table.column_names else [None] * len(labels)
    chosen = np.asarray(sides)
    counts = {}
    for side, name in enumerate(names):
        samples: dict[str | None, int] = {}
        lengths: dict[str | None, float] = {}
        rows = np.flatnonzero(chosen == side).tolist()
        for row in rows:
            label = labels[row]
            kind = None if label is None else classes[label] if classes else str(label)
            samples[kind] = samples.get(kind, 0) + 1
            lengths[kind] = lengths.get(kind, 0.0) + (seconds[row] or 0.0)
        counts[name] = SplitCount(samples, lengths, len({groups[row] for row in rows}))
    return counts
