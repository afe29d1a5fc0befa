"""The picture of the README is that of the plan."""

from __future__ import annotations

import re

from bench.decode import plan_picture
from bench.report import BEGIN
from fastvid.load.clips.sampling import Segments
from tests.datasets import REPOSITORY

FILE = "docs/images/plan.svg"


def test_the_picture_shows_what_the_plan_feeds():
    drawn = (REPOSITORY / FILE).read_text()
    assert drawn == plan_picture.svg()
    wanted = Segments(8, jitter=False).spread(plan_picture.NUM_FRAMES, 1)[0]
    plan = plan_picture.table().plan(wanted)
    assert re.findall(r">(\d+) of 96 packets<", drawn) == [str(plan.packets_from_keys), str(len(plan.packets))]


def test_the_first_screen_of_the_readme_has_a_picture_ten_lines_and_the_measured_table():
    text = (REPOSITORY / "README.md").read_text()
    places = [text.index(part) for part in (f"]({FILE})", "```bash", "```python", BEGIN, "## Commands")]
    assert places == sorted(places)
    assert f"![84 of 96 packets without a plan, 22 with it]({FILE})" in text
