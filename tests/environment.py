"""Print one line about an environment: its versions, and the results of a pytest run.

Usage: ``python -m tests.environment NAME junit.xml``
"""

import platform
import sys
import xml.etree.ElementTree as ET
from importlib import metadata
from pathlib import Path

from fastvid.errors import MissingDependency
from fastvid.media.ffmpeg import find_ffmpeg

PACKAGES = ("torch", "av", "numpy", "pyarrow", "torchcodec", "nvidia-dali-cuda130", "obstore")


def line(name: str, report: Path) -> str:
    """Return ``name: versions: counts``."""
    versions = [f"Python {platform.python_version()}", f"ffmpeg {_ffmpeg()}"]
    for package in PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    return f"{name}: {', '.join(versions)}: {_counts(report)}"


def _ffmpeg() -> str:
    try:
        return find_ffmpeg().version
    except MissingDependency as error:
        return f"unusable ({error.message})"


def _counts(report: Path) -> str:
    if not report.exists():
        return "pytest wrote no report"
    suite = next(iter(ET.parse(report).getroot().iter("testsuite")))
    tests, skipped, *failed = (int(suite.get(key, 0)) for key in ("tests", "skipped", "failures", "errors"))
    passed = tests - skipped - sum(failed)
    return f"{passed} passed, {sum(failed)} failed, {skipped} skipped in {float(suite.get('time', 0)):.0f} s"


if __name__ == "__main__":
    print(line(sys.argv[1], Path(sys.argv[2])))
