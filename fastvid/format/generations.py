"""Generations of a dataset: the commit record, what a generation holds, and how a new one becomes the current one.

A change is made in four steps, and only the last one shows:

1. its shards are written, under names that no other change uses;
2. ``generations/000007.json`` is created, which claims the number: creating fails when the file exists;
3. ``annotations-000007.parquet`` is written;
4. ``dataset.json`` is swapped, if it still is what the change started from. Of two changes that start from the same
   record, one wins, and the other raises ConflictError with nothing done.

A process that dies on the way leaves files that no generation refers to; `fastvid gc` deletes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fastvid.errors import ConflictError, FormatError, StorageError
from fastvid.format.parquet import from_parquet, to_parquet
from fastvid.format.schema import (
    ANNOTATION_FIELDS,
    DATASET_JSON,
    FORMAT,
    FORMAT_VERSION,
    annotations_file,
    check_version,
    generation_file,
)
from fastvid.runtime import faults
from fastvid.runtime.hashing import sha256
from fastvid.storage import Storage


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """One shard as a generation records it.

    Attributes:
        name: Stem of its files, such as ``data-000000``.
        bytes: Size of the tar.
        sha256: Of the tar, hex.
        samples: Samples in the tar.
        profile: The encode profile with its parameters.
        encoder: Build of the encoder that wrote it.
    """

    name: str
    bytes: int
    sha256: str
    samples: int
    profile: Mapping[str, Any] = field(default_factory=dict)
    encoder: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Generation:
    """An immutable state of a dataset.

    Attributes:
        number: Counts from 1; a number whose commit was interrupted is left out.
        shards: In the order of the annotations' rows.
        streams: Video streams of every sample.
        classes: Class names; a label is an index into them.
        note: What made the generation, such as the command.
        parent: The generation before; 0 for the first.
        revision: Of the commit record that the change started from; 0 for the first.
        annotations_sha256: Of the annotations' file, hex; empty where it was not recorded.
        extras: How sound and optical flow were made, by stream; empty where there is neither.
    """

    number: int
    shards: tuple[ShardRecord, ...]
    streams: tuple[str, ...] = ("rgb",)
    classes: tuple[str, ...] = ()
    note: str = ""
    parent: int = 0
    revision: int = 0
    annotations_sha256: str = ""
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """Samples in all shards, removed ones included."""
        return sum(shard.samples for shard in self.shards)


@dataclass(frozen=True, slots=True)
class Head:
    """The commit record, ``dataset.json``.

    Attributes:
        dataset_id: Stays the same over generations.
        generation: Number of the current generation.
        revision: Counts the swaps of the record.
        content: The record's bytes as they were read; a swap succeeds only while they are there.
    """

    dataset_id: str
    generation: int
    revision: int
    content: bytes


def read_head(storage: Storage) -> Head:
    """The commit record of a dataset.

    Raises:
        StorageError: There is no dataset here.
        VersionError: It is of a newer major version.
        FormatError: The record is broken.
    """
    if not storage.exists(DATASET_JSON):
        raise StorageError(
            f"there is no dataset: no {DATASET_JSON}",
            file=storage.url,
            hint="make one with `fastvid shard`; a job that was interrupted goes on when run again",
        )
    content = storage.read(DATASET_JSON)
    try:
        record = json.loads(content)
        check_version(record["version"], file=DATASET_JSON)
        if record["format"] != FORMAT:
            raise FormatError(f"format {record['format']!r} is not {FORMAT!r}", file=DATASET_JSON)
        return Head(
            str(record["dataset_id"]), int(record["generation"]), int(record.get("revision", 0)), bytes(content)
        )
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{DATASET_JSON} is broken: {error!r}", file=storage.url) from error


def swap_head(storage: Storage, head: Head | None, *, dataset_id: str, generation: int) -> Head:
    """Replaces the commit record, if it still is `head`; None stands for a folder without a dataset.

    Raises:
        ConflictError: It is another one.
    """
    revision = head.revision + 1 if head else 1
    content = _json(
        {
            "format": FORMAT,
            "version": ".".join(map(str, FORMAT_VERSION)),
            "dataset_id": dataset_id,
            "generation": generation,
            "revision": revision,
        }
    )
    if not storage.swap(DATASET_JSON, content, head.content if head else None):
        raise ConflictError(
            "the dataset was changed by someone else in the meantime; nothing was done",
            file=storage.url,
            hint="run the command again",
        )
    return Head(dataset_id, generation, revision, content)


def commit_generation(
    storage: Storage, dataset_id: str, generation: Generation, annotations: pa.Table, *, head: Head | None = None
) -> Generation:
    """Makes `generation` the current one. Until the last write, readers see the one before.

    Args:
        storage: The dataset's folder.
        dataset_id: Stays the same over generations.
        generation: The record to add; its number is one more than that of the generation it was made from.
        annotations: One row a sample in the order of the shards, with the columns of ANNOTATION_FIELDS.
        head: The commit record that the change was made from. Without it, the one there is now; what changed between
            reading the generation before and this call then goes unnoticed if it left the number as it was.

    Returns:
        The generation as it was recorded. Its number is higher than asked for when an interrupted commit has left the
        one asked for behind.

    Raises:
        FormatError: Rows and shards disagree, a column is missing, or a key comes twice.
        ConflictError: Someone else has committed a generation in the meantime.
    """
    check_annotations(generation, annotations)
    if head is None and storage.exists(DATASET_JSON):
        head = read_head(storage)
    current = head.generation if head else 0
    if current >= generation.number:
        raise ConflictError(
            f"generation {generation.number} exists already; nothing was done",
            file=storage.url,
            hint=f"the current one is {current}; run the command again",
        )
    table = to_parquet(annotations)
    generation = replace(
        generation,
        parent=current,
        revision=head.revision if head else 0,
        annotations_sha256=sha256(table),
    )
    generation = _claim(storage, generation)
    storage.write(annotations_file(generation.number), table)
    faults.reach("manifest")
    swap_head(storage, head, dataset_id=dataset_id, generation=generation.number)
    faults.reach("committed")
    return generation


def check_annotations(generation: Generation, annotations: pa.Table) -> None:
    """Checks that annotations fit a generation.

    Raises:
        FormatError: Rows and shards disagree, a column is missing or of another type, or a key comes twice.
    """
    if annotations.num_rows != generation.num_samples:
        raise FormatError(f"{annotations.num_rows} annotations for {generation.num_samples} samples")
    missing = [name for name in ANNOTATION_FIELDS if name not in annotations.column_names]
    if missing:
        raise FormatError(f"annotations lack the columns {', '.join(missing)}")
    keys = annotations["key"]
    if pc.count_distinct(keys).as_py() != len(keys):
        counts = pc.value_counts(keys)
        twice = next(c["values"] for c in counts.to_pylist() if c["counts"] > 1)
        raise FormatError("key stands in the annotations twice", key=twice)
    for name, kind in ANNOTATION_FIELDS.items():
        if annotations.schema.field(name).type != kind:
            raise FormatError(f"column {name!r} is {annotations.schema.field(name).type}, expected {kind}")


def read_generation(storage: Storage, number: int | None = None) -> tuple[str, Generation]:
    """The dataset's id and a generation, the current one by default.

    Raises:
        StorageError: There is no dataset here, or no such generation.
        VersionError: It is of a newer major version.
        FormatError: A record is broken.
    """
    head = read_head(storage)
    number = head.generation if number is None else number
    # Numbers above the current one belong to commits that are under way or were interrupted.
    if number > head.generation or not storage.exists(generation_file(number)):
        raise StorageError(
            f"dataset has no generation {number}", file=storage.url, hint=f"the current one is {head.generation}"
        )
    return head.dataset_id, _read_record(storage, number)


def read_annotations(storage: Storage, number: int) -> pa.Table:
    """All rows of a generation's annotations, in the order of its shards.

    Raises:
        StorageError: The file is missing.
        FormatError: It is no Parquet file.
    """
    name = annotations_file(number)
    return from_parquet(storage.read(name), file=name)


def history(storage: Storage, head: Head) -> Iterator[Generation]:
    """The generations that were committed and are still there, from the current one back.

    Raises:
        StorageError: The current generation is missing.
        FormatError: A record is broken.
    """
    generation = _read_record(storage, head.generation)
    yield generation
    while generation.parent and storage.exists(generation_file(generation.parent)):
        generation = _read_record(storage, generation.parent)
        yield generation


def _claim(storage: Storage, generation: Generation) -> Generation:
    """Creates the generation's record under its number, or under the next one that is free."""
    while not storage.swap(generation_file(generation.number), _json(asdict(generation)), None):
        # The very same record is the same change to the same state: its interrupted commit is taken up where it was
        # left. What another change has claimed may be about to be deleted, so its number is left alone.
        if storage.read(generation_file(generation.number)) == _json(asdict(generation)):
            return generation
        generation = replace(generation, number=generation.number + 1)
    return generation


def _read_record(storage: Storage, number: int) -> Generation:
    name = generation_file(number)
    try:
        record = json.loads(storage.read(name))
        return Generation(
            number=record["number"],
            shards=tuple(ShardRecord(**_known(shard)) for shard in record["shards"]),
            streams=tuple(record["streams"]),
            classes=tuple(record["classes"]),
            note=record.get("note", ""),
            parent=record.get("parent", 0),
            revision=record.get("revision", 0),
            annotations_sha256=record.get("annotations_sha256", ""),
            extras=record.get("extras", {}),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"generation record is broken: {error!r}", file=name) from error


def _known(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name in ShardRecord.__dataclass_fields__}


def _json(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, indent=1, sort_keys=True) + "\n").encode()
