"""A page with all building blocks in a browser: wide and narrow, light and dark."""

import re

from fastvid.report.charts import bars, lines
from fastvid.report.page import Section, card, definitions, document, figures, grid, table
from tests.browser import Browser, needs_chromium

LONG = "fastvid_planes_of_a_profile_with_a_long_name_from_memory" * 2
# Elements that extend beyond the right edge of the screen, except those that scroll.
WIDE = """
[...document.querySelectorAll('main *')]
  .filter(part => part.getBoundingClientRect().right > innerWidth + 1 && !part.closest('.table'))
  .map(part => part.outerHTML.slice(0, 80))
"""
# Position of the second mark of the first curve, as a fraction of the chart's width.
PLACE = """(() => {
  const chart = document.querySelector('svg.chart'), mark = chart.querySelectorAll('circle')[1].getBoundingClientRect();
  const axis = chart.querySelector('.rule').getBoundingClientRect();
  return (mark.x + mark.width / 2 - axis.x) / axis.width;
})()"""


def made():
    points = {"tsm": [(0, 1.0), (5, 3.0), (10, 2.0)], LONG: [(0, 2.0), (10, 4.0)], "one": [(10, 1.0)]}
    body = card(LONG, table((LONG, *"abcdefgh"), [(LONG, *"12345678")]), LONG, LONG)
    body += grid(card("", lines(points, "loss", across="epochs")), card("Speed", bars({LONG: 3.0, "b": 1.0}, unit="s")))
    body += card("Facts", definitions({LONG * 3: LONG}))
    numbers = figures([("Samples", "213 h 5 min", LONG)] * 3)
    sections = [Section(f"Section {n}", body, LONG) for n in range(9)]
    return document(LONG, sections, command="test", lead=LONG, chips={"name": LONG}, top=numbers)


def rgb(colour):
    return [float(part) for part in re.findall(r"[\d.]+", colour)[:3]]


@needs_chromium
def test_page_fits_a_phone_and_follows_the_colour_scheme(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(made(), encoding="utf-8")
    browser = Browser(tmp_path / "profile")
    try:
        browser.load(path)
        for width in (1280, 400):
            browser.resize(width)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert browser.evaluate(WIDE) == [], width
            # Long names leave room for the values beside them, and wrap in tables.
            assert min(browser.evaluate("[...document.querySelectorAll('dd')].map(e => e.clientWidth)")) > 100
            tables = "Math.max(...[...document.querySelectorAll('.table')].map(e => e.scrollWidth))"
            assert browser.evaluate(tables) <= max(width, 500)
            # Text keeps its size, because the chart is laid out again, not scaled.
            size = "[...document.querySelectorAll('svg.chart')].map(e => e.getScreenCTM().a)"
            assert set(browser.evaluate(size)) == {1}
            assert abs(browser.evaluate(PLACE) - 0.5) < 0.01, "epoch 5 of 10 is in the middle"

        found = {}
        for scheme in ("light", "dark"):
            browser.prefer(scheme)
            style = "getComputedStyle(document.querySelector('{}')).{}"
            back, ink = (rgb(browser.evaluate(style.format("body", name))) for name in ("backgroundColor", "color"))
            fill = browser.evaluate(style.format(".fill", "backgroundColor"))
            found[scheme] = (sum(back), sum(ink), fill)
        assert found["light"][0] > 600 > found["light"][1]
        assert found["dark"][0] < 100 < found["dark"][1]
        assert found["light"][2] != found["dark"][2]
        assert not [url for url in browser.requests() if not url.startswith(("file:", "data:"))]
    finally:
        browser.close()
