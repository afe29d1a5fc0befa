"""Encode raw videos into an indexed WebDataset.

The class of a video is its folder, unless annotations say otherwise. After a kill or an interruption, run the command
again with the same arguments to resume it. The summary is printed to stdout; ledger.parquet records the outcome of
every source. To share the work among machines, run it with --part 0/N to N-1/N and the same folder; after all have
finished, the command without --part writes the dataset.

Exit codes: 0 everything was packed, 1 the job failed, 2 wrong usage, 3 the dataset, or the part, is complete, but some
sources were rejected (0 with --allow-rejected).
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Final

from fastvid.errors import UsageError, visible
from fastvid.media.reasons import MEANING
from fastvid.sharding.encode.profile import Profile
from fastvid.sharding.encode.profiles import PROFILES, get_profile
from fastvid.sharding.engines.engine import ENGINES
from fastvid.sharding.job.job import MAX_SECONDS, JobReport, run_job
from fastvid.sharding.job.plan import SAMPLES_PER_SHARD

EXIT_REJECTED: Final = 3
_SHOWN: Final = 20  # most rejected sources listed in the summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid shard``."""
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="folder of videos, a video, or tars of samples; also s3:// and gs:// folders and files, http(s):// files; "
        "none if the annotations contain URLs",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the dataset; also s3:// and gs://")
    parser.add_argument(
        "--annotations",
        action="append",
        default=[],
        metavar="FORMAT:PATH",
        help="csv:FILE json:FILE list:FILE kinetics:FILE ucf101:DIR hmdb51:DIR sthv2:DIR diving48:PATH;"
        " may be repeated",
    )
    parser.add_argument("--classes", metavar="FILE", help="class names for integer labels, one per line")
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
    parser.add_argument("--audio", default="drop", choices=["drop", "copy", "aac"], help="default: %(default)s")
    parser.add_argument(
        "--engine", default="local", choices=list(ENGINES), help="where to encode (default: %(default)s)"
    )
    parser.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="address of the Ray cluster (default: RAY_ADDRESS, or a cluster on this machine)",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="sources encoded at once (default: one per core)")
    parser.add_argument(
        "--part",
        metavar="I/N",
        help="only write shards I, I+N, I+2N, ... (I counts from 0) and commit nothing; finish with the same command "
        "without --part",
    )
    parser.add_argument(
        "--scratch",
        metavar="DIR",
        help="local folder for samples that are not yet packed (default: the dataset's, or TMPDIR for an object store)",
    )
    add_packing_options(parser)
    parser.add_argument(
        "--allow-encoder-change", action="store_true", help="resume with another ffmpeg than the job began with"
    )


def add_packing_options(parser: argparse.ArgumentParser) -> None:
    """Options of commands that pack sources into new shards."""
    parser.add_argument("--samples-per-shard", type=int, default=SAMPLES_PER_SHARD, metavar="N", help="%(default)s")
    parser.add_argument(
        "--max-seconds", type=float, default=MAX_SECONDS, metavar="S", help="longer videos are split; %(default)s"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the order in the new shards (default: %(default)s)"
    )
    add_allow_rejected(parser)
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
    """Run the job and print its summary."""
    report = run_job(
        args.sources,
        args.out,
        annotations=args.annotations,
        class_names=class_names(args.classes),
        profile=_profile(args),
        streams=args.streams,
        audio=args.audio,
        flow=args.flow,
        flow_bound=args.flow_bound,
        engine=args.engine,
        ray_address=args.ray_address,
        workers=args.workers,
        samples_per_shard=args.samples_per_shard,
        max_seconds=args.max_seconds,
        seed=args.seed,
        follow_links=args.follow_links,
        allow_encoder_change=args.allow_encoder_change,
        reject_unreadable=args.reject_unreadable,
        part=args.part,
        scratch=args.scratch,
    )
    print(summary(report))
    return EXIT_REJECTED if report.rejected and not args.allow_rejected else 0


def summary(report: JobReport) -> str:
    """Render counts by reason, sizes, and the first rejected sources."""
    rows = report.ledger.to_pylist()
    packed = [row for row in rows if row["status"] == "packed"]
    rejected = [row for row in rows if row["status"] != "packed"]
    lines = [] if report.part is None else [f"part {report.part}; run the command without --part to write the dataset"]
    lines.append(f"{len(packed):8} packed")
    changes = Counter(warning for row in packed for warning in row["warnings"] or ())
    lines += [f"{count:8}   {change}" for change, count in sorted(changes.items())]
    lines.append(f"{len(rejected):8} rejected")
    lines += [f"{count:8}   {reason.value}: {MEANING[reason]}" for reason, count in sorted(report.rejected.items())]
    lines += [f"{count:8} ignored: {kind}" for kind, count in sorted(report.ignored.items())]
    bytes_in, bytes_out = (sum(row[name] or 0 for row in packed) for name in ("bytes_in", "bytes_out"))
    shards = len({row["shard"] for row in packed})
    frames = sum(row["num_frames"] or 0 for row in packed)
    lines.append(f"{report.dataset}: {shards} shards, {frames} frames, {bytes_out / 1e6:.1f} MB")
    if bytes_in:
        lines[-1] += f" from {bytes_in / 1e6:.1f} MB ({100 * bytes_out / bytes_in:.0f} %)"
    lines += [f"rejected {row['source_id']}: {row['reason']}: {row['message']}" for row in rejected[:_SHOWN]]
    if len(rejected) > _SHOWN:
        lines.append(f"and {len(rejected) - _SHOWN} more in ledger.parquet")
    return "\n".join(map(visible, lines))


def _profile(args: argparse.Namespace) -> Profile:
    return get_profile(args.profile).changed(short_side=args.short_side, crf=args.crf, gop=args.gop, fps=args.fps)


def class_names(path: str | None) -> list[str]:
    """Return the lines of the file given as ``--classes``; an empty list without one.

    Raises:
        UsageError: If it cannot be read.
    """
    if path is None:
        return []
    try:
        return [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"class names cannot be read: {error}", file=path) from error
