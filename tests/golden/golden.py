"""Read and write the recorded digests."""

import hashlib
import json
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


def write(name, values):
    """Write a file of digests, one value per line, so that each change is one line of the diff."""
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps(values, indent=1, sort_keys=True)
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")
