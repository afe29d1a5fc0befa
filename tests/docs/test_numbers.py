"""Pages say what their result files say, and state no other measurements."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.docs import numbers

SETTINGS = Path(__file__).parent / "settings.txt"
# A docstring or comment that states a measurement.
MEASUREMENT = re.compile(
    r"\d\s?% (?:faster|slower)|\d times (?:faster|slower)|\d[^.(]*\(measured\b|\bmeasured: [^.]*\d"
    r"|(?:costs?|takes?|:|instead of) [\d.]+ ?(?:ms|us|ns)\b",
    re.IGNORECASE,
)
SOURCE = re.compile(r"bench/results/(\w+\.json)|python -m bench (\w+)")


@pytest.mark.parametrize("page", numbers.PAGES, ids=lambda page: page.relative_to(numbers.ROOT).as_posix())
def test_a_page_says_what_its_result_files_say(page: Path) -> None:
    text = page.read_text()
    assert numbers.rewritten(text) == text, "run `python -m tests.docs.numbers`"


def allowed() -> dict[str, list[str]]:
    """Return phrases that are no measurements of ours, by page."""
    lines = [line for line in SETTINGS.read_text().splitlines() if line and not line.startswith("#")]
    found: dict[str, list[str]] = {}
    for line in lines:
        page, phrase, reason = (part.strip() for part in line.split("|"))
        assert reason
        found.setdefault(page, []).append(phrase)
    return found


def test_pages_state_no_measurement_without_a_source() -> None:
    known, found, used = allowed(), [], set()
    for page in numbers.PAGES:
        name = page.relative_to(numbers.ROOT).as_posix()
        for phrase in numbers.unsourced(page.read_text()):
            fits = [one for one in known.get(name, ()) if one in phrase]
            used |= {(name, one) for one in fits}
            if not fits:
                found.append(f"{name}: {phrase}")
    assert found == [], "write it from a result file (tests/docs/written.py), or list it in tests/docs/settings.txt"
    assert {(name, one) for name, phrases in known.items() for one in phrases} - used == set()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("It is 2.5x faster.", 1), ("Clips at 1,200 clips/s", 1), ("ends at 34 % accuracy", 1), ("took 12 min 28 s", 1),
        ("17.2 times as long", 1), ("eight frames of 224 x 224", 0), ("<!-- 34 % --> `34 %`", 0), ("```\n34 %\n```", 0),
    ],
)  # fmt: skip
def test_what_looks_measured(text: str, count: int) -> None:
    assert len(list(numbers.unsourced(text))) == count


def remarks(path: Path) -> list[str]:
    """Return the docstrings and the comments of a file, consecutive comment lines as one."""
    text = path.read_text()
    found = [
        node.value.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    last, comment = -2, ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                found.append(comment)
                comment = ""
            comment += token.string.removeprefix("#")
            last = token.start[0]
    return [" ".join(one.split()) for one in [*found, comment] if one]


def test_docstrings_and_comments_state_no_measurement_without_a_source() -> None:
    found = []
    for path in sorted((numbers.ROOT / "fastvid").rglob("*.py")):
        for remark in remarks(path):
            if MEASUREMENT.search(remark) is None:
                continue
            name = path.relative_to(numbers.ROOT).as_posix()
            sources = SOURCE.findall(remark)
            if not sources:
                found.append(f"{name}: {MEASUREMENT.search(remark)[0]!r} in {remark[:160]}")
            for file, _ in sources:
                assert not file or (numbers.RESULTS / file).is_file(), f"{name} names {file}"
    assert found == [], "name the result file or the command that measures it, or leave the number out"
