"""Numbers in a model file: exact, an interval, or several measurements, each with its source.

8                                                          exact
{ value = 8, source = "..." }                              exact, with its source
{ low = 1.0, high = 2.0, source = "..." }                  uniform in the interval
{ low = 1.0, high = 100.0, scale = "log", source = "..." } log-uniform in the interval
{ values = [1.0, 1.2, 1.1], source = "..." }               drawn from several measurements
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bench.scaling.collectives import Value
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
