"""Measure clips/s of decoders on the same videos: sparse (TSN) and dense clips, RGB crops on the host.

Every contender must deliver the right frames before it is timed. Rivals are at their newest versions, swept over
settings, workers and threads, and run with their best; then all run in alternating rounds. fastvid also has a row for
YUV planes, its input for a GPU; that is a different output and labelled as such. Each row ends with its goal.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.common.footage import KINDS, SAMPLINGS, datasets, shard
from bench.common.harness import Record, options
from bench.common.newest import CHECKED, use_newest
from bench.decode import goals
from bench.decode.contest import Rivals, at_their_best, entry, megabytes_kept
from bench.decode.floor import FloorJob
from bench.decode.rivals import KNOBS, library_of
from fastvid.errors import UsageError
from fastvid.tune.measure import Contender, Corpus, fastvid, measure, ratio

SCHEMA: Final = "fastvid-bench-decode/1"


add_arguments = options(
    "data footage profiles cache installed by workers sweep_rounds",
    json="decode.json",
    kinds=([], "with --footage: other footage, see `bench footage`", {"choices": KINDS}),
    sampling=(str, "such as tsn8, dense16x4 (those two, or those of the kind)", {"nargs": "+"}),
    together=(1, "clips of one visit to a video"),
    rivals=(list(KNOBS), "rivals", {"nargs": "*", "choices": list(KNOBS)}),
    rounds=7,
    repeats=(2, "clips per video"),
)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    folders = [Path(folder) for folder in args.data]
    if args.footage is None and not folders:
        raise UsageError("nothing to decode", hint="pass --data DIR, or --footage FOLDER to shard videos first")
    if not args.installed:
        use_newest([library_of(name) for name in args.rivals], args.cache)
    record = Record(SCHEMA, args, "workers", "by", rows=[], newest_checked=CHECKED.isoformat())
    for kind in args.kinds:
        for name, folder in datasets(kind, args.footage, args.cache):
            for sampling in args.sampling or KINDS[kind].samplings:
                corpus = Corpus(str(folder), sampling, args.repeats, crop=KINDS[kind].crop, together=args.together)
                _add(record, args, corpus, {"kind": kind, "encoding_of_kind": name})
    for folder in () if args.kinds else folders or [shard(args.footage, one, args.cache) for one in args.profiles]:
        for sampling in args.sampling or SAMPLINGS[:2]:
            _add(record, args, Corpus(str(folder), sampling, repeats=args.repeats, together=args.together), {})
    print("\n".join(goals.lines(record["rows"])))
    return 0


def _add(record: Record, args: argparse.Namespace, corpus: Corpus, facts: dict[str, Any]) -> None:
    """Measure a row and add it to the record."""
    rivals = at_their_best(args.rivals, corpus, args.workers, args.sweep_rounds, by=args.by)
    row = compare(corpus, rivals, args.workers, args.rounds) | facts | {"load_average": os.getloadavg()[0]}
    row["goal"] = goals.verdict(row, args.by)
    record["rows"].append(row)
    print(table(row), flush=True)
    record.save()


def compare(corpus: Corpus, rivals: Rivals, workers: int, rounds: int) -> dict[str, Any]:
    """Time all contenders in alternating rounds on one corpus."""
    own = [fastvid(corpus, workers, product=p, source=s) for p in ("rgb", "planes") for s in ("memory", "disk")]
    # No decoder built on libavcodec can be faster than libavcodec alone.
    floor = Contender("libavcodec alone", {}, partial(FloorJob, corpus), workers)
    *timings, limit = measure([*own, *rivals.best, floor], len(corpus.requests), rounds)
    ours = dict(zip(own, timings, strict=False))
    entries = [
        entry(contender, timing) | {"share_of_floor": ratio(timing, limit)} for contender, timing in ours.items()
    ]
    entries.append(entry(floor, limit))
    for contender, timing in zip(rivals.best, timings[len(own) :], strict=True):
        times = {f"{c.settings['product']} from {c.settings['source']}": ratio(t, timing) for c, t in ours.items()}
        kept = {"megabytes_kept": megabytes_kept(contender, len(corpus.requests))}
        entries.append(entry(contender, timing) | {"fastvid_is_faster_by": times} | kept)
    return {
        "dataset": Path(corpus.folder).name,
        "profile": dict(corpus.dataset.generation.shards[0].profile),
        "sampling": corpus.sampling,
        "clips": len(corpus.requests),
        "videos": len(corpus.dataset),
        "together": corpus.together,
        "megabytes": round(sum(map(len, corpus.mp4s)) / 1e6, 2),
        "packets_a_clip": corpus.mean_packets(),
        "contenders": entries,
        "sweeps": rivals.sweeps,
        "refused": rivals.refused,
    }


def _line(one: Mapping[str, Any]) -> str:
    spread = f"{one['rate_min']:.0f}..{one['rate_max']:.0f}"
    return f"  {one['label']:58} {one['rate']:8.1f} {spread:>13} {one['cpu_ms']:7.2f}"


def table(row: dict[str, Any]) -> str:
    """Format a row as a text table."""
    packets = row["packets_a_clip"]
    lines = [
        f"{row['dataset']} {row['sampling']}: {row['clips']} clips of {row['megabytes']} MB,"
        f" {packets['planned']:.1f} of {packets['from_keys']:.1f} packets per clip"
    ]
    lines.append(f"  {'':58} {'clips/s':>8} {'min..max':>13} {'CPU ms':>7}")
    for one in row["contenders"]:
        lines.append(_line(one))
        if "share_of_floor" in one:
            share = one["share_of_floor"]
            lines.append(f"      {share['wall']:.2f} of libavcodec alone   by CPU time {share['cpu']:.2f}")
        if "megabytes_kept" in one:
            lines.append(f"      grows by {one['megabytes_kept']:.0f} MB over {row['videos']} videos")
        for ours, times in one.get("fastvid_is_faster_by", {}).items():
            lines.append(f"      fastvid, {ours:20} {times['wall']:.2f}x   by CPU time {times['cpu']:.2f}x")
    lines += [f"  {name} cannot run here: {why}" for name, why in row["refused"].items()]
    lines += [f"  {goals.sentence(row['goal'])}"] if row.get("goal") else []
    return "\n".join(lines)
