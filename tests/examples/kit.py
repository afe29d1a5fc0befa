"""Helpers for the tests of the examples."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

from tests.datasets import REPOSITORY, make_clip, pack


def load(name: str) -> ModuleType:
    """Import an example, which is in no package."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dataset(folder: Path, samples: int) -> str:
    """Create one shard of samples that all contain the same clip of 20 frames; return its folder."""
    data = make_clip(folder / "clip.mp4", frames=20)
    pack(folder / "set", [[(f"clip{n}", data, n % 2) for n in range(samples)]])
    return str(folder / "set")


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process that imports this checkout."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), **more}
