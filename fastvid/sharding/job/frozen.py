"""Freezes the sources of a job: the first process that runs it stores the list by shard, and all others read it.

So new files in the folders do not prevent that a job resumes, and a part of a job reads only the sources of its own
shards. The list is stored next to the record of the job, in two files: one has a compressed JSON for each shard, the
other says where each of these begins.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Final

from fastvid.errors import JobError
from fastvid.format.schema import DATASET_JSON, LEDGER_PARTS
from fastvid.runtime.names import encode_name
from fastvid.runtime.values import as_type, things
from fastvid.sharding.job.lock import Staging, first_of
from fastvid.sharding.job.members import columns_from_json, columns_to_json
from fastvid.sharding.job.plan import JobPart, digest
from fastvid.sharding.job.run import ShardWork
from fastvid.sharding.sources.sources import BY_ID, Source, SourceList, check_exists, told_names
from fastvid.sharding.sources.spool import Spool, sort
from fastvid.sharding.sources.tars import gather_sources, paths_of
from fastvid.storage import Storage
from fastvid.storage.urls import is_remote

_LOG = logging.getLogger(__name__)

_FOLDER: Final = f"{LEDGER_PARTS}/plan"
_NAME_DIGITS: Final = 16
_LISTED: Final = ("sources", "annotations", "root")  # the fields of a job's identity about its sources
_FIELDS: Final = {one.name: one.default for one in fields(Source)}


Roots = Sequence[str | os.PathLike[str]] | str | os.PathLike[str]
"""Paths and URLs of sources."""


def given_sources(roots: Roots, annotations: Sequence[str] | str | None, **looking: Any) -> dict[str, Any]:
    """Return the arguments that name a job's sources, as JSON: if they are equal, two processes list the same files."""
    places = [path if is_remote(path) else os.path.abspath(path) for path in paths_of("source", roots)]
    for path in itertools.filterfalse(is_remote, places):
        check_exists(path)
    return {"sources": places, "annotations": annotations and paths_of("annotations", annotations), **looking}


def starting(
    storage: Storage, sources: Roots, annotations: Any, looking: Mapping[str, Any], part: JobPart | None, make: Any
) -> Callable[[], Any]:
    """Return a function that calls `start_work`; the caller calls it when the folder is locked.

    For a part of a job only the existence of local sources is checked here: the first of the parts lists them.
    """
    gather = partial(gather_sources, sources, annotations, **looking)
    return partial(start_work, storage, given_sources(sources, annotations, **looking), part, gather, make)


def start_work(
    storage: Storage,
    given: Mapping[str, Any],
    part: JobPart | None,
    gather: Callable[[], SourceList],
    make: Callable[[SourceList], Any],
) -> Any:
    """Return `make` of the job's frozen sources; if there are none, list the sources and freeze them.

    `storage`: the folder of the job's records. `given`: see `given_sources`; the frozen list is used only if it is the
    same as when the job began. `gather`: lists the sources; not called for a part of a job that finds a frozen list.
    `make`: makes the work, or a report, from a list of sources.
    """
    staging = Staging(storage)
    with nullcontext(True) if part is None else first_of(storage, lambda: staging.job() is not None):
        begun = staging.job()
        found = _thaw(storage, begun, given, part)
        if found is not None:
            if part is None:
                _tell(compare_sources(found.sources, gather().sources), storage)
            return make(found)
        work = make(gather())
        if isinstance(work, ShardWork) and begun is None and not storage.exists(DATASET_JSON):
            # Do not store URLs with a query, which may be a signature: that is secret, and expires.
            if not any("?" in source.path and is_remote(source.path) for source in work.found.sources):
                _freeze(storage, work, given)
            work.is_begun = staging.begin(work.identity) is None
        return work


@dataclass(frozen=True, slots=True)
class Changes:
    """The names of sources that differ between two listings."""

    arrived: Sequence[str]
    gone: Sequence[str]
    changed: Sequence[str]
    annotated: Sequence[str] = ()  # those with other labels or columns

    def __str__(self) -> str:
        kinds = {"new": self.arrived, "changed": self.changed, "gone": self.gone}
        return ", ".join(f"{len(names)} {told_names(kind, names)}" for kind, names in kinds.items() if names)


def compare_sources(old: Iterable[Source], new: Iterable[Source]) -> Changes:
    """Return how a listing of sources differs from an earlier one."""
    before, now = ({source.id: source for source in listing} for listing in (old, new))
    both = [(before[name], now[name]) for name in sorted(before.keys() & now.keys())]
    return Changes(
        sorted(now.keys() - before.keys()),
        sorted(before.keys() - now.keys()),
        [one.id for one, other in both if not other.is_version(one.size, one.tag)],
        [one.id for one, other in both if _notes(one) != _notes(other)],
    )


def _notes(source: Source) -> str:
    return json.dumps([source.label, dict(source.columns)], sort_keys=True, default=str)


def _tell(changes: Changes, storage: Storage) -> None:
    """Log which sources are new, changed or gone since they were listed; raise JobError if annotations changed."""
    if changes.annotated:
        raise JobError(
            f"the annotations of {things(len(changes.annotated), 'source')} have changed since the unfinished job here"
            f" began, such as of {encode_name(changes.annotated[0])!r}",
            file=storage.url,
            hint="resume it with the annotations as they were, or choose another folder",
        )
    if told := str(changes):
        _LOG.warning("since the job began: %s; it keeps its list, and `fastvid add` takes what is new or changed", told)


def _freeze(storage: Storage, work: ShardWork, given: Mapping[str, Any]) -> None:
    name, ends = _name(work.identity), [0]
    problems = [source for source in work.found.sources if source.problem is not None]
    with storage.create(f"{name}.sources") as file:
        for shard in [*work.shards, problems]:
            data = zlib.compress(json.dumps([_to_json(source) for source in shard]).encode(), 1)
            file.write(data)
            ends.append(ends[-1] + len(data))
    head = {"given": given, "classes": work.found.classes, "ignored": work.found.ignored, "ends": ends}
    storage.write(f"{name}.json", json.dumps(head).encode())


def _thaw(
    storage: Storage, identity: Mapping[str, Any] | None, given: Mapping[str, Any], part: JobPart | None
) -> SourceList | None:
    """Return the frozen sources, for a part of a job only its own; None if there are none, or `given` differs."""
    if identity is None or "order" not in identity or not storage.exists(f"{_name(identity)}.json"):
        return None
    name = _name(identity)
    head = json.loads(storage.read(f"{name}.json"))
    if head["given"] != json.loads(json.dumps(given)):
        return None
    ends, count = head["ends"], len(head["ends"]) - 2
    wanted = [number for number in range(count + 1) if part is None or (number < count and part.has(number))]
    made, shards = Spool[Source](), list[Sequence[Source]]([()] * (count + 1))
    places = [(ends[number], memoryview(bytearray(ends[number + 1] - ends[number]))) for number in wanted]
    storage.read_into(f"{name}.sources", places)
    for number, (_, data) in zip(wanted, places, strict=True):
        read = [_from_json(told) for told in json.loads(zlib.decompress(data))]
        made.extend(read)
        shards[number] = made[len(made) - len(read) :]
    sources = Spool(sort(made, BY_ID))
    listed = {key: identity[key] for key in _LISTED if key in identity}
    return SourceList(sources, tuple(head["classes"]), head["ignored"], shards[:count], listed)


def _name(identity: Mapping[str, Any]) -> str:
    # Not the whole identity, which changes if the job is resumed with another encoder, but only its sources.
    told = digest([identity.get(key) for key in ("sources", "annotations", "order")])
    return f"{_FOLDER}/{told[:_NAME_DIGITS]}"


def _to_json(source: Source) -> dict[str, Any]:
    """Return the fields of a source that differ from their default, as JSON."""
    told = {name: value for name, default in _FIELDS.items() if (value := getattr(source, name)) != default}
    return told | {"columns": columns_to_json(told["columns"])}


def _from_json(told: dict[str, Any]) -> Source:
    columns = columns_from_json(told.pop("columns"))
    return replace(as_type(told, Source), columns=columns)
