"""Which tests run: with CI=true a skip fails unless ``allowed_skips.txt`` lists its reason; ``make soak`` runs more."""

import os
import re
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest

ALLOWED = Path(__file__).with_name("allowed_skips.txt")


def soak_but(values: Iterable[object], *kept: object) -> list[object]:
    """Return values for `pytest.mark.parametrize` of which all but those kept run in ``make soak`` only."""
    return [
        value
        if value in kept
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.soak)
        for value in values
    ]


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
