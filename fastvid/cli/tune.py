"""Encodes a sample of your videos with each profile, measures size, encode time, quality and clips a second, and
recommends one.

Nothing is left behind unless --keep names a folder. All profiles are timed in turn, so what else runs on the machine
hits them alike; ratios between profiles hold better than the numbers themselves.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fastvid.errors import UsageError
from fastvid.sharding.encode.profiles import PROFILES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid tune``."""
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="folder of videos, or a video")
    parser.add_argument(
        "--profiles", nargs="+", default=list(PROFILES), choices=list(PROFILES), metavar="PROFILE", help="(all)"
    )
    parser.add_argument("--sampling", default="tsn8", help="frames of a clip: tsnN or denseNxSTRIDE (%(default)s)")
    parser.add_argument("--need", type=float, metavar="N", help="clips a second that training takes; picks by it")
    parser.add_argument("--videos", type=int, default=24, metavar="N", help="videos of the sample (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample and its clips (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="times that clips are decoded (%(default)s)")
    parser.add_argument("--workers", type=int, metavar="N", help="to encode and to decode with (default: one a core)")
    parser.add_argument("--html", metavar="FILE", help="write the table, charts and advice as one page")
    parser.add_argument("--keep", metavar="DIR", help="leave the encoded samples here")
    parser.add_argument("--follow-links", action="store_true", help="take links that lead out of their folder")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measures and prints."""
    from fastvid.tune.advice import recommend
    from fastvid.tune.study import study
    from fastvid.tune.text import render

    found = study(
        args.sources,
        profiles=args.profiles,
        videos=args.videos,
        seed=args.seed,
        sampling=args.sampling,
        rounds=args.rounds,
        workers=args.workers,
        folder=args.keep,
        follow_links=args.follow_links,
    )
    advice = recommend(found, args.need)
    record = found.to_json() | {"recommended": advice.profile, "reasons": list(advice.reasons)}
    print(json.dumps(record, indent=1) if args.json else render(found, advice))
    if args.html is not None:
        from fastvid.tune import page

        try:
            Path(args.html).write_text(page.render(found, advice), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"page cannot be written: {error.strerror}", file=args.html) from error
    return 0
