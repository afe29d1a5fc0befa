"""Make one dataset of several, without encoding: shards are linked or copied, classes are united by name."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import UsageError
from fastvid.format.annotations import join_stats
from fastvid.format.generations import Generation, read_annotations, read_generation
from fastvid.format.in_place import common_root
from fastvid.format.schema import ANNOTATION_FIELDS, FOREIGN, IN_PLACE, LEROBOT, SIGNALS, check_key
from fastvid.runtime.values import things
from fastvid.sharding.change.repack import Made, Piece, Recipe, Renaming, arrange, folder_name, make_dataset, pieces_of
from fastvid.sharding.encode.flow import Streams
from fastvid.sharding.job.ledger import Row, ledger_rows
from fastvid.storage import Storage, open_storage

_SHOWN: Final = 10  # keys that a message lists


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the datasets."""

    storage: Storage
    dataset_id: str
    generation: Generation
    renaming: Renaming
    pieces: tuple[Piece, ...]
    table: pa.Table
    ledger: tuple[Row, ...]


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
    found = [(storage, *read_generation(storage)) for storage in map(open_storage, datasets)]
    generations = [generation for _, _, generation in found]
    _check_common([storage.url for storage, _, _ in found], generations)
    classes = _classes([storage.url for storage, _, _ in found], generations)
    numbers = {name: number for number, name in enumerate(classes)}
    parts = []
    for (storage, dataset_id, generation), prefix in zip(found, prefixes or [""] * len(found), strict=True):
        labels = {old: numbers[name] for old, name in enumerate(generation.classes) if numbers[name] != old}
        parts.append(_part(storage, dataset_id, generation, Renaming(f"{prefix}/" if prefix else "", labels)))
    _check_names(parts)
    recipe = Recipe(
        identity={
            "merge": [{"dataset": part.dataset_id, "generation": part.generation.number} for part in parts],
            "prefixes": [part.renaming.prefix for part in parts],
        },
        shards=arrange([piece for part in parts for piece in part.pieces]),
        table=_united(parts),
        ledger=_ledger(parts),
        streams=generations[0].streams,
        classes=classes,
        extras=_extras(generations),
        note="merge of " + ", ".join(f"{part.dataset_id} generation {part.generation.number}" for part in parts),
    )
    return make_dataset(os.fspath(out), recipe, "merge")


def _part(storage: Storage, dataset_id: str, generation: Generation, renaming: Renaming) -> _Part:
    every = read_annotations(storage, generation)
    # Hidden samples of another tool's tar stay where they are.
    foreign = [shard.profile.get("name") == FOREIGN for shard in generation.shards]
    keep = ~every["removed"].to_numpy() | np.repeat(foreign, [shard.samples for shard in generation.shards])
    pieces = tuple(pieces_of(storage, generation, keep, renaming))
    table = every.filter(pa.array(keep))
    table = _renamed(table, renaming)
    return _Part(
        storage, dataset_id, generation, renaming, pieces, table, _renamed_ledger(storage, generation, renaming)
    )


def _renamed(table: pa.Table, renaming: Renaming) -> pa.Table:
    def replaced(name: str, values: Any) -> pa.Table:
        return table.set_column(table.column_names.index(name), table.schema.field(name), values)

    if renaming.prefix:
        for name in ("key", "source_id", "parent"):
            if name in table.column_names and not pa.types.is_null(table.schema.field(name).type):
                table = replaced(name, pc.binary_join_element_wise(renaming.prefix, table[name], ""))
        for key in table["key"].to_pylist():
            check_key(key)
    if renaming.labels:
        numbers = [None if old is None else renaming.labels.get(old, old) for old in table["label"].to_pylist()]
        table = replaced("label", pa.array(numbers, ANNOTATION_FIELDS["label"]))
    return table


def _renamed_ledger(storage: Storage, generation: Generation, renaming: Renaming) -> tuple[Row, ...]:
    rows = []
    for row in ledger_rows(storage, generation):
        key = None if row["key"] is None else f"{renaming.prefix}{row['key']}"
        rows.append({**row, "source_id": f"{renaming.prefix}{row['source_id']}", "key": key})
    return tuple(rows)


def _ledger(parts: Sequence[_Part]) -> dict[str, Row]:
    """Return one row for each source; of two rows for one name, that of a packed source."""
    rows: dict[str, Row] = {}
    for row in (row for part in parts for row in part.ledger):
        before = rows.get(row["source_id"])
        if before is None or (before["status"] == "rejected" and row["status"] != "rejected"):
            rows[row["source_id"]] = row
    return rows


def _check_names(parts: Sequence[_Part]) -> None:
    """Raise a UsageError if two datasets have samples or sources of the same name."""
    for column, kind in (("key", "key"), ("source_id", "source")):
        counts: Counter[str] = Counter()
        for part in parts:
            counts.update(pc.unique(part.table[column]).to_pylist())
        doubles = [name for name, number in counts.items() if number > 1]
        if doubles:
            more = f" and {len(doubles) - _SHOWN} more" if len(doubles) > _SHOWN else ""
            raise UsageError(
                f"{things(len(doubles), kind)} in more than one dataset: "
                + ", ".join(map(repr, sorted(doubles)[:_SHOWN]))
                + more,
                hint="give each dataset a prefix, such as --prefix a,b, or remove the samples from one of them",
            )


# What all datasets must have in common: how to say that two differ, what is compared, and what to do.
_COMMON: Final[Sequence[tuple[str, Callable[[Generation], Any], str]]] = (
    (
        "{} has the streams {}, {} has {}",
        lambda one: ",".join(one.streams),
        "encode one of them with the streams of the other by `fastvid transcode --streams`",
    ),
    (
        "{} has the signals {}, {} has {}",
        lambda one: ", ".join(sorted(one.extras.get(SIGNALS, {}))) or "none",
        "merge datasets with the same signals",
    ),
    (
        "{0} and {2} number their tasks differently",
        lambda one: one.extras.get(LEROBOT, {}).get("tasks"),
        "merge them with lerobot first, then index the result",
    ),
    (
        "flow in {} was computed as {}, in {} as {}",
        lambda one: Streams.from_json(one.extras).flow,
        "encode one of them as the other by `fastvid transcode --streams rgb,flow`",
    ),
)


def _check_common(urls: Sequence[str], generations: Sequence[Generation]) -> None:
    for url, generation in zip(urls, generations, strict=True):
        if not generation.shards:
            raise UsageError("dataset has no shards", file=url, hint="leave it out")
        for text, of, hint in _COMMON:
            first, other = of(generations[0]), of(generation)
            if first != other:
                said = text.format(folder_name(urls[0]), first, folder_name(url), other)
                raise UsageError(said, file=url, hint=hint)


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
    return extras | ({IN_PLACE: {"root": common_root([f"{root}/file" for root in roots])}} if roots else {})


def _classes(urls: Sequence[str], generations: Sequence[Generation]) -> tuple[str, ...]:
    named = [bool(generation.classes) for generation in generations]
    if any(named) and not all(named):
        url = urls[named.index(False)]
        raise UsageError(
            f"{folder_name(url)} has no class names, others have",
            file=url,
            hint="give its labels names with `fastvid relabel --new-classes`",
        )
    for url, generation in zip(urls, generations, strict=True):
        if len(set(generation.classes)) < len(generation.classes):
            raise UsageError("two classes have the same name", file=url, hint="rename one of them")
    return tuple(dict.fromkeys(name for generation in generations for name in generation.classes))


def _united(parts: Sequence[_Part]) -> pa.Table:
    """Concatenate annotations with the columns of all; whole numbers become decimals where another dataset has them."""
    table: pa.Table = None
    for part in parts:
        mine = pa.table({name: part.table[name] for name in part.table.column_names})  # without metadata
        try:
            table = pa.concat_tables([table, mine], promote_options="permissive") if table else mine
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise UsageError(
                f"a column of {folder_name(part.storage.url)} has another type than before: {error}",
                file=part.storage.url,
                hint="store it under another name in one of them with `fastvid relabel`",
            ) from error
    return table.combine_chunks()
