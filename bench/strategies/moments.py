"""Compare Adam and AdamW under K-step averaging: moments, outer steps, compression, fragments and delays.

Four ranks learn the task of `bench.strategies.toy_task` with the same number of steps and learning rate. Training
loss, held-out loss and bytes are compared with Adam, AdamW and SGD with gradients averaged in every step. Some runs
vary the learning rate, because the optimum may differ. docs/strategies.md shows a part of the result.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bench.common.harness import RESULTS, machine_facts, write_json
from bench.strategies.ranks import Ranks, RunSpec

SCHEMA: Final = "fastvid-bench-moments/2"
RANKS: Final = 4
PERIODS: Final = (1, 8, 32)
MOMENTS: Final = ("local", "average", "reset")
RATE: Final = 2e-3
RATES: Final = (1e-3, 4e-3)
SWEPT_PERIOD: Final = 8
SGD: Final = {"base_lr": 0.05}
DECAY: Final = 0.01
"""Weight decay of AdamW, torch's default."""

STREAMING: Final = {
    "K=16": {"period": 16},
    "K=64": {"period": 64},
    "K=16 fp16": {"period": 16, "compress": "fp16"},
    "K=16 int8": {"period": 16, "compress": "int8"},
    "K=16 int4": {"period": 16, "compress": "int4"},
    "K=16 outer=nesterov": {"period": 16, "outer": "nesterov"},
    "K=16 outer=nesterov, momentum .6": {"period": 16, "outer": "nesterov", "outer_momentum": 0.6},
    "K=16 fragments=3": {"period": 16, "fragments": 3},
    "K=16 delay=4": {"period": 16, "delay": 4},
    "K=16 fragments=3 delay=4 int4": {"period": 16, "fragments": 3, "delay": 4, "compress": "int4"},
}
"""Options that are compared with AdamW."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m bench moments``."""
    parser.add_argument("--seeds", type=int, default=3, help="runs per contender (default %(default)s)")
    parser.add_argument("--steps", type=int, default=320, help="steps per run (default %(default)s)")
    parser.add_argument("--json", type=Path, default=RESULTS / "moments.json", help="result file (%(default)s)")


def contenders() -> list[tuple[str, RunSpec]]:
    """Return names and run specifications."""
    adam = {"name": "adam", "base_lr": RATE}
    found = [("ddp adam", RunSpec("ddp", optim=adam)), ("ddp sgd", RunSpec("ddp", optim=SGD))]
    found += [
        (f"kavg adam {moments} K={k}", RunSpec("kavg", {"period": k, "moments": moments}, adam))
        for moments in MOMENTS
        for k in PERIODS
    ]
    found += [(f"kavg sgd local K={SWEPT_PERIOD}", RunSpec("kavg", {"period": SWEPT_PERIOD}, SGD))]
    for rate in RATES:
        optim = {**adam, "base_lr": rate}
        found.append((f"ddp adam lr={rate:g}", RunSpec("ddp", optim=optim)))
        found.append(
            (f"kavg adam local K={SWEPT_PERIOD} lr={rate:g}", RunSpec("kavg", {"period": SWEPT_PERIOD}, optim))
        )
    adamw = {"name": "adamw", "base_lr": RATE, "weight_decay": DECAY}
    found.append(("ddp adamw", RunSpec("ddp", optim=adamw)))
    found += [(f"kavg adamw {name}", RunSpec("kavg", options, adamw)) for name, options in STREAMING.items()]
    return found


def run(args: argparse.Namespace) -> int:
    """Run the benchmark."""
    record: dict[str, Any] = {
        "schema": SCHEMA, "machine": machine_facts(), "ranks": RANKS, "steps": args.steps, "seeds": args.seeds,
        "adam_lr": RATE, "weight_decay": DECAY, "sgd": dict(SGD), "rows": [],
    }  # fmt: skip
    with Ranks(RANKS) as ranks:
        for name, spec in contenders():
            clips = args.steps * spec.batch
            plan = replace(spec, clips=clips, look_clips=clips)
            row = _row(name, [ranks.run(replace(plan, seed=seed))[0] for seed in range(args.seeds)])
            record["rows"].append(row)
            print(_line(row), flush=True)
            write_json(args.json, record)
    return 0


def _row(name: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "contender": name,
        "train_loss": statistics.mean(run["trained"][0] for run in runs),
        "train_losses": [run["trained"][0] for run in runs],
        "held_out_losses": [run["curve"][-1][2] for run in runs],
        "accuracies": [run["curve"][-1][3] for run in runs],
        "parameters": runs[0]["parameters"],
        "accuracy": statistics.mean(run["curve"][-1][3] for run in runs),
        "all_reduces": runs[0]["messages"],
        "all_reduced_mb": runs[0]["message_bytes"] / 1e6,
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['contender']:32} train loss {row['train_loss']:.3f}  accuracy {row['accuracy']:.3f}"
        f"  {row['all_reduces']:4d} all-reduces, {row['all_reduced_mb']:6.1f} MB"
    )
