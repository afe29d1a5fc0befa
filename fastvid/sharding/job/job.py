"""The sharding job: makes a dataset of raw videos; if killed at any moment, it resumes when run again.

Every source gets one ledger row. The output depends only on the sources, the profile and the encoder build, not on the
number of workers, the order in which they finish, or interruptions. `run` is the common procedure of all jobs that make
a dataset, whether they encode, index, or import a LeRobot dataset.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import pyarrow as pa

from fastvid.errors import JobError, UsageError
from fastvid.format.generations import Generation, commit_generation, read_generation
from fastvid.format.schema import DATASET_JSON, LEDGER
from fastvid.format.tar import TarDigest
from fastvid.format.writing import sample_members, write_shard
from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.media.index_video import Proof
from fastvid.media.reasons import Reason
from fastvid.runtime.names import decode_name
from fastvid.runtime.values import check_choice, count, size, things
from fastvid.sharding.encode.flow import PICTURES, choose_streams
from fastvid.sharding.encode.profiles import Profile, Settings, get_profile
from fastvid.sharding.job import ledger
from fastvid.sharding.job.frozen import Changes, Roots, compare_sources, starting
from fastvid.sharding.job.ledger import PackedSample, Part
from fastvid.sharding.job.lock import lock_folder, scratch_folder
from fastvid.sharding.job.members import annotate_members, annotation_row, annotations_of, dataset_record, with_record
from fastvid.sharding.job.plan import SAMPLES_PER_SHARD, JobPart, differences, digest, job_identity
from fastvid.sharding.job.run import How, Job, ShardWork, SourceWork, View
from fastvid.sharding.sources.sources import Source, SourceList
from fastvid.sharding.sources.tars import is_dataset, paths_of
from fastvid.sharding.work.tasks import EncodedSample
from fastvid.storage import Storage, open_storage

# Hex digits of the job's identity that form the dataset's id.
_ID_DIGITS = 32


_LOG = logging.getLogger(__name__)

MAX_SECONDS: Final = 600.0
"""Maximum duration of a sample in seconds, by default; longer videos are split."""

UNDIVIDED: Final = 1e9
"""A maximum duration in seconds that no video reaches, so that none is split."""


@dataclass(frozen=True, slots=True)
class JobReport:
    """The result of a job.

    Attributes:
        dataset: The dataset's folder.
        ledger: One row per source, with the columns of LEDGER_SCHEMA; for a part of a job, those of its shards.
        ignored: Number of files that are not sources, by kind.
        part: The part that was made, after which there is no dataset yet; None for the whole job.
    """

    dataset: str
    ledger: pa.Table = field(repr=False)
    ignored: Mapping[str, int]
    part: JobPart | None = None

    @property
    def packed(self) -> int:
        """Number of sources that became samples."""
        return sum(status == "packed" for status in self.ledger["status"].to_pylist())

    @property
    def duplicates(self) -> int:
        """Number of sources with the same bytes as an earlier one."""
        return sum("duplicate" in (warnings or ()) for warnings in self.ledger["warnings"].to_pylist())

    @property
    def rejected(self) -> Mapping[Reason, int]:
        """Number of rejected sources, by reason."""
        return Counter(Reason(reason) for reason in self.ledger["reason"].to_pylist() if reason is not None)


Commit = Callable[[ShardWork, Sequence[Part], str], pa.Table]
"""Commits the shards of a job, and returns the ledger rows of its sources; the text is the name of the command."""


def commit_job(work: ShardWork, parts: Sequence[Part], command: str) -> pa.Table:
    """Write the ledger, commit the first generation, and return the ledger."""
    storage, found, identity = work.storage, work.found, work.committed_identity(parts)
    rows = [row for part in parts for row in part.rows]
    rows += [ledger.problem_row(source, *source.problem) for source in found.sources if source.problem is not None]
    rows, hidden = ledger.settle_rows(rows, ledger.read_blocked(storage), drop_duplicates=work.drop_duplicates)
    table = ledger.write_ledger(storage, rows, identity)
    shards = ledger.shard_records(parts, work.profile)
    if not shards:
        reasons = Counter(table["reason"].to_pylist()).most_common()
        raise JobError(
            f"none of {table.num_rows} sources could be packed: "
            + ", ".join(f"{count} {reason}" for reason, count in reasons),
            file=storage.url,
            hint=f"see {LEDGER} for the reason of each",
        )
    labels = {name: number for number, name in enumerate(found.classes)}
    note = f"fastvid {command}"
    generation = Generation(1, shards, work.streams, found.classes, note=note, extras=work.extras)
    commit_generation(storage, dataset_id(identity), generation, annotations_of(parts, found, labels, hidden))
    return table


def dataset_id(identity: Mapping[str, Any]) -> str:
    """Return the id of the dataset that a job makes: the same job makes the same dataset."""
    return digest(identity)[:_ID_DIGITS]


def run(
    storage: Storage, how: How, prepare: Callable[[], ShardWork | JobReport], commit: Commit = commit_job
) -> JobReport:
    """Make a dataset in a folder, or a part of it: lock it, process what is missing, and commit unless it is a part.

    `prepare` returns the work, or the report if there is nothing to do; it is called while the folder is locked.
    """
    with lock_folder(storage, how.mine, how.command) as lease:
        work = prepare()
        if isinstance(work, JobReport):
            if how.mine is None:
                lease.end()  # delete the record of a run that was killed when everything was done
            return work
        if work.found.sources:  # a merge has none
            tell_sources(work)
        job, blocked = Job(work, how), ledger.read_blocked(storage)
        if work.records is None and storage.exists(DATASET_JSON):
            # If this job was killed after its commit, only its temporary files have to be deleted.
            is_own = job.staging.job() == work.identity
            table = ledger.read_ledger(storage)[0] if is_own else finished_ledger(storage, work.identity, work.found)
        else:
            parts = job.run(lease, blocked)
            if how.mine is not None:
                rows = ledger.rows_table(row for part in parts for row in part.rows)
                return JobReport(storage.url, rows, work.found.ignored, how.mine)
            try:
                table = commit(work, parts, how.command)
            except JobError:
                if all(part.digest is None for part in parts):
                    job.end()  # the same command tries all sources again: servers and disks may answer then
                raise
        job.end()
        lease.end()
    return JobReport(storage.url, table, work.found.ignored)


def tell_sources(work: ShardWork) -> None:
    """Log the number of videos and classes, and the size, so that a mistake shows before the job works for hours."""
    found, cameras = work.found, work.sources_per_sample
    number = things(len(found.sources) // cameras, "video" if cameras == 1 else "episode")
    classes = count(len(found.classes)) + (" class" if len(found.classes) == 1 else " classes")
    bare = sum(not source.class_names for source in found.sources) if found.classes else 0
    if bare:
        classes += f" ({count(bare)} without label)"
    of = f" of {cameras} cameras" if cameras > 1 else f" in {classes}"
    total = bytes_of(found.sources)
    _LOG.info("%s%s%s", number, of, f", {size(total)}" if total else "")  # of web addresses it is unknown


def bytes_of(sources: Iterable[Source]) -> int:
    """Return the bytes of sources; a file whose clips, or episodes of a camera, follow each other counts once."""
    total, last = 0, dict[str, tuple[object, ...]]()
    for source in sources:
        file = source.path, source.member
        total += source.size * (last.get(source.stream) != file)
        last[source.stream] = file
    return total


def run_job(
    sources: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    annotations: Sequence[str] | str | None = None,
    columns: str | Mapping[str, str] | None = None,
    class_names: Sequence[str] = (),
    profile: str | Profile = "compact",
    streams: Sequence[str] | str = ("rgb",),
    audio: str = "drop",
    flow: str = "dis",
    flow_bound: float | None = None,
    engine: str = "local",
    ray_address: str | None = None,
    workers: int | None = None,
    samples_per_shard: int = SAMPLES_PER_SHARD,
    max_seconds: float = MAX_SECONDS,
    max_bad_frames: int | str | None = None,
    seed: int = 0,
    follow_links: bool = False,
    allow_encoder_change: bool = False,
    part: JobPart | str | None = None,
    scratch: str | os.PathLike[str] | None = None,
    reject_unreadable: bool = False,
    drop_duplicates: bool = False,
    command: str = "shard",
    limits: Limits | None = None,
) -> JobReport:
    """Encode raw videos into an indexed WebDataset, as ``fastvid shard`` does.

    Run again with the same arguments after an interruption, it resumes; ``engine``, ``workers``, ``part`` and
    ``limits`` may differ.

    Args:
        sources: Folders of videos, single files, webdataset tars with one video per sample, or datasets; paths, or
            URLs: ``s3://`` and ``gs://`` folders and files, ``http(s)://`` files. Not needed if the annotations name
            URLs.
        out: Folder of the dataset: a path, or a ``s3://`` or ``gs://`` URL.
        annotations: ``format:path``, one or several; by default the class of a video is its folder.
        columns: Names for the columns of annotation tables, such as ``path=videoid,caption=text``.
        class_names: Names for integer labels.
        profile: How to encode, by name or as a `Profile`.
        streams: Video streams of every sample: "rgb", or "rgb,flow" to add optical flow.
        audio: "drop", "copy" (keep AAC and ALAC packets unchanged, encode other codecs) or "aac" (encode all).
        flow: Method of optical flow: "dis" or "tvl1".
        flow_bound: Largest stored motion, in pixels per frame; 20 by default.
        engine: Where to encode: "local", or "ray" for all nodes of a Ray cluster.
        ray_address: Address of the cluster's head; by default RAY_ADDRESS, or else a new cluster on this machine.
        workers: Sources encoded in parallel; by default one per core.
        samples_per_shard: Maximum number of sources in a shard.
        max_seconds: Longer videos are split into segments of equal length, none longer than this.
        max_bad_frames: The most frames that may be left out of a damaged video to keep its longest run without damage:
            a number, or a percentage such as "5%"; by default damaged videos are rejected. See
            `fastvid.sharding.encode.salvage`.
        seed: Seed of the order of samples in the shards.
        follow_links: Whether to follow symbolic links that point outside their folder.
        allow_encoder_change: Whether to resume a job that began with another build of ffmpeg; each shard records its
            build.
        part: Make only every N-th shard, from the I-th, as ``I/N``, without committing. Parts may run in parallel, on
            any machines that can access `out`; after they have finished, the same call without `part` makes the
            remaining shards and commits the dataset.
        scratch: Local folder for samples that wait to be packed; by default `out` itself, or for an object store the
            folder for temporary files. A resumed job finds its samples there.
        reject_unreadable: Reject sources that their disk does not deliver, even in a retry at the end. By default the
            job stops at its end and tries them again when it is resumed.
        drop_duplicates: Hide the samples of a source with the same bytes as an earlier one, by the order of their ids.
            They are found when the dataset is committed; `fastvid compact` then frees their bytes.
        command: Name of the command, for ``fastvid status`` and the history.
        limits: Limits per source.

    Returns:
        The report, also if sources were rejected.

    Raises:
        UsageError: If an argument is wrong, or there is nothing to do.
        MissingDependency: If there is no ffmpeg, or no Ray for engine "ray".
        JobError: If another job, or the same part, is running in `out`, the unfinished job there differs, or no source
            could be packed.
        StorageError: If `out` cannot be written or is full, or a disk or store does not deliver sources; run again to
            resume.
        WorkerError: If workers cannot be started, or the Ray cluster is gone; run again to resume.
    """
    how = How(engine, ray_address, workers, part, reject_unreadable, allow_encoder_change, command)
    how.check(samples_per_shard, max_seconds=max_seconds)
    settings = choose_settings(
        profile,
        streams=streams,
        audio=audio,
        flow=flow,
        flow_bound=flow_bound,
        max_seconds=max_seconds,
        max_bad_frames=max_bad_frames,
        limits=limits,
    )
    how.open_engine(settings)  # raises for wrong arguments, before the slow listing of sources
    looking: dict[str, Any] = {"columns": columns, "class_names": class_names, "follow_links": follow_links}
    looking["rate"] = settings.profile.fps
    storage = open_storage(out)
    packing: dict[str, Any] = {"seed": seed, "samples_per_shard": samples_per_shard, "scratch": scratch}

    def make(found: SourceList) -> ShardWork:
        return EncodeShards(storage, found, settings, **packing, drop_duplicates=drop_duplicates)

    def commit(work: ShardWork, parts: Sequence[Part], name: str) -> pa.Table:
        inherit_blocks(storage, sources)
        return commit_job(work, parts, name)

    return run(storage, how, starting(storage, sources, annotations, looking, how.mine, make), commit)


def inherit_blocks(storage: Storage, sources: Roots) -> None:
    """Block what the datasets among a job's sources block: what was taken down there must not come back here."""
    for path in filter(is_dataset, paths_of("source", sources)):
        ledger.block(storage, ledger.read_blocked(open_storage(path)))


def choose_settings(
    profile: str | Profile = "compact",
    *,
    streams: Sequence[str] | str = ("rgb",),
    audio: str = "drop",
    flow: str = "dis",
    flow_bound: float | None = None,
    max_seconds: float = MAX_SECONDS,
    max_bad_frames: int | str | None = None,
    limits: Limits | None = None,
) -> Settings:
    """Return how a job's sources are encoded, with this machine's ffmpeg; arguments as for `run_job`."""
    chosen = get_profile(profile)
    build = chosen.completed(find_ffmpeg())
    if not chosen.runs_on(build):
        raise UsageError(f"{build.path} has no encoder {chosen.encoder!r}", hint="name another in FASTVID_FFMPEG")
    extras = choose_streams(streams, audio=audio, method=flow, bound=flow_bound)
    if chosen.copies and extras != PICTURES:
        raise UsageError("profile 'copy' copies pictures without audio or flow", hint="use --profile compact")
    bad = None if max_bad_frames is None else str(max_bad_frames)
    return Settings(chosen, build, limits or Limits(), max_seconds, extras, max_bad_frames=bad)


def index_settings(limits: Limits | None, proof: str, *, hdr: str | None = None) -> Settings:
    """Return the settings of a job that indexes videos."""
    check_choice("invalid proof {}", proof, Proof)
    # Of the profile only `hdr` is relevant, because nothing is encoded.
    profile = get_profile("compact").changed(hdr=hdr)
    return Settings(profile, find_ffmpeg(), limits or Limits(), MAX_SECONDS, proof=Proof(proof))


def transcode_dataset(
    dataset: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    audio: str | None = None,
    samples_per_shard: int | None = None,
    **options: Any,
) -> JobReport:
    """Encode the samples of a dataset again, as ``fastvid transcode`` does.

    Keys, labels, all classes, captions, splits, parents and other columns are kept; samples are never divided, and
    removed ones are left out. Videos lose quality each time they are encoded.

    Args:
        dataset: Folder of the dataset: a path, or a ``s3://`` or ``gs://`` URL.
        out: Folder of the new one.
        audio: "copy" keeps the sound as it is, "drop" omits it; None keeps it if the dataset has sound.
        samples_per_shard: Maximum number of samples in a shard; by default that of the dataset's shards.
        options: Other arguments of `run_job`: ``profile``, ``streams``, ``flow``, ``flow_bound``, ``engine``,
            ``ray_address``, ``workers``, ``seed``, ``allow_encoder_change``, ``part``, ``scratch`` and ``limits``.

    Raises:
        UsageError: If an argument is wrong; otherwise as `run_job`.
    """
    if audio not in (None, "copy", "drop"):
        raise UsageError(f"sound of a dataset cannot be encoded as {audio!r}", hint="use copy or drop")
    generation = read_generation(open_storage(dataset))[1]
    most = max((shard.samples for shard in generation.shards), default=1)
    return run_job(
        [dataset],
        out,
        audio=audio or ("copy" if "audio" in generation.extras else "drop"),
        samples_per_shard=most if samples_per_shard is None else samples_per_shard,
        max_seconds=UNDIVIDED,
        command="transcode",
        **options,
    )


def finished_ledger(storage: Storage, identity: Mapping[str, Any], found: SourceList) -> pa.Table:
    """Return the ledger of the existing dataset, if the same job made it from the same sources; else raise."""
    name, hint = "its ledger", "choose another folder"
    # Videos in place are indexed again where they lie.
    again = ", `fastvid index DIR` what changed" if "proof" in identity else " or changed"
    takes = f"`fastvid add` takes what is new{again}"
    if storage.exists(LEDGER):
        table, before = ledger.read_ledger(storage)
        changes = list(differences(before, identity))
        if not changes:
            _LOG.info("the dataset in %s is complete", storage.url)
            if told := str(_since(table, found)):
                _LOG.warning("since then %s; %s", told, takes)
            return table
        name = changes[0][0]
        if all(one.startswith(("sources.", "annotations.")) for one, _, _ in changes):
            told = str(_since(table, found))
            name = f"its sources: since then {told}" if told else "its annotations"
            hint = takes if told else "`fastvid relabel DIR --annotations FORMAT:FILE` takes what changed in them"
    raise UsageError(f"the folder contains a dataset made by a job that differs in {name}", file=storage.url, hint=hint)


def _since(table: pa.Table, found: SourceList) -> Changes:
    """Return which sources are new, changed or gone, compared with a ledger."""
    rows = table.select(["source_id", "bytes_in", "source_tag"]).to_pylist()
    known = (Source(decode_name(row["source_id"]), "", row["bytes_in"] or 0, tag=row["source_tag"]) for row in rows)
    return compare_sources(known, found.sources)


class EncodeShards(SourceWork):
    """Encodes sources into new tars. `scratch`: see `run_job`; `packing`: see `SourceWork`."""

    def __init__(
        self,
        storage: Storage,
        found: SourceList,
        settings: Settings,
        *,
        scratch: str | os.PathLike[str] | None = None,
        **packing: Any,
    ) -> None:
        super().__init__(storage, found, settings, **packing)
        self.scratch = scratch_folder(storage, scratch)
        self.identity = {
            **job_identity(found, settings, **self.packing),
            **({"drop_duplicates": True} if self.drop_duplicates else {}),
        }
        self.encoder, self.profile = self.identity["encoder"], self.identity["profile"]
        self.streams, self.extras = settings.streams.video, settings.streams.to_json()

    def made(self, views: Sequence[View]) -> Iterator[tuple[PackedSample, tuple[str, Mapping[str, bytes]]]]:
        """See `SourceWork`."""
        for source, sample in self._samples(views):
            packed = PackedSample.of(source, sample)
            row = annotation_row(packed, source, self.labels)
            members = sample_members(sample.meta, sample.streams)
            yield packed, (sample.key, annotate_members(members, row, self.classes))

    def pack(self, shard: int, samples: Iterator[tuple[str, Mapping[str, bytes]]]) -> TarDigest | None:
        """See `SourceWork`."""
        first = next(samples, None)
        if first is None:
            return None
        made = Generation(self.generation, (), self.streams, self.classes, extras=self.extras)
        members = with_record(chain([first], samples), dataset_record(made, self.profile, self.encoder))
        return write_shard(self.storage, self.stems[shard], members, streams=self.streams, scratch=self.scratch)

    def _samples(self, views: Sequence[View]) -> Iterator[tuple[Source, EncodedSample]]:
        """Yield the encoded samples of packed sources, each with the source whose name and annotations it gets."""
        for source, outcome in views:
            yield from ((source, sample) for sample in outcome.samples)
