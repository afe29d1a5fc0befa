"""Measure every profile on a sample of your videos, and recommend one.

Encodes the sample with each profile and measures size, encode time, quality and clips per second. The encoded samples
are deleted unless --keep names a folder. Profiles are timed in turn, so other load on the machine affects all of them
alike; ratios between profiles are more reliable than the numbers themselves.
"""

from __future__ import annotations

import argparse
import json

from fastvid.sharding.encode.profiles import PROFILES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid tune``."""
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="folder of videos, or a video")
    parser.add_argument(
        "--profiles", nargs="+", default=list(PROFILES), choices=list(PROFILES), metavar="PROFILE", help="(all)"
    )
    parser.add_argument("--sampling", default="tsn8", help="frames of a clip: tsnN or denseNxSTRIDE (%(default)s)")
    parser.add_argument(
        "--need", type=float, metavar="N", help="clips per second that training needs; recommend for it"
    )
    parser.add_argument("--videos", type=int, default=24, metavar="N", help="videos in the sample (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample and its clips (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="times to decode the clips (%(default)s)")
    parser.add_argument("--workers", type=int, metavar="N", help="workers to encode and decode (default: one per core)")
    parser.add_argument("--keep", metavar="DIR", help="keep the encoded samples here")
    parser.add_argument("--follow-links", action="store_true", help="accept links that point outside their folder")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure and print the results."""
    from fastvid.tune.study import recommend, study
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
    return 0
