"""Code lines of each room, and how many it may have: `python -m tests.budget` prints both, `--set` makes them equal.

A code line has a token; docstrings, comments and blank lines are free, so nobody saves by leaving them out. A limit may
go down at any time. It goes up only by a commit that says what users get for it.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import Final

REPOSITORY = Path(__file__).parents[1]

BUDGET: Final[dict[str, int]] = {
    "format": 3_499,
    "decode": 2_466,
    "media": 2_272,
    "storage": 1_852,
    "videos": 794,
    "sharding": 10_999,
    "load": 5_868,
    "train": 6_597,
    "models": 1_057,
    "cli": 1_464,
    "report": 417,
    "runtime": 635,
    "demo": 366,
    "tune": 537,
    "root": 172,
    "bench": 8_496,
    "examples": 553,
    "pipelines": 585,
    "docker": 199,
}
"""Code lines by room: a folder of fastvid, `root` for the files beside the folders, or a folder beside fastvid."""

OUTSIDE: Final = ("bench", "examples", "pipelines", "docker")
"""Folders beside fastvid that have a limit of their own, so that nothing hides there."""

TESTS: Final = 50_536
"""Lines of all files of tests, blank ones and comments included."""

_TOKENS: Final = {tokenize.OP, tokenize.NAME, tokenize.NUMBER, tokenize.STRING}


def code_lines(text: str) -> int:
    """Return the number of lines with a token, without docstrings and comments."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                value = statement.value
                docstrings |= set(range(value.lineno, value.end_lineno + 1)) if isinstance(value.value, str) else set()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _TOKENS:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def files() -> dict[Path, str]:
    """The rooms of all files that have one, by their paths below the repository."""
    found = {}
    for top in ("fastvid", *OUTSIDE):
        for path in sorted((REPOSITORY / top).rglob("*.py")):
            relative = path.relative_to(REPOSITORY)
            inside = relative.parts[1] if len(relative.parts) > 2 else "root"
            found[relative] = top if top in OUTSIDE else inside
    return found


def sizes() -> Counter[str]:
    """Code lines by room."""
    found: Counter[str] = Counter()
    for path, room in files().items():
        found[room] += code_lines((REPOSITORY / path).read_text())
    return found


def grown(rooms: set[str]) -> list[str]:
    """Files of rooms that have grown since a limit was last set, as `path: before -> after`; empty without git."""
    table = Path(__file__).relative_to(REPOSITORY)
    then = _git("log", "-1", "--format=%H", "--", str(table)).strip()
    found = []
    for path, room in files().items() if then else ():
        if room in rooms:
            before = _git("show", f"{then}:{path}")
            now, was = code_lines((REPOSITORY / path).read_text()), code_lines(before)
            found += [f"{path}: {was} -> {now}"] if now > was else []
    return found


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def test_lines() -> int:
    """Lines of all files of tests."""
    return sum(path.read_text().count("\n") for path in (REPOSITORY / "tests").rglob("*.py"))


def main() -> None:
    found, own = sizes(), Path(__file__)
    if "--set" in sys.argv:
        text = re.sub(
            r'^    "(\w+)": [\d_]+', lambda at: f'    "{at[1]}": {found[at[1]]:_}', own.read_text(), flags=re.MULTILINE
        )
        own.write_text(re.sub(r"^TESTS: Final = [\d_]+", f"TESTS: Final = {test_lines():_}", text, flags=re.MULTILINE))
        return
    for room, limit in BUDGET.items():
        print(f"{room:12} {found[room]:6,} of {limit:6,}")
    inside = [room for room in BUDGET if room not in OUTSIDE]
    print(f"{'fastvid':12} {sum(found[room] for room in inside):6,} of {sum(BUDGET[room] for room in inside):6,}")
    print(f"{'tests':12} {test_lines():6,} of {TESTS:6,} lines")


if __name__ == "__main__":
    main()
