"""Clips a second of decoders on the same videos: sparse (TSN) and dense clips, RGB crops on the host.

Before anything is timed, every contender must deliver the right frames. Rivals are swept over their settings, workers
and threads, and run at their best; all then take turns, round by round. fastvid also has a row for YUV planes, which is
what it hands to a device; it is not the same product, and says so.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from av.video.frame import VideoFrame

from bench.charts import Bars, Chart
from bench.corpus import SAMPLINGS, shard
from bench.decoders import KNOBS, rival
from bench.floor import FloorJob
from bench.harness import RESULTS, cores, machine_facts, write_json
from fastvid.errors import FastvidError, UsageError
from fastvid.measure.clips import Corpus
from fastvid.measure.planned import FastvidJob, fastvid
from fastvid.measure.rounds import Contender, Timing, measure, ratio

SCHEMA: Final = "fastvid-bench-decode/1"

# Mean difference from fastvid's RGB, in levels. Converters differ by 1 to 2 (rounding, chroma); a wrong frame of a
# moving scene by far more.
_TOLERANCE: Final = 4.0
_CHECKED: Final = 16

UInt8Array = npt.NDArray[np.uint8]

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m bench decode``."""
    parser.add_argument(
        "--data", action="append", default=[], metavar="DIR", help="a dataset; may be given more than once"
    )
    parser.add_argument(
        "--footage", type=Path, metavar="FOLDER", help="videos to shard as --profiles where no --data is given"
    )
    parser.add_argument(
        "--profiles", nargs="+", default=["compact", "intra"], metavar="PROFILE", help="of --footage (compact intra)"
    )
    parser.add_argument("--cache", type=Path, default=Path("runs/bench"), help="where datasets are made (%(default)s)")
    parser.add_argument(
        "--sampling", nargs="+", default=["tsn8", "dense16x4"], choices=list(SAMPLINGS), help="(tsn8 dense16x4)"
    )
    parser.add_argument("--rivals", nargs="*", default=list(KNOBS), choices=list(KNOBS), help="(all)")
    parser.add_argument("--workers", type=int, default=cores(), help="cores to use (default: all, %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds (default %(default)s)")
    parser.add_argument("--sweep-rounds", type=int, default=2, help="rounds of each setting of a sweep (%(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="clips of each video (default %(default)s)")
    parser.add_argument("--json", type=Path, default=RESULTS / "decode.json", help="result file (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark."""
    folders = [Path(folder) for folder in args.data]
    if not folders:
        if args.footage is None:
            raise UsageError("nothing to decode", hint="give --data DIR, or --footage FOLDER to shard videos first")
        folders = [shard(args.footage, profile, args.cache) for profile in args.profiles]
    record: dict[str, Any] = {"schema": SCHEMA, "machine": machine_facts(), "workers": args.workers, "rows": []}
    for folder in folders:
        for sampling in args.sampling:
            corpus = Corpus(str(folder), sampling, repeats=args.repeats)
            row = compare(corpus, args.rivals, args.workers, args.rounds, args.sweep_rounds)
            record["rows"].append(row)
            print(table(row), flush=True)
            write_json(args.json, record)
    return 0


def compare(corpus: Corpus, rivals: Sequence[str], workers: int, rounds: int, sweep_rounds: int) -> dict[str, Any]:
    """Measures one corpus: checks outputs, sweeps the rivals, times everyone in turn."""
    own = [fastvid(corpus, workers, product=p, source=s) for p in ("rgb", "planes") for s in ("memory", "disk")]
    others: list[Contender] = []
    sweeps, refused = {}, {}
    for name in rivals:
        try:
            best, sweeps[name] = sweep(name, corpus, workers, sweep_rounds)
            others.append(best)
        except (ImportError, OSError) as error:
            refused[name] = str(error)
            _log.warning("%s does not run here: %s", name, error)
    # What no decoder built on libavcodec can be faster than: its share is the speed reached, of the speed possible.
    floor = Contender("libavcodec alone", {}, partial(FloorJob, corpus), workers)
    *timings, limit = measure([*own, *others, floor], len(corpus.requests), rounds)
    ours = dict(zip(own, timings, strict=False))
    entries = [
        _entry(contender, timing) | {"share_of_floor": ratio(timing, limit)} for contender, timing in ours.items()
    ]
    entries.append(_entry(floor, limit))
    for contender, timing in zip(others, timings[len(own) :], strict=True):
        entry = _entry(contender, timing)
        entry["fastvid_is_faster_by"] = {
            f"{c.settings['product']} from {c.settings['source']}": ratio(t, timing) for c, t in ours.items()
        }
        entries.append(entry)
    return {
        "dataset": Path(corpus.folder).name,
        "profile": dict(corpus.dataset.generation.shards[0].profile),
        "sampling": corpus.sampling,
        "clips": len(corpus.requests),
        "megabytes": round(sum(map(len, corpus.mp4s)) / 1e6, 2),
        "packets_a_clip": corpus.packets_a_clip(),
        "contenders": entries,
        "sweeps": sweeps,
        "refused": refused,
    }


def sweep(name: str, corpus: Corpus, workers: int, rounds: int) -> tuple[Contender, list[dict[str, Any]]]:
    """A rival at its best setting: one knob after the other is set to its fastest value, the rest being held.

    Settings that deliver wrong frames are recorded and never chosen.

    Returns:
        The best, and all that were tried.
    """
    knobs: dict[str, tuple[Any, ...]] = {
        "parallel": ((workers, False), (workers, True), (workers + 1, False), (max(1, workers // 2), False)),
        **KNOBS[name],
    }
    chosen = {knob: values[0] for knob, values in knobs.items()}
    tried: dict[tuple[tuple[str, Any], ...], tuple[float, Contender | None, dict[str, Any]]] = {}

    def attempt(settings: dict[str, Any]) -> float:
        place = tuple(settings.items())
        if place not in tried:
            options = {knob: value for knob, value in settings.items() if knob != "parallel"}
            contender = rival(name, corpus, options, *settings["parallel"])
            wrong = None if settings["parallel"][1] else check(contender, corpus)
            rate = 0.0 if wrong else measure([contender], len(corpus.requests), rounds)[0].summary()["rate"]
            _log.info("%s: %s", contender.label, wrong or f"{rate:.1f} clips/s")
            tried[place] = (rate, contender, _entry_settings(contender) | {"rate": rate, "wrong": wrong})
        return tried[place][0]

    for knob, values in reversed(knobs.items()):
        chosen[knob] = max(values, key=lambda value: attempt(chosen | {knob: value}))
    best = max(tried.values(), key=lambda found: found[0])
    if best[1] is None or not best[0]:
        raise FastvidError(f"{name} delivers wrong frames with every setting")
    return best[1], [entry for _, _, entry in tried.values()]


def check(contender: Contender, corpus: Corpus) -> str | None:
    """Compares a contender's pictures with fastvid's, whose frames its own tests prove.

    Returns:
        None, or what is wrong. A frame passes when it is closer to the wanted frame than to its neighbours, unless they
        hardly differ, and within the tolerance.
    """
    ours, theirs = FastvidJob(corpus, "rgb", "memory"), contender.open_job()
    for task in range(min(_CHECKED, len(corpus.requests))):
        found = _rgb(np.asarray(theirs(task))).astype(np.int16)
        request = corpus.requests[task]
        last = corpus.dataset[request.sample].num_frames - 1
        distances = []
        for shift in (0, -1, 1):
            shifted = np.clip(request.frames + shift, 0, last)
            wanted = np.asarray(ours.decode(replace(request, frames=shifted))).astype(np.int16)
            distances.append(np.abs(found - wanted).mean(axis=(1, 2, 3)))
        exact, *neighbours = distances
        nearer = np.minimum(*neighbours) < exact - 0.2
        if exact.max() > _TOLERANCE or nearer.any():
            frame = int(request.frames[int(np.argmax(np.where(nearer, 255, exact)))])
            key = corpus.dataset.key(request.sample)
            return f"wrong picture for frame {frame} of {key}: {exact.max():.1f} levels off on average"
    return None


def table(row: dict[str, Any]) -> str:
    """A row's numbers for people."""
    packets = row["packets_a_clip"]
    lines = [
        f"{row['dataset']} {row['sampling']}: {row['clips']} clips of {row['megabytes']} MB,"
        f" {packets['planned']:.1f} of {packets['from_keys']:.1f} packets a clip"
    ]
    lines.append(f"  {'':58} {'clips/s':>8} {'min..max':>13} {'CPU ms':>7}")
    for entry in row["contenders"]:
        spread = f"{entry['rate_min']:.0f}..{entry['rate_max']:.0f}"
        lines.append(f"  {entry['label']:58} {entry['rate']:8.1f} {spread:>13} {entry['cpu_ms']:7.2f}")
        if "share_of_floor" in entry:
            share = entry["share_of_floor"]
            lines.append(f"      {share['wall']:.2f} of libavcodec alone   by CPU time {share['cpu']:.2f}")
        for ours, times in entry.get("fastvid_is_faster_by", {}).items():
            lines.append(f"      fastvid, {ours:20} {times['wall']:.2f}x   by CPU time {times['cpu']:.2f}x")
    lines += [f"  {name} does not run here: {why}" for name, why in row["refused"].items()]
    return "\n".join(lines)


def charts(record: Mapping[str, Any]) -> list[Chart]:
    """What a result shows: see `bench.report`."""
    found: list[Chart] = []
    for row in record["rows"]:
        names = {}
        for entry in row["contenders"]:
            own = entry["name"] == "fastvid"
            product = f", {entry['settings']['product']} from {entry['settings']['source']}" if own else ""
            names[entry["name"] + product] = entry
        rivals = [name for name, entry in names.items() if "fastvid_is_faster_by" in entry]
        packets = row["packets_a_clip"]
        found.append(
            Bars(
                f"Decoding {row['dataset']}, {row['sampling']}",
                "clips/s",
                {name: entry["rate"] for name, entry in names.items()},
                {name: (entry["rate_min"], entry["rate_max"]) for name, entry in names.items()},
                rivals,
                f"{row['clips']} clips, {row['megabytes']} MB; the plan feeds {packets['planned']:.1f} of"
                f" {packets['from_keys']:.1f} packets a clip. Planes are what a device takes; the others deliver RGB"
                f" crops. Best settings found: {'; '.join(names[name]['label'] for name in rivals)}.",
            )
        )
    return found


def _rgb(pictures: UInt8Array) -> UInt8Array:
    """Pictures [T, H, W, 3]; YUV 4:2:0 [T, H * 3 / 2, W] is converted."""
    if pictures.ndim == 4:
        return pictures
    frames = [VideoFrame.from_ndarray(picture, format="yuv420p") for picture in pictures]
    return np.stack([frame.to_ndarray(format="rgb24") for frame in frames])


def _entry_settings(contender: Contender) -> dict[str, Any]:
    return {
        "name": contender.name,
        "label": contender.label,
        "settings": dict(contender.settings),
        "workers": contender.workers,
        "processes": contender.processes,
    }


def _entry(contender: Contender, timing: Timing) -> dict[str, Any]:
    return _entry_settings(contender) | timing.summary()
