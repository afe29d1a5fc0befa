"""The report: every result is drawn, several machines are compared, and the README matches the results."""

import copy
import json
from pathlib import Path

import pytest

from bench import __main__ as command
from bench import report
from bench.common.harness import RESULTS
from fastvid.errors import UsageError

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_contains_the_measured_table():
    text = README.read_text()
    assert report.with_table(text, report.readme_table(report.load(RESULTS / "decode.json"))) == text


def test_a_readme_without_markers_is_refused():
    with pytest.raises(UsageError, match="lacks the markers"):
        report.with_table("# fastvid\n", "| a |")


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
    assert "from 100 to 150" in text


def test_an_unreadable_result_is_named(tmp_path, capsys):
    (tmp_path / "broken.json").write_text("{")
    assert command.main(["report", str(tmp_path / "broken.json")]) == 1
    assert "broken.json" in capsys.readouterr().err
    (tmp_path / "list.json").write_text("[]")
    assert command.main(["report", str(tmp_path / "list.json")]) == 1
    assert "expected a JSON object" in capsys.readouterr().err
