"""Machine facts and JSON records, shared by all benchmarks.

Contenders run in alternating rounds (`fastvid.tune.measure`); a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from bench.common import newest
from fastvid.errors import JobError, UsageError
from fastvid.runtime.processes import available_cores

_HERE: Final = Path(__file__).parents[1]
# In a checkout, the repository's bench/results; in an installation, below the working directory.
RESULTS: Final = _HERE / "results" if _HERE.parent.joinpath("pyproject.toml").exists() else Path("bench/results")

_PACKAGES: Final = ("decord", "numpy", "nvidia-dali-cuda120", "torch")  # besides those of `newest`


def machine_facts() -> dict[str, Any]:
    """Return hardware, versions and load of this machine, as far as they can be read."""
    versions = newest.versions()
    versions |= {package: found for package in _PACKAGES if (found := newest.installed(package)) is not None}
    return {
        "cpu": _first("/proc/cpuinfo", "model name"),
        "cores": available_cores(ranks=1),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": versions,
        "commit": _commit(),
        "load_average": round(os.getloadavg()[0], 2),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _commit() -> str | None:
    # An installation may be inside another project's checkout, whose commit would be wrong.
    git = shutil.which("git")
    if git is None or not _HERE.parent.joinpath(".git").exists():
        return None
    command = [git, "-C", str(_HERE), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


def _first(file: str, field_name: str) -> str | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field_name)), None)


def merge_remeasured(before: dict[str, Any], now: dict[str, Any], part: str) -> dict[str, Any]:
    """Return the record `before` with the machine on which one part is now measured again."""
    for key in now.keys() - {"machine"}:
        if before.get(key) != now[key]:
            raise UsageError(
                f"{key} is {now[key]!r}, but the earlier result used {before.get(key)!r}",
                hint="use the same settings, or measure all parts again",
            )
    return {**before, "machines": {**before.get("machines", {}), part: now["machine"]}}


def run_json(command: Sequence[str]) -> dict[str, Any]:
    """Run a command and return the JSON object of its last line.

    Its processes compute in one thread each: several commands share the cores, and the sums stay the same.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FASTVID_LOG": "WARNING"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode:
        raise JobError(f"`{' '.join(command)}` ended with exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a result as JSON with sorted keys and a trailing newline."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
