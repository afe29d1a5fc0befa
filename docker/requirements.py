"""Prints what a project and the named extras of its pyproject.toml depend on, one requirement a line.

    python requirements.py torch,dali-cuda13

The images install this before they copy the code, so that their large layer changes only with the dependencies.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """The dependencies of the project and of `extras`, in the order of the file.

    Raises:
        SystemExit: An extra is not in the file.
    """
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    known = project.get("optional-dependencies", {})
    if unknown := [extra for extra in extras if extra not in known]:
        raise SystemExit(f"extra {unknown[0]!r} is unknown; known are {', '.join(sorted(known))}")
    return [*project["dependencies"], *(line for extra in extras for line in known[extra])]


if __name__ == "__main__":
    wanted = [extra for extra in ",".join(sys.argv[1:]).split(",") if extra]
    sys.stdout.write("".join(f"{line}\n" for line in requirements(Path("pyproject.toml"), wanted)))
