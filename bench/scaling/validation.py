"""Compare the scaling model with measured runs. Predictions use the measured parts, never the runs themselves.

A measurement file is JSON of the form in ``models/measurements.schema.json``:

- ``workload``: clips per rank and step, parameters, and optionally bucket sizes and ``backward_fraction``.
- ``ranks_per_node``: processes that share the ``intra`` link; 1 if every rank has its own node or network namespace.
- ``local_steps``: seconds per step with clips in memory and without synchronisation, in ``ranks`` concurrent processes,
  so that ranks that share cores slow each other down as in training.
- ``all_reduces``: seconds of one all-reduce of ``bytes`` over ``ranks`` ranks that use only one ``link``.
- ``loaders`` (optional): total clips per second of ``ranks`` loaders without training.
- ``runs``: seconds per step of real training. Only these are compared; nothing is fitted to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from bench.scaling.cluster import ClusterModel, Compute, DataPath, Gradients, SyncSpec, Workload
from bench.scaling.collectives import AllReducePoint, NetworkLink, Topology, fit_link
from bench.scaling.quantity import finite, whole
from bench.scaling.scaling_model import predict_step
from fastvid.errors import UsageError

MEASUREMENTS: Final = "fastvid-scaling-measurements/1"
VALIDATION: Final = "fastvid-scaling-validation/1"

# Key -> whether it is required. The JSON schema contains the same and more.
KEYS: Final[dict[str, dict[str, bool]]] = {
    "": {
        "schema": True,
        "machine": True,
        "workload": True,
        "ranks_per_node": True,
        "algorithm": False,
        "local_steps": True,
        "all_reduces": True,
        "loaders": False,
        "runs": True,
    },
    "workload": {
        "clips_per_rank": True,
        "parameters": True,
        "bytes_per_parameter": False,
        "bucket_bytes": False,
        "first_bucket_bytes": False,
        "averaged_bytes_per_parameter": False,
        "backward_fraction": False,
    },
    "local_steps": {"ranks": True, "seconds": True},
    "all_reduces": {"link": True, "ranks": True, "bytes": True, "seconds": True},
    "loaders": {"ranks": True, "clips_per_second": True},
    "runs": {"ranks": True, "strategy": True, "seconds_per_step": True},
}


@dataclass(frozen=True)
class _MeasuredParts:
    """The contents of a measurement file except its runs."""

    workload: Workload
    gradients: Gradients
    backward_fraction: float
    topology: Topology
    local_steps: Mapping[int, Sequence[float]]
    loader_rates: Mapping[int, float]

    def cluster(self, ranks: int) -> ClusterModel:
        """Return the model's inputs for `ranks` ranks."""
        if ranks not in self.local_steps:
            known = ", ".join(map(str, sorted(self.local_steps)))
            raise UsageError(
                f"runs has {ranks} ranks, but local_steps has only {known}",
                hint=f"measure local_steps on {ranks} ranks",
            )
        steps = np.asarray(self.local_steps[ranks])
        compute = Compute(
            seconds=float(steps.mean()),
            clips=self.workload.clips_per_gpu,
            backward_fraction=self.backward_fraction,
            step_jitter=float(steps.std() / steps.mean()),
        )
        # With one request per clip the measured clip rate of all loaders is the request rate.
        rate = self.loader_rates.get(ranks)
        data = DataPath() if rate is None else DataPath(shared_requests_per_second=rate)
        return ClusterModel(self.workload, self.gradients, compute, self.topology, data)


def validate(measurements: Mapping[str, Any]) -> dict[str, Any]:
    """Predict every run of a measurement file from the file's other parts.

    Returns A JSON object with one row per run: predicted and measured seconds per step, clips per second and
    efficiency against the smallest run of the same strategy, the step's relative error, and the parts of the
    predicted step.
    """
    _check("", measurements)
    if measurements["schema"] != MEASUREMENTS:
        raise UsageError(f"schema is {measurements['schema']!r}, must be {MEASUREMENTS!r}")
    parts = _parts(measurements)
    algorithm = str(measurements.get("algorithm", "ring"))  # the algorithm of gloo
    runs = [
        (whole(run["ranks"], "runs.ranks"), SyncSpec.parse(str(run["strategy"])), _numbers(run, "seconds_per_step"))
        for run in measurements["runs"]
    ]
    rows: list[dict[str, Any]] = []
    for ranks, strategy, seconds in sorted(runs, key=lambda run: (str(run[1]), run[0])):
        step = predict_step(parts.cluster(ranks), ranks, strategy, algorithm)
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
        for end, link in (("intra", parts.topology.intra), ("inter", parts.topology.inter))
    }
    return {
        "schema": VALIDATION,
        "label": "predicted beside measured",
        "machine": measurements["machine"],
        "algorithm": algorithm,
        "fitted_links": links,
        "rows": rows,
        "largest_error": max((abs(row["relative_error"]) for row in rows), default=0.0),
    }


def table(report: Mapping[str, Any]) -> str:
    """Format a validation report as text."""
    lines = ["ranks sync      predicted ms  measured ms   error  predicted eff.  measured eff."]
    lines += [
        f"{row['ranks']:>5} {row['strategy']:8} {1000 * row['predicted_step_seconds']:13.2f} "
        f"{1000 * row['measured_step_seconds']:12.2f} {100 * row['relative_error']:+6.1f}% "
        f"{100 * row['predicted_efficiency']:14.1f}% {100 * row['measured_efficiency']:13.1f}%"
        for row in report["rows"]
    ]
    return "\n".join(lines)


def _parts(measurements: Mapping[str, Any]) -> _MeasuredParts:
    raw = measurements["workload"]
    _check("workload", raw)
    for section in ("local_steps", "all_reduces", "loaders", "runs"):
        for entry in measurements.get(section, []):
            _check(section, entry)
    sizes = {
        key: whole(raw[key], f"workload.{key}")
        for key in KEYS["workload"]
        if key in raw and key not in ("clips_per_rank", "backward_fraction")
    }
    points: dict[str, list[AllReducePoint]] = {"intra": [], "inter": []}
    for entry in measurements["all_reduces"]:
        if entry["link"] not in points:
            raise UsageError(f"all_reduces.link is {entry['link']!r}, must be intra or inter")
        ranks, size = whole(entry["ranks"], "all_reduces.ranks"), finite(entry["bytes"], "all_reduces.bytes")
        points[entry["link"]].append(AllReducePoint(ranks, size, float(np.median(_numbers(entry, "seconds")))))
    links = {end: fit_link(found) for end, found in points.items() if found}
    if not links:
        raise UsageError("all_reduces is empty, so no link can be fitted", hint="measure at least two sizes")
    used: NetworkLink = next(iter(links.values()))  # no run uses a link that was not measured
    return _MeasuredParts(
        Workload(clips_per_epoch=1, epochs=1, clips_per_gpu=whole(raw["clips_per_rank"], "workload.clips_per_rank")),
        Gradients(**sizes),
        finite(raw.get("backward_fraction", 2 / 3), "workload.backward_fraction"),
        Topology(
            whole(measurements["ranks_per_node"], "ranks_per_node"), links.get("intra", used), links.get("inter", used)
        ),
        {
            whole(entry["ranks"], "local_steps.ranks"): _numbers(entry, "seconds")
            for entry in measurements["local_steps"]
        },
        {
            whole(entry["ranks"], "loaders.ranks"): float(np.median(_numbers(entry, "clips_per_second")))
            for entry in measurements.get("loaders", [])
        },
    )


def _check(section: str, table: object) -> None:
    where = section or "the measurement file"
    if not isinstance(table, Mapping):
        raise UsageError(f"{where} has {table!r}, must be an object")
    keys = KEYS[section]
    wrong = sorted(set(table) - set(keys)) + sorted(key for key, needed in keys.items() if needed and key not in table)
    if wrong:
        raise UsageError(f"{where} has unknown or missing keys {', '.join(wrong)}", hint=f"known are {', '.join(keys)}")


def _numbers(entry: Mapping[str, Any], key: str) -> list[float]:
    raw = entry[key]
    numbers = [finite(number, key) for number in (raw if isinstance(raw, list) else [raw])]
    if not numbers or min(numbers) <= 0:
        raise UsageError(f"{key} is {raw!r}, must be numbers above 0")
    return numbers
