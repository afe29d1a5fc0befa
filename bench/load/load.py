"""Measure whole loading pipelines on the same videos: uint8 [B, 3, 8, 224, 224] on the host.

Each pipeline runs in its own process, rivals at their newest versions with the best of their swept settings, in
alternating rounds. CPU time includes all worker processes. One pipeline is fastvid's decoder alone with its clips
discarded, as an upper bound for the loader. The rounds of a sweep are not those that are reported.

loaders       all pipelines, with files in the page cache
http          fastvid over a web server on loopback that delays each response, against the disk; and requests and bytes
              per clip by the server's count, without any cache
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.common.footage import shard
from bench.common.harness import Record, options
from bench.common.newest import CHECKED, use_newest
from bench.common.rounds import apart, cpu_of_family, in_turn, ranged
from bench.load.pipelines import PIPELINES, Batches, PipelineInputs, check_installed, decoder_alone, fastvid_loader
from bench.load.slow_server import served, slow_server
from fastvid.errors import JobError, UsageError
from fastvid.storage.protocol import CACHE_VARIABLE
from fastvid.tune.measure import Corpus

WANTED: Final = {"compact": (2.6, 0.95), "intra": (1.9, 0.9), "tiles": (1.9, 0.9), "tiles, resized": (1.7, 0.9)}
"""By profile and crop: times the best rival's speed, in random order; share of the decoder alone."""
SHORT_EPOCHS: Final = 0.92
"""Speed of epochs of 30 clips, as a share of that of long ones."""


def goals(row: Mapping[str, Any], by: str) -> list[dict[str, Any]]:
    """Return the goals of a row of `bench.load.load`: what was found, and whether they were met.

    `row`: the row.
    """
    rival, decoder = WANTED.get(row["profile"], (1.0, 0.0))
    entries = {one["pipeline"]: one for one in row["page-cached"]}
    rivals = [one for name, one in entries.items() if "fastvid_is_faster_by" in one and not name.startswith("fastvid")]
    found = []
    if rivals:
        best = min(rivals, key=lambda one: float(one["fastvid_is_faster_by"][by]))
        found.append(_goal(f"times {best['pipeline']}", rival, best["fastvid_is_faster_by"], by))
    for entry in entries.values():
        if "fastvid_reaches" in entry:
            found.append(_goal("of the decoder alone", decoder, entry["fastvid_reaches"], by))
        if "short_reaches" in entry:
            found.append(_goal("epochs of 30 clips, of long ones", SHORT_EPOCHS, entry["short_reaches"], by))
    return found


def _goal(what: str, wanted: float, ratio: Mapping[str, float], by: str) -> dict[str, Any]:
    spread = [ratio[f"{by}_min"], ratio[f"{by}_max"]]
    return {"what": what, "wanted": wanted, "found": ratio[by], "range": spread, "by": by, "met": ratio[by] >= wanted}


def sentence(goal: Mapping[str, Any]) -> str:
    """Return a goal as a line of text."""
    low, high = goal["range"]
    found = f"{goal['found']:.2f} ({low:.2f} to {high:.2f}) {goal['what']} by {goal['by']} time"
    return f"{found}: goal {goal['wanted']} {'met' if goal['met'] else 'MISSED'}"


SCHEMA: Final = "fastvid-bench-load/1"

DECODER: Final = "decoder alone"
SHORT: Final = "fastvid, epochs of 30 clips"

_SHARD: Final = 4  # videos per shard
_WARM: Final = 4  # batches

_log = logging.getLogger(__name__)


add_arguments = options(
    "data footage profiles cache workers batch rounds sweep_rounds installed by latency",
    json="load.json",
    rivals=(list(PIPELINES), "rivals", {"nargs": "*", "choices": list(PIPELINES)}),
    batches=(60, "batches per round"),
    crop=("RandomCrop", "crop", {"choices": ("RandomCrop", "RandomResizedCrop")}),
    only=(str, "measure one part", {"choices": ("loaders", "http")}),
)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    folders = [Path(folder) for folder in args.data]
    if not folders:
        if args.footage is None:
            raise UsageError("nothing to load", hint="pass --data DIR, or --footage FOLDER to shard videos first")
        # Small shards, because some rivals assign whole shards to workers.
        small = ("--samples-per-shard", str(_SHARD))
        folders = [
            shard(args.footage, profile, args.cache, options=small, name=f"{profile}-by-{_SHARD}")
            for profile in args.profiles
        ]
    if not args.installed:
        use_newest([library for name in args.rivals for library in PIPELINES[name].needs], args.cache)
    record = Record(SCHEMA, args, "workers", "by", newest_checked=CHECKED.isoformat(), rows=[])
    for folder in folders:
        corpus = Corpus(str(folder), "tsn8")
        own = Path(f"{folder}.pipelines")
        own.mkdir(exist_ok=True)
        tars = tuple(sorted(map(str, folder.glob("*.tar"))))
        inputs = PipelineInputs(str(folder), tuple(corpus.files), tars, str(own), args.batch, args.workers, args.crop)
        profile = corpus.dataset.generation.shards[0].profile["name"]
        name = profile if args.crop == "RandomCrop" else f"{profile}, resized"
        row: dict[str, Any] = {"dataset": folder.name, "profile": name}
        if args.only in (None, "loaders"):
            row |= compare(inputs, args)
            row["goals"] = goals(row, args.by)
            print("\n".join(map(sentence, row["goals"])))
        if args.only in (None, "http"):
            row["http"] = over_http(inputs, args.batches, args.rounds, args.latency)
        print(json.dumps(row, indent=1), flush=True)
        record["rows"].append(row)
        record.save()
    return 0


_RATIO_KEYS: Final = {DECODER: "fastvid_reaches", SHORT: "short_reaches"}


@dataclass(frozen=True)
class Pipeline:
    """A pipeline with its settings; `start` must be picklable."""

    name: str
    settings: Mapping[str, Any]
    start: Callable[[], Batches]


def spent(start: Callable[[], Batches], batches: int) -> tuple[float, float]:
    """Return the wall and CPU seconds of a clip over so many batches, in this process and those that it starts."""
    import torch

    # More torch threads would compete with the workers of rivals.
    torch.set_num_threads(1)
    made, clips = start(), 0
    for _ in range(_WARM):
        next(made)
    cpu, wall = cpu_of_family(os.getpid()), time.perf_counter()
    for _ in range(batches):
        batch = next(made)
        clips += len(batch)
        assert (batch.dtype, batch.shape[1:]) == (torch.uint8, (3, 8, 224, 224))
    wall = time.perf_counter() - wall
    return wall / clips, (cpu_of_family(os.getpid()) - cpu) / clips


def compare(inputs: PipelineInputs, args: argparse.Namespace) -> dict[str, Any]:
    """Time all pipelines in alternating rounds."""
    chosen = [Pipeline("fastvid", {"workers": inputs.workers}, partial(fastvid_loader, inputs))]
    chosen.append(Pipeline("fastvid, processes", {}, partial(fastvid_loader, inputs, workers="process")))
    chosen.append(Pipeline(SHORT, {}, partial(fastvid_loader, inputs, epoch=30)))
    chosen.append(Pipeline(DECODER, {"workers": inputs.workers}, partial(decoder_alone, inputs)))
    result: dict[str, Any] = {"batch": inputs.batch, "sweeps": {}, "refused": {}}
    for name in args.rivals:
        try:
            best, result["sweeps"][name] = _sweep(name, inputs, args)
            chosen.append(best)
        except JobError as error:
            result["refused"][name] = str(error)
            _log.warning("%s cannot run here: %s", name, error)
    result["load_average"] = os.getloadavg()[0]
    found = _in_turn(chosen, args.batches, args.rounds)
    result["page-cached"] = [
        {"pipeline": one.name, "settings": dict(one.settings), **_rates(times)}
        for one, times in zip(chosen, found, strict=True)
    ]
    for entry, times in zip(result["page-cached"][1:], found[1:], strict=True):
        name = _RATIO_KEYS.get(entry["pipeline"], "fastvid_is_faster_by")
        entry[name] = _ratio(times, found[0]) if entry["pipeline"] == SHORT else _ratio(found[0], times)
    return result


def _sweep(name: str, inputs: PipelineInputs, args: argparse.Namespace) -> tuple[Pipeline, list[dict[str, Any]]]:
    """Return a rival with its best settings and number of workers, and all settings tried; they take turns."""
    check_installed(name)
    start, settings, _ = PIPELINES[name]
    counts = sorted({max(1, inputs.workers // 2), inputs.workers, inputs.workers + 1, 2 * inputs.workers})
    tried = [
        Pipeline(name, {"workers": workers, **options}, partial(start, replace(inputs, workers=workers), **options))
        for options in settings
        for workers in (counts if args.by == "wall" else [inputs.workers])
    ]
    # A third of a round is enough to tell the best settings.
    rates = [_rates(times) for times in _in_turn(tried, max(1, args.batches // 3), args.sweep_rounds)]
    for one, rate in zip(tried, rates, strict=True):
        _log.info("%s %s: %s", name, dict(one.settings), rate)
    cost = [rate["cpu_ms_a_clip"] if args.by == "cpu" else 1 / rate["clips_a_second"] for rate in rates]
    best = tried[min(range(len(tried)), key=cost.__getitem__)]
    return best, [dict(one.settings) | rate for one, rate in zip(tried, rates, strict=True)]


def _in_turn(pipelines: Sequence[Pipeline], batches: int, rounds: int) -> list[list[tuple[float, float]]]:
    """Return the wall and CPU seconds of a clip in each round of each pipeline."""

    def once(number: int, _: int) -> tuple[float, float]:
        # A process of its own each time: a waiting pipeline would prefetch during the turns of others.
        wall, cpu = apart(spent, pipelines[number].start, batches)
        return wall, cpu

    return list(in_turn(range(len(pipelines)), rounds, once).values())


def over_http(inputs: PipelineInputs, batches: int, rounds: int, latency: float) -> dict[str, Any]:
    """Time fastvid over a slow web server against fastvid on the local disk."""
    os.environ.pop(CACHE_VARIABLE, None)  # every byte must cross the network
    with slow_server(Path(inputs.url), latency) as (url, server):
        remote = replace(inputs, url=url)
        pipelines = [Pipeline("local", {}, partial(fastvid_loader, inputs))]
        pipelines.append(Pipeline("http", {"latency_ms": latency}, partial(fastvid_loader, remote)))
        before = cpu_of_family(server)
        local, http = _in_turn(pipelines, batches, rounds)
        served = cpu_of_family(server) - before
        planned = counted(url, lambda: one_epoch(url, inputs.batch))
    return {
        "latency_ms": latency,
        "local": _rates(local),
        "http": _rates(http),
        "http_over_local": _ratio(http, local),
        # Spent on the same cores, which a server on another host would leave to the loader.
        "server_cpu_ms_a_clip": 1e3 * served / (rounds * (batches + _WARM) * inputs.batch),
        "a_clip": planned,
    }


def counted(url: str, read: Callable[[], int]) -> dict[str, float]:
    """Return the tar requests and bytes per clip read by `read`, by the server's count."""
    before, clips, after = served(url), read(), served(url)
    return {kind: (after[kind]["tar"] - before[kind].get("tar", 0)) / clips for kind in ("requests", "bytes")}


def one_epoch(url: str, batch: int) -> int:
    """Read an epoch; return its number of clips."""
    import fastvid

    options: dict[str, Any] = {"frames": fastvid.Segments(8), "spatial": fastvid.RandomCrop(224), "last": "keep"}
    dataset = fastvid.open(url)
    loader = fastvid.ClipLoader(
        dataset, global_batch_size=min(batch, len(dataset)), decoder="pyav", rank=0, world_size=1, **options
    )
    return sum(one.num_rows for one in loader)


def _rates(times: Sequence[tuple[float, float]]) -> dict[str, float]:
    cpu = 1e3 * statistics.median(cpu for _, cpu in times)
    return ranged("clips_a_second", [1 / wall for wall, _ in times]) | {"cpu_ms_a_clip": cpu}


def _ratio(ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return how many times faster ours is, as the median over rounds, by wall and by CPU time."""
    pairs = list(zip(ours, theirs, strict=True))
    # A round too short for the clock of CPU time has none.
    cpu = [other[1] / mine[1] for mine, other in pairs if mine[1]] or [0.0]
    return ranged("wall", [other[0] / mine[0] for mine, other in pairs]) | ranged("cpu", cpu)
