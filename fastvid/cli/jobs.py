"""``fastvid shard``, ``add``, ``index`` and ``transcode``: the commands that make a dataset, or add to one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal

from fastvid.cli.command import forwards, read_text
from fastvid.errors import UsageError, visible
from fastvid.format.generations import read_generation
from fastvid.format.schema import DATASET_JSON
from fastvid.media.index_video import Proof
from fastvid.media.reasons import explain_note
from fastvid.runtime.names import encode_name, is_video
from fastvid.runtime.values import check_integers, duration, size, things
from fastvid.sharding.change.add import add_sources
from fastvid.sharding.encode.profiles import PROFILES as PROFILES
from fastvid.sharding.encode.profiles import get_profile
from fastvid.sharding.engines.local import ENGINES as ENGINES
from fastvid.sharding.in_place import index_videos, reindex
from fastvid.sharding.job.estimate import SAMPLED, DryRun, estimate_job
from fastvid.sharding.job.index import are_own, index_tars, rebuild, restore_dataset
from fastvid.sharding.job.job import MAX_SECONDS, JobReport, bytes_of, run_job, transcode_dataset
from fastvid.sharding.job.ledger import whole_name
from fastvid.sharding.job.lock import Staging
from fastvid.sharding.job.plan import SAMPLES_PER_SHARD
from fastvid.sharding.lerobot.jobs import index_lerobot, new_episodes, shard_lerobot
from fastvid.sharding.lerobot.read import EPISODES_PER_SHARD, is_lerobot
from fastvid.sharding.sets import Selection, make_subset
from fastvid.sharding.sources.annotations import FORMATS as FORMATS
from fastvid.sharding.sources.sources import public_path
from fastvid.sharding.sources.tars import is_tar
from fastvid.storage import open_storage

_LOG = logging.getLogger(__name__)
EXIT_REJECTED: Final = 3
_NAMES: Final = 10  # maximum number of names in a line of an estimate
_SHOWN: Final = 20  # maximum number of rejected sources listed in the summary


@dataclass(frozen=True)
class Labels:
    """Annotations of videos: labels, captions and other columns.
    Attributes:
        annotations (FORMAT:PATH): A format, {FORMATS}, and a file or folder, also s3:// and gs:// URLs; may be
            repeated.
        columns (NAME=COLUMN,...): Names for the columns of csv, json, jsonl, parquet and hf tables, such as
            path=videoid,start=t0,end=t1,caption=text; a.b is a nested value, segments=COLUMN a list of segments.
        classes (FILE): Class names for integer labels, one per line.
    """

    annotations: tuple[str, ...] = ()
    columns: str | None = None
    classes: str | None = None

    def options(self) -> dict[str, Any]:
        """As keyword arguments of a job."""
        names = [] if self.classes is None else read_text(self.classes, "class names").splitlines()
        return {"annotations": self.annotations, "columns": self.columns, "class_names": list(filter(None, names))}


@dataclass(frozen=True)
class Encoding:
    """How videos are encoded.

    Attributes:
        profile (NAME): One of {PROFILES}.
        short_side (PIXELS): Short side (default: 256); smaller videos keep theirs, rounded down to a multiple of 16.
        enlarge: Enlarge smaller videos to the short side.
        crf (N): Quality, lower is better (default: the profile's).
        gop (FRAMES): Key frame interval (default: the profile's).
        fps (RATE): Frame rate, such as 15 or 30000/1001 (default: each source's).
        hdr: Tone-map high dynamic range, or keep its values as they are (default: tonemap).
        streams (NAMES): rgb, or rgb,flow.
        flow: Optical flow method.
        flow_bound (PIXELS): Largest motion per frame (default: 20).
    """

    profile: str = "compact"
    short_side: int | None = None
    enlarge: bool = False
    crf: int | None = None
    gop: int | None = None
    fps: str | None = None
    hdr: Literal["tonemap", "keep"] | None = None
    streams: str = "rgb"
    flow: Literal["dis", "tvl1"] = "dis"
    flow_bound: float | None = None

    def options(self) -> dict[str, Any]:
        """As keyword arguments of a job."""
        given = asdict(self) | {"enlarge": self.enlarge or None}
        other = {name: given.pop(name) for name in ("streams", "flow", "flow_bound")}
        return {"profile": get_profile(given.pop("profile")).changed(**given), **other}


@dataclass(frozen=True)
class Machines:
    """Where the work of a job is done; jobs can be shared among machines.

    Attributes:
        engine ({ENGINES}): Where to process sources.
        ray_address (HOST:PORT): Address of the Ray cluster (default: RAY_ADDRESS, or a cluster on this machine).
        workers (N): Sources processed at once (default: one per core).
        part (I/N): Only write shards I, I+N, I+2N, ... (I counts from 0) and commit nothing; finish with the same
            command without --part. For auto or auto/N, I is the number of the task of a Slurm array, of the pod of an
            indexed job of Kubernetes, or the rank under torchrun.
    """

    engine: str = "local"
    ray_address: str | None = None
    workers: int | None = None
    part: str | None = None


@dataclass(frozen=True)
class Packing:
    """How sources become samples of new shards.

    Attributes:
        samples_per_shard (N): Most videos in one shard.
        max_seconds (S): Split longer videos into samples of at most S seconds.
        max_bad_frames (N|P%): Keep the longest run without damage of a damaged video if at most N frames, or P % of its
            frames, are left out (default: reject it).
        seed (N): Seed of the order in the new shards.
        drop_duplicates: Hide samples of files with the same bytes as an earlier one; `fastvid compact` frees their
            bytes.
    """

    samples_per_shard: int = SAMPLES_PER_SHARD
    max_seconds: float = MAX_SECONDS
    max_bad_frames: str | None = None
    seed: int = 0
    drop_duplicates: bool = False


@dataclass(frozen=True)
class Looking:
    """How videos are looked for in folders.

    Attributes:
        reject_unreadable: Reject sources that the disk does not deliver; without it the job stops at its end, to be
            resumed.
        follow_links: Accept links that point outside their folder.
    """

    reject_unreadable: bool = False
    follow_links: bool = False


@forwards(run_job)
def shard(
    *sources: str,
    out: str | None = None,
    labels: Labels,
    encoding: Encoding,
    audio: Literal["drop", "copy", "aac"] = "drop",
    machines: Machines,
    packing: Packing,
    looking: Looking,
    allow_rejected: bool = False,
    dry_run: bool = False,
    sampled: int = SAMPLED,
    **options: Any,
) -> int:
    """Encode raw videos into an indexed WebDataset.

    The class of a video is its folder; with annotations, their label. Of lerobot:ROOT, a folder or URL of a LeRobot
    dataset, each episode is a sample, its cameras are streams and its numbers are signals.

    After a kill or an interruption, run the command again with the same arguments to resume it. The summary is printed
    to stdout; ledger.parquet records the outcome of every source. To share the work among machines, run it with
    --part 0/N to N-1/N and the same folder; after all have finished, the command without --part writes the dataset.

    Exit codes: 0 everything was packed, 1 the job failed, 2 wrong usage, 3 the dataset, or the part, is complete, but
    some sources were rejected (0 with --allow-rejected).

    Args:
        sources (SOURCE): Folder of videos, a video, lerobot:ROOT, tars of samples, Parquet with videos in its cells, or
            with --fps folders or tars of pictures; also s3:// and gs:// folders and files, http(s):// files; none if
            the annotations contain URLs.
        out (DIR): Folder of the dataset; also s3:// and gs://; needed without --dry-run.
        audio: Sound: none, AAC and ALAC as they are, or all encoded as AAC.
        scratch (DIR): Local folder for samples that are not yet packed (default: the dataset's, or TMPDIR for an object
            store).
        allow_encoder_change: Resume with another ffmpeg than the job began with.
        allow_rejected: Exit with 0, not 3, if the only problem is rejected sources.
        dry_run: Write nothing: list what was found, encode a sample, and estimate size and time of the whole.
        sampled (N): Videos that --dry-run encodes.
    """
    is_robot = any(map(is_lerobot, sources))
    if dry_run and is_robot:
        raise UsageError("--dry-run is not for LeRobot datasets", hint="encode one, or index it with `fastvid index`")
    if is_robot:
        _check_lerobot(sources, (labels, encoding, packing, looking), _ENCODED_EPISODES)
        if audio != "drop":
            raise UsageError("--audio is not for LeRobot datasets, whose sound is not read", hint="omit --audio")
    given = labels.options() | encoding.options() | asdict(packing) | {"audio": audio}
    if dry_run:
        given |= {"workers": machines.workers, "follow_links": looking.follow_links, "sampled": sampled}
        del given["drop_duplicates"]  # duplicates are known only when all sources are encoded
        print(estimate_text(estimate_job(sources, **given)))
        return 0
    if out is None:
        raise UsageError("no folder is given for the dataset", hint="name it with --out, or use --dry-run")
    how = asdict(machines) | options | {"reject_unreadable": looking.reject_unreadable}
    if is_robot:
        episodes = min(packing.samples_per_shard, EPISODES_PER_SHARD)
        report = shard_lerobot(sources[0], out, profile=given["profile"], episodes_per_shard=episodes, **how)
    else:
        report = run_job(sources, out, **given, follow_links=looking.follow_links, **how)
    return _report(report, allow_rejected)


@forwards(add_sources)
def add(
    dataset: str,
    *sources: str,
    annotations: tuple[str, ...] = (),
    columns: str | None = None,
    machines: Machines,
    packing: Packing,
    looking: Looking,
    allow_rejected: bool = False,
    allow_encoder_change: bool = False,
    **options: Any,
) -> int:
    """Add new videos to a dataset, encoded with its profile.

    Sources that are already in the dataset are skipped, including those that were rejected (unless --retry-rejected) or
    removed; one whose file changed, by its size or ETag, is named and encoded again, under a new key. New samples go
    into new shards; old shards are not changed. After a kill or an interruption, run the command again with the same
    arguments to resume it. To share the work among machines, run it with --part 0/N to N-1/N; after all have finished,
    the command without --part adds the samples.

    Exit codes: 0 all new sources were packed, 1 the job failed, 2 wrong usage, 3 the samples were added, but some
    sources were rejected (0 with --allow-rejected).

    Args:
        dataset (DIR): Folder of the dataset.
        sources (SOURCE): Folder of videos, or a video; none if the annotations contain URLs.
        annotations (FORMAT:PATH): As for `fastvid shard`.
        columns (NAME=COLUMN,...): As for `fastvid shard`.
        prefix (NAME): Prepend NAME/ to the names of all these sources.
        retry_rejected: Retry sources that were rejected before.
        sync: Remove the samples of videos and clips that no longer exist below the sources, or that the annotations no
            longer name.
        remove_most: Allow --sync to remove most videos of the dataset.
        dry_run: Change nothing: print what is new, changed and gone.
        allow_rejected: Exit with 0, not 3, if the only problem is rejected sources.
        allow_encoder_change: Encode with another ffmpeg than the dataset's.
    """
    if not sources and not annotations:
        raise UsageError("no source is given", hint="name a folder of videos, or a video, or --annotations with URLs")
    given = options | asdict(machines) | asdict(packing) | asdict(looking)
    given |= {"annotations": annotations, "columns": columns, "allow_encoder_change": allow_encoder_change}
    done, is_dry = add_sources(dataset, sources, **given), options["dry_run"]
    if is_dry:
        print(f"{done.new:8} to encode")
    if done.known or done.report.part is None:
        print(f"{done.known:8} already known{' (`fastvid relabel` changes annotations)' * bool(annotations)}")
    removed = f"{'to be ' * is_dry}removed, because they left the list"
    for names, what in ((done.changed, "changed since"), (done.gone, removed)):
        if names:
            print(visible(f"{len(names):8} {what}: {_first(names)}"))
    if done.report.ledger.num_rows or done.report.part is not None:
        print(summary(done.report))
    if done.report.part is None:
        print(f"generation {done.generation}")
    return EXIT_REJECTED if done.report.rejected and not allow_rejected else 0


def index(
    *sources: str,
    out: str | None = None,
    labels: Labels,
    prove: Proof | None = None,
    hdr: Literal["tonemap", "keep"] = "tonemap",
    root: str | None = None,
    allow_rejected: bool = False,
    looking: Looking,
    machines: Machines,
) -> int:
    """Make a dataset of videos where they are, or of tars that other tools wrote, without re-encoding.

    Videos (MP4, MOV, MKV, WebM, ...; folders, s3://, gs://, http(s)://): the dataset lists the files, with the version
    of each, and indexes their packets; nothing of a video is copied. The tables of an MP4 are read by ranges. --prove
    says how much of each video is compared with an independent decode: none, sample (some frames) or all (every frame;
    the file is read once). A video that cannot be planned in parts is decoded from its key frames or from its start;
    the ledger says so. Reading a file that changed since is an error.

    lerobot:ROOT, a folder or URL of a LeRobot dataset (version 3.0 or 2.1): each episode is a sample, its cameras are
    streams, its numbers are signals. Its videos stay where they are.

    Tars in webdataset style (video2dataset, webdataset): a video is a sample, with the caption (txt), label (cls) and
    fields (json) of its name or key. Every packet is indexed and verified by decoding. The tars are not changed.

    ledger.parquet records the outcome of every video. After a kill or an interruption, run the command again with the
    same arguments to resume it: finished shards are not indexed again. To share the work among machines, run it with
    --part 0/N to N-1/N; after all have finished, the command without --part writes the dataset.

    If the folder is already a dataset, rebuild all its sidecars from the tars; of videos in place, index those that
    changed again, or all of them at --root if they were moved. If a dataset of videos in place must not or cannot be
    changed, --out indexes its videos again into a new one.

    Tars that fastvid wrote also contain the dataset's description: from them alone, without any other file, the dataset
    is restored with its classes, annotations and profiles as they were when the tars were written. Later relabels are
    lost, and removed samples come back unless `fastvid compact` deleted them.

    Exit codes: 0 everything was indexed, 1 the job failed, 2 wrong usage, 3 the dataset is complete, but some samples
    could not be indexed (0 with --allow-rejected).

    Args:
        sources (SOURCE): Folders of videos or single files, paths or URLs; lerobot:ROOT; tars or folders of tars; or
            the folder of a dataset.
        out (DIR): Folder of the dataset; tars are linked into it (default: the tars' folder).
        prove: How much of each video in place is compared with an independent decode (default: sample).
        hdr: Of videos in place with high dynamic range: tonemap rejects them, because only encoding tone-maps; keep
            leaves their values as they are (default: tonemap).
        root (DIR): Where the videos of a dataset of videos in place are now; they are indexed there again.
        allow_rejected: Exit with 0, not 3, if the only problem is rejected sources.
    """
    check_integers(1, workers=machines.workers)
    is_job = out is not None or machines.part is not None or len(sources) > 1
    is_again = not is_job and bool(sources) and _is_dataset(sources[0])
    is_copy = not is_again and out is not None and len(sources) == 1 and _lists_others(sources[0])
    if (is_again or is_copy) and (labels.annotations or labels.columns or prove):
        raise UsageError(
            "a dataset is indexed again with its own annotations, and as much is proven as before",
            hint="omit --annotations, --columns and --prove; `fastvid relabel` changes annotations",
        )
    if is_copy:
        make_subset(sources[0], str(out), Selection(where="key is not null"))
    if is_again or is_copy:
        return _rebuild(sources[0] if out is None else out, root, machines.workers)
    proof, how = prove or Proof.SAMPLE, asdict(machines)
    if any(map(is_lerobot, sources)):
        _check_lerobot(sources, (labels, looking), _EPISODES)
        folder = _needed(out, "a dataset of episodes is made in a new folder")
        how["reject_unreadable"] = looking.reject_unreadable
        return _report(index_lerobot(sources[0], folder, proof=proof, **how), allow_rejected)
    if not sources or not all(map(is_tar, sources)):
        folder = _needed(out, "videos are listed in a new folder")
        report = index_videos(sources, folder, proof=proof, hdr=hdr, **labels.options(), **asdict(looking), **how)
        return _report(report, allow_rejected)
    if labels.annotations or labels.columns or prove:
        raise UsageError("--annotations, --columns and --prove are not for tars", hint="omit these options")
    if are_own(sources):
        return _restore(sources, out, is_plain=labels.classes is None and machines.part is None)
    return _report(index_tars(sources, out, class_names=labels.options()["class_names"], **how), allow_rejected)


@forwards(run_job)
def transcode(
    dataset: str,
    *,
    out: str,
    encoding: Encoding,
    audio: Literal["drop", "copy"] | None = None,
    machines: Machines,
    samples_per_shard: int | None = None,
    allow_rejected: bool = False,
    **options: Any,
) -> int:
    """Encode a dataset again, such as in another size or profile, with its keys, labels, captions, splits and sound.

    Removed samples are left out; all classes are kept. After a kill or an interruption, run the command again with the
    same arguments to resume it. To share the work among machines, run it with --part 0/N to N-1/N and the same folder;
    after all have finished, the command without --part writes the dataset.

    Videos lose quality each time they are encoded: if the originals still exist, `fastvid shard` of them looks better.

    Exit codes: as for `fastvid shard`.

    Args:
        dataset (DIR): Folder of the dataset; also s3:// and gs://.
        out (OUT): Folder of the new dataset; also s3:// and gs://.
        audio: Sound as it is, or none (default: copy if the dataset has sound).
        scratch (DIR): Local folder for samples that are not yet packed (default: the dataset's, or TMPDIR for an object
            store).
        allow_encoder_change: Resume with another ffmpeg than the job began with.
        samples_per_shard (N): Most samples of a new shard (default: as in the old one).
        seed (N): Seed of the order in the new shards.
        allow_rejected: Exit with 0, not 3, if the only problem is rejected sources.
    """
    if encoding.profile == "copy":
        raise UsageError("profile 'copy' encodes nothing", hint="use `fastvid subset` or `fastvid merge` to copy")
    _LOG.warning("videos lose quality each time they are encoded; if the originals still exist, shard them instead")
    given = options | encoding.options() | asdict(machines)
    report = transcode_dataset(dataset, out, audio=audio, samples_per_shard=samples_per_shard, **given)
    return _report(report, allow_rejected)


_EPISODES: Final = ("annotations", "columns", "classes", "follow_links")
"""Options that do not apply to a LeRobot dataset, because its metadata contains what they set."""

_ENCODED_EPISODES: Final = (
    *_EPISODES, "streams", "flow", "flow_bound", "max_seconds", "max_bad_frames", "seed", "drop_duplicates",
)  # fmt: skip
"""Further options that do not apply when the episodes of a LeRobot dataset are encoded."""


def _check_lerobot(sources: Sequence[str], groups: Iterable[Any], refused: Sequence[str]) -> None:
    if len(sources) > 1:
        raise UsageError(
            "a LeRobot dataset is a source by itself", hint="make one dataset of several with `fastvid merge --prefix`"
        )
    for group in groups:
        for field in fields(group):
            if field.name in refused and getattr(group, field.name) != field.default:
                option = "--" + field.name.replace("_", "-")
                raise UsageError(f"{option} is not for LeRobot datasets: their metadata is used", hint=f"omit {option}")


def _needed(out: str | None, why: str) -> str:
    if out is None:
        raise UsageError(why, hint="name it with --out DIR")
    return out


def _rebuild(dataset: str, root: str | None, workers: int | None) -> int:
    """Rebuild the sidecars of shards that are tars; index videos in place again if they changed or were moved."""
    if shards := rebuild(dataset, workers=workers):
        print(f"rebuilt the sidecars of {things(len(shards), 'shard')}")
    found = reindex(dataset, root=root, workers=workers)
    if found.shards or not shards:
        again = things(len(found.shards), "shard")
        print(f"{things(found.changed, 'file')} changed; indexed {again} again: generation {found.generation}")
    source, gained = new_episodes(dataset)
    if gained:
        print(f"{gained:+} episodes in {source} since: `fastvid index lerobot:{source} --out NEW` indexes all")
    return 0


def _restore(tars: Sequence[str], out: str | None, *, is_plain: bool) -> int:
    if not is_plain:
        raise UsageError("tars of fastvid name their classes and are indexed in one run", hint="omit the option")
    made = restore_dataset(tars, out)
    shards = things(len(made.generation.shards), "shard")
    print(f"restored {things(made.generation.num_samples, 'sample')} in {shards} from fastvid's own tars")
    if made.replaced:
        print(f"left out, because later tars contain their samples: {', '.join(made.replaced)}")
    return 0


def _is_dataset(folder: str) -> bool:
    """Return whether a folder is a finished dataset; one whose job was killed after its commit must be resumed."""
    if folder.endswith(".tar") or is_video(public_path(folder)):
        return False
    storage = open_storage(folder)
    return storage.exists(DATASET_JSON) and Staging(storage).job() is None


def _lists_others(folder: str) -> bool:
    """Return whether a folder is a dataset of videos in place that are outside the folder."""
    if is_lerobot(folder) or not _is_dataset(folder):
        return False
    storage = open_storage(folder)
    root = read_generation(storage)[1].root
    return root is not None and not f"{root}/".startswith(f"{storage.url}/")


def _report(report: JobReport, allow_rejected: bool) -> int:
    print(summary(report))
    return EXIT_REJECTED if report.rejected and not allow_rejected else 0


def summary(report: JobReport) -> str:
    """Render counts by reason, sizes, and the first rejected sources."""
    rows = report.ledger.to_pylist()
    packed = [row for row in rows if row["status"] == "packed"]
    rejected = [row for row in rows if row["status"] == "rejected"]
    lines = [] if report.part is None else [f"part {report.part}; run the command without --part to write the dataset"]
    cameras = max(
        1, len(packed) // max(1, len({row["key"] for row in packed}))
    )  # the videos of all cameras of an episode have the episode's key
    episodes = f": {things(len(packed) // cameras, 'episode')} of {cameras} cameras" if cameras > 1 else ""
    lines.append(f"{len(packed):8} packed{episodes}")
    changes = Counter(warning for row in packed for warning in row["warnings"] or ())
    lines += [f"{count:8}   {explain_note(change)}" for change, count in sorted(changes.items())]
    if removed := sum(row["status"] == "removed" for row in rows):
        lines.append(f"{removed:8} removed")
    lines.append(f"{len(rejected):8} rejected")
    lines += [f"{count:8}   {reason.value}: {reason.meaning}" for reason, count in sorted(report.rejected.items())]
    lines += [f"{count:8} ignored: {kind}" for kind, count in sorted(report.ignored.items())]
    # Each clip of a file has a row: count the bytes of the file once. Those of a tar or a table are of their videos.
    inside = (".tar", ".parquet")
    files = {whole_name(row["source_id"]) if row["path"].endswith(inside) else row["path"]: row for row in packed}
    bytes_in = sum(row["bytes_in"] or 0 for row in files.values())
    bytes_out = sum(row["bytes_out"] or 0 for row in packed)
    shards = len({row["shard"] for row in packed})
    frames = sum(row["num_frames"] or 0 for row in packed) // cameras
    lines.append(f"{report.dataset}: {things(shards, 'shard')}, {things(frames, 'frame')}, ")
    if packed and not bytes_out:
        lines[-1] += f"videos of {size(bytes_in)} stay where they are"
    else:
        share = f" from {size(bytes_in)} ({100 * bytes_out / bytes_in:.0f} %)" if bytes_in else ""
        lines[-1] += size(bytes_out) + share
    copies = [row for row in rows if "duplicate" in (row["warnings"] or ())]
    if copies:
        what = "1 source is a copy of another" if len(copies) == 1 else f"{len(copies)} sources are copies of others"
        lines.append(f"{what}, by SHA-256" + ("" if copies[0]["status"] == "packed" else "; their samples are hidden"))
    lines += [f"duplicate {row['source_id']}: {row['message']}" for row in copies[:_SHOWN]]
    if len(copies) > _SHOWN:
        lines.append(f"and {len(copies) - _SHOWN} more in ledger.parquet")
    lines += [f"rejected {row['source_id']}: {row['reason']}: {row['message']}" for row in rejected[:_SHOWN]]
    if len(rejected) > _SHOWN:
        lines.append(f"and {len(rejected) - _SHOWN} more in ledger.parquet")
    if report.part is None:
        lines.append(f"`fastvid inspect {report.dataset}` shows it, and fastvid.open reads it")
    return "\n".join(map(visible, lines))


def estimate_text(run: DryRun) -> str:
    """Render the result of a dry run as text: the sources, classes and problems, and the estimate of size and time."""
    estimate, missing, classes = run.estimate, run.missing, run.class_counts
    bytes_in = bytes_of(run.found.sources)
    lines = [f"{len(run.found.sources):8} sources" + (f", {size(bytes_in)}" if bytes_in else "")]
    named = [f"{name} {number}" for name, number in classes.items()]
    lines.append(f"{len(classes):8} classes" + (f": {_first(named)}" if named else ""))
    for column, counts in sorted(run.split_counts.items()):
        lines.append(f"{len(counts):8} values of {column}: {_first([f'{name} {n}' for name, n in counts.items()])}")
    if missing:
        lines.append(f"{len(missing):8} without a file: {_first([encode_name(source.id) for source in missing])}")
    lines += [f"{number:8} ignored: {kind}" for kind, number in sorted(run.found.ignored.items())]
    lines.append(f"{estimate.sampled:8} encoded as a sample")
    lines += [f"{number:8}   rejected, {reason}" for reason, number in sorted(run.rejected.items())]
    lines.append(f"{estimate.sentence()}, {run.footage.text(duration)} of footage")
    lines.append("an estimate: 95 % interval, if the videos that were not sampled are like those that were")
    return "\n".join(map(visible, lines))


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")
