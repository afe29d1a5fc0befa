"""The README's picture shows the actual plan."""

import re

import pytest

from bench.decode import plan_picture
from bench.report import BEGIN
from fastvid.load.clips.sampling import Segments
from tests.datasets import REPOSITORY
from tests.load.tools import video

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
    places = [text.index(part) for part in (f"]({FILE})", "```bash", "```python", BEGIN, "## Commands")]
    assert places == sorted(places)
    assert f"![84 of 96 packets without a plan, 22 with it]({FILE})" in text
