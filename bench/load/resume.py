"""Compare what loaders deliver after a kill: samples lost, doubled or in another order, in other worlds too.

Each loader of `bench/load/resume_programs.py` delivers numbered samples to two ranks with two workers each. Its state
is saved in the middle of an epoch, and the ranks are killed (SIGKILL) some steps later. Then the state is resumed: as
it was, in a later epoch, by one and by four ranks, without workers and with four. What was delivered up to the state
and after resuming is compared with an epoch that nobody interrupted; work after the state is repeated and not counted.

Rivals need environments of their own, given by their interpreters; without one it is left out. What was measured:

--rivals   Python 3.11 with torch 2.13.0, torchdata 0.11.0, accelerate 1.15.0, datasets 5.2.0, litdata 0.2.76,
           webdataset 1.0.2; without dependencies, because a solver finds no common versions, megatron-energon 7.4.1,
           multi-storage-client, mfusepy, filetype, rapidyaml, s3fs and aiobotocore; no torchvision that does not fit
--lerobot  Python 3.12 with lerobot[dataset] 0.6.1, torch 2.11.0, accelerate 1.15.0; without dependencies
           mosaicml-streaming 0.13.0, transformers 5.23.0 and what `bench.common.newest` lists for it
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.common.harness import Record, options
from bench.common.ports import reserved_port
from bench.load.resume_programs import LOADERS, SAMPLES
from fastvid.errors import JobError

SCHEMA: Final = "fastvid-bench-resume/1"
SAVED: Final = 21
KILLED: Final = 29
"""Steps of an epoch of 64 after which the state is saved, and after which ranks are killed."""

CASES: Final[Mapping[str, tuple[int, int, int]]] = {
    "same": (0, 2, 2),
    "second epoch": (1, 2, 2),
    "1 rank": (0, 1, 2),
    "4 ranks": (0, 4, 2),
    "no workers": (0, 2, 0),
    "4 workers": (0, 2, 4),
}
"""Epoch in which the state is saved, and ranks and workers that resume it; two ranks with two workers saved it."""

_PROGRAM: Final = Path(__file__).with_name("resume_programs.py")
_PATIENCE: Final = 900.0
"""Seconds after which ranks hang."""

add_arguments = options(
    json="resume.json",
    only=([], "loaders; others stay in the result", {"choices": tuple(LOADERS), "metavar": "NAME"}),
    rivals=(str, "interpreter with the other rivals", {"metavar": "PYTHON"}),
    lerobot=(str, "interpreter with lerobot and mosaicml-streaming, which require torchvision", {"metavar": "PYTHON"}),
)

Logs = Sequence[Sequence[Any]]
"""For each rank, the batches [epoch, step, numbers] that it delivered."""


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    record, rows = Record(SCHEMA, args, samples=SAMPLES, saved=SAVED, killed=KILLED), dict[str, Any]()
    others = {"fastvid": sys.executable, "torch": sys.executable}
    others |= dict.fromkeys(("streaming", "lerobot", "lerobot-streaming"), args.lerobot)
    for name in args.only or LOADERS:
        if python := others.get(name, args.rivals):
            row = {"commit": record["machine"]["commit"], **measured(name, python)}
            print(json.dumps(row, indent=1), flush=True)
            if args.only and args.json.exists():
                rows = {one["loader"]: one for one in json.loads(args.json.read_text())["rows"]}
            rows[name] = row
            record["rows"] = [rows[one] for one in LOADERS if one in rows]
            record.save()
    return 0


def measured(name: str, python: str, program: Path = _PROGRAM) -> dict[str, Any]:
    """Return what a loader delivers in each case."""
    kind, killed = LOADERS[name], dict[int, Logs]()
    title, _, source = (" ".join(part.split()) for part in (kind.__doc__ or "").partition("\n\n"))
    row = {"loader": name, "title": title, "source": source, "package": kind.package, "offers": kind.offers.split()}
    with tempfile.TemporaryDirectory(prefix="fastvid-resume-") as scratch:
        folder = Path(scratch)
        with served(name, python, folder, program) as ranks:
            whole = ranks.run(folder / "whole", 2, 2, epochs=3)
            for epoch in sorted({epoch for epoch, *_ in CASES.values()}):
                places = {"save": [epoch, SAVED], "hold": [epoch, KILLED]}
                killed[epoch] = ranks.run(folder / f"killed{epoch}", 2, 2, epochs=3, **places)
            once = {0: list(range(SAMPLES))}
            row |= {"version": ranks.version, "uninterrupted": judged(epoch_of(whole, 0), once)}
            row["cases"] = {case: resumed(ranks, folder, case, whole, killed) for case in CASES}
    return row


def resumed(ranks: Ranks, folder: Path, case: str, whole: Logs, killed: Mapping[int, Logs]) -> dict[str, Any]:
    """Return how the epoch that was interrupted and the next one went, or why the state was refused."""
    epoch, world, workers = CASES[case]
    place = {"state": str(folder / f"killed{epoch}" / "state"), "start": [epoch, SAVED]}
    try:
        after = ranks.run(folder / case, world, workers, epochs=epoch + 2, **place)
    except JobError as error:
        return {"refused": error.message}
    before = {step: ids for step, ids in epoch_of(killed[epoch], epoch).items() if step < SAVED}
    found = judged(before | epoch_of(after, epoch), epoch_of(whole, epoch))
    return found | {"next": judged(epoch_of(after, epoch + 1), epoch_of(whole, epoch + 1))}


def epoch_of(logs: Logs, epoch: int) -> dict[int, list[int]]:
    """Return the samples of each global batch of an epoch, sorted, by step."""
    steps: dict[int, list[int]] = {}
    for number, step, ids in (batch for log in logs for batch in log):
        if number == epoch:
            steps[step] = sorted([*steps.get(step, []), *ids])
    return steps


def judged(found: Mapping[int, list[int]], whole: Mapping[int, list[int]]) -> dict[str, Any]:
    """Return how many samples of an epoch were lost and doubled, and whether all global batches are as they should."""
    seen, right = (Counter(one for ids in steps.values() for one in ids) for steps in (found, whole))
    return {"lost": (right - seen).total(), "doubled": (seen - right).total(), "exact": found == whole}


@contextlib.contextmanager
def served(name: str, python: str, folder: Path, program: Path) -> Iterator[Ranks]:
    """Make the samples and start the process of which all ranks are forked, which imports the loader once."""
    (folder / "samples").mkdir()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if python != sys.executable:  # an interpreter of its own: without this one's packages
        environment.pop("PYTHONPATH", None)
    words, file = [name, str(folder / "samples")], folder / "output"
    with file.open("w") as output:
        how: dict[str, Any] = {"stderr": output, "env": environment, "text": True}
        if subprocess.run([python, "-P", str(program), "make", *words], stdout=output, **how, check=False).returncode:
            raise JobError(f"{name}: its samples cannot be made: {file.read_text()[-1500:]}")
        how |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([python, "-P", str(program), "serve", *words], **how) as server:
            try:
                ranks = Ranks(server)
                if not ranks.version:
                    raise JobError(f"{name} cannot be imported: {file.read_text()[-1500:]}")
                yield ranks
            finally:
                server.kill()


class Ranks:
    """Runs ranks of one loader."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server
        self.version = server.stdout.readline().strip()  # type: ignore[union-attr]
        """The version of the loader's package."""

    def run(self, folder: Path, world: int, workers: int, **more: Any) -> Logs:
        """Run ranks until they end or wait, kill them and their workers, and return what they delivered.

        Raises:
            JobError: If a rank fails, or they hang.
        """
        (folder / "state").mkdir(parents=True)
        logs, started = [folder / str(rank) for rank in range(world)], list[int]()
        settings = {"state": str(folder / "state"), "world": world, "workers": workers, **more}
        with reserved_port() as port:
            try:
                for rank, log in enumerate(logs):
                    log.touch()
                    shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
                    own = dict.fromkeys(("RANK", "LOCAL_RANK", "GLOBAL_RANK"), rank)
                    variables = {"MASTER_ADDR": "127.0.0.1"} | {
                        key: str(value) for key, value in (shared | own).items()
                    }
                    line = json.dumps(settings | {"rank": rank, "log": str(log), "variables": variables})
                    print(line, file=self._server.stdin, flush=True)
                    started.append(int(self._server.stdout.readline()))  # type: ignore[union-attr]
                _wait(logs, started, more.get("hold"))
            finally:
                for process in started:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process, signal.SIGKILL)
        return [[one for one in _read(log) if isinstance(one, list)] for log in logs]


def _wait(logs: Sequence[Path], started: Sequence[int], hold: list[int] | None) -> None:
    """Wait until all ranks have ended or reached the place where they wait."""
    begun = time.monotonic()
    while time.monotonic() < begun + _PATIENCE:
        gone = [not Path(f"/proc/{process}").exists() for process in started]
        last = [(_read(log) or [None])[-1] for log in logs]
        for one, is_gone in zip(last, gone, strict=True):
            if isinstance(one, dict) and "error" in one:
                raise JobError(one["error"])
            if is_gone and not isinstance(one, dict):
                raise JobError("a rank ended without a word")
        if all(isinstance(one, dict) or (one and [one[0], one[1] + 1] == hold) for one in last):
            return
        time.sleep(0.1)
    raise JobError(f"hung: no end after {_PATIENCE:.0f} s")


def _read(log: Path) -> list[Any]:
    """Return the complete lines of a log."""
    return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
