"""Pages: whatever the text is, it stays text; plots say what they show."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from fastvid.report import page, plots

HOSTILE = "<script>alert('\"')</script>&"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.alt = ""
        self.said = ""

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.alt = dict(attrs).get("alt") or self.alt

    def handle_data(self, data):
        self.said += data


def test_text_cannot_become_markup():
    body = (
        page.figures([(HOSTILE, HOSTILE)])
        + page.card(HOSTILE, page.table((HOSTILE, "n"), [(HOSTILE, "1")]), HOSTILE)
        + page.picture(np.zeros((2, 2, 3), np.uint8), HOSTILE)
    )
    tags = Tags()
    tags.feed(page.page(HOSTILE, HOSTILE, body))
    assert "script" not in tags.names
    # Title and heading, lead, two in figures, card and its note, a head and a cell.
    assert tags.said.count(HOSTILE) == 9
    assert tags.alt == HOSTILE


def test_a_page_refers_to_nothing_outside_itself():
    drawn = plots.lines({"a": [(1, 2), (2, 3)]}, "loss", across="epochs") + plots.bars({"x": 1.0}, unit="ms")
    text = page.page("t", "l", drawn)
    assert not [url for url in re.findall(r'(?:src|href)="([^"]*)"', text) if not url.startswith(("data:", "#"))]


def test_plots_say_names_units_and_values():
    drawn = plots.bars({"wait": 12.34, "decode": 1234.5}, unit="ms", spread={"wait": (10, 14)}, marked=["wait"])
    for word in ("wait", "decode", "12.3 ms", "1,234 ms"):
        assert word in drawn
    curve = plots.lines({"tsm": [(1, 10.0)], "none": []}, "top-1", across="epochs", log_x=True, log_y=True)
    for word in ("tsm", "none", "top-1", "epochs"):
        assert word in curve


def test_the_same_plot_is_the_same_text():
    assert plots.bars({"a": 1.0}, unit="") == plots.bars({"a": 1.0}, unit="")
