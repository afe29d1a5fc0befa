"""Batches a second of whole loading pipelines over the same videos: normalised float32 [B, 3, 8, 224, 224] on the host.

Every pipeline runs in a process of its own, rivals at the best of their swept settings; all take turns, round by round.
CPU time is that of the process and of all its workers. One of them is fastvid's decoder without a loader, whose clips
are thrown away: what the loader reaches of it is recorded.

page-cached   files that were read before
cold          files that the system was asked to forget before each round
http          fastvid over a web server on loopback that waits before each answer, against the disk; and by the
              server's own count the requests and bytes of a clip, planned and as a whole file, without any cache
beside        the step time of a thread that launches many small operations, as a model on a GPU does, with batches
              coming from fastvid and with one batch kept; and as a control with a process that has no part in it
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from bench.common.corpus import shard
from bench.common.harness import RESULTS, machine_facts, measured_again, write_json
from bench.load.beside import KINDS, beside
from bench.load.cold import drop_from_cache
from bench.load.pipelines import PIPELINES, Batches, Work, decoder_alone, fastvid_loader, missing
from fastvid.errors import UsageError
from fastvid.measure.clips import Corpus
from fastvid.runtime.cores import available_cores
from fastvid.storage.options import CACHE_VARIABLE

SCHEMA: Final = "fastvid-bench-load/1"

DECODER: Final = "decoder alone"

_SHARD: Final = 4  # videos of a shard
_WARM: Final = 4
_BESIDE: Final = 12  # its rounds are short

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m bench load``."""
    parser.add_argument("--data", action="append", default=[], metavar="DIR", help="a dataset; may be given again")
    parser.add_argument("--footage", type=Path, metavar="FOLDER", help="videos to shard as --profiles without --data")
    parser.add_argument(
        "--profiles", nargs="+", default=["compact", "intra"], metavar="PROFILE", help="(compact intra)"
    )
    parser.add_argument("--cache", type=Path, default=Path("runs/bench"), help="where datasets are made (%(default)s)")
    parser.add_argument("--rivals", nargs="*", default=list(PIPELINES), choices=list(PIPELINES), help="(all)")
    parser.add_argument("--workers", type=int, default=available_cores(), help="cores (default: all, %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="clips of a batch (default %(default)s)")
    parser.add_argument("--batches", type=int, default=20, help="batches of a round (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default %(default)s)")
    parser.add_argument("--latency", type=float, default=20.0, help="of the web server, ms (default %(default)s)")
    parser.add_argument("--only", choices=("http", "beside"), help="one part; the others are taken from --json")
    parser.add_argument("--json", type=Path, default=RESULTS / "load.json", help="result file (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark."""
    folders = [Path(folder) for folder in args.data]
    if not folders:
        if args.footage is None:
            raise UsageError("nothing to load", hint="give --data DIR, or --footage FOLDER to shard videos first")
        # In shards enough for the workers of rivals that divide a dataset by its files.
        small = ("--samples-per-shard", str(_SHARD))
        folders = [
            shard(args.footage, profile, args.cache, options=small, name=f"{profile}-by-{_SHARD}")
            for profile in args.profiles
        ]
    record: dict[str, Any] = {"schema": SCHEMA, "machine": machine_facts(), "workers": args.workers}
    if args.only is None:
        record["rows"] = []
    else:
        record = measured_again(json.loads(args.json.read_text()), record, args.only)
    for folder in folders:
        corpus = Corpus(str(folder), "tsn8")
        own = Path(f"{folder}.pipelines")
        own.mkdir(exist_ok=True)
        tars = tuple(sorted(map(str, folder.glob("*.tar"))))
        work = Work(str(folder), tuple(corpus.files), tars, str(own), args.batch, args.workers)
        row: dict[str, Any] = {"dataset": folder.name}
        if args.only is None:
            row |= compare(work, args.rivals, args.batches, args.rounds)
        if args.only in (None, "http"):
            row["http"] = over_http(work, args.batches, args.rounds, args.latency)
        if args.only in (None, "beside"):
            row["beside"] = {kind: beside(work, kind, _BESIDE * args.rounds) for kind in KINDS}
        print(json.dumps(row, indent=1), flush=True)
        if args.only is None:
            record["rows"].append(row)
        else:
            record["rows"] = _replaced(record["rows"], row)
        write_json(args.json, record)
    return 0


def _replaced(rows: Sequence[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows, with those parts of one dataset that were measured again."""
    if all(row["dataset"] != new["dataset"] for row in rows):
        raise UsageError(f"there is no {new['dataset']!r} to measure again", hint="leave --only away")
    return [row | new if row["dataset"] == new["dataset"] else row for row in rows]


_VERSUS: Final = {DECODER: "fastvid_reaches"}


@dataclass(frozen=True)
class Pipeline:
    """One pipeline with its settings; `start` is picklable."""

    name: str
    settings: Mapping[str, Any]
    start: Callable[[], Batches]


class Runner:
    """A pipeline in a process of its own, which gives batches when asked."""

    def __init__(self, pipeline: Pipeline) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # No daemon: pipelines start processes of their own.
        self._process = context.Process(target=_serve, args=(theirs, pipeline.start))
        self._process.start()
        theirs.close()
        self._ask(_WARM)

    def round(self, batches: int) -> tuple[float, float]:
        """Wall and CPU seconds of so many batches."""
        cpu = cpu_of_family(self._process.pid)
        wall = self._ask(batches)
        return wall, cpu_of_family(self._process.pid) - cpu

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(OSError):
            self._pipe.send(0)
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _ask(self, batches: int) -> float:
        self._pipe.send(batches)
        try:
            answer: float | str = self._pipe.recv()
        except EOFError:
            raise UsageError("the pipeline's process died") from None
        if isinstance(answer, str):
            raise UsageError(f"the pipeline failed: {answer}")
        return answer


def _serve(pipe: Connection, start: Callable[[], Batches]) -> None:
    import torch

    # The consumer normalises for rivals; more threads would only fight with their workers.
    torch.set_num_threads(1)
    try:
        batches = start()
        while count := pipe.recv():
            begun = time.perf_counter()
            for _ in range(count):
                batch = next(batches)
                assert batch.dtype is torch.float32
                assert batch.shape[1:] == (3, 8, 224, 224)
            pipe.send(time.perf_counter() - begun)
    except Exception as error:  # noqa: BLE001 - told to the parent
        pipe.send(repr(error))
    finally:
        pipe.close()
        os._exit(0)  # rivals' worker processes must not keep this one


def compare(work: Work, rivals: Sequence[str], batches: int, rounds: int) -> dict[str, Any]:
    """Everyone in turn, page-cached and cold."""
    chosen = [Pipeline("fastvid", {"workers": work.workers}, partial(fastvid_loader, work))]
    chosen.append(Pipeline("fastvid, processes", {}, partial(fastvid_loader, work, workers="process")))
    chosen.append(Pipeline(DECODER, {"workers": work.workers}, partial(decoder_alone, work)))
    refused: dict[str, str] = {}
    sweeps: dict[str, list[dict[str, Any]]] = {}
    for name in rivals:
        reason = missing(name)
        if reason is None:
            try:
                best, sweeps[name] = _sweep(name, work, batches)
                chosen.append(best)
                continue
            except UsageError as error:
                reason = str(error)
        refused[name] = reason
        _log.warning("%s does not run here: %s", name, reason)
    result: dict[str, Any] = {"batch": work.batch, "sweeps": sweeps, "refused": refused}
    for state in ("page-cached", "cold"):
        found = _in_turn(chosen, work, batches, rounds, cold=state == "cold")
        result[state] = [
            {"pipeline": one.name, "settings": dict(one.settings), **_rates(times, batches * work.batch)}
            | ({} if one is chosen[0] else {_VERSUS.get(one.name, "fastvid_is_faster_by"): _ratio(found[0], times)})
            for one, times in zip(chosen, found, strict=True)
        ]
    return result


def _sweep(name: str, work: Work, batches: int) -> tuple[Pipeline, list[dict[str, Any]]]:
    """A rival's best of its settings and numbers of workers."""
    start, settings = PIPELINES[name]
    tried: list[tuple[float, Pipeline, dict[str, Any]]] = []
    for options in settings:
        for workers in sorted({max(1, work.workers // 2), work.workers, work.workers + 1, 2 * work.workers}):
            given = {"workers": workers, **options}
            one = Pipeline(name, given, partial(start, replace(work, workers=workers), **options))
            (times,) = _in_turn([one], work, batches, 1, cold=False)
            rate = batches * work.batch / times[0][0]
            _log.info("%s %s: %.1f clips/s", name, given, rate)
            tried.append((rate, one, given | {"rate": rate}))
    best = max(tried, key=lambda entry: entry[0])
    return best[1], [entry for _, _, entry in tried]


def _in_turn(
    pipelines: Sequence[Pipeline], work: Work, batches: int, rounds: int, *, cold: bool
) -> list[list[tuple[float, float]]]:
    """Wall and CPU seconds of each round of each pipeline."""
    times: list[list[tuple[float, float]]] = [[] for _ in pipelines]
    for number in range(rounds):
        for step in range(len(pipelines)):
            who = (step + number) % len(pipelines)
            runner = Runner(pipelines[who])  # anew each time: a waiting pipeline would read ahead in others' turns
            try:
                if cold:
                    for file in (*work.files, *work.tars, *map(str, Path(work.folder).rglob("*.mds"))):
                        drop_from_cache(Path(file))
                times[who].append(runner.round(batches))
            finally:
                runner.close()
    return times


def over_http(work: Work, batches: int, rounds: int, latency: float) -> dict[str, Any]:
    """fastvid over a server that waits, against fastvid on the disk."""
    os.environ.pop(CACHE_VARIABLE, None)  # every byte crosses the wire
    with slow_server(Path(work.url), latency) as (url, server):
        remote = replace(work, url=url)
        pipelines = [Pipeline("local", {}, partial(fastvid_loader, work))]
        pipelines.append(Pipeline("http", {"latency_ms": latency}, partial(fastvid_loader, remote)))
        before = cpu_of_family(server)
        local, http = _in_turn(pipelines, work, batches, rounds, cold=False)
        served = cpu_of_family(server) - before
        planned = counted(url, lambda: one_epoch(url, work.batch))
        whole = counted(url, lambda: whole_files(url))
    return {
        "latency_ms": latency,
        "local": _rates(local, batches * work.batch),
        "http": _rates(http, batches * work.batch),
        "http_over_local": _ratio(http, local),
        # On the same cores, which a server elsewhere would leave to the loader.
        "server_cpu_ms_a_clip": 1e3 * served / (rounds * (batches + _WARM) * work.batch),
        "a_clip": planned,
        "a_whole_file": whole,
        "whole_over_planned_bytes": whole["bytes"] / planned["bytes"],
    }


def counted(url: str, read: Callable[[], int]) -> dict[str, float]:
    """Requests for tars and their bytes, for each of the clips that `read` reads, by the server's own count."""

    def log() -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = json.loads(urllib.request.urlopen(f"{url}/log").read())
        return found

    before, clips, after = log(), read(), log()
    return {kind: (after[kind]["tar"] - before[kind].get("tar", 0)) / clips for kind in ("requests", "bytes")}


def whole_files(url: str) -> int:
    """Reads every video whole, as loaders without an index do; returns their number."""
    corpus = Corpus(url, "tsn8")
    return len([corpus.mp4(sample) for sample in range(len(corpus.dataset))])


def one_epoch(url: str, batch: int) -> int:
    """Reads an epoch; returns its clips."""
    import fastvid

    options: dict[str, Any] = {"frames": fastvid.Segments(8), "spatial": fastvid.RandomCrop(224), "last": "keep"}
    dataset = fastvid.open(url)
    loader = fastvid.ClipLoader(
        dataset, global_batch_size=min(batch, len(dataset)), decoder="pyav", rank=0, world_size=1, **options
    )
    return sum(len(one) for one in loader)


@contextlib.contextmanager
def slow_server(folder: Path, latency: float) -> Iterator[tuple[str, int]]:
    """The address and the process of a server of `folder`."""
    command = [sys.executable, "-m", "bench.load.slow_server", str(folder), str(latency)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}", process.pid
        finally:
            process.kill()


def cpu_of_family(pid: int | None) -> float:
    """CPU seconds of a process and its living descendants, and of those it has waited for."""
    assert pid is not None
    parents: dict[int, int] = {}
    spent: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            own = int(stat.parent.name)
            parents[own] = int(fields[1])
            # utime, stime, and those of waited-for children: fields 14 to 17 of proc(5).
            spent[own] = sum(map(int, fields[11:15]))
    family = {pid}
    grown = True
    while grown:
        more = {child for child, parent in parents.items() if parent in family} - family
        family |= more
        grown = bool(more)
    return sum(spent.get(member, 0) for member in family) / os.sysconf("SC_CLK_TCK")


def _rates(times: Sequence[tuple[float, float]], clips: int) -> dict[str, float]:
    rates = [clips / wall for wall, _ in times]
    return {
        "clips_a_second": statistics.median(rates),
        "clips_a_second_min": min(rates),
        "clips_a_second_max": max(rates),
        "cpu_ms_a_clip": 1e3 * statistics.median(cpu for _, cpu in times) / clips,
    }


def _ratio(ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """How many times as fast ours is, round by round, by the clock and by CPU time."""
    wall = [b[0] / a[0] for a, b in zip(ours, theirs, strict=True)]
    cpu = [b[1] / a[1] for a, b in zip(ours, theirs, strict=True) if a[1]]
    return {
        "wall": statistics.median(wall),
        "wall_min": min(wall),
        "wall_max": max(wall),
        "cpu": statistics.median(cpu) if cpu else 0.0,
    }
