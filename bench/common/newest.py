"""The newest versions of the libraries that fastvid is compared with, and their installation beside this environment.

`CHECKED` is the day on which somebody last looked at the package index; the versions were the newest then. A benchmark
installs what it compares with into a folder and imports it from there, so that this environment keeps its own packages.
"""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

CHECKED: Final = date(2026, 11, 25)
"""When these versions were last compared with the package index."""
MAX_AGE: Final = timedelta(days=60)
"""A result may be measured at most this long after `CHECKED`: its rivals would not be the newest."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rival:
    """A library at its newest version."""

    package: str
    version: str
    needs: tuple[str, ...] = ()

    @property
    def requirements(self) -> tuple[str, ...]:
        """What pip installs, without dependencies."""
        return f"{self.package}=={self.version}", *self.needs


NEWEST: Final[Mapping[str, Rival]] = {
    # The wheel is for CUDA, also where torch is not; see `bench.common.linked`.
    "torchcodec": Rival("torchcodec", "0.17.0", ("nvidia-cuda-runtime==13.5.37",)),
    # The living fork of decord, whose last release is of 2021; it is imported as decord, too.
    "decord": Rival("decord2", "3.4.0"),
    "av": Rival("av", "18.1.0"),
    "spdl": Rival("spdl", "0.8.0", ("spdl-core==0.8.0", "spdl-io==0.8.0")),
    "dali": Rival("nvidia-dali-cuda130", "2.4.0"),
    "webdataset": Rival("webdataset", "1.0.2", ("braceexpand==0.1.7",)),
    "litdata": Rival("litdata", "0.2.76", ("tifffile==2026.3.3", "lightning-utilities==0.15.3")),
    "lance": Rival(
        "pylance", "14.0.2", ("lance-namespace==0.13.0", "lance-namespace-urllib3-client==0.13.0")
    ),
    # The libjpeg-turbo that loaders of pictures in tables take.
    "simplejpeg": Rival("simplejpeg", "1.9.0"),
    # What it requires of numpy and transformers is older than what fastvid's environment has; it runs with these, too.
    "streaming": Rival(
        "mosaicml-streaming",
        "0.13.0",
        (
            "brotli==1.2.1",
            "catalogue==2.0.10",
            "cramjam==2.14.0",
            "python-snappy==0.7.3",
            "xxhash==3.8.2",
            "zstd==1.5.7.2",
        ),
    ),
    # In an interpreter of its own, see `bench.load.lerobot`; requires Python 3.12.
    "lerobot": Rival("lerobot", "0.6.1"),
}  # fmt: skip
"""Libraries by the name that benchmarks use."""


def use_newest(names: Collection[str], cache: Path) -> None:
    """Import these libraries at their newest versions from now on, here and in child processes.

    Those that this environment lacks are installed on first use, each into a folder of its own below `cache`. What
    cannot be installed is logged, and stays as it is in this environment.
    """
    for name in names:
        if name in NEWEST and installed(NEWEST[name].package) != NEWEST[name].version:
            _use(NEWEST[name], cache.resolve() / "rivals")


def _use(rival: Rival, folder: Path) -> None:
    target = folder / f"{rival.package}-{rival.version}"
    if not target.exists():
        _log.info("installing %s %s into %s", rival.package, rival.version, target)
        part = target.with_suffix(".part")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(part)]
        done = subprocess.run([*command, *rival.requirements], capture_output=True, text=True, check=False)
        if done.returncode:
            _log.warning("%s %s cannot be installed: %s", rival.package, rival.version, done.stderr.strip()[-500:])
            return
        part.rename(target)
    sys.path.insert(0, str(target))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(target), os.environ.get("PYTHONPATH")]))
    importlib.invalidate_caches()


def installed(package: str) -> str | None:
    """Return the version of a package that would be imported, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Return the version of each library that can be imported, by its name on the package index."""
    found = {rival.package: installed(rival.package) for rival in NEWEST.values()}
    return {package: one for package, one in found.items() if one is not None}


def outdated(packages: Mapping[str, str], measured: date) -> list[str]:
    """Return what is wrong with the versions that a result was measured with."""
    wrong = [
        f"{rival.package} {packages[rival.package]} was measured; {rival.version} is the newest"
        for rival in NEWEST.values()
        if packages.get(rival.package, rival.version) != rival.version
    ]
    if abs(measured - CHECKED) > MAX_AGE:
        wrong.append(f"measured on {measured}, but the newest versions were looked up on {CHECKED}")
    return wrong


def main(today: date) -> int:
    """Return 1 if the newest versions were looked up too long ago, as .ci/run asks; else 0."""
    if late := today > CHECKED + MAX_AGE:
        text = f"the versions were looked up on {CHECKED}, more than {MAX_AGE.days} days ago; look them up, and measure"
        print(f"bench/common/newest.py: {text} bench decode and bench load again", file=sys.stderr)
    return int(late)


if __name__ == "__main__":
    sys.exit(main(datetime.now(UTC).date()))
