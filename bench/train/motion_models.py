"""Check which models learn motion: videos of eight directions, which no single frame shows.

TSM and I3D model time and must learn the directions; TSN averages frames and must stay at chance; TSM with in-place
shift must end with the same weights as TSM with copies. All train on the demo's shards (created by `fastvid demo`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.common.harness import machine_facts, options, run_json, write_json
from fastvid.train.records.checkpoint import Checkpoints, decode

SCHEMA: Final = "fastvid-bench-motion/1"
CHANCE: Final = 12.5
MODELS: Final = {
    "tsm": ("motion_tsm",),
    "tsn": ("motion_tsm", "model.name=tsn-r18", "model.options.shift_div=none"),
    "i3d": ("motion_i3d",),
}
"""Recipe and overrides of each model."""

_SHORT_EPOCHS: Final = 2  # for the comparison of weights


add_arguments = options(
    data=(Path("runs/demo/shards"), "dataset"),
    seeds=(1, "runs per model"),
    processes=(2, "ranks per run"),
    only=(str, "measure one part; keep the others from --json", {"choices": [*MODELS, "inplace"]}),
    json="motion.json",
)


def run(args: argparse.Namespace) -> int:
    """Train all models and write the result; exit code 1 if a model fails its check."""
    record: dict[str, Any] = {}
    if args.json.exists():
        record = json.loads(args.json.read_text())
    record.setdefault("top1_percent", {})
    for name, (recipe, *changes) in MODELS.items():
        if args.only in (None, name):
            record["top1_percent"][name] = [_top1(args, recipe, changes, seed) for seed in range(args.seeds)]
            print(name, record["top1_percent"][name])
            _write(args, record)
    if args.only in (None, "inplace"):
        record["inplace_weights_differ_by"] = _inplace(args)
        print("in place and copied differ by", record["inplace_weights_differ_by"])
        _write(args, record)
    return 0 if verdict(record) else 1


def verdict(record: dict[str, Any]) -> bool:
    """Return whether all measured models pass their checks."""
    top1 = record["top1_percent"]
    learned = all(score >= 95 for name in ("tsm", "i3d") for score in top1.get(name, ()))
    # Chance on 128 held-out clips: three standard deviations of sqrt(0.125 * 0.875 / 128) are 8.8 %.
    blind = all(abs(score - CHANCE) <= 8.8 for score in top1.get("tsn", ()))
    return learned and blind and record.get("inplace_weights_differ_by", 0.0) == 0.0


def _write(args: argparse.Namespace, record: dict[str, Any]) -> None:
    write_json(args.json, {**record, "schema": SCHEMA, "chance_percent": CHANCE, "machine": machine_facts()})


def _top1(args: argparse.Namespace, recipe: str, changes: Sequence[str], seed: int) -> float:
    with tempfile.TemporaryDirectory() as out:
        summary = _train(args, out, recipe, [*changes, f"run.seed={seed}", "run.eval_every_epochs=1000"])
        return float(summary["eval"]["top1_percent"])


def _inplace(args: argparse.Namespace) -> float:
    states = []
    for inplace in ("false", "true"):
        with tempfile.TemporaryDirectory() as out:
            _train(
                args,
                out,
                "motion_tsm",
                [f"model.options.shift_inplace={inplace}", f"run.epochs={_SHORT_EPOCHS}", "data.eval_split=none",
                 "optim.warmup_epochs=1"],
            )  # fmt: skip
            found = Checkpoints(f"{out}/checkpoints").newest()
            assert found is not None
            states.append(decode(found.data, found.name)["replica"]["model"])
    one, other = states
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def _train(args: argparse.Namespace, out: str, recipe: str, changes: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.processes)]
    command += ["-m", "fastvid.train", recipe, f"data.path={args.data}", f"run.out={out}", *changes]
    return run_json(command)
