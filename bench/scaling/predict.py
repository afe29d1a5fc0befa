"""Predict throughput, efficiency and time to train on up to thousands of GPUs from a model file.

Uncertain inputs are drawn many times with a fixed seed; a result is the mean, the median and the 5 % and 95 % quantiles
of the draws. Nothing here is measured: every row is labelled "predicted".

Measured runs of `bench.scaling.scale` are predicted from their other parts; nothing is fitted to the runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.scaling.model import (
    AllReducePoint,
    ClusterModel,
    Compute,
    DataPath,
    Gradients,
    SyncSpec,
    Topology,
    Value,
    Workload,
    fit_link,
    predict_step,
    train_seconds,
)
from bench.scaling.model_file import ModelFile, load_model
from fastvid.errors import UsageError
from fastvid.runtime.values import sha256

VALIDATION: Final = "fastvid-scaling-validation/1"
_GLOO: Final = "ring"  # its all-reduce

SCHEMA: Final = "fastvid-scaling-prediction/1"
QUANTILES: Final = {"p05": 0.05, "p50": 0.5, "p95": 0.95}
BOTTLENECKS: Final = ("data", "communication", "compute")
_PARTS: Final = ("step", "compute", "wait", "exposed", "data_stall")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m bench scale --model``."""
    parser.add_argument("--model", type=Path, metavar="FILE.toml", help="predict from this model file of a cluster")
    parser.add_argument("--json", type=Path, metavar="FILE", help="result file")
    parser.add_argument("--draws", type=int, default=2000, help="draws of the uncertain inputs (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default %(default)s)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="override an input, such as workload.epochs=50"
    )


def run(args: argparse.Namespace) -> int:
    """Print the table and write the JSON; return 0."""
    changes: dict[str, str] = {}
    for change in args.set:
        name, equals, value = change.partition("=")
        if not equals:
            raise UsageError(f"--set {change!r} is not NAME=VALUE", hint="write --set workload.epochs=50, for example")
        changes[name] = value
    if args.draws < 1:
        raise UsageError(f"--draws is {args.draws}, must be at least 1")
    model = load_model(args.model, changes)
    try:
        report = predict(model, draws=args.draws, seed=args.seed)
    except UsageError as error:
        raise error.at(file=args.model) from None
    report["model_file"] = {"name": args.model.name, "sha256": sha256(args.model.read_bytes())}
    report["changes"] = changes
    print(table(report))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def beside_measured(worlds: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Predict every measured run from its world's local steps, all-reduces and loaders; None without all-reduces."""
    points: dict[str, list[AllReducePoint]] = {}
    for world in worlds:
        first = world["ranks"][0]
        link = "intra" if first["local_world_size"] > 1 else "inter"
        points.setdefault(link, []).extend(
            AllReducePoint(world["world_size"], one["bytes"], statistics.median(one["seconds"]))
            for one in first["all_reduces"]
        )
    links = {end: fit_link(found) for end, found in points.items() if found}
    if not links:
        return None
    links = {end: links.get(end, next(iter(links.values()))) for end in ("intra", "inter")}
    local = max(rank["local_world_size"] for world in worlds for rank in world["ranks"])
    topology = Topology(local, links["intra"], links["inter"])
    rows: list[dict[str, Any]] = []
    for name in sorted(worlds[0]["ranks"][0]["strategies"]):
        compared = [_compared(world, SyncSpec.parse(name), topology) for world in worlds]
        for row in compared:
            for kind in ("predicted", "measured"):
                speeds = [one[f"{kind}_clips_per_second"] / one["ranks"] for one in (row, compared[0])]
                row[f"{kind}_efficiency"] = speeds[0] / speeds[1]
        rows += compared
    return {
        "schema": VALIDATION,
        "label": "predicted beside measured",
        "machine": worlds[0]["machine"],
        "algorithm": _GLOO,
        "fitted_links": {end: dataclasses.asdict(link) for end, link in links.items()},
        "rows": rows,
        "largest_error": max(abs(row["relative_error"]) for row in rows),
    }


def _compared(world: Mapping[str, Any], strategy: SyncSpec, topology: Topology) -> dict[str, Any]:
    """Return the predicted and the measured step of one strategy in one world."""
    size, ranks, clips = world["world_size"], world["ranks"], world["clips_per_rank"]
    # The slowest rank, which the others wait for.
    slowest = np.array(max((rank["step_seconds"] for rank in ranks), key=statistics.median))
    mean = float(slowest.mean())
    # With one request per clip the measured clip rate of all loaders is the request rate.
    rate = sum(rank["load"]["clips_per_second"] for rank in ranks)
    cluster = ClusterModel(
        Workload(1, 1, clips_per_gpu=clips),
        Gradients(world["parameters"]),
        Compute(mean, clips, step_jitter=float(slowest.std() / mean)),
        topology,
        DataPath(shared_requests_per_second=rate),
    )
    step = predict_step(cluster, size, strategy, _GLOO)
    predicted = float(step.seconds)
    measured = max(statistics.median(rank["strategies"][str(strategy)]["train_seconds"]) for rank in ranks)
    return {
        "ranks": size,
        "strategy": str(strategy),
        "predicted_step_seconds": predicted,
        "measured_step_seconds": measured,
        "relative_error": predicted / measured - 1,
        "predicted_clips_per_second": step.clips / predicted,
        "measured_clips_per_second": step.clips / measured,
        "predicted_split_seconds": {
            part: float(getattr(step, part)) for part in ("compute", "wait", "exposed", "data_stall")
        },
    }


def comparison(report: Mapping[str, Any]) -> str:
    """Format predictions beside measured runs as text."""
    lines = ["ranks sync      predicted ms  measured ms   error  predicted eff.  measured eff."]
    lines += [
        f"{row['ranks']:>5} {row['strategy']:8} {1000 * row['predicted_step_seconds']:13.2f} "
        f"{1000 * row['measured_step_seconds']:12.2f} {100 * row['relative_error']:+6.1f}% "
        f"{100 * row['predicted_efficiency']:14.1f}% {100 * row['measured_efficiency']:13.1f}%"
        for row in report["rows"]
    ]
    return "\n".join(lines)


def predict(model: ModelFile, *, draws: int = 2000, seed: int = 0) -> dict[str, Any]:
    """Predict every combination of GPU count, strategy and all-reduce algorithm in the model file.

    Returns A JSON object: ``rows``, one per combination, each number as ``{"mean", "p05", "p50", "p95"}``;
    ``references``, each published result with its prediction and error; ``inputs``, the contents of the model file.
    """
    cluster = model.cluster(seed, draws)
    rows = [
        _row(cluster, gpus, SyncSpec.parse(strategy), algorithm)
        for algorithm in model.predict.algorithms
        for strategy in model.predict.strategies
        for gpus in model.predict.gpus
    ]
    references = []
    for reference in model.reference:
        row = _row(cluster, reference.gpus, SyncSpec.parse(reference.strategy), model.predict.algorithms[0])
        predicted = row[reference.quantity]
        references.append(
            {
                "label": "predicted",
                "gpus": reference.gpus,
                "strategy": reference.strategy,
                "quantity": reference.quantity,
                "predicted": predicted,
                "reference": reference.value,
                "relative_error": predicted["p50"] / reference.value - 1,
                "inside_interval": predicted["p05"] <= reference.value <= predicted["p95"],
                "source": reference.source,
            }
        )
    return {
        "schema": SCHEMA,
        "label": "predicted",
        "name": model.name,
        "note": model.note,
        "draws": draws,
        "seed": seed,
        "quantiles": QUANTILES,
        "rows": rows,
        "references": references,
        "inputs": model.raw,
    }


def table(report: Mapping[str, Any]) -> str:
    """Format the report as text: one line per row, then the references."""
    lines = [
        f"PREDICTED, not measured: {report['name']}, {report['draws']} draws, seed {report['seed']}; "
        "median [5 %, 95 %] of the draws",
        "last columns: means in ms, step = compute + wait for the slowest GPU + exposed communication + data stall",
        f"{'GPUs':>6} {'sync':8} {'all-reduce':12} {'clips/s':>26} {'against one node':>21} {'time to train':>30} "
        f"{'step':>8} {'compute':>8} {'wait':>8} {'exposed':>8} {'data':>8}  bottleneck",
    ]
    lines += [
        f"{row['gpus']:>6} {row['strategy']:8} {row['algorithm']:12} "
        f"{_interval(row, 'clips_per_second'):>26} {_interval(row, 'efficiency_node'):>21} "
        f"{_interval(row, 'train_seconds'):>30} "
        + " ".join(f"{1000 * row[f'{part}_seconds']['mean']:8.1f}" for part in _PARTS)
        + f"  {row['costs_most']}"
        for row in report["rows"]
    ]
    for reference in report["references"]:
        name = reference["quantity"]
        lines.append(
            f"reference: {name} on {reference['gpus']} GPUs ({reference['strategy']}): predicted "
            f"{_interval({name: reference['predicted']}, name)}, reference {_FORMS[name](reference['reference'])}, "
            f"error {100 * reference['relative_error']:+.1f} %, "
            f"{'inside' if reference['inside_interval'] else 'outside'} the interval; {reference['source']}"
        )
    return "\n".join(lines)


def _row(cluster: ClusterModel, gpus: int, strategy: SyncSpec, algorithm: str) -> dict[str, Any]:
    step = predict_step(cluster, gpus, strategy, algorithm)
    per_gpu = step.clips_per_second / gpus
    node = cluster.topology.gpus_per_node
    base = {n: predict_step(cluster, n, strategy, algorithm).clips_per_second / n for n in (1, node)}
    numbers: dict[str, Value] = {
        "clips_per_second": step.clips_per_second,
        "efficiency_node": per_gpu / base[node],
        "efficiency_gpu": per_gpu / base[1],
        "train_seconds": train_seconds(cluster, step),
        "step_seconds": step.seconds,
        "data_seconds": step.data,
        "data_stall_seconds": step.data_stall,
        "compute_seconds": step.compute,
        "wait_seconds": step.wait,
        "communication_seconds": step.communication,
        "exposed_seconds": step.exposed,
    }
    numbers |= {f"speedup_without_{name}": step.seconds / step.seconds_without(name) for name in BOTTLENECKS}
    summary: dict[str, Any] = {
        "label": "predicted",
        "gpus": gpus,
        "nodes": cluster.topology.nodes(gpus),
        "strategy": str(strategy),
        "algorithm": algorithm,
        "clips_per_step": step.clips,
    }
    summary |= {name: quantiles(value) for name, value in numbers.items()}
    # Everything that a step costs beyond the average GPU's computation.
    lost = {
        "data": summary["data_stall_seconds"]["mean"],
        "communication": summary["exposed_seconds"]["mean"],
        "stragglers": summary["wait_seconds"]["mean"],
    }
    worst = max(lost, key=lambda name: lost[name])
    return summary | {"costs_most": worst if lost[worst] > 0 else "-"}


def quantiles(value: Value) -> dict[str, float]:
    """Return the mean and quantiles of the draws; for an exact number all are equal."""
    drawn = np.atleast_1d(np.asarray(value, dtype=np.float64))
    found = {name: float(np.quantile(drawn, share)) for name, share in QUANTILES.items()}
    return found | {"mean": float(drawn.mean())}


def _interval(row: Mapping[str, Any], name: str) -> str:
    middle, low, high = (_FORMS[name](row[name][quantile]) for quantile in ("p50", "p05", "p95"))
    return f"{middle} [{low}, {high}]"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


_FORMS: Final[dict[str, Callable[[float], str]]] = {
    "train_seconds": _duration,
    "clips_per_second": "{:,.0f}".format,
    "efficiency_node": "{:.1%}".format,
    "efficiency_gpu": "{:.1%}".format,
    "step_seconds": "{:.4g} s".format,
}
