"""Elastic training under random accidents: nodes join, leave, are killed and are cut off the network.

Each node is a network namespace of this machine with a torchrun agent of its own, joined by a switch, so the run needs
root. The rendezvous' store stands outside the nodes, as an etcd would. A sequence is a run of one to three nodes with
random accidents at random moments; afterwards the weights must equal those of an undisturbed run of one process up to
the rounding of float64 sums, and the lineage must be the same, sample for sample.

Accidents: ``join`` (another node starts), ``leave`` (SIGTERM to an agent), ``kill-worker`` (SIGKILL to a worker),
``kill-node`` (SIGKILL to an agent and its worker), ``cut`` (the node's link goes down and stays down).

Times: detection is from the accident until every survivor's worker of before has ended; recovery, until the first row
of training that the group of afterwards writes.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench import harness
from bench.elastic_nodes import Node, network
from fastvid.errors import JobError
from fastvid.shard.job import run_job
from fastvid.train import metrics
from fastvid.train.checkpoint import Checkpoints, decode

log = logging.getLogger(__name__)

SCHEMA: Final = "fastvid-bench-elastic/1"
ROOT: Final = Path(__file__).parents[1]
ACCIDENTS: Final = ("join", "leave", "kill-worker", "kill-node", "cut")
NODES: Final = 3
VIDEOS: Final = 24
TIMEOUT_S: Final = 10.0  # run.timeout_s: after which a silent peer is dead
LIMIT: Final = 1e-9

RECIPE: Final = """
from fastvid.load.augment import CenterCrop, RandomCrop
from fastvid.load.sampling import Segments
from fastvid.train.config import Config, DataConfig, ModelConfig, OptimConfig, RunConfig


def recipe():
    return Config(
        data=DataConfig(
            path={data!r}, split=None, eval_split=None, frames=Segments(2), eval_frames=Segments(2, jitter=False),
            spatial=(RandomCrop(32),), eval_spatial=(CenterCrop(32),), global_batch_size=6, num_threads=1,
        ),
        model=ModelConfig(name="bench.elastic_model:net", num_classes=4, options={{"pause_s": {pause}}}),
        optim=OptimConfig(base_lr=0.01, base_batch_size=6, decay="cosine", warmup_epochs=1, clip_norm=5.0),
        run=RunConfig(
            out={out!r}, epochs={epochs}, log_every_steps=1, checkpoint_every_s=1.0, timeout_s={timeout},
        ),
    )
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many sequences, and how long."""
    parser.add_argument("--sequences", type=int, default=20, metavar="N", help="(default %(default)s)")
    parser.add_argument("--accidents", type=int, default=4, metavar="N", help="of a sequence (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=40, help="of a run, 4 steps each (default %(default)s)")
    parser.add_argument("--pause", type=float, default=0.2, metavar="S", help="of a step (default %(default)s)")
    parser.add_argument("--patience", type=float, default=240, metavar="S", help="for one recovery (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result")


def run(args: argparse.Namespace) -> int:
    """Runs the sequences, prints, writes; exit code 1 when one ends wrongly."""
    with tempfile.TemporaryDirectory(prefix="fastvid-elastic-") as folder:
        here = Path(folder)
        shards = _dataset(here)
        undisturbed = here / "undisturbed"
        _alone(here, shards, undisturbed, args)
        truth = _outcome(undisturbed)
        sequences = []
        for number in range(args.sequences):
            found = _sequence(here / f"s{number}", shards, truth, args, args.seed + number)
            log.info("sequence %d: %s", number, json.dumps(found))
            sequences.append(found)
            record = summary(sequences)
            if args.json is not None:
                harness.write_json(args.json, {**record, "machine": harness.machine_facts()})
    print(json.dumps({name: value for name, value in record.items() if name != "sequences"}, indent=1))
    return 0 if record["passed"] == len(sequences) else 1


def summary(sequences: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and detection and recovery by accident: median and worst."""
    times: dict[str, dict[str, Any]] = {}
    for kind in ACCIDENTS:
        events = [event for one in sequences for event in one["accidents"] if event["kind"] == kind]
        if events:
            times[kind] = {"count": len(events)}
            for what in ("detection_s", "recovery_s"):
                values = [event[what] for event in events if event[what] is not None]
                if values:
                    times[kind][what] = {"median": round(statistics.median(values), 2), "worst": round(max(values), 2)}
    return {
        "schema": SCHEMA,
        "sequences": list(sequences),
        "passed": sum(one["passed"] for one in sequences),
        "weights_differ_by_at_most": max(one["difference"] for one in sequences),
        "timeout_s": TIMEOUT_S,
        "accidents": times,
    }


def _sequence(out: Path, shards: Path, truth: dict[str, Any], args: argparse.Namespace, seed: int) -> dict[str, Any]:
    draws = random.Random(seed)
    recipe = _recipe(out.parent, shards, out, args)
    accidents: list[dict[str, Any]] = []
    with network(NODES) as hosts:
        nodes = [Node(hosts, number, recipe, NODES, out.parent) for number in range(NODES)]
        try:
            for node in nodes[: draws.randint(1, NODES)]:
                node.start()
            _wait_for_row(out, 0, nodes, args.patience)
            for _ in range(args.accidents):
                time.sleep(draws.uniform(0.5, 3.0))
                if _over(out):
                    break
                kind, node = _choose(nodes, draws)
                accidents.append(_accident(kind, node, nodes, out, args.patience))
            if not any(node.alive for node in nodes):
                nodes[0].start()
            _wait_until_over(out, nodes, args.patience + 4 * args.epochs * (args.pause + 0.2))
        finally:
            for node in nodes:
                node.kill()
    found = _outcome(out)
    difference = _difference(truth["weights"], found["weights"])
    rows = metrics.read(out / metrics.METRICS_FILE)
    worlds = [row["world_size"] for row in rows if row["kind"] == "start"]
    exact = found["lineage"] == truth["lineage"] and found["samples"] == truth["samples"]
    return {
        "seed": seed,
        "worlds": worlds,
        "accidents": accidents,
        "difference": difference,
        "lineage_exact": exact,
        "passed": bool(exact and difference < LIMIT),
    }


def _choose(nodes: Sequence[Node], draws: random.Random) -> tuple[str, Node]:
    """An accident that can happen now: something is left to go on, or can come back."""
    alive, idle = [node for node in nodes if node.alive], [node for node in nodes if not node.alive and not node.cut]
    kinds = ["kill-worker"]
    if idle:
        kinds += ["join", "join"]
    if len(alive) > 1:
        kinds += ["leave", "kill-node", "cut"]
    kind = draws.choice(kinds)
    return kind, draws.choice(idle if kind == "join" else alive)


def _accident(kind: str, node: Node, nodes: Sequence[Node], out: Path, patience: float) -> dict[str, Any]:
    starts = _count(out, "start")
    others = [other for other in nodes if other.alive and other is not node]
    before = [pid for other in others for pid in other.workers()]
    if kind == "kill-worker":
        before = [pid for other in (*others, node) for pid in other.workers()]
    log.info("%s of node %d; %d nodes", kind, node.number, len(others) + node.alive)
    began = time.monotonic()
    {
        "join": node.start, "leave": node.leave, "kill-worker": node.kill_worker, "kill-node": node.kill,
        "cut": node.cut_off,
    }[kind]()  # fmt: skip
    detected: float | None = None
    deadline = began + patience
    while time.monotonic() < deadline:
        if detected is None and not any(Path(f"/proc/{pid}").exists() for pid in before):
            detected = time.monotonic() - began
        if _over(out):
            break
        if _count(out, "start") > starts and _rows_after_start(out):
            return {
                "kind": kind,
                "detection_s": detected,
                "recovery_s": time.monotonic() - began,
            }
        time.sleep(0.1)
    else:
        raise JobError(f"no recovery from {kind} within {patience:g} s", file=out)
    return {"kind": kind, "detection_s": detected, "recovery_s": None}


def _rows(out: Path) -> list[dict[str, Any]]:
    file = out / metrics.METRICS_FILE
    return metrics.read(file) if file.exists() else []


def _count(out: Path, kind: str) -> int:
    return sum(row["kind"] == kind for row in _rows(out))


def _rows_after_start(out: Path) -> int:
    kinds = [row["kind"] for row in _rows(out)]
    last = len(kinds) - 1 - kinds[::-1].index("start")
    return kinds[last:].count("train")


def _over(out: Path) -> bool:
    try:
        return bool(json.loads((out / "summary.json").read_text())["over"])
    except (OSError, ValueError, KeyError):
        return False


def _wait_for_row(out: Path, rows: int, nodes: Sequence[Node], patience: float) -> None:
    deadline = time.monotonic() + patience
    while _count(out, "train") <= rows:
        if time.monotonic() > deadline or not any(node.alive for node in nodes):
            raise JobError("training did not begin", file=out, hint=str([str(node.log) for node in nodes]))
        time.sleep(0.2)


def _wait_until_over(out: Path, nodes: Sequence[Node], patience: float) -> None:
    deadline = time.monotonic() + patience
    while not _over(out):
        if time.monotonic() > deadline or not any(node.alive for node in nodes):
            raise JobError("training did not end", file=out, hint=str([str(node.log) for node in nodes]))
        time.sleep(0.2)


def _outcome(out: Path) -> dict[str, Any]:
    found = Checkpoints(str(out / "checkpoints")).newest()
    if found is None:
        raise JobError("run left no checkpoint", file=out)
    state = decode(found.data, found.name)
    return {
        "weights": state["replica"]["model"],
        "lineage": state["lineage"],
        "samples": state["replica"]["samples"],
    }


def _difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def _recipe(here: Path, shards: Path, out: Path, args: argparse.Namespace, *, pause: bool = True) -> Path:
    text = RECIPE.format(
        data=str(shards), out=str(out), epochs=args.epochs, pause=args.pause if pause else 0.0, timeout=TIMEOUT_S
    )
    path = here / f"{out.name}.py"
    path.write_text(text)
    return path


def _alone(here: Path, shards: Path, out: Path, args: argparse.Namespace) -> None:
    recipe = _recipe(here, shards, out, args, pause=False)
    command = [sys.executable, "-m", "fastvid.train", str(recipe), "run.log_every_steps=50"]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    if result.returncode:
        raise JobError(f"the undisturbed run failed: {shlex.join(command)}")


def _dataset(here: Path) -> Path:
    """Small videos of four textures; the class is the folder."""
    sources = ("testsrc", "testsrc2", "smptebars", "rgbtestsrc")
    for number in range(VIDEOS):
        kind = sources[number % len(sources)]
        path = here / "videos" / kind / f"v{number:02d}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        command = ["ffmpeg", "-v", "error", "-f", "lavfi", "-i", f"{kind}=size=64x48:rate=8:duration=2"]
        command += ["-vf", f"hue=h={15 * number}", "-pix_fmt", "yuv420p", str(path)]
        subprocess.run(command, check=True)
    run_job([str(here / "videos")], here / "shards")
    return here / "shards"
