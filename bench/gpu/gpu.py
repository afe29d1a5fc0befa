"""Prove and measure everything that needs a GPU, on a machine without ffmpeg and without a network.

    python -m bench gpu --pack DIR --footage FOLDER     here: make the data, at most 15 MB
    python -m bench gpu --bundle TAR                    here: or the data, fastvid and a script that installs it
    python -m bench gpu --all --data DIR --out DIR      there: run all sections
    python -m bench gpu --all --data DIR --out DIR --fake    a rehearsal on a CPU

    facts         the GPU, its driver and engines, fastvid doctor
    conformance   every frame of every GPU decoder against packed references
    pixels        the planes-to-batch kernel: exactness, bandwidth beside a copy, compiled kernels
    lanes         lanes and options of every GPU decoder: NVDEC utilisation, delivered frames/s, host cores
    rivals        PyNvVideoCodec, torchcodec and DALI on the same clips: right frames, rates in rounds, ratios
    loader        batches against the CPU's, also beside a busy stream; memory over time
    step          the trainer's step in bfloat16 by memory format and kernels; then fed by the loader; host syncs
    ranks         torchrun: one rank over NCCL; two ranks over gloo on one device, killed and resumed
    scaler        50 steps in fp16

Each section runs in a process of its own with a time limit; after each, OUT/gpu.json is written. The exit code is the
number of proofs that failed. Without a GPU nothing here has been measured.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import multiprocessing
import operator
import os
import signal
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from bench.common.harness import DATASET, FOLDER, machine_facts, options, write_json
from bench.gpu.bundle import bundle
from bench.gpu.pack import pack
from bench.gpu.settings import Notes, Settings
from fastvid.errors import UsageError
from fastvid.runtime.processes import how_it_ended

_SIGNS: Final = {">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt}


@dataclass(frozen=True)
class Proof:
    """An expectation about one number."""

    section: str
    value: str
    sign: str
    bound: float
    says: str
    goal: bool = False
    card: bool = False


PROOFS: Final = (
    Proof("facts", "engines", ">=", 1, "the driver reports NVDEC engines", card=True),
    Proof("facts", "decoders", ">=", 1, "a GPU decoder runs here"),
    Proof("conformance", "reference_wrong", "==", 0, "PyAV's frames have the packed digests"),
    Proof("conformance", "errors", "==", 0, "GPU decoders decode every clip"),
    Proof("conformance", "wrong_frames", "==", 0, "every frame is the requested one, among all frames of its clip"),
    Proof("conformance", "spoiled_accepted", "==", 0, "black, stale, swapped, flipped and late frames are refused"),
    Proof("conformance", "planes_unequal", "==", 0, "planes are bit-exact to libavcodec", goal=True),
    Proof("conformance", "rgb_mean_levels", "<=", 3, "RGB of GPU decoders is near the reference, in mean levels"),
    Proof("conformance", "rgb_of_planes_levels", "<=", 1, "RGB is within one level of our reference", goal=True),
    Proof("pixels", "most_levels", "<=", 1, "the kernel is within one level of our reference"),
    Proof("pixels", "share_of_copy", ">", 0.5, "the kernel's bandwidth / that of a copy", goal=True, card=True),
    Proof("pixels", "kernels", "<=", 16, "200 random crops compile few kernels", card=True),
    Proof("lanes", "failed", "==", 0, "every setting of the sweep decodes"),
    Proof("lanes", "nvdec_percent", ">=", 95, "all NVDEC engines are busy at the best setting", goal=True, card=True),
    Proof("lanes", "frames_per_s", ">=", 20_000, "delivered frames/s, 256 lines, compact, TSN-8", goal=True, card=True),
    Proof("lanes", "host_cores", "<=", 4, "host cores at that setting", goal=True, card=True),
    Proof("rivals", "ours_refused", "==", 0, "fastvid's decoders run and show the right frames"),
    Proof("rivals", "compared", ">=", 6, "rivals that ran and showed the right frames", goal=True),
    Proof("rivals", "least_ratio", ">", 1, "clips/s / the fastest rival's, at worst", goal=True, card=True),
    Proof("loader", "wrong_batches", "==", 0, "batches have the CPU's frames"),
    Proof("loader", "raced_batches", "==", 0, "batches are the same beside a busy stream, with batches dropped"),
    Proof("loader", "gpu_memory_growth_mb", "<=", 0, "GPU memory does not grow", goal=True, card=True),
    Proof("step", "finite", "==", 1, "the loss is finite in every variant"),
    Proof("step", "channels_last_speedup", ">=", 1.3, "channels_last speeds up the step", card=True),
    Proof("step", "loader_of_cached", ">=", 0.98, "fed by a loader / cached, TSM-R50, bf16", goal=True, card=True),
    Proof("step", "host_syncs", "==", 0, "host synchronisations per step", goal=True, card=True),
    Proof("ranks", "finished", "==", 1, "one rank trains over the device's own collectives"),
    Proof("ranks", "resumed", "==", 1, "two ranks on one device resume after a rank is killed"),
    Proof("ranks", "same_lineage", "==", 1, "the resumed run has seen the same samples"),
    Proof("scaler", "finite_steps", "==", 50, "50 steps with a loss scale have finite weights"),
)
"""Every expectation, in the order of the sections."""


def judge(sections: Collection[str], found: Mapping[str, Any], *, fake: bool) -> list[dict[str, Any]]:
    """Return a row for each expectation of some sections; a number that is missing misses its bound."""
    rows = []
    for proof in PROOFS:
        if proof.section in sections:
            value = found.get(proof.section, {}).get(proof.value)
            met = isinstance(value, int | float) and bool(_SIGNS[proof.sign](value, proof.bound))
            row = {"section": proof.section, "value": proof.value, "says": proof.says, "goal": proof.goal}
            row |= {"expected": f"{proof.sign} {proof.bound:g}", "found": value}
            rows.append(row | {"met": None if proof.card and fake else met})
    return rows


def line(row: Mapping[str, Any]) -> str:
    """Return a row of `judge` for people."""
    word = {True: "met", False: "MISSED", None: "not judged"}[row["met"]]
    found = "not measured" if row["found"] is None else f"{row['found']:.6g}"
    kind = "goal " if row["goal"] else "proof"
    return f"{word:10} {kind} {row['section']}: {row['says']}: {found} (expected {row['expected']})"


SCHEMA: Final = "fastvid-bench-gpu/2"

# Seconds. A rehearsal, which may share its cores with others, has five times as long.
LIMITS: Final = {
    "facts": 60, "conformance": 170, "pixels": 180, "lanes": 340, "rivals": 240, "loader": 230, "step": 300,
    "ranks": 170, "scaler": 90,
}  # fmt: skip
"""Time limit of each section, in the order in which they run."""

_MOST_FAILED = 100  # exit codes above 125 mean other things

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m bench gpu``."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--all", action="store_true", help="run all sections")
    what.add_argument("--only", nargs="+", choices=tuple(LIMITS), metavar="SECTION", help="run some sections")
    what.add_argument("--pack", type=Path, metavar="DIR", help="make the data; needs ffmpeg, but no GPU")
    what.add_argument("--bundle", type=Path, metavar="TAR", help="make the data and what else a stranger needs")
    _options(parser)


_options = options(
    data=(Path, "folder made by --pack", DATASET),
    out=(Path, "folder of gpu.json and gpu.log", DATASET),
    fake=(False, "rehearse on a CPU, with decoders that pose as a GPU's"),
    batch=(32, "clips per batch"),
    model=("tsm-r50", "model of the training step"),
    seconds=(4.0, "duration per measurement"),
    footage=(Path, "with --pack: real videos, instead of generated ones", FOLDER),
    wheels=(Path, "with --bundle: wheels to add, such as PyNvVideoCodec's", FOLDER),
    clips=(24, "with --pack: clips of 256 lines"),
    clip_seconds=(2.0, "with --pack: duration"),
    lines=([256, 720], "with --pack: short sides"),
)


def run(args: argparse.Namespace) -> int:
    """Make the data, or run the sections and return the number of failed proofs."""
    settings = {"clips": args.clips, "lines": sorted(args.lines), "seconds": args.clip_seconds}
    if args.pack is not None:
        print(f"{args.pack}: {pack(args.footage, args.pack, **settings):.1f} MB")
        return 0
    if args.bundle is not None:
        print(f"{args.bundle}: {bundle(args.bundle, args.wheels, args.footage, **settings):.1f} MiB")
        return 0
    if args.data is None or args.out is None:
        raise UsageError("--all and --only need data and a result folder", hint="add --data DIR --out DIR")
    return _prove(_settings(args), list(LIMITS) if args.all else args.only, args.out)


def _settings(args: argparse.Namespace) -> Settings:
    settings = Settings(args.data, args.fake, args.seconds, args.batch, args.model)
    if args.fake:
        # With a width of 8, oneDNN of torch 2.13 crashes in backward passes with channels last.
        settings = Settings(args.data, True, 0.05, 2, "tsm-r18", {"width": 16}, "off")
    settings.smallest()
    return settings


def _prove(settings: Settings, sections: list[str], out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "schema": SCHEMA, "fake": settings.fake, "machine": machine_facts(), "seconds": {}, "ended": {}, "sections": {},
    }  # fmt: skip
    for name in filter(sections.__contains__, LIMITS):
        begun = time.perf_counter()
        ended, found = _section(name, settings, out / "gpu.log")
        record["sections"][name], record["ended"][name] = found, ended
        record["seconds"][name] = round(time.perf_counter() - begun, 1)
        record["verdicts"] = judge(record["sections"], record["sections"], fake=settings.fake)
        # A section that broke after its last number has broken a proof too.
        missed = [row for row in record["verdicts"] if row["met"] is False] + list(
            filter(None, record["ended"].values())
        )
        record["failed"] = len(missed)
        write_json(out / "gpu.json", record)
        print(f"== {name}: {record['seconds'][name]} s" + (f", {ended}" if ended else ""), flush=True)
        for row in record["verdicts"]:
            if row["section"] == name:
                print(f"   {line(row)}", flush=True)
    print(f"{record['failed']} proofs failed; {out / 'gpu.json'}")
    return min(record["failed"], _MOST_FAILED)


def _section(name: str, settings: Settings, log: Path) -> tuple[str | None, dict[str, Any]]:
    """Run a section in a process of its own; return how it broke, None if it did not, and its numbers."""
    # The fork server has loaded torch but never used CUDA: sections start at once, and each has its own CUDA context.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"bench.gpu.{section}" for section in LIMITS])
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder, "part.json")
        child = context.Process(target=_child, args=(name, settings, part, log))
        child.start()
        limit = LIMITS[name] * (5 if settings.fake else 1)
        child.join(limit)
        ended = None
        if child.is_alive():
            ended = f"stopped after its limit of {limit} s"
            _kill(child.pid)
            child.kill()  # it may not have its own group yet
            child.join()
        elif child.exitcode:
            ended = how_it_ended(child.exitcode)
            _kill(child.pid)
        found = json.loads(part.read_text()) if part.exists() else {}
    return ended, found


def _kill(group: int | None) -> None:
    """Kill a section with everything that it started."""
    if group is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _child(name: str, settings: Settings, part: Path, log: Path) -> None:
    os.setsid()
    with log.open("ab") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    print(f"== {name}", flush=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    if settings.fake:  # a GPU's host threads sleep; a CPU's would compete with the decoders
        torch.set_num_threads(1)
    importlib.import_module(f"bench.gpu.{name}").measure(settings, Notes(part))
