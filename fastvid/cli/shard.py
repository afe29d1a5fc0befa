"""Encodes raw videos into an indexed WebDataset.

The class of a video is the folder it lies in, unless annotations say otherwise. Killed or interrupted, the command
goes on when it is run again with the same arguments. The summary goes to stdout; ledger.parquet says of every source
what became of it. Several machines share the work with --part 0/N to N-1/N and the same folder; when they have ended,
the command without --part makes the dataset.

Exit codes: 0 everything was packed, 1 the job failed, 2 wrong usage, 3 the dataset, or the part, is complete, but
sources were rejected (0 with --allow-rejected).
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Final

from fastvid.errors import UsageError
from fastvid.media.reasons import MEANING
from fastvid.sharding.encode.profile import Profile
from fastvid.sharding.encode.profiles import PROFILES, get_profile
from fastvid.sharding.engines.engine import ENGINES
from fastvid.sharding.job.job import MAX_SECONDS, JobReport, run_job
from fastvid.sharding.job.plan import SAMPLES_PER_SHARD

EXIT_REJECTED: Final = 3
_SHOWN: Final = 20  # rejected sources that the summary names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid shard``."""
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="folder of videos, a video, or tars of samples; also s3:// and gs:// folders and files, http(s):// files; "
        "none where the annotations name URLs",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the dataset; also s3:// and gs://")
    parser.add_argument(
        "--annotations",
        action="append",
        default=[],
        metavar="FORMAT:PATH",
        help="csv:FILE json:FILE list:FILE kinetics:FILE ucf101:DIR hmdb51:DIR sthv2:DIR diving48:PATH;"
        " may be given more than once",
    )
    parser.add_argument("--classes", metavar="FILE", help="class names for integer labels, one a line")
    parser.add_argument("--profile", default="compact", help=f"one of {', '.join(PROFILES)} (default: %(default)s)")
    parser.add_argument("--short-side", type=int, metavar="PIXELS", help="instead of the profile's 256")
    parser.add_argument("--crf", type=int, metavar="N", help="instead of the profile's quality; lower is better")
    parser.add_argument("--gop", type=int, metavar="FRAMES", help="instead of the profile's distance of key frames")
    parser.add_argument("--fps", metavar="RATE", help="instead of each source's own rate; such as 15 or 30000/1001")
    parser.add_argument("--streams", default="rgb", metavar="NAMES", help="rgb, or rgb,flow (default: %(default)s)")
    parser.add_argument(
        "--flow", default="dis", choices=["dis", "tvl1"], help="how flow is made (default: %(default)s)"
    )
    parser.add_argument("--flow-bound", type=float, metavar="PIXELS", help="largest motion a frame (default: 20)")
    parser.add_argument("--audio", default="drop", choices=["drop", "copy", "aac"], help="default: %(default)s")
    parser.add_argument(
        "--engine", default="local", choices=list(ENGINES), help="where to encode (default: %(default)s)"
    )
    parser.add_argument(
        "--ray-address", metavar="HOST:PORT", help="of the Ray cluster (default: RAY_ADDRESS, or one on this machine)"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="sources at the same time (default: one a core)")
    parser.add_argument(
        "--part",
        metavar="I/N",
        help="do only every N-th shard, from the I-th (from 0), and commit nothing; the same command without --part "
        "finishes",
    )
    parser.add_argument(
        "--scratch",
        metavar="DIR",
        help="local folder for what waits to be packed (default: the dataset's, or TMPDIR for an object store)",
    )
    add_packing_options(parser)
    parser.add_argument("--other-build", action="store_true", help="go on with another ffmpeg than the job began with")


def add_packing_options(parser: argparse.ArgumentParser) -> None:
    """Options of commands that pack sources into new shards."""
    parser.add_argument("--samples-per-shard", type=int, default=SAMPLES_PER_SHARD, metavar="N", help="%(default)s")
    parser.add_argument(
        "--max-seconds", type=float, default=MAX_SECONDS, metavar="S", help="longer videos are split; %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order in the new shards (default: %(default)s)")
    add_allow_rejected(parser)
    parser.add_argument("--follow-links", action="store_true", help="take links that lead out of their folder")


def add_allow_rejected(parser: argparse.ArgumentParser) -> None:
    """The option of all commands that may reject sources."""
    parser.add_argument(
        "--allow-rejected", action="store_true", help="exit with 0, not 3, when the only trouble is rejected sources"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the job and prints its summary."""
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
        other_build=args.other_build,
        part=args.part,
        scratch=args.scratch,
    )
    print(summary(report))
    return EXIT_REJECTED if report.rejected and not args.allow_rejected else 0


def summary(report: JobReport) -> str:
    """The counts by reason, the sizes, and the first rejected sources."""
    rows = report.ledger.to_pylist()
    packed = [row for row in rows if row["status"] == "packed"]
    rejected = [row for row in rows if row["status"] != "packed"]
    lines = [] if report.part is None else [f"part {report.part}; the command without --part makes the dataset"]
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
    return "\n".join(lines)


def _profile(args: argparse.Namespace) -> Profile:
    return get_profile(args.profile).changed(short_side=args.short_side, crf=args.crf, gop=args.gop, fps=args.fps)


def class_names(path: str | None) -> list[str]:
    """Lines of the file of ``--classes``; none without one.

    Raises:
        UsageError: It cannot be read.
    """
    if path is None:
        return []
    try:
        return [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"class names cannot be read: {error}", file=path) from error
