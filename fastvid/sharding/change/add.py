"""More samples for a dataset: new sources become new shards beside the old ones, and a new generation shows both.

The new sources are encoded as a job of their own inside the folder of the ledger's parts, so it is resumed like any
other when it was killed, and every other command sees that something is unfinished. Then its shards are copied beside
the old ones, a generation is committed, and the ledger gets the new rows; each step finds what an earlier run has done.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Final

from fastvid.errors import JobError, MissingDependency, UsageError
from fastvid.format.generations import Generation, read_annotations, read_generation
from fastvid.format.schema import LEDGER_PARTS, LEDGER_SCHEMA, MAX_KEY_BYTES
from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.media.limits import Limits
from fastvid.runtime import faults
from fastvid.sharding.change.edit import ClassNames
from fastvid.sharding.change.merge import KnownSource, known_sources, merge_parts
from fastvid.sharding.encode.profile import Profile
from fastvid.sharding.encode.streams import same_streams
from fastvid.sharding.engines.local_engine import LocalEngine
from fastvid.sharding.job.identity import differences
from fastvid.sharding.job.job import MAX_SECONDS, JobReport, check_amounts
from fastvid.sharding.job.ledger import read_part
from fastvid.sharding.job.lock import alone
from fastvid.sharding.job.plan import SAMPLES_PER_SHARD
from fastvid.sharding.job.run import Job
from fastvid.sharding.job.staging import Staging
from fastvid.sharding.sources.sources import Source, SourceList, assign_keys, encode_name
from fastvid.sharding.sources.tar_sources import gather_sources
from fastvid.sharding.work.messages import Settings
from fastvid.storage import Storage, open_storage

_FOLDER: Final = f"{LEDGER_PARTS}/add"
# A key and "/0000" of a part must stay a key.
_KEY_BYTES: Final = MAX_KEY_BYTES - 5
_HASH_DIGITS: Final = 8


@dataclass(frozen=True, slots=True)
class Added:
    """What `add_sources` did.

    Attributes:
        report: The job over the new sources; its ledger holds their rows only.
        generation: The generation that is current now.
        known: Sources that the dataset knew already.
    """

    report: JobReport
    generation: int
    known: int


def add_sources(
    dataset: str,
    sources: Sequence[str] | str,
    *,
    annotations: Sequence[str] | str | None = None,
    class_names: Sequence[str] = (),
    workers: int | None = None,
    samples_per_shard: int = SAMPLES_PER_SHARD,
    max_seconds: float = MAX_SECONDS,
    seed: int = 0,
    follow_links: bool = False,
    prefix: str | None = None,
    retry_rejected: bool = False,
    allow_encoder_change: bool = False,
    limits: Limits | None = None,
) -> Added:
    """Encodes the sources that a dataset does not know yet, in its own profile, and adds them.

    A source is known by its name among the sources, also when it was rejected or its samples were removed: what was
    taken out does not come back. New class names go behind the known ones.

    Args:
        dataset: Folder of the dataset.
        sources: Folders of videos, or single files.
        annotations: ``format:path``, one or several; by default the class of a video is its folder.
        class_names: Names for integer labels.
        workers: Processes; by default one for each core.
        samples_per_shard: Most sources in a shard.
        max_seconds: Longer videos are split into parts of equal length, none longer than this.
        seed: Of the order of samples in the new shards.
        follow_links: Take symbolic links that lead out of their folder.
        prefix: Put in front of the names of all sources, with a slash.
        retry_rejected: Retry sources that were rejected before.
        allow_encoder_change: Encode although the dataset, or the unfinished addition, was encoded by another build of
            ffmpeg; each shard records its own.
        limits: What one source may cost.

    Raises:
        UsageError: An argument is wrong, or a new source has the name of a known one.
        MissingDependency: There is no ffmpeg that can encode the dataset's profile.
        JobError: Another job works here, an unfinished one differs, or ffmpeg is another build.
        StorageError: There is no dataset, or it cannot be written; the job can go on later.
        WorkerError: Workers cannot be started.
    """
    check_amounts(workers=workers, samples_per_shard=samples_per_shard, max_seconds=max_seconds)
    storage = open_storage(dataset)
    with alone(storage) as check:
        _, generation = read_generation(storage)
        settings = _settings(generation, limits or Limits(), max_seconds, allow_encoder_change=allow_encoder_change)
        scratch = open_storage(f"{storage.url}/{_FOLDER}")
        if _is_merged(storage, scratch, generation):
            _delete_shards(scratch)
            Staging(scratch).end()
        every = gather_sources(sources, annotations, class_names=class_names, follow_links=follow_links)
        found = _new_sources(storage, generation, every, prefix=prefix, retry_rejected=retry_rejected)
        known = len(every.sources) - len(found.sources)
        if not found.sources:
            return Added(JobReport(storage.url, LEDGER_SCHEMA.empty_table(), every.ignored), generation.number, known)
        job = Job(scratch, found, settings, seed=seed, samples_per_shard=samples_per_shard, added_to=storage)
        parts = job.run(LocalEngine(settings, workers), check, allow_encoder_change=allow_encoder_change)
        faults.reach("encoded")
        number, ledger = merge_parts(storage, scratch, parts, found, settings.profile)
        _delete_shards(scratch)
        job.end()
    return Added(JobReport(storage.url, ledger, found.ignored), number, known)


def _settings(generation: Generation, limits: Limits, max_seconds: float, *, allow_encoder_change: bool) -> Settings:
    """The profile of the newest shard, and an ffmpeg that may encode it."""
    if not generation.shards:
        raise UsageError("the dataset has no shard whose profile could be taken", hint="make a new one")
    shard, build = generation.shards[-1], find_ffmpeg()
    try:
        profile = Profile(**shard.profile)
    except TypeError as error:
        raise UsageError(
            f"profile {shard.profile.get('name', 'unknown')!r} of the dataset is none that this fastvid encodes",
            hint="shard these sources into a dataset of their own",
        ) from error
    if not profile.runs_on(build):
        raise MissingDependency(f"{build.path} has no encoder {profile.encoder!r}", hint="name one in FASTVID_FFMPEG")
    changed = next(differences(shard.encoder, build.identity()), None)
    if changed is not None and not allow_encoder_change:
        name, old, new = changed
        raise JobError(
            f"the dataset was encoded by another build of ffmpeg: {name} was {old!r} and is {new!r}",
            hint="name that build in FASTVID_FFMPEG, or allow this one with --allow-encoder-change; its shards record"
            " it",
        )
    streams = same_streams(generation.extras, allow_encoder_change=allow_encoder_change)
    return Settings(profile, build, limits, max_seconds, streams)


def _is_merged(storage: Storage, scratch: Storage, generation: Generation) -> bool:
    """Whether all that is left in the scratch folder is in the dataset: its run was killed while clearing up."""
    names = scratch.list(f"{LEDGER_PARTS}/")
    if any(name.startswith(f"{LEDGER_PARTS}/staging/") for name in names):
        return False
    stems = [PurePosixPath(name).stem for name in names if name.endswith(".parquet")]
    rows = [row for stem in stems for row in read_part(scratch, stem).rows]
    known = known_sources(storage, generation) if rows else {}
    # The time that a source took tells this attempt at it from an earlier one.
    return all(row["source_id"] in known and known[row["source_id"]].seconds == row["seconds"] for row in rows)


def _delete_shards(scratch: Storage) -> None:
    """Delete the shards of a job; what tells that they are unfinished stays."""
    for name in scratch.list():
        if not name.startswith(f"{LEDGER_PARTS}/"):
            scratch.delete(name)


def _new_sources(
    storage: Storage, generation: Generation, every: SourceList, *, prefix: str | None, retry_rejected: bool
) -> SourceList:
    """The sources that the dataset does not know, with keys that it does not use, and labels that it can have.

    Raises:
        UsageError: A new source has the name of a known one, or a label is no class.
    """
    sources = every.sources
    if prefix is not None:
        sources = assign_keys([replace(source, id=f"{prefix}/{source.id}") for source in sources])
    known = known_sources(storage, generation)
    # A file that was whole may come again under another name, when another folder is given.
    paths = {row.path: row for name, row in known.items() if "#" not in name}
    new = []
    for source in sources:
        name = encode_name(source.id)
        row = known.get(name)
        if row is None and source.start is None and source.end is None:
            row = paths.get(encode_name(source.path))
        if row is None or (retry_rejected and row.reason is not None):
            new.append(source)
        elif row.reason is None and row.path not in (name, encode_name(source.path)) and row.bytes_in != source.size:
            raise UsageError(
                f"source {name!r} is in the dataset already, from another file",
                file=row.path,
                hint="--prefix NAME puts a name in front of the names of all new sources",
            )
    names = ClassNames(generation.classes, [source.label for source in new], grow=not _numbered(every))
    for source in new:
        names.index(source.label, source.key)
    return SourceList(_free_keys(storage, generation, new, known), every.classes, every.ignored)


def _numbered(found: SourceList) -> bool:
    """Whether labels are positions in the dataset's classes rather than names."""
    return bool(found.classes) and all(name.isdecimal() for name in found.classes)


def _free_keys(
    storage: Storage, generation: Generation, sources: Sequence[Source], known: Mapping[str, KnownSource]
) -> tuple[Source, ...]:
    """Gives sources whose key is in use, or was, or is a folder of such a key, another key."""
    table = read_annotations(storage, generation.number)
    new = {encode_name(source.id) for source in sources}
    rows = zip(table["key"].to_pylist(), table["source_id"].to_pylist(), strict=True)
    # An interrupted addition may have committed these very sources already.
    taken = {key for key, source_id in rows if source_id not in new}
    taken |= {row.key for name, row in known.items() if row.key is not None and name not in new}
    folders = {folder for key in taken for folder in _folders(key)}

    def free(key: str) -> bool:
        return key not in taken and key not in folders and not any(folder in taken for folder in _folders(key))

    renamed = []
    for source in sources:
        key, digits = source.key, _HASH_DIGITS
        while not free(key):
            digest = hashlib.blake2b(encode_name(source.id).encode()).hexdigest()[:digits]
            key = f"{source.key[: _KEY_BYTES - digits - 1].rstrip('/').replace('/', '_')}-{digest}"
            digits += 1
        renamed.append(replace(source, key=key))
    return tuple(renamed)


def _folders(key: str) -> Iterator[str]:
    return (key[:cut] for cut, letter in enumerate(key) if letter == "/")
