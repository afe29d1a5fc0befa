"""Datasets for benchmarks, made from footage on first use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fastvid.errors import UsageError

SAMPLINGS: Final = ("tsn8", "dense16x4", "dense32x2")
"""Samplings to benchmark; see `fastvid.tune.measure.parse_sampling`."""


def shard(footage: Path, profile: str, cache: Path, *, options: Sequence[str] = (), name: str | None = None) -> Path:
    """Return the dataset of `footage` in a profile, created on first use."""
    folder = cache / (name or profile)
    if not (folder / "dataset.json").exists():
        command = [sys.executable, "-m", "fastvid", "shard", str(footage), "--out", str(folder), "--profile", profile]
        done = subprocess.run([*command, *options], stdout=subprocess.DEVNULL, check=False)
        # 3: complete, but some sources were rejected.
        if done.returncode not in (0, 3):
            raise UsageError(f"`{' '.join(command[1:])}` failed with exit code {done.returncode}")
    return folder
