"""Read model files: TOML with the measured parts of a cluster, each exact or uncertain, each with its source.

    name = "my-cluster"
    note = "what this file describes"
    [workload]   [gradients]   [compute]   [topology]   [topology.intra]   [topology.inter]   [data]   [predict]
    [[reference]]

The keys of a section are the fields of the class of that name in `bench.scaling.model`, except that ``[compute]``
contains a measured step (`step_seconds` on `measured_gpus` GPUs), from which the computation time is derived. Numbers
are exact, an interval, or several measurements, each with its source:

    8                                                          exact
    { value = 8, source = "..." }                              exact, with its source
    { low = 1.0, high = 2.0, source = "..." }                  uniform in the interval
    { low = 1.0, high = 100.0, scale = "log", source = "..." } log-uniform in the interval
    { values = [1.0, 1.2, 1.1], source = "..." }               drawn from several measurements

A link is given by its fields, or by ring all-reduces measured on it alone:

    points = [[2, 65536, 0.0002], [2, 26214400, 0.011]]        [ranks, bytes, seconds]
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.scaling.model import (
    ALGORITHMS,
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
    calibrate,
    fit_link,
)
from fastvid.errors import UsageError

_SPELLINGS: Final = (
    "write 8, {value = 8}, {low = 1, high = 2}, {low = 1, high = 9, scale = 'log'} or {values = [1, 2]}, "
    "each table with a source"
)
_FORMS: Final = ({"value"}, {"low", "high"}, {"low", "high", "scale"}, {"values"})


@dataclass(frozen=True)
class Quantity:
    """One input number."""

    low: float
    high: float
    log: bool = False
    values: tuple[float, ...] = ()

    @classmethod
    def parse(cls, raw: object, where: str) -> Quantity:
        """Parse one of the forms in this module's docstring."""
        if not isinstance(raw, Mapping):
            number = finite(raw, where)
            return cls(number, number)
        keys = set(raw) - {"source"}
        if keys not in _FORMS or raw.get("scale", "log") != "log":
            raise UsageError(f"{where} is {dict(raw)!r}", hint=_SPELLINGS)
        if "values" in keys:
            if not isinstance(raw["values"], list) or not raw["values"]:
                raise UsageError(f"{where}.values is {raw['values']!r}, must be a list of numbers", hint=_SPELLINGS)
            values = tuple(finite(number, f"{where}.values") for number in raw["values"])
            return cls(min(values), max(values), values=values)
        low = finite(raw.get("value", raw.get("low")), where)
        high = finite(raw.get("value", raw.get("high")), where)
        log = "scale" in keys
        if low > high or (log and low <= 0):
            raise UsageError(f"{where}: low is {low} and high is {high}" + (" on a log scale" if log else ""))
        return cls(low, high, log=log)

    def draw(self, name: str, seed: int, count: int) -> Value:
        """Return `count` draws, shape [count], or the number itself if it is exact.

        Each name has its own random stream, so that adding an input does not change the draws of the others.
        """
        stream = np.random.default_rng([seed, zlib.crc32(name.encode())])
        if self.values:
            return np.asarray(self.values)[stream.integers(len(self.values), size=count)]
        if self.low == self.high:
            return self.low
        unit: NDArray[np.float64] = stream.random(count)
        if self.log:
            drawn: NDArray[np.float64] = np.exp(math.log(self.low) + unit * math.log(self.high / self.low))
            return drawn
        return self.low + unit * (self.high - self.low)


def finite(raw: object, where: str) -> float:
    """Return `raw` as a float."""
    if not isinstance(raw, int | float) or isinstance(raw, bool) or not math.isfinite(raw):
        raise UsageError(f"{where} is {raw!r}, must be a finite number", hint=_SPELLINGS)
    return float(raw)


def whole(raw: object, where: str) -> int:
    """Return `raw`, or its ``value``, as an int."""
    value = raw.get("value") if isinstance(raw, Mapping) else raw
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{where} is {raw!r}, must be an integer")
    return value


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
