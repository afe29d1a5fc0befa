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
import sys
import tomllib
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

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
    calibrate,
    fit_link,
)
from fastvid.errors import UsageError

_SPELLINGS: Final = (
    "write numbers as 8, {value = 8}, {low = 1, high = 2}, {low = 1, high = 9, scale = 'log'} or {values = [1, 2]}, "
    "each table with a source; $ is the whole file"
)
_FORMS: Final = ({"value"}, {"low", "high"}, {"low", "high", "scale"}, {"values"})

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
Algorithm: TypeAlias = Literal["auto", "hierarchical", "ring", "tree"]
Finite: TypeAlias = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a file; its fields are all keys that the part may have."""


class Quantity(Part):
    """One input number, in one of the forms of this module's docstring."""

    value: int | Finite | None = None
    low: Finite | None = None
    high: Finite | None = None
    scale: Literal["log"] | None = None
    values: Annotated[list[Finite], msgspec.Meta(min_length=1)] | None = None
    source: str = ""

    def __post_init__(self) -> None:
        given = {name for name in ("value", "low", "high", "scale", "values") if getattr(self, name) is not None}
        if given not in _FORMS:
            raise ValueError(f"a number of {', '.join(sorted(given)) or 'nothing'}")
        if self.low is not None and self.high is not None and (self.low > self.high or (self.scale and self.low <= 0)):
            raise ValueError(f"low is {self.low} and high is {self.high}{' on a log scale' if self.scale else ''}")

    def draw(self, name: str, seed: int, count: int) -> Value:
        """Return `count` draws, shape [count], or the number itself if it is exact.

        Each name has its own random stream, so that adding an input does not change the draws of the others.
        """
        stream = np.random.default_rng([seed, zlib.crc32(name.encode())])
        if self.value is not None:
            return self.value
        if self.values is not None:
            return np.asarray(self.values)[stream.integers(len(self.values), size=count)]
        assert self.low is not None
        assert self.high is not None
        if self.low == self.high:
            return self.low
        unit: NDArray[np.float64] = stream.random(count)
        if self.scale:
            drawn: NDArray[np.float64] = np.exp(math.log(self.low) + unit * math.log(self.high / self.low))
            return drawn
        return self.low + unit * (self.high - self.low)


Section: TypeAlias = dict[str, int | Finite | Quantity]
_SECTIONS: Final = {"workload": Workload, "gradients": Gradients, "compute": Compute, "data": DataPath}
_MEASURED: Final = ("step_seconds", "measured_gpus")  # keys of [compute] instead of ``seconds``


class Link(Part):
    """The fields of a link, or all-reduces measured on it alone: ranks, bytes and seconds of each."""

    bytes_per_second: Finite | Quantity | None = None
    latency_seconds: Finite | Quantity | None = None
    points: list[tuple[Count, float, float]] | None = None

    def __post_init__(self) -> None:
        if self.points is not None and (self.bytes_per_second is not None or self.latency_seconds is not None):
            raise ValueError("a link has points and also fields; give points or the link's fields")
        if self.points is None and self.bytes_per_second is None:
            raise ValueError("a link needs bytes_per_second or points")

    def drawn(self, name: str, seed: int, draws: int) -> NetworkLink:
        """Return the link, fitted to its points if it has them."""
        if self.points is not None:
            return fit_link([AllReducePoint(*point) for point in self.points])
        given = {"bytes_per_second": self.bytes_per_second, "latency_seconds": self.latency_seconds}
        known = {key: value for key, value in given.items() if value is not None}
        return NetworkLink(**{key: _drawn(value, f"{name}.{key}", seed, draws) for key, value in known.items()})


class Places(Part):
    """Where ranks are, and their links."""

    gpus_per_node: Count | Quantity
    intra: Link
    inter: Link


class Asked(Part):
    """What to predict."""

    gpus: Annotated[list[Count], msgspec.Meta(min_length=1)]
    strategies: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("ddp",)
    algorithms: Annotated[tuple[Algorithm, ...], msgspec.Meta(min_length=1)] = ("auto",)


class Reference(Part):
    """A published or measured result to compare a prediction with."""

    gpus: Count
    quantity: Literal["train_seconds", "clips_per_second", "efficiency_node", "efficiency_gpu", "step_seconds"]
    value: Finite
    source: str
    strategy: str = "ddp"


class ModelFile(Part):
    """A model file; `raw` keeps the original values with their sources."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    workload: Section
    gradients: Section
    compute: Section
    topology: Places
    data: Section
    predict: Asked
    note: str = ""
    reference: tuple[Reference, ...] = ()
    raw: Mapping[str, Any] = msgspec.field(default_factory=dict)

    def cluster(self, seed: int = 0, draws: int = 1) -> ClusterModel:
        """Return the cluster with `draws` draws of each uncertain number, calibrated to the measured step."""
        drawn: dict[str, dict[str, Any]] = {
            section: {
                name: _drawn(value, f"{section}.{name}", seed, draws) for name, value in getattr(self, section).items()
            }
            for section in _SECTIONS
        }
        compute = drawn["compute"]
        step_seconds, measured_gpus = (compute.pop(name) for name in _MEASURED)
        workload = Workload(**drawn["workload"])
        compute.setdefault("clips", workload.clips(measured_gpus)[0])
        places = self.topology
        measured = ClusterModel(
            workload,
            Gradients(**drawn["gradients"]),
            Compute(seconds=step_seconds, **compute),
            Topology(
                whole(places.gpus_per_node, "topology.gpus_per_node"),
                places.intra.drawn("topology.intra", seed, draws),
                places.inter.drawn("topology.inter", seed, draws),
            ),
            DataPath(**drawn["data"]),
        )
        return calibrate(measured, step_seconds, measured_gpus, self.predict.algorithms[0])


def _drawn(value: int | float | Quantity, name: str, seed: int, draws: int) -> Value:
    return value.draw(name, seed, draws) if isinstance(value, Quantity) else value


def whole(number: int | float | Quantity, where: str) -> int:
    """Return a number that must be exact and an integer."""
    value = number.value if isinstance(number, Quantity) else number
    if not isinstance(value, int):
        raise UsageError(f"{where} is {value!r}, must be an integer")
    return value


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
    try:
        model = msgspec.convert({**raw, "raw": raw}, ModelFile)
    except msgspec.ValidationError as error:
        raise UsageError(str(error), hint=_SPELLINGS) from None
    for name, kind in _SECTIONS.items():
        table: Section = getattr(model, name)
        fields = {field.name: field.type for field in dataclasses.fields(kind)}
        if kind is Compute:
            del fields["seconds"]
            fields |= {"step_seconds": "Value", "measured_gpus": "int"}
            if missing := [key for key in _MEASURED if key not in table]:
                raise UsageError(f"compute.{missing[0]} is missing")
        if unknown := sorted(table.keys() - fields):
            raise UsageError(f"{name} has unknown {', '.join(unknown)}; known are {', '.join(fields)}")
        for key, value in table.items():
            if fields[key] == "int":
                whole(value, f"{name}.{key}")
    for text in (*model.predict.strategies, *(reference.strategy for reference in model.reference)):
        SyncSpec.parse(text)
    return model
