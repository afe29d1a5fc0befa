"""The report: every result is drawn, several machines are compared, and the README matches the results."""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path

import pytest

from bench import __main__ as command
from bench import report
from bench.common.charts import Bars, Lines, Table
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
        record = report.load(file)
        for chart in report.charts(record, file.stem):
            assert chart.title in text.replace("&#x27;", "'").replace("&gt;", ">").replace("&amp;", "&")


def test_every_benchmark_schema_has_a_reader():
    pytest.importorskip("torch")
    for module, _ in command.BENCHES.values():
        schema = getattr(importlib.import_module(module), "SCHEMA", None)
        assert schema is None or schema in report.READERS, module
    for schema in report.READERS:
        assert callable(report.reader(schema))


def test_bars_of_two_machines_are_merged_into_one_chart(tmp_path):
    ours = report.load(RESULTS / "decode.json")
    theirs = copy.deepcopy(ours)
    for row in theirs["rows"]:
        for entry in row["contenders"]:
            entry["rate"] *= 3
    for name, record in (("ours", ours), ("theirs", theirs)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "decode.json").write_text(json.dumps(record))
    files = report._labels([tmp_path / "ours" / "decode.json", tmp_path / "theirs" / "decode.json"])
    assert list(files) == ["ours/decode", "theirs/decode"]
    charts = report.merged({label: report.load(file) for label, file in files.items()})
    assert len(charts) >= len(ours["rows"])
    for chart, row in zip(charts, ours["rows"], strict=False):
        assert isinstance(chart, Bars)
        assert len(chart.values) == 2 * len(row["contenders"])
        for name, value in chart.values.items():
            if name.endswith("(ours/decode)"):
                assert chart.values[name.replace("ours", "theirs")] == pytest.approx(3 * value)
                assert (name in chart.rivals) == (not name.startswith(("fastvid", "libavcodec")))


def test_merged_series_and_tables_carry_the_labels_of_their_files():
    lines = [Lines("t", "x", "y", {"ddp": [(1, 1)], "model": [(1, 2)]}, ["model"])] * 2
    merged = report._merge([("a", lines[0]), ("b", lines[1])])
    assert list(merged.series) == ["a: ddp", "a: model", "b: ddp", "b: model"]
    assert merged.expected == ["a: model", "b: model"]
    table = report._merge([("a", Table("t", ("k", "v"), [("x", "1")])), ("b", Table("t", ("k", "v"), [("x", "2")]))])
    assert table.rows == [["a: x", "1"], ["b: x", "2"]]


def test_a_result_with_an_unknown_schema_is_shown_as_a_table():
    record = {"schema": "somebody/9", "machine": {"cpu": "x"}, "runs": [{"killed": 20}, {"killed": 3}], "s": [1, 2]}
    (chart,) = report.charts(record, "kills")
    assert isinstance(chart, Table)
    assert dict(chart.rows) == {"schema": "somebody/9", "runs[0].killed": "20", "runs[1].killed": "3", "s": "1, 2"}


def test_an_unreadable_result_is_named(tmp_path, capsys):
    (tmp_path / "broken.json").write_text("{")
    assert command.main(["report", str(tmp_path / "broken.json")]) == 1
    assert "broken.json" in capsys.readouterr().err
    (tmp_path / "list.json").write_text("[]")
    assert command.main(["report", str(tmp_path / "list.json")]) == 1
    assert "expected a JSON object" in capsys.readouterr().err
