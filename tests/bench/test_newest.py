"""Rivals: the newest versions, which results are measured with, and goals against the best of them."""

import os
import sys
from dataclasses import replace
from datetime import date, timedelta

import pytest

from bench import report
from bench.common import newest
from bench.common.harness import RESULTS
from bench.common.newest import CHECKED, MAX_AGE, NEWEST, Rival, outdated
from bench.decode import goals

CURRENT = {rival.package: rival.version for rival in NEWEST.values()}


def test_the_readmes_rivals_are_the_newest_of_their_day():
    record = report.load(RESULTS / "decode.json")
    machine = record["machine"]
    assert machine["packages"]["torchcodec"]
    assert outdated(machine["packages"], date.fromisoformat(machine["time"][:10])) == []


def test_a_result_with_an_older_rival_or_of_another_time_is_outdated():
    assert outdated(CURRENT, CHECKED) == []
    assert outdated(CURRENT, CHECKED + MAX_AGE) == []
    assert "0.11.1 was measured" in outdated(CURRENT | {"torchcodec": "0.11.1"}, CHECKED)[0]
    for day in (CHECKED + MAX_AGE + timedelta(1), CHECKED - MAX_AGE - timedelta(1)):
        assert str(CHECKED) in outdated(CURRENT, day)[0]


def test_the_check_of_the_versions_expires_for_developers(capsys):
    assert newest.main(CHECKED + MAX_AGE) == 0
    assert newest.main(CHECKED + MAX_AGE + timedelta(1)) == 1
    assert "bench/common/newest.py" in capsys.readouterr().err


def test_a_newer_version_comes_from_its_own_folder_here_and_in_children(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    rival = Rival("pytest", "9999.0")
    monkeypatch.setattr(newest, "NEWEST", {"pytest": rival, "same": replace(rival, version=pytest.__version__)})
    folder = tmp_path / "rivals" / "pytest-9999.0"
    facts = folder / "pytest-9999.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: pytest\nVersion: 9999.0\n")
    newest.use_newest(["same", "unknown"], tmp_path)
    assert newest.installed("pytest") == pytest.__version__
    newest.use_newest(["pytest"], tmp_path)
    assert newest.versions()["pytest"] == "9999.0"
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(folder), "elsewhere"]


def entry(name, cpu, times):
    ratio = {"wall": times, "wall_min": times, "wall_max": times, "cpu": times, "cpu_min": times, "cpu_max": times}
    one = {"name": name, "label": name, "rate": 1e3 / cpu, "cpu_ms": cpu}
    return one | {"fastvid_is_faster_by": {goals.OURS: ratio}}


@pytest.mark.parametrize("by", ["wall", "cpu"])
def test_a_goal_is_met_against_the_best_rival_with_the_same_output_and_without_our_plan(by):
    row = {"profile": {"name": "compact"}, "sampling": "tsn8", "dataset": "compact"}
    row["contenders"] = [
        entry("slow", 40.0, 4.0),
        entry("quick", 28.0, 2.8),
        *(entry(n, 1.0, 0.1) for n in goals.NOT_RIVALS),
    ]
    found = goals.verdict(row, by)
    assert (found["rival"], found["wanted"], found["met"]) == ("quick", 2.8, True)
    assert "goal met: 2.800x" in goals.sentence(found)
    row["contenders"].append(entry("quicker", 27.0, 2.7))
    assert not goals.verdict(row, by)["met"]
    assert "MISSED" in goals.lines([row | {"goal": goals.verdict(row, by)}])[0]
    # Other footage has no number to reach: it must be ahead.
    assert goals.verdict(row | {"kind": "hour"}, by)["met"]
    assert goals.verdict(row | {"contenders": row["contenders"][2:4]}, by) is None
