"""Changes to a dataset that touch no video: taking samples out, and giving them other labels.

Each makes a new generation in milliseconds, whatever the size of the shards. A job that has pinned an older generation
keeps seeing that one until `fastvid gc` deletes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import ConflictError, UsageError
from fastvid.format.generations import Generation, commit_generation, history, read_annotations, read_head
from fastvid.format.schema import ANNOTATION_FIELDS
from fastvid.runtime.units import things
from fastvid.storage import Storage

_LOG = logging.getLogger(__name__)

# Someone who commits every few milliseconds is no other person but a loop; do not fight it for ever.
_ATTEMPTS: Final = 10
# Unknown keys that a message lists.
_SHOWN: Final = 10

Edit = Callable[[Generation, pa.Table], tuple[Generation, pa.Table] | None]


@dataclass(frozen=True, slots=True)
class Removed:
    """What `remove_samples` did.

    Attributes:
        generation: The generation that is current now.
        removed: Samples that it hides and the one before showed.
        already: Samples that were hidden before.
    """

    generation: int
    removed: int
    already: int


@dataclass(frozen=True, slots=True)
class Relabelled:
    """What `relabel_samples` did.

    Attributes:
        generation: The generation that is current now.
        samples: Rows that differ from the generation before.
        columns: Columns in which they differ.
        new_classes: Class names that were added behind the others.
    """

    generation: int
    samples: int
    columns: tuple[str, ...]
    new_classes: tuple[str, ...]


def remove_samples(storage: Storage, keys: Sequence[str]) -> Removed:
    """Hides samples from every later open of the dataset. The bytes go with `compact_shards` and `collect_garbage`.

    Raises:
        UsageError: A key is unknown, or none is given; nothing is done.
        StorageError: There is no dataset.
        ConflictError: The dataset never stood still for long enough.
    """
    wanted = pa.array(list(dict.fromkeys(keys)), pa.string())
    if not len(wanted):
        raise UsageError("no key is given")
    found = Removed(0, 0, 0)

    def edit(generation: Generation, table: pa.Table) -> tuple[Generation, pa.Table] | None:
        nonlocal found
        _rows_of(table, wanted, storage)
        named = pc.is_in(table["key"], value_set=wanted)
        before = table["removed"]
        already = pc.sum(pc.and_(named, before)).as_py()
        found = Removed(generation.number, len(wanted) - already, already)
        if not found.removed:
            return None
        note = f"remove {things(found.removed, 'sample')}"
        return replace(generation, note=note), _with(table, "removed", pc.or_(named, before))

    current = change(storage, edit)
    return replace(found, generation=current.number)


def relabel_samples(
    storage: Storage, rows: Mapping[str, Mapping[str, Any]], *, new_classes: bool = False, note: str = "relabel"
) -> Relabelled:
    """Gives samples other values in their columns; samples that are not named keep theirs.

    Args:
        storage: The dataset's folder.
        rows: For each key its new values by column. ``label`` is a class name, an index into the classes, or None for
            no label; other columns are changed or added as they are.
        new_classes: Add unknown class names behind the known ones. A dataset without classes takes any.
        note: What the generation records of its origin.

    Raises:
        UsageError: A key, class or column is wrong; nothing is done.
        StorageError: There is no dataset.
        ConflictError: The dataset never stood still for long enough.
    """
    if not rows:
        raise UsageError("no sample is given")
    columns = tuple(dict.fromkeys(name for values in rows.values() for name in values))
    fixed = [name for name in columns if name in ANNOTATION_FIELDS and name != "label"]
    if fixed or not columns:
        raise UsageError(
            f"column {fixed[0]!r} cannot be changed" if fixed else "no column is given",
            hint="label, split columns, captions and columns of your own can",
        )
    done = Relabelled(0, 0, (), ())

    def edit(generation: Generation, table: pa.Table) -> tuple[Generation, pa.Table] | None:
        nonlocal done
        indices = _rows_of(table, pa.array(list(rows), pa.string()), storage)
        changed = np.zeros(table.num_rows, dtype=bool)
        labels = [row["label"] for row in rows.values() if "label" in row]
        classes, touched = ClassNames(generation.classes, labels, grow=new_classes), []
        for name in columns:
            old: list[Any] = table[name].to_pylist() if name in table.column_names else [None] * table.num_rows
            values = list(old)
            for index, (key, row) in zip(indices, rows.items(), strict=True):
                if name in row:
                    value = row[name]
                    values[index] = classes.index(value, key) if name == "label" else value
            differs = np.asarray([a != b for a, b in zip(old, values, strict=True)])
            if differs.any() or name not in table.column_names:
                kind = table.schema.field(name).type if name in table.column_names else None
                table = _with(table, name, _column(name, values, kind))
                touched.append(name)
                changed |= differs
        added = tuple(classes.names[len(generation.classes) :])
        done = Relabelled(generation.number, int(changed.sum()), tuple(touched), added)
        if not touched:
            return None
        return replace(generation, classes=tuple(classes.names), note=note), table

    current = change(storage, edit)
    return replace(done, generation=current.number)


def change(storage: Storage, edit: Edit) -> Generation:
    """Commits what `edit` makes of the current generation and its annotations; again, if someone else was faster.

    Args:
        storage: The dataset's folder.
        edit: Returns the new state, or None when there is nothing to change; may be called more than once.

    Returns:
        The generation that is current then.

    Raises:
        StorageError: There is no dataset.
        ConflictError: The dataset never stood still for long enough.
    """
    for attempt in range(_ATTEMPTS):
        head = read_head(storage)
        generation = next(history(storage, head))
        made = edit(generation, read_annotations(storage, generation.number))
        if made is None:
            return generation
        try:
            new = replace(made[0], number=generation.number + 1)
            return commit_generation(storage, head.dataset_id, new, made[1], head=head)
        except ConflictError:
            if attempt + 1 == _ATTEMPTS:
                raise
            _LOG.info("someone else changed the dataset; starting again from the new generation")
    raise AssertionError("unreachable")


def _rows_of(table: pa.Table, keys: pa.Array, storage: Storage) -> list[int]:
    """Row of each key.

    Raises:
        UsageError: A key is unknown.
    """
    rows = pc.index_in(keys, value_set=table["key"].combine_chunks())
    if rows.null_count:
        unknown = keys.filter(pc.is_null(rows)).to_pylist()
        listed = ", ".join(repr(key) for key in unknown[:_SHOWN])
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        raise UsageError(
            f"{len(unknown)} of {len(keys)} keys are not in the dataset: {listed}{more}",
            file=storage.url,
            hint="nothing was changed; keys stand in the column `key` of annotations-*.parquet",
        )
    numbers: list[int] = rows.to_pylist()
    return numbers


def _with(table: pa.Table, name: str, values: Any) -> pa.Table:
    if name not in table.column_names:
        return table.append_column(name, values)
    index = table.column_names.index(name)
    return table.set_column(index, table.schema.field(name), values)


class ClassNames:
    """Class names and the labels that texts stand for."""

    def __init__(self, names: Sequence[str], labels: Sequence[Any], *, grow: bool) -> None:
        self.names = list(names)
        self._known = {name: index for index, name in reversed(list(enumerate(names)))}
        # Without class names, numbers are labels, unless some are no numbers: then all are names.
        self._plain = not names and all(label is None or str(label).isdecimal() for label in labels)
        self._grow = grow or not names

    def index(self, value: Any, key: str) -> int | None:
        """Label of a class given by name or index; None for None.

        Raises:
            UsageError: The class is unknown and may not be added.
        """
        if value is None:
            return None
        text = str(value)
        known = self._known.get(text)
        if known is not None:
            return known
        if text.isdecimal() and (self._plain or int(text) < len(self.names)) and (self._plain or not self._grow):
            return int(text)
        if not self._grow:
            shown = ", ".join(self.names[:_SHOWN]) + (", ..." if len(self.names) > _SHOWN else "")
            raise UsageError(
                f"label {text!r} is no class of the dataset",
                key=key,
                hint=f"classes are {shown}; --new-classes adds it; nothing was changed",
            )
        self._known[text] = len(self.names)
        self.names.append(text)
        return len(self.names) - 1


def _column(name: str, values: list[Any], kind: pa.DataType | None) -> pa.Array:
    try:
        if kind is None and all(value is None for value in values):
            kind = pa.string()
        return pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise UsageError(
            f"values of column {name!r} do not fit its type {kind}: {error}", hint="nothing was changed"
        ) from error
