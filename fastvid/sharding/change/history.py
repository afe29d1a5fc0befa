"""The history of a dataset: its generations, what differs between two of them, and their tags."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import ConflictError, UsageError
from fastvid.format.generations import Generation, history, read_annotations, read_generation, read_head, swap_head
from fastvid.runtime.arrays import BoolArray
from fastvid.runtime.near_names import near_names
from fastvid.storage import Storage

_TAG: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
# A writer that commits every few milliseconds is a runaway loop, so give up eventually.
_ATTEMPTS: Final = 10
_CLASS: Final = "class"


@dataclass(frozen=True, slots=True)
class Entry:
    """One generation of a dataset."""

    number: int
    time: str
    note: str  # what was done, such as "remove 3 samples"
    reason: str
    samples: int | None  # number of samples that it shows; None if an earlier fastvid wrote it
    removed: int | None  # number of samples that it hides; None likewise
    shards: int
    bytes: int
    tags: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ColumnChange:
    """The samples of which a column differs."""

    column: str
    values: tuple[tuple[str, Any, Any], ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs between two generations. Samples are compared by key; hidden ones count as absent."""

    old: int
    new: int  # number of the second
    added: tuple[str, ...]  # keys that only the second has, in its order
    removed: tuple[str, ...]
    changed: tuple[ColumnChange, ...]  # columns of samples in both that differ, in the order of the columns
    samples: int  # number of samples in both of which anything differs
    # class names that only the second has, and those that only the first has.
    classes: tuple[tuple[str, ...], tuple[str, ...]]
    # shards that only the second has, and those that only the first has.
    shards: tuple[tuple[str, ...], tuple[str, ...]]

    @property
    def differs(self) -> bool:
        """Whether anything differs."""
        return bool(self.added or self.removed or self.changed or any(self.classes) or any(self.shards))

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "old": self.old,
            "new": self.new,
            "added": list(self.added),
            "removed": list(self.removed),
            "changed": {
                one.column: {key: {"old": old, "new": new} for key, old, new in one.values} for one in self.changed
            },
            "samples_changed": self.samples,
            "classes": {"added": list(self.classes[0]), "removed": list(self.classes[1])},
            "shards": {"added": list(self.shards[0]), "removed": list(self.shards[1])},
        }


def list_generations(storage: Storage) -> list[Entry]:
    """Return the generations of a dataset that can be opened, newest first."""
    head = read_head(storage)
    names: dict[int, list[str]] = {}
    for tag, number in sorted(head.tags.items()):
        names.setdefault(number, []).append(tag)
    return [_entry(generation, names.get(generation.number, ())) for generation in history(storage, head)]


def compare_generations(storage: Storage, old: int | str, new: int | str | None = None) -> Difference:
    """Return what differs between two generations of a dataset.

    `new`: number or tag of the second; the current one by default.
    """
    first, second = (read_generation(storage, which)[1] for which in (old, new))
    before, after = (_visible(storage, generation) for generation in (first, second))
    places = pc.index_in(before["key"], value_set=after["key"].combine_chunks())
    both = before.filter(places.is_valid())
    there = after.take(places.drop_null())
    differs = np.zeros(both.num_rows, dtype=bool)
    changed = []
    for name in dict.fromkeys([*both.column_names, *there.column_names]):
        if name in ("key", "label", "removed"):
            continue
        rows = _differences(_column(both, name), _column(there, name))
        if rows.any():
            differs |= rows
            where = pa.array(rows)
            values = (_column(table, name).filter(where).to_pylist() for table in (both, there))
            changed.append(ColumnChange(name, tuple(zip(both["key"].filter(where).to_pylist(), *values, strict=True))))
    is_new = pc.invert(pc.is_in(after["key"], value_set=before["key"].combine_chunks()))
    return Difference(
        first.number,
        second.number,
        tuple(after["key"].filter(is_new).to_pylist()),
        tuple(before["key"].filter(places.is_null()).to_pylist()),
        tuple(changed),
        int(differs.sum()),
        _only(first.classes, second.classes),
        _only([shard.name for shard in first.shards], [shard.name for shard in second.shards]),
    )


def tag_generation(storage: Storage, tag: str, which: int | str | None = None, *, move: bool = False) -> int:
    """Give a generation a name, by which it can be opened and which keeps it from `collect_garbage`.

    Returns the number of the generation.
    """
    if not _TAG.fullmatch(tag):
        raise UsageError(
            f"invalid tag {tag!r}", hint="use up to 64 letters, digits, dots, dashes and underscores, a letter first"
        )
    number = read_generation(storage, which)[1].number

    def edit(tags: dict[str, int]) -> None:
        if tags.get(tag, number) != number and not move:
            raise UsageError(
                f"generation {tags[tag]} has the tag {tag!r} already", file=storage.url, hint="move it with --move"
            )
        tags[tag] = number

    _edit_tags(storage, edit, needed=number)
    return number


def delete_tag(storage: Storage, tag: str) -> int:
    """Take a name from its generation, and return the generation's number."""
    found = 0

    def edit(tags: dict[str, int]) -> None:
        nonlocal found
        if tag not in tags:
            near = near_names(pa.chunked_array([pa.array(sorted(tags), pa.string())]), tag)
            hint = f"did you mean {', '.join(map(repr, near))}?" if near else "list the tags with `fastvid log DIR`"
            raise UsageError(f"no generation has the tag {tag!r}", file=storage.url, hint=hint)
        found = tags.pop(tag)

    _edit_tags(storage, edit)
    return found


def _edit_tags(storage: Storage, edit: Callable[[dict[str, int]], None], *, needed: int | None = None) -> None:
    for attempt in range(_ATTEMPTS):
        head = read_head(storage)
        tags = dict(head.tags)
        edit(tags)
        if tags == dict(head.tags):
            return
        if needed is not None:
            # It may have been deleted meanwhile; it cannot be deleted between here and the swap.
            read_generation(storage, needed)
        try:
            swap_head(storage, head, dataset_id=head.dataset_id, generation=head.generation, tags=tags)
        except ConflictError:
            if attempt + 1 == _ATTEMPTS:
                raise
        else:
            return


def _entry(generation: Generation, tags: Sequence[str]) -> Entry:
    removed = generation.removed
    return Entry(
        generation.number,
        generation.time,
        generation.note,
        generation.reason,
        None if removed is None else generation.num_samples - removed,
        removed,
        len(generation.shards),
        sum(shard.bytes for shard in generation.shards),
        tuple(tags),
    )


def _visible(storage: Storage, generation: Generation) -> pa.Table:
    """Return the annotations of the samples that are not hidden, with the column ``class`` for their labels."""
    table = read_annotations(storage, generation)
    table = table.filter(pc.invert(table["removed"]))
    if _CLASS in table.column_names:
        return table
    numbers = table["label"].to_pylist()
    names = generation.classes
    text = [None if n is None else names[n] if 0 <= n < len(names) else str(n) for n in numbers]
    return table.append_column(_CLASS, pa.array(text, pa.string()))


def _column(table: pa.Table, name: str) -> pa.ChunkedArray:
    return table[name] if name in table.column_names else pa.chunked_array([pa.nulls(table.num_rows)])


def _differences(old: pa.ChunkedArray, new: pa.ChunkedArray) -> BoolArray:
    """Return which values differ; two nulls are equal, bool [N]."""
    try:
        equal = pc.or_kleene(pc.equal(old, new), pc.and_(old.is_null(), new.is_null()))
        return ~np.asarray(equal.fill_null(False).to_numpy(), dtype=bool)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):  # lists, or columns of two types
        pairs = zip(old.to_pylist(), new.to_pylist(), strict=True)
        return np.fromiter((one != other for one, other in pairs), dtype=bool, count=len(old))


def _only(old: Sequence[str], new: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names that only the second has, and those that only the first has."""
    before, after = set(old), set(new)
    return tuple(name for name in new if name not in before), tuple(name for name in old if name not in after)
