"""Write the measured parts of the documentation from their result files: ``python -m tests.docs.numbers``.

A measured part of a page stands between ``<!-- from bench/results: NAME -->`` and ``<!-- end of NAME -->``, and a
function of `tests.docs.written` returns its text. A test fails when a page says anything else than its files, and when
a page, outside such parts, states a number as if it had been measured; see CONTRIBUTING, "Numbers in the docs".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs import written

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = ROOT / "bench" / "results"

BLOCK = re.compile(
    r"(?P<begin><!-- from bench/results: (?P<name>[a-z0-9_]+) -->\n)(?P<text>.*?)(?P<end><!-- end of (?P=name) -->)",
    re.DOTALL,
)
# What is no text of ours: examples and their output, comments.
_ELSEWHERE = re.compile(r"```.*?```|<!--.*?-->|`[^`\n]*`", re.DOTALL)
# A ratio, a share, a rate or a duration, as measurements are written.
_MEASURED = re.compile(
    r"\d[\d,.]*\s?(?:x\b(?!\s?\d)|%|percent\b|clips/s|clips (?:a|per) second|[kMG]B/s|ms\b|us\b|ns\b|s a\b"
    r"|s against\b|times (?:as|faster|slower|longer|less|more|the)|min \d+ s)"
)


def rewritten(page: str) -> str:
    """Return a page with its measured parts as their result files say.

    Raises:
        AttributeError: If a part has a name that `tests.docs.written` does not have.
    """

    def part(found: re.Match[str]) -> str:
        return f"{found['begin']}{getattr(written, found['name'])()}\n{found['end']}"

    return BLOCK.sub(part, page)


def unsourced(text: str) -> Iterator[str]:
    """Yield the phrases around numbers that look measured, outside parts that are written from files."""
    plain = _ELSEWHERE.sub(lambda found: " " * len(found[0]), BLOCK.sub(lambda found: " " * len(found[0]), text))
    for found in _MEASURED.finditer(plain):
        start, end = max(0, found.start() - 60), found.end() + 40
        yield " ".join(plain[start:end].split())


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(rewritten(path.read_text()))
