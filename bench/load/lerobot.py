"""Measure training items of a LeRobot dataset: LeRobot's own loader, and fastvid from the same files and encoded again.

An item has two frames of each camera and three actions, in random order over all frames. LeRobot runs in an interpreter
of its own (``--lerobot PYTHON``, one that has ``lerobot[dataset]``), which also writes the dataset, from real footage
with the number of each frame painted in a corner. Loaders take turns, with the same number of workers.

right    items that both loaders deliver, compared bit by bit, and with the numbers that their frames show
rate     items a second; seconds from opening the dataset to the first batch
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.common.harness import Record, options, run_json
from bench.common.newest import NEWEST
from bench.common.rounds import apart, in_turn, ratios
from bench.load.lerobot_programs import OFFSETS, described
from fastvid.errors import FastvidError

SCHEMA: Final = "fastvid-bench-lerobot/1"
_RIVALS: Final = ("torchcodec", "pyav")
_OURS: Final = ("in place", "compact", "intra")


add_arguments = options(
    "footage workers cache",
    json="lerobot.json",
    lerobot=(str, "interpreter that has lerobot", {"required": True, "metavar": "PYTHON"}),
    episodes=(200, "episodes of the dataset"),
    frames=(50, "frames of an episode"),
    cameras=(4, "cameras of an episode"),
    batch=8,
    seconds=(15.0, "of a measurement"),
    rounds=3,
    compared=(500, "items compared bit by bit"),
)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    record = Record(SCHEMA, args, "episodes", "frames", "cameras", "workers", "batch")
    root, folders = _datasets(args, record)
    version, newest = _lerobot(args, "version", root)["version"], NEWEST["lerobot"].version
    record["machine"]["packages"]["lerobot"] = version
    if version != newest:
        print(f"LeRobot {version} is not the newest, {newest}")
    total = args.episodes * args.frames
    chosen = random.Random(0).sample(range(total), min(args.compared, total))
    theirs = _lerobot(args, "items", root, "torchcodec", ",".join(map(str, chosen)))["items"]
    for name, folder in folders.items():
        mine = apart(items, str(folder), chosen)
        record[f"right {name}"] = compared(mine, theirs, chosen, args.frames)
        print(name, json.dumps(record[f"right {name}"]))
    if record["right in place"]["other_bits"] or any(record[f"right {name}"]["wrong"] for name in folders):
        raise FastvidError(f"fastvid delivered wrong items: {record}")
    sizes = (args.workers, args.batch, args.seconds)

    def rated(name: str, _: int) -> tuple[float, float]:
        words = map(str, sizes)
        found = (
            _lerobot(args, "rate", root, name, *words) if name in _RIVALS else apart(rate, str(folders[name]), *sizes)
        )
        print(name, json.dumps(found), flush=True)
        return found["rate"], found["first_batch"]

    found = {
        name: list(zip(*made, strict=True)) for name, made in in_turn([*_RIVALS, *folders], args.rounds, rated).items()
    }
    record["rows"] = [_row(name, rates, firsts, found[_RIVALS[0]][0]) for name, (rates, firsts) in found.items()]
    return record.finish()


def _row(name: str, rates: Sequence[float], firsts: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    times = ratios(rates, base)
    return {
        "loader": name,
        "items_s": statistics.median(rates),
        "of_lerobot": statistics.median(times),
        "of_lerobot_range": [min(times), max(times)],
        "first_batch_s": statistics.median(firsts),
    }


def compared(mine: list[Any], theirs: list[Any], indices: list[int], frames: int) -> dict[str, int]:
    """Return how many items differ from LeRobot's in any bit, and how many of each show a wrong number."""
    count = {"items": len(indices), "other_bits": 0, "wrong": 0, "theirs": 0, "their_errors": 0}
    for own, other, index in zip(mine, theirs, indices, strict=True):
        first = index - index % frames
        right = [max(first, index - 1), index]
        count["wrong"] += any([number for _, number in views] != right for views in own.values())
        if "error" in other:
            count["their_errors"] += 1
            continue
        count["theirs"] += any([number for _, number in views] != right for views in other.values())
        count["other_bits"] += own != other
    return count


def _datasets(args: argparse.Namespace, record: dict[str, Any]) -> tuple[Path, dict[str, Path]]:
    """Make the dataset, and fastvid's of it, unless the cache has them; return their folders."""
    name = f"lerobot-{args.episodes}x{args.frames}x{args.cameras}"
    root = args.cache / name
    if not (root / "meta/info.json").exists() or not (args.cache / f"{name}.made").exists():
        if args.footage is None:
            raise FastvidError("there is no dataset yet", hint="name a folder of videos with --footage")
        shutil.rmtree(root, ignore_errors=True)
        args.cache.mkdir(parents=True, exist_ok=True)
        sizes = (str(args.episodes), str(args.frames), str(args.cameras))
        _lerobot(args, "make", root, str(args.footage.resolve()), *sizes)
        (args.cache / f"{name}.made").touch()
    folders = {}
    for kind in _OURS:
        folder = folders[kind] = args.cache / f"{name}-{kind.replace(' ', '-')}"
        begun = time.perf_counter()
        if not (folder / "dataset.json").exists():
            way = ["index"] if kind == "in place" else ["shard", "--profile", kind, "--short-side", "240"]
            words = [*way[:1], f"lerobot:{root}", "--out", str(folder), *way[1:]]
            subprocess.run([sys.executable, "-m", "fastvid", *words], check=True)
            record[f"seconds to make {kind}"] = time.perf_counter() - begun
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        record[f"bytes {kind}"] = size
    record["bytes lerobot"] = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    return root, folders


def _lerobot(args: argparse.Namespace, command: str, root: Path, *words: str) -> dict[str, Any]:
    program = Path(__file__).with_name("lerobot_programs.py")
    # An interpreter of its own: without this one's packages, and without this folder, whose `lerobot` is another one.
    words = (args.lerobot, "-P", str(program), command, str(root.resolve()), *words)
    return run_json(words, HF_HUB_OFFLINE="1", PYTHONPATH=None)


def _loader(folder: str, **options: Any) -> Any:
    import torch

    import fastvid

    torch.set_num_threads(1)
    workers = fastvid.Workers(num_threads=options.pop("workers"))
    return fastvid.ClipLoader(
        fastvid.EveryFrame(fastvid.open(folder)),
        frames=fastvid.Deltas(OFFSETS, tolerance=1e-4),
        signals={"action": fastvid.Deltas([0.0, 0.1, 0.2])},
        spatial=fastvid.Native(),
        output=fastvid.Output(dtype=torch.uint8, layout="BTCHW"),
        device="cpu",
        workers=workers,
        **options,
    )


def rate(folder: str, workers: int, batch: int, seconds: float) -> dict[str, Any]:
    """Return items a second, and the seconds until the first batch; importing torch counts for neither loader."""
    import torch  # noqa: F401

    begun = time.perf_counter()
    loader = _loader(folder, workers=workers, global_batch_size=batch, seed=os.getpid())
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - begun
    for _ in range(2 * workers):
        next(batches)
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        if (_ := next(batches, None)) is None:
            batches = iter(loader)
            continue
        count += batch
    return {"rate": count / (time.perf_counter() - begun), "first_batch": first}


def items(folder: str, indices: list[int]) -> list[Any]:
    """Return what `lerobot_programs.items` does, of fastvid's items."""
    wanted = {index: place for place, index in enumerate(indices)}
    loader = _loader(folder, workers=2, global_batch_size=1, shuffle=False)
    found: list[Any] = [None] * len(wanted)
    for index, batch in enumerate(loader):
        if index in wanted:
            found[wanted[index]] = {
                name: [described(frame) for frame in batch[name][0]] for name in loader.dataset.streams
            }
    return found
