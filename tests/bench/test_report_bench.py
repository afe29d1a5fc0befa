"""Reports and rivals: every result is drawn, of the newest versions, and told by the README and the pages."""

import copy
import json
import os
import re
import sys
from dataclasses import replace
from datetime import date, timedelta

import pytest

from bench import __main__ as command
from bench import report
from bench.common import newest
from bench.common.harness import RESULTS, shown
from bench.common.newest import CHECKED, MAX_AGE, NEWEST, Rival, outdated
from bench.decode import goals, plan_picture
from fastvid.load.clips.sampling import Segments
from tests.datasets import REPOSITORY
from tests.load.tools import video


def test_every_committed_result_is_drawn(tmp_path):
    page = tmp_path / "report.html"
    assert command.main(["report", "--html", str(page)]) == 0
    text = page.read_text()
    for file in RESULTS.glob("*.json"):
        assert file.stem in text


def test_rows_of_two_machines_are_in_one_table(tmp_path):
    ours = report.load(RESULTS / "decode.json")
    theirs = copy.deepcopy(ours)
    for name, record in (("ours", ours), ("theirs", theirs)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "decode.json").write_text(json.dumps(record))
    files = report._labels([tmp_path / "ours" / "decode.json", tmp_path / "theirs" / "decode.json"])
    assert list(files) == ["ours/decode", "theirs/decode"]
    rows = report.merged({label: report.load(file) for label, file in files.items()})["rows"]
    assert [row["result"] for row in rows] == [label for label in files for _ in ours["rows"]]
    assert [row["clips"] for row in rows] == 2 * [row["clips"] for row in ours["rows"]]


def test_numbers_with_a_range_are_bars_and_all_others_are_in_tables():
    row = {"label": "pyav", "rate": 123.4, "rate_min": 100.25, "rate_max": 150.5, "settings": {"source": "file"}}
    record = {"schema": "somebody/9", "machine": {"cpu": "x"}, "seeds": [1, 2], "rows": [{"clips": 77, "ways": [row]}]}
    text = report.render({"kills": record})
    assert "1, 2" in text
    assert ">77<" in text
    assert text.count('class="row"') == 1
    assert "from 100 clips/s to 150 clips/s" in text


def test_a_result_is_printed_as_values_and_as_tables_of_rows_and_of_values_by_name():
    rows = [{"label": "one", "cost": {"cpu": 1.25}}, {"label": "other", "cost": {"cpu": 12.5}, "wrong": True}]
    record = {"machine": {"cpu": "x"}, "open": {"files": 7, "a": {"median": 1.5}, "b": {"median": 20}}, "rows": rows}
    assert shown(record).splitlines() == [
        "open.files: 7", "", "open", "   median", "a     1.5", "b      20",
        "", "rows", "label  cost.cpu  wrong", "  one      1.25       ", "other      12.5   True",
    ]  # fmt: skip


def test_an_unreadable_result_is_named(tmp_path, capsys):
    (tmp_path / "broken.json").write_text("{")
    assert command.main(["report", str(tmp_path / "broken.json")]) == 1
    assert "broken.json" in capsys.readouterr().err
    (tmp_path / "list.json").write_text("[]")
    assert command.main(["report", str(tmp_path / "list.json")]) == 1
    assert "expected a JSON object" in capsys.readouterr().err


FILE = "docs/images/plan.svg"


@pytest.mark.parametrize(("theme", "file"), [("light", FILE), ("dark", "docs/images/plan-dark.svg")])
def test_the_picture_shows_the_planned_packets(theme, file):
    drawn = (REPOSITORY / file).read_text()
    assert drawn == plan_picture.svg(theme)
    wanted = Segments(8, jitter=False).spread(video(plan_picture.NUM_FRAMES), 1)[0]
    plan = plan_picture.table().plan(wanted)
    assert re.findall(r">(\d+) of 96 packets<", drawn) == [str(plan.packets_from_keys), str(len(plan.packets))]


def test_the_readme_shows_picture_example_and_measured_table_before_the_commands():
    text = (REPOSITORY / "README.md").read_text()
    places = [text.index(part) for part in (f"]({FILE})", "```bash", "```python", "## Measured", "## Commands")]
    assert places == sorted(places)
    assert f"![84 of 96 packets without a plan, 22 with it]({FILE})" in text


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
