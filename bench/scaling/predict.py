"""Predict throughput, efficiency and time to train on up to thousands of GPUs from a model file.

Uncertain inputs are drawn many times with a fixed seed; a result is the mean, the median and the 5 % and 95 % quantiles
of the draws. Nothing here is measured: every row is labelled "predicted".

Compare the scaling model with measured runs. Predictions use the measured parts, never the runs themselves.

A measurement file is JSON of the form of `Measurements`:

- ``workload``: clips per rank and step, parameters, and optionally bucket sizes and ``backward_fraction``.
- ``ranks_per_node``: processes that share the ``intra`` link; 1 if every rank has its own node or network namespace.
- ``local_steps``: seconds per step with clips in memory and without synchronisation, in ``ranks`` concurrent processes,
  so that ranks that share cores slow each other down as in training.
- ``all_reduces``: seconds of one all-reduce of ``bytes`` over ``ranks`` ranks that use only one ``link``.
- ``loaders`` (optional): total clips per second of ``ranks`` loaders without training.
- ``runs``: seconds per step of real training. Only these are compared; nothing is fitted to them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
import numpy as np

from bench.scaling.model import (
    AllReducePoint,
    ClusterModel,
    Compute,
    DataPath,
    Gradients,
    NetworkLink,
    SyncSpec,
    Topology,
    Value,
    Workload,
    fit_link,
    predict_step,
    train_seconds,
)
from bench.scaling.model_file import Algorithm, Count, ModelFile, Part, load_model
from fastvid.errors import UsageError
from fastvid.runtime.values import sha256

MEASUREMENTS: Final = "fastvid-scaling-measurements/1"
VALIDATION: Final = "fastvid-scaling-validation/1"

Positive: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
Positives: TypeAlias = Positive | Annotated[list[Positive], msgspec.Meta(min_length=1)]


class MeasuredWorkload(Part):
    """What each rank trains; what is absent is as in `Gradients`."""

    clips_per_rank: Count
    parameters: Count
    bytes_per_parameter: Count | msgspec.UnsetType = msgspec.UNSET
    bucket_bytes: Count | msgspec.UnsetType = msgspec.UNSET
    first_bucket_bytes: Count | msgspec.UnsetType = msgspec.UNSET
    averaged_bytes_per_parameter: Count | msgspec.UnsetType = msgspec.UNSET
    backward_fraction: Annotated[float, msgspec.Meta(gt=0, le=1)] = 2 / 3


class MeasuredSteps(Part):
    """Seconds of single local steps of one of `ranks` processes that worked at the same time."""

    ranks: Count
    seconds: Positives


class MeasuredReduce(Part):
    """Seconds of all-reduces over one kind of link."""

    link: Literal["intra", "inter"]
    ranks: Count
    bytes: Positive
    seconds: Positives


class MeasuredLoaders(Part):
    """Clips per second of all loaders together."""

    ranks: Count
    clips_per_second: Positives


class MeasuredRun(Part):
    """Seconds per step of real training."""

    ranks: Count
    strategy: str
    seconds_per_step: Positives


class Measurements(Part):
    """A measurement file, see this module's docstring."""

    schema: Literal["fastvid-scaling-measurements/1"]
    machine: dict[str, Any]
    workload: MeasuredWorkload
    ranks_per_node: Count
    local_steps: list[MeasuredSteps]
    all_reduces: list[MeasuredReduce]
    runs: list[MeasuredRun]
    algorithm: Algorithm = "ring"  # the algorithm of gloo
    loaders: tuple[MeasuredLoaders, ...] = ()

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Measurements:
        """Check and convert the contents of a file."""
        try:
            return msgspec.convert(raw, cls)
        except msgspec.ValidationError as error:
            raise UsageError(f"the measurements are not valid: {error}", hint="$ is the whole file") from None

    def topology(self) -> Topology:
        """Return the nodes, with links fitted to the all-reduces."""
        points: dict[str, list[AllReducePoint]] = {}
        for one in self.all_reduces:
            points.setdefault(one.link, []).append(AllReducePoint(one.ranks, one.bytes, float(np.median(one.seconds))))
        links = {end: fit_link(found) for end, found in points.items()}
        if not links:
            raise UsageError("all_reduces is empty, so no link can be fitted", hint="measure at least two sizes")
        used: NetworkLink = next(iter(links.values()))  # no run uses a link that was not measured
        return Topology(self.ranks_per_node, links.get("intra", used), links.get("inter", used))

    def cluster(self, ranks: int, topology: Topology) -> ClusterModel:
        """Return the model's inputs for `ranks` ranks."""
        steps = {one.ranks: np.atleast_1d(one.seconds) for one in self.local_steps}
        if ranks not in steps:
            known = ", ".join(map(str, sorted(steps)))
            raise UsageError(
                f"runs has {ranks} ranks, but local_steps has only {known}",
                hint=f"measure local_steps on {ranks} ranks",
            )
        sizes = msgspec.to_builtins(self.workload)
        clips, backward = sizes.pop("clips_per_rank"), sizes.pop("backward_fraction")
        mean = float(steps[ranks].mean())
        compute = Compute(mean, clips, backward_fraction=backward, step_jitter=float(steps[ranks].std() / mean))
        # With one request per clip the measured clip rate of all loaders is the request rate.
        rates = {one.ranks: float(np.median(one.clips_per_second)) for one in self.loaders}
        data = DataPath(shared_requests_per_second=rates[ranks]) if ranks in rates else DataPath()
        return ClusterModel(Workload(1, 1, clips_per_gpu=clips), Gradients(**sizes), compute, topology, data)


def validate(measurements: Mapping[str, Any]) -> dict[str, Any]:
    """Predict every run of a measurement file from the file's other parts.

    Returns A JSON object with one row per run: predicted and measured seconds per step, clips per second and
    efficiency against the smallest run of the same strategy, the step's relative error, and the parts of the
    predicted step.
    """
    parts = Measurements.of(measurements)
    topology = parts.topology()
    runs = [(run.ranks, SyncSpec.parse(run.strategy), run.seconds_per_step) for run in parts.runs]
    rows: list[dict[str, Any]] = []
    for ranks, strategy, seconds in sorted(runs, key=lambda run: (str(run[1]), run[0])):
        step = predict_step(parts.cluster(ranks, topology), ranks, strategy, parts.algorithm)
        predicted, measured = float(step.seconds), float(np.median(seconds))
        rows.append(
            {
                "ranks": ranks,
                "strategy": str(strategy),
                "predicted_step_seconds": predicted,
                "measured_step_seconds": measured,
                "relative_error": predicted / measured - 1,
                "predicted_clips_per_second": step.clips / predicted,
                "measured_clips_per_second": step.clips / measured,
                "predicted_split_seconds": {
                    "compute": float(step.compute),
                    "wait": float(step.wait),
                    "exposed": float(step.exposed),
                    "data_stall": float(step.data_stall),
                },
            }
        )
    for row in rows:
        base = next(other for other in rows if other["strategy"] == row["strategy"])
        for kind in ("predicted", "measured"):
            per_rank = [float(entry[f"{kind}_clips_per_second"]) / entry["ranks"] for entry in (row, base)]
            row[f"{kind}_efficiency"] = per_rank[0] / per_rank[1]
    links = {
        end: {"bytes_per_second": float(link.bytes_per_second), "latency_seconds": float(link.latency_seconds)}
        for end, link in (("intra", topology.intra), ("inter", topology.inter))
    }
    return {
        "schema": VALIDATION,
        "label": "predicted beside measured",
        "machine": parts.machine,
        "algorithm": parts.algorithm,
        "fitted_links": links,
        "rows": rows,
        "largest_error": max((abs(row["relative_error"]) for row in rows), default=0.0),
    }


def comparison(report: Mapping[str, Any]) -> str:
    """Format a validation report as text."""
    lines = ["ranks sync      predicted ms  measured ms   error  predicted eff.  measured eff."]
    lines += [
        f"{row['ranks']:>5} {row['strategy']:8} {1000 * row['predicted_step_seconds']:13.2f} "
        f"{1000 * row['measured_step_seconds']:12.2f} {100 * row['relative_error']:+6.1f}% "
        f"{100 * row['predicted_efficiency']:14.1f}% {100 * row['measured_efficiency']:13.1f}%"
        for row in report["rows"]
    ]
    return "\n".join(lines)


SCHEMA: Final = "fastvid-scaling-prediction/1"
QUANTILES: Final = {"p05": 0.05, "p50": 0.5, "p95": 0.95}
BOTTLENECKS: Final = ("data", "communication", "compute")
_PARTS: Final = ("step", "compute", "wait", "exposed", "data_stall")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m bench scale --model``."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", type=Path, metavar="FILE.toml", help="predict from this model file of a cluster")
    what.add_argument("--validate", type=Path, metavar="FILE.json", help="compare predictions with these measured runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="result file")
    parser.add_argument("--draws", type=int, default=2000, help="draws of the uncertain inputs (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default %(default)s)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="override an input, such as workload.epochs=50"
    )


def run(args: argparse.Namespace) -> int:
    """Print the table and write the JSON; return 0."""
    report, text = _validation(args.validate) if args.validate else _prediction(args)
    print(text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _validation(path: Path) -> tuple[dict[str, Any], str]:
    try:
        report = validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"cannot read the measurements: {error.strerror}", file=path) from error
    except json.JSONDecodeError as error:
        raise UsageError(f"not valid JSON: {error}", file=path) from error
    return report, comparison(report)


def _prediction(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
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
    return report, table(report)


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
        f"{_interval(row['clips_per_second'], _count):>26} {_interval(row['efficiency_node'], _percent):>21} "
        f"{_interval(row['train_seconds'], _duration):>30} "
        + " ".join(f"{1000 * row[f'{part}_seconds']['mean']:8.1f}" for part in _PARTS)
        + f"  {row['costs_most']}"
        for row in report["rows"]
    ]
    for reference in report["references"]:
        form = _FORMS[reference["quantity"]]
        lines.append(
            f"reference: {reference['quantity']} on {reference['gpus']} GPUs ({reference['strategy']}): predicted "
            f"{_interval(reference['predicted'], form)}, reference {form(reference['reference'])}, "
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


def _interval(number: Mapping[str, float], form: Callable[[float], str]) -> str:
    return f"{form(number['p50'])} [{form(number['p05'])}, {form(number['p95'])}]"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


_FORMS: Final[dict[str, Callable[[float], str]]] = {
    "train_seconds": _duration,
    "clips_per_second": _count,
    "efficiency_node": _percent,
    "efficiency_gpu": _percent,
    "step_seconds": "{:.4g} s".format,
}
