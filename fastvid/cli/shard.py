"""Encode raw videos into an indexed WebDataset.

The class of a video is its folder, unless annotations say otherwise. Of lerobot:ROOT, a folder or URL of a LeRobot
dataset, each episode is a sample, its cameras are streams and its numbers are signals.

After a kill or an interruption, run the command again with the same arguments to resume it. The summary is printed to
stdout; ledger.parquet records the outcome of every source. To share the work among machines, run it with --part 0/N to
N-1/N and the same folder; after all have finished, the command without --part writes the dataset.

Exit codes: 0 everything was packed, 1 the job failed, 2 wrong usage, 3 the dataset, or the part, is complete, but some
sources were rejected (0 with --allow-rejected).
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from fastvid.errors import UsageError, visible
from fastvid.media.timing import MEANING
from fastvid.runtime.names import add_reason, encode_name
from fastvid.runtime.values import duration, size, things
from fastvid.sharding.encode.profile import Profile
from fastvid.sharding.encode.profiles import PROFILES, get_profile
from fastvid.sharding.engines.local import ENGINES
from fastvid.sharding.job.estimate import SAMPLED, DryRun, estimate_job
from fastvid.sharding.job.job import MAX_SECONDS, JobReport, run_job
from fastvid.sharding.job.plan import SAMPLES_PER_SHARD
from fastvid.sharding.lerobot.jobs import shard_lerobot
from fastvid.sharding.lerobot.read import EPISODES_PER_SHARD, is_lerobot
from fastvid.sharding.sources.annotations import FORMATS

EXIT_REJECTED: Final = 3
_NAMES: Final = 10  # most names in a line of an estimate
_SHOWN: Final = 20  # most rejected sources listed in the summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid shard``."""
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="folder of videos, a video, lerobot:ROOT, or tars of samples; also s3:// and gs:// folders and files, "
        "http(s):// files; none if the annotations contain URLs",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="folder of the dataset; also s3:// and gs://; needed without --dry-run"
    )
    add_annotation_options(parser)
    add_encoding_options(parser)
    parser.add_argument(
        "--audio",
        default="drop",
        choices=["drop", "copy", "aac"],
        help="sound: none, AAC and ALAC as they are, or all encoded as AAC (default: %(default)s)",
    )
    add_engine_options(parser)
    add_packing_options(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="write nothing: list what was found, encode a sample, and estimate size and time of the whole",
    )
    parser.add_argument(
        "--sampled", type=int, default=SAMPLED, metavar="N", help="videos that --dry-run encodes (default: %(default)s)"
    )


def add_annotation_options(parser: argparse.ArgumentParser) -> None:
    """Options of commands that make a dataset of videos and annotations."""
    parser.add_argument(
        "--annotations",
        action="append",
        default=[],
        metavar="FORMAT:PATH",
        help=f"a format, {', '.join(FORMATS)}, and a file or folder, also s3:// and gs:// URLs; may be repeated",
    )
    add_columns(parser)
    parser.add_argument("--classes", metavar="FILE", help="class names for integer labels, one per line")


def add_encoding_options(parser: argparse.ArgumentParser) -> None:
    """Options of commands that choose how videos are encoded."""
    parser.add_argument("--profile", default="compact", help=f"one of {', '.join(PROFILES)} (default: %(default)s)")
    parser.add_argument("--short-side", type=int, metavar="PIXELS", help="short side (default: 256)")
    parser.add_argument("--crf", type=int, metavar="N", help="quality, lower is better (default: the profile's)")
    parser.add_argument("--gop", type=int, metavar="FRAMES", help="key frame interval (default: the profile's)")
    parser.add_argument("--fps", metavar="RATE", help="frame rate, such as 15 or 30000/1001 (default: each source's)")
    parser.add_argument("--streams", default="rgb", metavar="NAMES", help="rgb, or rgb,flow (default: %(default)s)")
    parser.add_argument(
        "--flow", default="dis", choices=["dis", "tvl1"], help="optical flow method (default: %(default)s)"
    )
    parser.add_argument("--flow-bound", type=float, metavar="PIXELS", help="largest motion per frame (default: 20)")


def add_machines_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of all jobs that can be shared among machines."""
    parser.add_argument(
        "--engine", default="local", choices=list(ENGINES), help="where to process sources (default: %(default)s)"
    )
    parser.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="address of the Ray cluster (default: RAY_ADDRESS, or a cluster on this machine)",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="sources processed at once (default: one per core)")
    parser.add_argument(
        "--part",
        metavar="I/N",
        help="only write shards I, I+N, I+2N, ... (I counts from 0) and commit nothing; finish with the same command "
        "without --part",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Options of commands that encode a whole dataset, on one machine or several."""
    add_machines_options(parser)
    parser.add_argument(
        "--scratch",
        metavar="DIR",
        help="local folder for samples that are not yet packed (default: the dataset's, or TMPDIR for an object store)",
    )
    parser.add_argument(
        "--allow-encoder-change", action="store_true", help="resume with another ffmpeg than the job began with"
    )
    add_reason(parser)


def add_columns(parser: argparse.ArgumentParser) -> None:
    """Add the option of all commands that read annotation tables."""
    parser.add_argument(
        "--columns",
        metavar="NAME=COLUMN,...",
        help="names for the columns of csv, json, jsonl, parquet and hf tables, such as "
        "path=videoid,start=t0,end=t1,caption=text; a.b is a nested value, segments=COLUMN a list of segments",
    )


def add_packing_options(parser: argparse.ArgumentParser) -> None:
    """Options of commands that pack sources into new shards."""
    parser.add_argument(
        "--samples-per-shard",
        type=int,
        default=SAMPLES_PER_SHARD,
        metavar="N",
        help="most videos in one shard (default: %(default)s)",
    )
    parser.add_argument(
        "--max-seconds",
        type=float,
        default=MAX_SECONDS,
        metavar="S",
        help="split longer videos into samples of at most S seconds (default: %(default)g)",
    )
    parser.add_argument(
        "--max-bad-frames",
        metavar="N|P%",
        help="keep the longest run without damage of a damaged video if at most N frames, or P %% of its frames, are "
        "left out (default: reject it)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the order in the new shards (default: %(default)s)"
    )
    add_allow_rejected(parser)
    add_source_options(parser)
    parser.add_argument(
        "--drop-duplicates",
        action="store_true",
        help="hide samples of files with the same bytes as an earlier one; `fastvid compact` frees their bytes",
    )


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Options of commands that look for videos in folders."""
    parser.add_argument(
        "--reject-unreadable",
        action="store_true",
        help="reject sources that the disk does not deliver; without it the job stops at its end, to be resumed",
    )
    parser.add_argument("--follow-links", action="store_true", help="accept links that point outside their folder")


def add_allow_rejected(parser: argparse.ArgumentParser) -> None:
    """Add the option of all commands that may reject sources."""
    parser.add_argument(
        "--allow-rejected", action="store_true", help="exit with 0, not 3, if the only problem is rejected sources"
    )


def run(args: argparse.Namespace) -> int:
    """Run the job and print its summary, or the estimate."""
    if args.dry_run and any(map(is_lerobot, args.sources)):
        raise UsageError("--dry-run is not for LeRobot datasets", hint="encode one, or index it with `fastvid index`")
    if args.dry_run:
        print(estimate_text(_estimate(args)))
        return 0
    if args.out is None:
        raise UsageError("nothing says where to write the dataset", hint="name a folder with --out, or use --dry-run")
    if any(map(is_lerobot, args.sources)):
        return _report(args, _shard_lerobot(args))
    report = run_job(
        args.sources,
        args.out,
        annotations=args.annotations,
        columns=args.columns,
        class_names=class_names(args.classes),
        profile=chosen_profile(args),
        streams=args.streams,
        audio=args.audio,
        flow=args.flow,
        flow_bound=args.flow_bound,
        engine=args.engine,
        ray_address=args.ray_address,
        workers=args.workers,
        samples_per_shard=args.samples_per_shard,
        max_seconds=args.max_seconds,
        max_bad_frames=args.max_bad_frames,
        seed=args.seed,
        follow_links=args.follow_links,
        allow_encoder_change=args.allow_encoder_change,
        reject_unreadable=args.reject_unreadable,
        drop_duplicates=args.drop_duplicates,
        part=args.part,
        scratch=args.scratch,
    )
    return _report(args, report)


def _report(args: argparse.Namespace, report: JobReport) -> int:
    print(summary(report))
    return EXIT_REJECTED if report.rejected and not args.allow_rejected else 0


def _shard_lerobot(args: argparse.Namespace) -> JobReport:
    pictures = {"streams": "rgb", "audio": "drop", "flow": "dis", "flow_bound": None}
    packing = {"max_seconds": MAX_SECONDS, "max_bad_frames": None, "seed": 0, "drop_duplicates": False}
    sources: dict[str, Any] = {"annotations": [], "columns": None, "classes": None, "follow_links": False}
    check_lerobot_options(args, **pictures, **packing, **sources)
    return shard_lerobot(
        args.sources[0],
        args.out,
        profile=chosen_profile(args),
        engine=args.engine,
        ray_address=args.ray_address,
        workers=args.workers,
        episodes_per_shard=min(args.samples_per_shard, EPISODES_PER_SHARD),
        part=args.part,
        scratch=args.scratch,
        reject_unreadable=args.reject_unreadable,
        allow_encoder_change=args.allow_encoder_change,
    )


def check_lerobot_options(args: argparse.Namespace, **defaults: Any) -> None:
    """Refuse options that a LeRobot dataset does not have, given with their defaults, and a second source."""
    if len(args.sources) > 1:
        raise UsageError(
            "a LeRobot dataset is a source by itself", hint="make one dataset of several with `fastvid merge --prefix`"
        )
    for name, default in defaults.items():
        if getattr(args, name) != default:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} is not for LeRobot datasets, which say it themselves", hint=f"omit {option}")


def summary(report: JobReport) -> str:
    """Render counts by reason, sizes, and the first rejected sources."""
    rows = report.ledger.to_pylist()
    packed = [row for row in rows if row["status"] == "packed"]
    rejected = [row for row in rows if row["status"] == "rejected"]
    lines = [] if report.part is None else [f"part {report.part}; run the command without --part to write the dataset"]
    lines.append(f"{len(packed):8} packed")
    changes = Counter(warning for row in packed for warning in row["warnings"] or ())
    lines += [f"{count:8}   {change}" for change, count in sorted(changes.items())]
    if removed := sum(row["status"] == "removed" for row in rows):
        lines.append(f"{removed:8} removed")
    lines.append(f"{len(rejected):8} rejected")
    lines += [f"{count:8}   {reason.value}: {MEANING[reason]}" for reason, count in sorted(report.rejected.items())]
    lines += [f"{count:8} ignored: {kind}" for kind, count in sorted(report.ignored.items())]
    # The clips of a file have a row each.
    bytes_in = sum({row["path"]: row["bytes_in"] or 0 for row in packed}.values())
    bytes_out = sum(row["bytes_out"] or 0 for row in packed)
    shards = len({row["shard"] for row in packed})
    frames = sum(row["num_frames"] or 0 for row in packed)
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
    return "\n".join(map(visible, lines))


def _estimate(args: argparse.Namespace) -> DryRun:
    return estimate_job(
        args.sources,
        annotations=args.annotations,
        columns=args.columns,
        class_names=class_names(args.classes),
        profile=chosen_profile(args),
        streams=args.streams,
        audio=args.audio,
        flow=args.flow,
        flow_bound=args.flow_bound,
        workers=args.workers,
        samples_per_shard=args.samples_per_shard,
        max_seconds=args.max_seconds,
        max_bad_frames=args.max_bad_frames,
        seed=args.seed,
        follow_links=args.follow_links,
        sampled=args.sampled,
    )


def estimate_text(run: DryRun) -> str:
    """Render what a job would do, and the estimate."""
    estimate, missing, classes = run.estimate, run.missing, run.class_counts
    bytes_in = sum(source.size for source in run.found.sources)
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
    lines.append(f"{estimate.sentence()}, {duration(run.footage.total)} of footage ({run.footage.spread()})")
    lines.append("an estimate: 95 % interval, if the videos that were not sampled are like those that were")
    return "\n".join(map(visible, lines))


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMES]) + (f" and {len(names) - _NAMES} more" if len(names) > _NAMES else "")


def chosen_profile(args: argparse.Namespace) -> Profile:
    """Return the profile that `add_encoding_options` describes."""
    return get_profile(args.profile).changed(short_side=args.short_side, crf=args.crf, gop=args.gop, fps=args.fps)


def class_names(path: str | None) -> list[str]:
    """Return the lines of the file given as ``--classes``; an empty list without one."""
    if path is None:
        return []
    try:
        return [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"class names cannot be read: {error}", file=path) from error
