"""The datasets that are compared, made of footage on first use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fastvid.errors import UsageError

SAMPLINGS: Final = ("tsn8", "dense16x4", "dense32x2")
"""The samplings that are compared; see `fastvid.measure.clips.parse_sampling`."""


def shard(footage: Path, profile: str, cache: Path, *, options: Sequence[str] = (), name: str | None = None) -> Path:
    """The dataset of `footage` in a profile, made on first use.

    Args:
        footage: A folder of videos.
        profile: Encode profile.
        cache: Where datasets are.
        options: Further ones of ``fastvid shard``.
        name: Of the dataset's folder; by default the profile.

    Raises:
        UsageError: ``fastvid shard`` failed.
    """
    folder = cache / (name or profile)
    if not (folder / "dataset.json").exists():
        command = [sys.executable, "-m", "fastvid", "shard", str(footage), "--out", str(folder), "--profile", profile]
        done = subprocess.run([*command, *options], stdout=subprocess.DEVNULL, check=False)
        # 3: complete, but some sources were rejected.
        if done.returncode not in (0, 3):
            raise UsageError(f"`{' '.join(command[1:])}` failed with exit code {done.returncode}")
    return folder
