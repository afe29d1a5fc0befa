"""Read, compare and write the recorded digests."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "recorded"


class Sha:
    """SHA-256 of integer arrays and texts, in the given order; arrays are hashed by values and shape, not by dtype."""

    def __init__(self):
        self._hash = hashlib.sha256()

    def add(self, *values):
        for value in values:
            array = np.asarray(value, dtype="<i8")
            self._hash.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())

    def say(self, text):
        self._hash.update(text.encode() + b"\n")

    def __str__(self):
        # 80 bits suffice against accidents and keep lines short.
        return self._hash.hexdigest()[:20]


def read(name):
    """Read a recorded file."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def check(file, name, found, recorded):
    """Compare a measured value with the recorded one.

    Raises:
        AssertionError: If they differ; the message lists the differences and how to record them.
    """
    lines = changes({name: recorded}, {name: found})
    hint = f"If this is intended, run `python -m tests.golden {file}` and mention it in the changelog."
    assert not lines, "\n".join([*lines, hint])


def write(name, values):
    """Write a file of digests, one value per line, so that each change is one line of the diff."""
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps(values, indent=1, sort_keys=True)
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def flat(values, prefix=""):
    """Yield the names and values of a nested mapping."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from flat(value, f"{prefix}{name} / ")
    else:
        yield prefix.removesuffix(" / "), str(values)


def changes(before, after):
    """Return one line per difference."""
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
