"""Generations of a dataset: read them, and commit a new one atomically.

The commit record, ``dataset.json``, says which generation is current. It also has the tags, names of generations, that
fastvid 0.2 could give.

A commit has four steps, and readers see only the last one:

1. write the new shards, under names that no other commit uses;
2. create ``generations/000007.json``, which claims the number: creating it fails if it exists;
3. write ``annotations-000007.parquet``;
4. swap ``dataset.json``, if it is still the record that the change started from. Of two changes that start from the
   same record, one wins, and the other raises ConflictError and changes nothing.

A process that dies in between leaves files that no generation refers to; `fastvid gc` deletes them.

Both records contain a SHA-256 of their other fields, and a generation contains those of its annotations and tars, so a
reader notices when any file is damaged or belongs to another dataset.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Meta

from fastvid.errors import ConflictError, FormatError, StorageError, UsageError
from fastvid.format import schema
from fastvid.format.in_place import Root, parse_root
from fastvid.format.reason import current_reason, now
from fastvid.runtime import faults
from fastvid.runtime.names import decode_name, is_video
from fastvid.runtime.values import as_type, check_integer, sha256, things
from fastvid.storage import Storage

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


@dataclass(frozen=True, slots=True)
class Head:
    """The content of the commit record, ``dataset.json``."""

    dataset_id: str
    generation: int  # number of the current generation
    revision: int  # grows by one with each swap of the record
    content: bytes  # the record's bytes as read; a swap succeeds only while the file still contains them
    tags: Mapping[str, int] = field(default_factory=dict)


def read_head(storage: Storage) -> Head:
    """Read the commit record of a dataset."""
    if not storage.exists(schema.DATASET_JSON):
        raise StorageError(
            f"there is no dataset: {schema.DATASET_JSON} is missing", file=storage.url, hint=_what_else(storage.url)
        )
    content = storage.read(schema.DATASET_JSON)
    with malformed(schema.DATASET_JSON, storage):
        record = json.loads(content)
        if record["format"] != schema.FORMAT:
            raise ValueError(f"format {record['format']!r} is not {schema.FORMAT!r}")
        major, minor = map(int, record["version"].split("."))
        schema.check_version(major, minor, file=schema.DATASET_JSON)
        check_seal(record)
        generation, revision = as_type(record["generation"], Count), as_type(record.get("revision", 0), Count)
        tags = as_type(record.get("tags", {}), dict[str, Count])
        return Head(record["dataset_id"], generation, revision, bytes(content), tags)


_LOOKED_AT: Final = 10_000
"""Most files of a folder without a dataset that are examined for a hint."""


def _what_else(url: str) -> str:
    """Return a hint for a folder or file that is not a dataset."""
    if os.path.isfile(url) and is_video(url):
        return f"look at a single video with fastvid.Video({url!r})"
    names = (name for _, _, names in os.walk(url) for name in names)
    videos = sum(map(is_video, itertools.islice(names, _LOOKED_AT)))
    if videos:
        return (
            f"it has {things(videos, 'video')}: `fastvid index {shlex.quote(url)} --out DIR` makes a dataset of them"
            " where they are, `fastvid shard` encodes them for faster reading"
        )
    if "://" not in url and not os.path.exists(url):
        return "there is no such folder: check its name, or create one with `fastvid shard`"
    return "create one with `fastvid shard`; to resume an interrupted job, run its command again"


def swap_head(
    storage: Storage, head: Head | None, *, dataset_id: str, generation: int, tags: Mapping[str, int] | None = None
) -> Head:
    """Replace the commit record if it is still `head`; otherwise raise ConflictError and change nothing.

    `head`: None if there must be no record yet.
    """
    revision = head.revision + 1 if head else 1
    tags = dict(head.tags if head and tags is None else tags or {})
    record: dict[str, Any] = {
        "format": schema.FORMAT,
        "version": ".".join(map(str, schema.FORMAT_VERSION)),
        "dataset_id": dataset_id,
        "generation": generation,
        "revision": revision,
    }
    content = sealed(record | ({"tags": tags} if tags else {}))
    if not storage.swap(schema.DATASET_JSON, content, head.content if head else None):
        raise conflict(storage)
    return Head(dataset_id, generation, revision, content, tags=tags)


def conflict(storage: Storage) -> ConflictError:
    """Return the error for a change whose dataset another process has changed since it was read."""
    told = "another process changed the dataset in the meantime; nothing was written"
    return ConflictError(told, file=storage.url, hint="run the command again")


@contextlib.contextmanager
def malformed(name: str, storage: Storage) -> Iterator[None]:
    """Raise FormatError, with a hint, for any error of the block, which parses a record."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{name} is malformed: {type(error).__name__}: {error}",
            file=storage.url,
            hint="restore the file from a copy of the dataset",
        ) from error


def check_seal(record: dict[str, Any]) -> None:
    """Raise ValueError if a record differs from its own SHA-256."""
    if record["sha256"] != _seal(record):
        raise ValueError("it differs from its SHA-256")


def _seal(record: Mapping[str, Any]) -> str:
    return sha256(_json({name: value for name, value in record.items() if name != "sha256"}))


def sealed(record: Mapping[str, Any]) -> bytes:
    """Return a record as JSON with a SHA-256 of its other fields, which `check_seal` compares."""
    return _json({**record, "sha256": _seal(record)})


def _json(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, indent=1, sort_keys=True) + "\n").encode()


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """One shard's entry in a generation's record."""

    name: str  # stem of its files
    bytes: Count  # size in bytes of the tar, or of the list of videos in place
    sha256: str  # of the tar, or of the list
    samples: Count  # number of samples in it
    profile: Mapping[str, Any] = field(default_factory=dict)
    encoder: Mapping[str, Any] = field(default_factory=dict)
    signals: str = ""  # SHA-256 of the file of signals; "" if there is none

    @property
    def is_in_place(self) -> bool:
        """Whether the shard only lists files of videos that the dataset does not contain, `fastvid.format.in_place`."""
        return self.profile.get("name") == schema.IN_PLACE

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of its files; the suffix of the tar, or of the list of videos in place, comes first."""
        suffixes = schema.IN_PLACE_SUFFIXES if self.is_in_place else schema.SHARD_SUFFIXES
        return (*suffixes, *(("signals.parquet",) if self.signals else ()))

    @property
    def data(self) -> str:
        """Name of its tar, or of its list of videos in place."""
        return f"{self.name}.{self.suffixes[0]}"


@dataclass(frozen=True, slots=True)
class Generation:
    """An immutable state of a dataset."""

    number: Count
    shards: tuple[ShardRecord, ...]  # in the order of the annotations' rows
    streams: Annotated[tuple[str, ...], Meta(min_length=1)] = ("rgb",)
    classes: tuple[str, ...] = ()
    note: str = ""
    parent: Count = 0  # number of the previous generation; 0 for the first
    revision: Count = 0  # revision of the commit record that the change started from; 0 for the first
    annotations_sha256: str = ""
    extras: Mapping[str, Any] = field(default_factory=dict)
    removed: Count | None = None  # number of samples that it hides; None in a record of an earlier fastvid
    time: str = ""
    reason: str = ""

    def root_of(self, shard: ShardRecord, moved: str | None = None) -> Root | None:
        """Return the root of the videos of a shard in place; None for a shard with a tar.

        `moved`: where the videos are now, if the user says that they were moved.
        """
        if not shard.is_in_place:
            return None
        if self.root is None:
            raise FormatError("generation does not say where its videos are", shard=shard.name)
        return parse_root(self.root, moved)

    @property
    def root(self) -> str | None:
        """Folder or URL below which the videos of its shards in place are; None if there are none."""
        found = self.extras.get(schema.IN_PLACE)
        return None if found is None else decode_name(str(found["root"]))

    @property
    def num_samples(self) -> int:
        """Number of samples in all shards, including removed ones."""
        return sum(shard.samples for shard in self.shards)


def commit_generation(
    storage: Storage, dataset_id: str, generation: Generation, annotations: pa.Table, *, head: Head | None = None
) -> Generation:
    """Make `generation` the current one. Readers see the previous generation until the last write.

    `annotations`: one row per sample in the order of the shards, with the columns of ANNOTATION_FIELDS. Returns the
    generation as recorded, with its time and the reason given by the `because` block around the call. Its number is
    higher than requested if an interrupted commit has used the requested one.
    """
    check_annotations(generation, annotations)
    if head is None and storage.exists(schema.DATASET_JSON):
        head = read_head(storage)
    current = head.generation if head else 0
    if current >= generation.number:
        raise ConflictError(
            f"generation {generation.number} already exists; nothing was written",
            file=storage.url,
            hint=f"run the command again: the current generation is {current}",
        )
    table = schema.to_parquet(annotations)
    generation = replace(
        generation,
        parent=current,
        revision=head.revision if head else 0,
        annotations_sha256=sha256(table),
        removed=int(pc.sum(annotations["removed"]).as_py() or 0),
        time=now(),
        reason=current_reason(),
    )
    generation = _claim(storage, generation)
    storage.write(schema.annotations_file(generation.number), table)
    faults.reach("manifest")
    swap_head(storage, head, dataset_id=dataset_id, generation=generation.number)
    faults.reach("committed")
    return generation


def check_annotations(generation: Generation, annotations: pa.Table) -> None:
    """Raise FormatError if annotations do not match a generation, or lack required columns."""
    if annotations.num_rows != generation.num_samples:
        raise FormatError(f"{annotations.num_rows} annotations for {generation.num_samples} samples")
    missing = [name for name in schema.ANNOTATION_FIELDS if name not in annotations.column_names]
    if missing:
        raise FormatError(f"annotations have no columns {', '.join(missing)}")
    keys = annotations["key"]
    if pc.count_distinct(keys).as_py() != len(keys):
        counts = pc.value_counts(keys)
        duplicate = next(c["values"] for c in counts.to_pylist() if c["counts"] > 1)
        raise FormatError("duplicate key in the annotations", key=duplicate)
    for name, kind in schema.ANNOTATION_FIELDS.items():
        if annotations.schema.field(name).type != kind:
            raise FormatError(f"column {name!r} has type {annotations.schema.field(name).type}, expected {kind}")


def read_generation(
    storage: Storage, which: int | str | None = None, head: Head | None = None
) -> tuple[str, Generation]:
    """Read the dataset's id and a generation, given by number or tag; by default the current one.

    `head`: the commit record, if it was read before.
    """
    head = head or read_head(storage)
    number = head.generation if which is None else _number(which, head, storage)
    # Numbers above the current one belong to unfinished or interrupted commits.
    if number > head.generation or not storage.exists(schema.generation_file(number)):
        raise StorageError(
            f"dataset has no generation {number}",
            file=storage.url,
            hint=f"use a number up to {head.generation}, the current one",
        )
    return head.dataset_id, _read_record(storage, number)


def _number(which: int | str, head: Head, storage: Storage) -> int:
    if not isinstance(which, str) or which.isdecimal():
        return check_integer("generation", int(which) if isinstance(which, str) else which)
    if which not in head.tags:
        known = ", ".join(sorted(head.tags))
        raise UsageError(
            f"no generation has the tag {which!r}",
            file=storage.url,
            hint=f"use one of {known}" if known else "give a number, as `fastvid log DIR` lists them",
        )
    return head.tags[which]


def read_annotations(storage: Storage, generation: Generation) -> pa.Table:
    """Read all rows of a generation's annotations, in the order of its shards."""
    name = schema.annotations_file(generation.number)
    try:
        content = storage.read(name)
    except StorageError as error:
        # Checked only after an error, to save every reader a request.
        if storage.exists(name):
            raise
        raise StorageError(
            f"the annotations {name} are missing",
            file=storage.url,
            hint="if `fastvid gc` ran just now, try again; otherwise restore the file from a copy of the dataset, or"
            " open an older generation; without either, `fastvid index DIR/*.tar --out NEW` makes a dataset of what the"
            " tars say",
        ) from error
    if sha256(content) != generation.annotations_sha256:
        raise FormatError(
            f"{name} differs from the SHA-256 in the generation",
            file=storage.url,
            hint="restore the file from a copy of the dataset, or open an older generation",
        )
    table = schema.from_parquet(content, file=name)
    if table.num_rows != generation.num_samples:
        raise FormatError(
            f"{table.num_rows} annotations for {generation.num_samples} samples",
            file=storage.url,
            hint="restore the generation's record and annotations from a copy of the dataset",
        )
    # Earlier versions stored a user's column "class" under this name, though it need not be the class of the label.
    names = table.column_names
    free = schema.SOURCE_CLASS if schema.SOURCE_CLASS not in names else f"source_{schema.SOURCE_CLASS}"
    return table.rename_columns([free if name == schema.CLASS else name for name in names])


def history(storage: Storage, head: Head) -> Iterator[Generation]:
    """Yield the committed generations that still exist, from the current one to the oldest."""
    number = head.generation
    while number:
        generation = _read_record(storage, number)
        yield generation
        number = generation.parent
        if number and not storage.exists(schema.generation_file(number)):
            # `fastvid gc` deletes generations between the newest ones and those that have a tag.
            older = [tagged for tagged in head.tags.values() if tagged < number]
            number = max((tagged for tagged in older if storage.exists(schema.generation_file(tagged))), default=0)


def _as_record(generation: Generation) -> dict[str, Any]:
    """Return a generation as JSON; shards without signals have no such entry, as before there were signals."""
    record = asdict(generation)
    for shard in record["shards"]:
        if not shard["signals"]:
            del shard["signals"]
    return record


def _claim(storage: Storage, generation: Generation) -> Generation:
    """Create the generation's record under its number, or under the next free one."""
    while not storage.swap(schema.generation_file(generation.number), sealed(_as_record(generation)), None):
        # If the existing record differs only in its time, it is an interrupted commit of the same change: resume it.
        # Do not reuse the number of any other record: its files may be about to be deleted.
        with contextlib.suppress(FormatError, StorageError):
            found = _read_record(storage, generation.number)
            if replace(found, time=generation.time) == generation:
                return found
        generation = replace(generation, number=generation.number + 1)
    return generation


def _read_record(storage: Storage, number: int) -> Generation:
    name = schema.generation_file(number)
    content = storage.read(name)
    with malformed(name, storage):
        record = json.loads(content)
        check_seal(record)
        if record["number"] != number:
            raise ValueError(f"it is the record of generation {record['number']!r}")
        json.dumps(record, ensure_ascii=False).encode()  # raises ValueError for text that cannot be encoded or printed
        # Records of an earlier fastvid have no time and no reason, but must have streams and classes.
        given = {name: value for name, value in record.items() if value is not None}
        found = as_type({"streams": None, "classes": None} | given, Generation)
        if found.parent >= found.number:
            raise ValueError(f"its parent is generation {found.parent}, which is not an earlier one")
        return found
