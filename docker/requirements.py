"""Print the dependencies of a project and of the named extras of its pyproject.toml, one per line.

    python requirements.py torch,nvdec,dali-cuda13

The images install these before they copy the code, so that the large layer changes only with the dependencies.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """Return the dependencies of the project and of `extras`, in the order of the file.

    Raises:
        SystemExit: If an extra is not in the file.
    """
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    known = project.get("optional-dependencies", {})
    if unknown := [extra for extra in extras if extra not in known]:
        raise SystemExit(f"unknown extra {unknown[0]!r}; known are {', '.join(sorted(known))}")
    return [*project["dependencies"], *(line for extra in extras for line in known[extra])]


if __name__ == "__main__":
    wanted = [extra for extra in ",".join(sys.argv[1:]).split(",") if extra]
    sys.stdout.write("".join(f"{line}\n" for line in requirements(Path("pyproject.toml"), wanted)))
