"""With CI=true a skipped test fails unless its reason is listed in ``allowed_skips.txt``."""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from pathlib import Path

import pytest

ALLOWED = Path(__file__).with_name("allowed_skips.txt")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Check the report of a test."""
    report = yield
    _judge(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Check the report of a file, which may be skipped as a whole."""
    report = yield
    _judge(report)
    return report


def _judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    if os.environ.get("CI") != "true" or not report.skipped or hasattr(report, "wasxfail"):
        return
    assert isinstance(report.longrepr, tuple)
    path, line, reason = report.longrepr
    reason = reason.removeprefix("Skipped: ")
    lines = (line.strip() for line in ALLOWED.read_text().splitlines())
    if not any(re.fullmatch(pattern, reason) for pattern in lines if pattern and not pattern.startswith("#")):
        report.outcome = "failed"
        report.longrepr = f"{path}:{line}: skipped, which {ALLOWED.name} does not allow in CI: {reason}"
