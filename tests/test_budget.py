"""The budget: no room has more code lines than `tests/budget.py` allows, no file and no folder is too large."""

from __future__ import annotations

from collections import Counter

from tests import budget
from tests.budget import BUDGET, REPOSITORY, TESTS

MOST_LINES = 600
MOST_FILES = 20


def test_no_room_is_larger_than_its_budget():
    found = budget.sizes()
    assert set(found) == set(BUDGET)
    above = {room: f"{found[room]} code lines, budget {limit}" for room, limit in BUDGET.items() if found[room] > limit}
    told = "a feature pays for its lines; else `python -m tests.budget --set`, and the commit says why; these grew:"
    assert not above, "\n".join([told, *budget.grown(set(above))])


def test_the_tests_are_not_larger_than_their_budget():
    assert budget.test_lines() <= TESTS, "set the limit by `python -m tests.budget --set`; the commit says what for"


def test_files_and_folders_stay_small():
    files = [path for top in ("fastvid", "bench", "tests") for path in (REPOSITORY / top).rglob("*.py")]
    folders = Counter(path.parent.relative_to(REPOSITORY).as_posix() for path in files if path.stem != "__init__")
    assert not {folder: number for folder, number in folders.items() if number > MOST_FILES}
    long = {path: lines for path in files if (lines := path.read_text().count("\n")) > MOST_LINES}
    assert not {path: lines for path, lines in long.items() if (REPOSITORY / "fastvid") in path.parents}
