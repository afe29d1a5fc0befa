"""Divides the samples of a dataset into splits, makes subsets, and merges datasets, without encoding.

Dividing assigns each group of samples to a side, which is a split, or the inside or outside of a subset. No group is
divided, classes keep their proportions, and the order of samples does not matter. A stratum consists of the groups with
the same value, such as a class. Groups are assigned stratum by stratum, inside a stratum in the order of a keyed hash
of their names, each to the side that so far lacks most samples compared with its share. Therefore, with k sides and a
largest group of G samples, each side has its share of every stratum, and of the whole, to within (k - 1) * G samples:
after each group, a side has between -(1 - 1/k) * G and (k - 1) * (1 - 1/k) * G samples too few, and a stratum is the
difference of two such counts.
A merge links or copies shards, and unites classes by name.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import UsageError
from fastvid.format.annotations import join_stats
from fastvid.format.dataset import Dataset
from fastvid.format.generations import Generation, read_annotations, read_generation
from fastvid.format.in_place import common_root, root_extra
from fastvid.format.schema import FOREIGN, LEROBOT, SIGNALS, check_key
from fastvid.runtime.arrays import IntArray
from fastvid.runtime.values import check_choice, sha256, things
from fastvid.sharding.change.edit import relabel_samples
from fastvid.sharding.change.repack import Made, Recipe, Renaming, arrange, folder_name, make_dataset, pieces_of
from fastvid.sharding.encode.flow import Streams
from fastvid.sharding.job.ledger import Row, is_nameless, ledger_rows
from fastvid.sharding.job.members import joined, with_column
from fastvid.sharding.job.plan import rank
from fastvid.storage import Storage, open_storage


@dataclass(frozen=True, slots=True)
class Group:
    """Samples that must be on the same side of a division."""

    name: str
    size: int  # number of its samples
    stratum: str = ""  # value that keeps its proportions, such as the class of the samples


def group_names(table: pa.Table, by: str) -> list[str]:
    """Return the name of each sample's group."""
    names = table.column_names
    _check_column(table, by if by != "parent" else None, "group")
    own = table["source_id" if by == "parent" else "key"].to_pylist()
    if by not in names:
        return [str(name) for name in own]
    # A sample without a value is a group of its own, named by its key. Prepend "=" to values, which then equal no key.
    mark = "" if by in ("parent", "key") else "="
    return [
        str(name) if value is None else f"{mark}{value}" for value, name in zip(table[by].to_pylist(), own, strict=True)
    ]


def _check_column(table: pa.Table, name: str | None, use: str) -> None:
    if name is not None:
        check_choice(f"dataset has no column {{}} to {use} by", name, table.column_names)


def make_groups(table: pa.Table, by: str, stratify: str | None) -> tuple[list[str], list[Group]]:
    """Return the name of each sample's group, and the groups. A group's stratum is the most frequent of its samples."""
    names = group_names(table, by)
    stratify = "label" if stratify == "class" and "class" not in table.column_names else stratify
    _check_column(table, stratify, "stratify")
    strata = [None] * len(names) if stratify is None else table[stratify].to_pylist()
    found: dict[str, Counter[str]] = {}
    for name, stratum in zip(names, strata, strict=True):
        found.setdefault(name, Counter())[repr(stratum)] += 1
    return names, [
        Group(name, counts.total(), min(counts, key=lambda stratum: (-counts[stratum], stratum)))
        for name, counts in found.items()
    ]


def divide(
    groups: Sequence[Group], shares: Sequence[float], *, seed: int = 0, placed: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the number of the side of each group, by the group's name.

    `shares`: share of the samples of each side; their sum is one. `placed`: groups that keep their side.
    """
    placed = placed or {}
    sides: dict[str, int] = {}
    total, counts = 0, [0] * len(shares)

    def order(group: Group) -> tuple[str, bool, bytes, str]:
        return group.stratum, group.name not in placed, rank(group.name, seed, "groups"), group.name

    for group in sorted(groups, key=order):
        total += group.size
        side = placed.get(group.name)
        if side is None:
            side = max(range(len(shares)), key=lambda at: (shares[at] * total - counts[at], -at))
        counts[side] += group.size
        sides[group.name] = side
    return sides


_NAMES: Final = {2: ("train", "val"), 3: ("train", "val", "test")}
_SHOWN: Final = 5  # values that a message lists
_SHOWN_KEYS: Final = 10


@dataclass(frozen=True, slots=True)
class SplitCount:
    """What one split contains."""

    samples: int
    seconds: float  # their duration
    groups: int


@dataclass(frozen=True, slots=True)
class SplitReport:
    """The result of `split_samples`."""

    generation: int
    column: str
    placed: int  # number of samples that got a split now
    kept: int  # number of samples that had one and keep it
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
        ConflictError: If another process changes the dataset meanwhile.
    """
    names = _checked(shares, names, column)
    _, generation = read_generation(storage)
    every = read_annotations(storage, generation)
    table = every.filter(pc.invert(every["removed"]))
    groups, divided = make_groups(table, by, stratify)
    before: list[Any] = [None] * len(groups)
    if column in table.column_names and not replace:
        before = table[column].to_pylist()
    placed = _placed(groups, before, names, column)
    sides = divide(divided, shares, seed=seed, placed=placed)
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
        note = f"split {text} by {by}" + (f", stratified by {stratify}" if stratify else "")
        number = relabel_samples(storage, rows, note=note, since=number).generation
    counts = _count(table, groups, sides, names)
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
            f"there are {things(len(shares), 'share')}, but the names are {','.join(found) or 'none'}",
            hint="give one distinct name for each share with --names",
        )
    if not column.startswith("split"):
        raise UsageError(f"{column!r} is no name of a split column", hint="begin it with 'split', such as split2")
    return found


def _placed(groups: Sequence[str], values: Sequence[Any], names: Sequence[str], column: str) -> dict[str, int]:
    """Return the sides of groups that already have a split; raise UsageError if a group is in two splits."""
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
    table: pa.Table, groups: Sequence[str], sides: Mapping[str, int], names: Sequence[str]
) -> dict[str, SplitCount]:
    seconds = table["duration"].to_pylist() if "duration" in table.column_names else [0.0] * len(groups)
    counts = {}
    for side, name in enumerate(names):
        mine = [length or 0.0 for group, length in zip(groups, seconds, strict=True) if sides[group] == side]
        counts[name] = SplitCount(len(mine), sum(mine), sum(other == side for other in sides.values()))
    return counts


@dataclass(frozen=True, slots=True)
class Selection:
    """Which samples a subset contains: those that meet every condition given.

    Attributes:
        split: A split, as for `fastvid.open`.
        where: A condition, as for `fastvid.open`.
        keys: Keys of samples.
        share: Share of the samples, drawn by groups; more than 0 and less than 1.
        by: Column whose values are the groups of `share`, see `fastvid.sharding.sets.split_samples`.
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
            stratified = f", stratified by {self.stratify}" if self.stratify else ""
            parts.append(f"share {self.share:g} by {self.by}{stratified}, seed {self.seed}")
        if self.per_class is not None:
            parts.append(f"{self.per_class} samples of each class, seed {self.seed}")
        return "; ".join(parts)


def make_subset(
    dataset: str | os.PathLike[str],
    out: str | os.PathLike[str],
    selection: Selection,
    *,
    generation: int | None = None,
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
    number = source.generation.number
    rows = np.sort(_selected(source, selection))
    keep = np.zeros(source.generation.num_samples, dtype=bool)
    keep[rows] = True
    table = source.annotations.take(pa.array(rows))
    names = set(table["source_id"].to_pylist())
    ledger = ledger_rows(source.storage, source.generation)
    note = f"subset of {source.dataset_id} generation {number}: {selection}"
    recipe = Recipe(
        identity={
            "subset": {"dataset": source.dataset_id, "generation": number},
            "samples": {"number": len(rows), "sha256": sha256(rows.astype("<i8").tobytes())},
        },
        shards=arrange(pieces_of(source.storage, source.generation, keep)),
        table=table,
        ledger={row["source_id"]: row for row in ledger if row["source_id"] in names or row["status"] == "removed"},
        made=Generation(1, (), source.streams, source.classes, note=note, extras=source.generation.extras),
        sources=[source.storage],
    )
    return make_dataset(os.fspath(out), recipe, "subset")


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
        names, groups = make_groups(some, selection.by, selection.stratify)
        sides = divide(groups, (selection.share, 1 - selection.share), seed=selection.seed)
        rows = rows[np.array([sides[name] == 0 for name in names], dtype=bool)]
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
        by_label.setdefault(label, []).append((rank(key, selection.seed, "subset"), row))
    by_label.pop(None, None)  # leave out samples without a label
    return np.array(
        [row for found in by_label.values() for _, row in sorted(found)[: selection.per_class]], dtype=np.int64
    )


class _Part:
    """One of the datasets to merge. `prefix`: prepended to its keys and the names of its sources."""

    def __init__(self, url: str | os.PathLike[str], prefix: str) -> None:
        self.storage, self.prefix = open_storage(url), prefix and f"{prefix}/"
        self.dataset_id, self.generation = read_generation(self.storage)

    def take(self, numbers: Mapping[str, int]) -> None:
        """Prepare the samples and ledger rows for the new dataset. `numbers`: index of each class there, by name."""
        storage, generation = self.storage, self.generation
        labels = {old: numbers[name] for old, name in enumerate(generation.classes) if numbers[name] != old}
        renaming, every = Renaming(self.prefix, labels), read_annotations(storage, generation)
        # Keep hidden samples in tars of other tools, which are not rewritten.
        foreign = [shard.profile.get("name") == FOREIGN for shard in generation.shards]
        keep = ~every["removed"].to_numpy() | np.repeat(foreign, [shard.samples for shard in generation.shards])
        self.pieces = pieces_of(storage, generation, keep, renaming)
        self.table = _renamed(every.filter(pa.array(keep)), renaming)
        if numbers and not generation.classes and self.table["label"].null_count < self.table.num_rows:
            raise UsageError(
                f"{folder_name(storage.url)} has labels without class names, others have names",
                file=storage.url,
                hint="give its labels names with `fastvid relabel --new-classes`",
            )
        # Drop rows of sources whose samples are dropped: another dataset may have other bytes under the name.
        here, known = set(self.table["source_id"].to_pylist()), ledger_rows(storage, generation)
        rows = (row if is_nameless(row) else renaming.changed(row) for row in known)
        self.ledger = [row for row in rows if row["status"] != "packed" or row["source_id"] in here]


def merge_datasets(
    datasets: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    prefixes: Sequence[str] = (),
) -> Made:
    """Make one dataset of the current generations of several, as ``fastvid merge`` does.

    Samples come in the order of the datasets. Classes are those of the first dataset, then the new names of the others.
    A shard whose samples keep keys and labels is hard-linked on a local disk and copied otherwise. The tars of others
    are packed again, because they contain keys and labels; their videos keep their bytes. Removed samples are dropped,
    except from tars of another tool, where they stay hidden. Shards may have different profiles. Columns are united: a
    sample has null in those of other datasets. Run again, it resumes.

    Args:
        datasets: Folders of the datasets, at least two.
        out: Folder of the new one.
        prefixes: One for each dataset, prepended with a slash to its keys and the names of its sources; an empty one
            changes nothing. By default no prefix.

    Raises:
        UsageError: If keys or sources of two datasets are equal, their streams or the types of a column differ, a tar
            of another tool would have to be rewritten, or another dataset is in the folder.
        JobError: If another job is running or unfinished in the folder.
        FormatError: If a shard is damaged.
        StorageError: If a file cannot be read or written.
    """
    if len(datasets) < 2:
        raise UsageError(f"{things(len(datasets), 'dataset')} to merge", hint="name at least two")
    if prefixes and len(prefixes) != len(datasets):
        raise UsageError(
            f"{len(prefixes)} prefixes for {len(datasets)} datasets", hint="give one for each, such as --prefix a,b"
        )
    parts = [_Part(url, prefix) for url, prefix in zip(datasets, prefixes or [""] * len(datasets), strict=True)]
    generations = [part.generation for part in parts]
    _check_common(parts)
    classes = _classes(parts)
    for part in parts:
        part.take({name: number for number, name in enumerate(classes)})
    _check_names(parts)
    note = "merge of " + ", ".join(f"{part.dataset_id} generation {part.generation.number}" for part in parts)
    recipe = Recipe(
        identity={
            "merge": [{"dataset": part.dataset_id, "generation": part.generation.number} for part in parts],
            "prefixes": [part.prefix for part in parts],
        },
        shards=arrange([piece for part in parts for piece in part.pieces]),
        table=reduce(joined, (part.table for part in parts)).combine_chunks(),
        ledger=_ledger(parts),
        made=Generation(1, (), generations[0].streams, classes, note=note, extras=_extras(generations)),
        sources=[part.storage for part in parts],
    )
    return make_dataset(os.fspath(out), recipe, "merge")


def _renamed(table: pa.Table, renaming: Renaming) -> pa.Table:
    names = [name for name in ("key", "source_id", "parent", "label") if renaming and name in table.column_names]
    rows = [renaming.changed(row) for row in table.select(names).to_pylist()]
    for name in names:
        table = with_column(table, name, [row[name] for row in rows])
    for row in rows if renaming.prefix else ():
        check_key(row["key"])
    return table


_STATES: Final = ("rejected", "removed", "packed")


def _ledger(parts: Sequence[_Part]) -> dict[str, Row]:
    """Return one ledger row for each source; of several rows, that of a packed source, or else of a removed one."""
    rows = [row for part in reversed(parts) for row in part.ledger]
    return {row["source_id"]: row for row in sorted(rows, key=lambda row: _STATES.index(row["status"]))}


def _check_names(parts: Sequence[_Part]) -> None:
    """Raise a UsageError if two datasets have samples or sources of the same name."""
    for column, kind in (("key", "key"), ("source_id", "source")):
        counts: Counter[str] = Counter()
        for part in parts:
            counts.update(pc.unique(part.table[column]).to_pylist())
        doubles = [name for name, number in counts.items() if number > 1]
        if doubles:
            more = f" and {len(doubles) - _SHOWN_KEYS} more" if len(doubles) > _SHOWN_KEYS else ""
            raise UsageError(
                f"{things(len(doubles), kind)} in more than one dataset: "
                + ", ".join(map(repr, sorted(doubles)[:_SHOWN_KEYS]))
                + more,
                hint="give each dataset a prefix, such as --prefix a,b, or remove the samples from one of them",
            )


# Properties that datasets must share to be merged: their names, the function that returns what is compared, and the
# hint.
_COMMON: Final[Mapping[str, tuple[Callable[[Generation], Any], str]]] = {
    "streams": (
        lambda one: ",".join(one.streams),
        "encode one of them with the streams of the other by `fastvid transcode --streams`",
    ),
    "signals": (
        lambda one: ", ".join(sorted(one.extras.get(SIGNALS, {}))) or "none",
        "merge datasets with the same signals",
    ),
    "tasks": (
        lambda one: ", ".join(one.extras.get(LEROBOT, {}).get("tasks", ())) or "none",
        "merge them with lerobot first, then index the result",
    ),
    "flow": (
        lambda one: Streams.from_json(one.extras).flow or "none",
        "encode one of them as the other by `fastvid transcode --streams rgb,flow`",
    ),
}


def _check_common(parts: Sequence[_Part]) -> None:
    begin = parts[0]
    for part in parts:
        if not part.generation.shards:
            raise UsageError("dataset has no shards", file=part.storage.url, hint="leave it out")
        for what, (of, hint) in _COMMON.items():
            first, other = of(begin.generation), of(part.generation)
            if first != other:
                names = folder_name(begin.storage.url), folder_name(part.storage.url)
                said = f"{names[0]} has the {what} {first}, {names[1]} has {other}"
                raise UsageError(said, file=part.storage.url, hint=hint)


def _extras(generations: Sequence[Generation]) -> Mapping[str, Any]:
    extras: dict[str, Any] = {}
    for generation in generations:
        extras = {**generation.extras, **extras}
    if SIGNALS in extras:
        known = [generation.extras[SIGNALS] for generation in generations]
        extras[SIGNALS] = {
            name: {**one, "stats": join_stats([signals[name].get("stats") for signals in known])}
            for name, one in extras[SIGNALS].items()
        }
    if LEROBOT in extras:
        known = [generation.extras[LEROBOT]["cameras"] for generation in generations]
        cameras = {name: {"stats": join_stats([one[name].get("stats") for one in known])} for name in known[0]}
        extras[LEROBOT] = {**extras[LEROBOT], "cameras": cameras}
    roots = [generation.root for generation in generations if generation.root is not None]
    return extras | (root_extra(common_root([f"{root}/file" for root in roots])) if roots else {})


def _classes(parts: Sequence[_Part]) -> tuple[str, ...]:
    every = [name for part in parts for name in part.generation.classes]
    for part in parts:
        url, names = part.storage.url, part.generation.classes
        if len(set(names)) < len(names):
            raise UsageError("two classes have the same name", file=url, hint="rename one of them")
    return tuple(dict.fromkeys(every))
