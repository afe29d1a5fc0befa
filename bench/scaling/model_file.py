"""Read model files: TOML with the measured parts of a cluster, each exact or uncertain, each with its source.

    name = "my-cluster"
    note = "what this file describes"
    [workload]   [gradients]   [compute]   [topology]   [topology.intra]   [topology.inter]   [data]   [predict]
    [[reference]]

The keys of a section are the fields of the class of that name in `bench.scaling.cluster` or
`bench.scaling.collectives`, except that ``[compute]`` contains a measured step (`step_seconds` on `measured_gpus`
GPUs), from which the computation time is derived. `bench.scaling.quantity` describes how to write numbers. A link is
given by its fields, or by ring all-reduces measured on it alone:

    points = [[2, 65536, 0.0002], [2, 26214400, 0.011]]        [ranks, bytes, seconds]
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.scaling.cluster import ClusterModel, Compute, DataPath, Gradients, SyncSpec, Workload
from bench.scaling.collectives import ALGORITHMS, AllReducePoint, NetworkLink, Topology, fit_link
from bench.scaling.quantity import Quantity, whole
from bench.scaling.scaling_model import calibrate
from fastvid.errors import UsageError

_SECTIONS: Final = {"workload": Workload, "gradients": Gradients, "compute": Compute, "data": DataPath}
_COMPUTE_EXTRA: Final = ("step_seconds", "measured_gpus")
_TOP: Final = ("name", "note", *_SECTIONS, "topology", "predict", "reference")
_QUANTITIES: Final = ("train_seconds", "clips_per_second", "efficiency_node", "efficiency_gpu", "step_seconds")


@dataclass(frozen=True)
class Reference:
    """A published or measured result to compare a prediction with."""

    gpus: int
    strategy: SyncSpec
    quantity: str
    value: float
    source: str


@dataclass(frozen=True)
class ModelFile:
    """A parsed model file; `raw` keeps the original values with their sources."""

    name: str
    note: str
    sections: Mapping[str, Mapping[str, Any]]
    gpus: tuple[int, ...]
    strategies: tuple[SyncSpec, ...]
    algorithms: tuple[str, ...]
    references: tuple[Reference, ...]
    raw: Mapping[str, Any]

    def cluster(self, seed: int = 0, draws: int = 1) -> ClusterModel:
        """Return the cluster with `draws` draws of each uncertain number, calibrated to the measured step."""
        drawn: dict[str, dict[str, Any]] = {
            section: {
                name: value.draw(f"{section}.{name}", seed, draws) if isinstance(value, Quantity) else value
                for name, value in table.items()
            }
            for section, table in self.sections.items()
        }
        compute = drawn["compute"]
        step_seconds, measured_gpus = compute.pop("step_seconds"), compute.pop("measured_gpus")
        workload = Workload(**drawn["workload"])
        compute.setdefault("clips", workload.clips(measured_gpus)[0])
        links = {end: _link(drawn[f"topology.{end}"]) for end in ("intra", "inter")}
        measured = ClusterModel(
            workload,
            Gradients(**drawn["gradients"]),
            Compute(seconds=step_seconds, **compute),
            Topology(drawn["topology"]["gpus_per_node"], **links),
            DataPath(**drawn["data"]),
        )
        return calibrate(measured, step_seconds, measured_gpus, self.algorithms[0])


def load_model(path: Path, changes: Mapping[str, str] | None = None) -> ModelFile:
    """Read a model file."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        for dotted, text in (changes or {}).items():
            *parents, last = dotted.split(".")
            table = raw
            for parent in parents:
                table = table.setdefault(parent, {})
            table[last] = tomllib.loads(f"value = {text}")["value"]
    except OSError as error:
        raise UsageError(f"cannot read the model file: {error.strerror}", file=path) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"not valid TOML: {error}", file=path) from error
    try:
        return parse_model(raw)
    except UsageError as error:
        raise error.at(file=path) from None


def parse_model(raw: Mapping[str, Any]) -> ModelFile:
    """Check and convert the contents of a model file; see `load_model`."""
    _known(raw, _TOP, "the file")
    sections: dict[str, dict[str, Any]] = {}
    for name, kind in _SECTIONS.items():
        fields = {field.name: field for field in dataclasses.fields(kind)}
        if kind is Compute:
            fields.pop("seconds")
        table = _table(raw, name)
        _known(table, (*fields, *(_COMPUTE_EXTRA if kind is Compute else ())), name)
        counts = {key for key, field in fields.items() if field.type == "int"} | {"measured_gpus"}
        sections[name] = {
            key: whole(value, f"{name}.{key}") if key in counts else Quantity.parse(value, f"{name}.{key}")
            for key, value in table.items()
        }
    for key in _COMPUTE_EXTRA:
        if key not in sections["compute"]:
            raise UsageError(f"compute.{key} is missing")
    topology = _table(raw, "topology")
    _known(topology, ("gpus_per_node", "intra", "inter"), "topology")
    sections["topology"] = {"gpus_per_node": whole(topology.get("gpus_per_node"), "topology.gpus_per_node")}
    for end in ("intra", "inter"):
        table = _table(topology, end)
        _known(table, ("bytes_per_second", "latency_seconds", "points"), f"topology.{end}")
        sections[f"topology.{end}"] = {
            key: value if key == "points" else Quantity.parse(value, f"topology.{end}.{key}")
            for key, value in table.items()
        }
    predict = _table(raw, "predict")
    _known(predict, ("gpus", "strategies", "algorithms"), "predict")
    model = ModelFile(
        name=str(raw.get("name", "")),
        note=str(raw.get("note", "")),
        sections=sections,
        gpus=tuple(whole(gpus, "predict.gpus") for gpus in predict.get("gpus", [])),
        strategies=tuple(SyncSpec.parse(str(text)) for text in predict.get("strategies", ["ddp"])),
        algorithms=tuple(str(name) for name in predict.get("algorithms", ["auto"])),
        references=tuple(_reference(table) for table in raw.get("reference", [])),
        raw=raw,
    )
    if unknown := set(model.algorithms) - set(ALGORITHMS):
        raise UsageError(f"predict.algorithms has unknown {sorted(unknown)}", hint=f"use {', '.join(ALGORITHMS)}")
    if not model.name or not model.gpus or not model.algorithms or not model.strategies:
        raise UsageError("name, predict.gpus, predict.strategies and predict.algorithms must not be empty")
    return model


def _link(table: Mapping[str, Any]) -> NetworkLink:
    if "points" in table:
        if len(table) > 1:
            raise UsageError(
                f"a link has points and also {sorted(set(table) - {'points'})}", hint="give points or the link's fields"
            )
        return fit_link([AllReducePoint(int(ranks), size, seconds) for ranks, size, seconds in table["points"]])
    if "bytes_per_second" not in table:
        raise UsageError("a link needs bytes_per_second or points")
    return NetworkLink(**table)


def _reference(table: Mapping[str, Any]) -> Reference:
    _known(table, ("gpus", "strategy", "quantity", "value", "source"), "reference")
    try:
        reference = Reference(
            whole(table["gpus"], "reference.gpus"),
            SyncSpec.parse(str(table.get("strategy", "ddp"))),
            str(table["quantity"]),
            float(table["value"]),
            str(table["source"]),
        )
    except KeyError as error:
        raise UsageError(f"a reference lacks {error}") from error
    if reference.quantity not in _QUANTITIES:
        raise UsageError(f"reference.quantity is {reference.quantity!r}", hint=f"use one of {', '.join(_QUANTITIES)}")
    return reference


def _table(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = raw.get(name)
    if not isinstance(table, Mapping):
        raise UsageError(f"the section [{name}] is missing" if table is None else f"{name} is {table!r}, not a section")
    return table


def _known(table: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    if unknown := sorted(set(table) - set(names)):
        raise UsageError(f"{where} has unknown {', '.join(unknown)}; known are {', '.join(names)}")
