"""What was recorded, and how it is compared and recorded anew."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FOLDER = Path(__file__).parent / "recorded"


class Sha:
    """SHA-256 of arrays of integers and of texts, in the order given; arrays count by values and shape alone."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, *values: npt.ArrayLike) -> None:
        for value in values:
            array = np.asarray(value, dtype="<i8")
            self._hash.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())

    def say(self, text: str) -> None:
        self._hash.update(text.encode() + b"\n")

    def __str__(self) -> str:
        # 80 bits: nobody attacks these, and a line stays short.
        return self._hash.hexdigest()[:20]


def read(name: str) -> dict[str, Any]:
    """A recorded file."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def check(file: str, name: str, found: Any, recorded: Any) -> None:
    """Compares what was found with what was recorded.

    Raises:
        AssertionError: They differ; says in what, and how to record anew.
    """
    lines = changes({name: recorded}, {name: found})
    hint = f"If that is meant, `python -m tests.golden {file}` records it, and the changelog names it."
    assert not lines, "\n".join([*lines, hint])


def write(name: str, values: Mapping[str, Any]) -> None:
    """Records a file anew: one value a line, so that a change shows as one line."""
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps(values, indent=1, sort_keys=True)
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def flat(values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values of a tree."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from flat(value, f"{prefix}{name} / ")
    else:
        yield prefix.removesuffix(" / "), str(values)


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What differs, one line each."""
    old, new = dict(flat(before)), dict(flat(after))
    lines = []
    for name in sorted(old.keys() | new.keys()):
        if name not in old:
            lines.append(f"new      {name}: {new[name]:.100}")
        elif name not in new:
            lines.append(f"gone     {name}: {old[name]:.100}")
        elif old[name] != new[name]:
            lines.append(f"changed  {name}: {old[name]:.60} -> {new[name]:.60}")
    return lines
