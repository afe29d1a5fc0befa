"""Pages: all text stays text, charts state their values, and nothing is loaded from outside."""

import base64
import hashlib
import io
import math
import re
import types

import av
import numpy as np
import pytest

from fastvid.errors import UsageError
from fastvid.report import results
from fastvid.report.charts import bars, lines
from fastvid.report.page import (
    Markup,
    Section,
    card,
    definitions,
    document,
    figures,
    film_strip,
    picture,
    png,
    row,
    table,
    text,
)
from tests.report.tags import Tags

HOSTILE = "<script>alert('\"')</script>&"
QUOTES = "\"onmouseover='alert()' x=\""


def whole(*bodies, **options):
    return document("title", [Section("One", "".join(bodies))], command="test", **options)


@pytest.mark.parametrize("hostile", [HOSTILE, QUOTES])
def test_text_cannot_become_markup(hostile):
    points = {hostile: [(1.0, 2.0), (2.0, 3.0)], f"{hostile} 2": [(1.0, 1.0)]}
    body = (
        figures([(hostile, hostile, hostile)])
        + card(hostile, table((hostile, "n"), [(hostile, "1")]), hostile, hostile)
        + definitions({hostile: hostile})
        + lines(points, hostile, across=hostile)
        + bars({hostile: 1.0}, unit=hostile, spread={hostile: (0.5, 2.0)})
        + picture(np.zeros((2, 2, 3), np.uint8), hostile)
    )
    made = document(
        hostile, [Section(hostile, body, hostile)] * 2, command=hostile, lead=hostile, chips={hostile: hostile}
    )
    tags = Tags(made)
    assert len(tags.find("script")) == 1
    assert "alert" not in tags.find("script")[0][1]
    for _, attrs, _ in tags.elements:
        assert not [name for name in attrs if name.startswith("on")]
    for tag, times in {"h1": 1, "h2": 2, "h3": 2, "dt": 2, "dd": 2, "figcaption": 2}.items():
        assert [hostile in said for _, said in tags.find(tag)] == [True] * times, tag
    assert {attrs["alt"] for attrs, _ in tags.find("img")} == {hostile}


def test_characters_that_reorder_or_hide_text_are_escaped():
    assert text("a<b>&\"'\u202e") == "a&lt;b&gt;&amp;&quot;&#x27;\\u202e"
    assert text("\x1b[2J\udc80") == "\\u001b[2J\\udc80"
    persian = "\u0645\u06cc\u200c\u062f\u0648\u062f"  # a word with a joiner inside
    assert text(persian) == persian
    whole(card("\udc80", "")).encode()  # a name that is not UTF-8 can be written


def test_table_escapes_everything_but_markup():
    cells = row((Markup("<b>1</b>"), "<b>2</b>"), (False, True))
    assert cells == '<tr><td><b>1</b></td><td class="num">&lt;b&gt;2&lt;/b&gt;</td></tr>'
    assert cells in table(("a", "b"), [cells], numeric=(False, True))


def test_definitions_show_lists_in_words_and_leave_out_what_is_empty():
    tags = Tags(definitions({"a": ["x", 1], "b": {"y": 2, "z": "<"}, "c": "", "d": False, "e": 0}))
    assert [said for _, said in tags.find("dt")] == ["a", "b", "d", "e"]
    assert [said for _, said in tags.find("dd")] == ["x, 1", "y 2, z <", "False", "0"]


def test_numbers_are_right_aligned():
    rows = [
        ("2, ddp", "3.16 MB", "358dd88", "8.0 of 8.0", ""),
        ("4, ddp", "not reached", "16aa91d", "99 %", "-"),
        ("8, ddp", "1.2e+05", "1x", "<1 %", ""),
    ]
    tags = Tags(whole(table(("ranks", "size", "commit", "packets", "none"), rows)))
    assert [said for _, said in tags.find("th", "num")] == ["size", "packets"]
    assert "<thead>" not in table(("", ""), rows and [("a", "b")])


def test_page_has_no_external_references_and_allows_only_its_script():
    body = lines({"a": [(1, 2), (2, 3)]}, "loss", across="epochs") + bars({"x": 1.0}, unit="ms")
    made = whole(body, picture(np.zeros((2, 2, 3), np.uint8), "p"), style="b { }", script="one('b');")
    for tag, attrs, _ in Tags(made).elements:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            assert attrs.get(name, "#").startswith(("#", "data:image/png;base64,")), (tag, name)
    assert not re.findall(r"@import|<link|<iframe|url\(|https?://", made)
    (_, script) = Tags(made).find("script")[0]
    assert script.endswith("one('b');")
    (policy,) = (attrs["content"] for attrs, _ in Tags(made).find("meta") if "http-equiv" in attrs)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none';")
    assert policy.endswith(f"script-src 'sha256-{digest}'")


def test_every_section_has_a_link():
    tags = Tags(document("t", [Section("Long runs", ""), Section("x", "")], command="test"))
    assert [attrs["href"] for attrs, _ in tags.find("a")] == ["#long-runs", "#x"]
    assert [attrs["id"] for attrs, _ in tags.find("section")] == ["long-runs", "x"]
    assert not Tags(whole("")).find("a")


def test_bars_show_names_units_values_and_spreads():
    made = bars({"wait": 12.34, "decode": 1234.5}, unit="ms", spread={"wait": (10, 14)}, quiet=["wait"])
    tags = Tags(made)
    assert [said for _, said in tags.find("span", "value")] == ["12.3 ms", "1,234 ms"]
    assert [said for _, said in tags.find("span", "name")] == ["wait", "decode"]
    assert [attrs.get("aria-label") for attrs, _ in tags.find("span", "track")] == ["from 10 ms to 14 ms", None]
    assert [attrs["class"] for attrs, _ in tags.find("div", "row")] == ["row quiet", "row"]
    widths = [float(re.search(r"width:([\d.]+)%", attrs["style"])[1]) for attrs, _ in tags.find("i", "fill")]
    assert widths == [1.0, 100.0]
    assert "width:0.00%" in bars({"nothing": 0.0})


def test_curves_have_their_numbers_in_a_table():
    made = lines({"tsm": [(1, 10.0), (2, 55.5)], "none": [], "at 2": [(2, 7)]}, "top-1, %", across="epochs")
    tags = Tags(made)
    (attrs, _) = tags.find("svg", "chart")[0]
    assert (attrs["role"], attrs["aria-label"]) == ("img", "top-1, % over epochs")
    assert [said for _, said in tags.find("th")] == ["epochs", "tsm", "none", "at 2"]
    assert [said for _, said in tags.find("td")] == ["1", "10", "", "", "2", "55.5", "", "7"]
    # The text shown on hover, and a name for each series in the legend.
    assert [attrs["data-tip"] for attrs, _ in tags.find("rect")] == ["epochs 1, tsm 10", "epochs 2, tsm 55.5, at 2 7"]
    assert [said for _, said in tags.find("span", "legend")] == ["tsmnoneat 2"]


def test_a_ninth_curve_differs_from_the_first():
    made = lines({f"run {n}": [(0, n), (1, n)] for n in range(9)}, "loss", across="epochs")
    drawn = [attrs["class"] for attrs, _ in Tags(made).find("polyline")]
    assert len(set(drawn)) == 9


def test_many_sections_are_listed_below_the_title():
    tags = Tags(document("t", [Section(f"Part {n}", "") for n in range(40)], command="test"))
    ((_, listed),) = tags.find("nav", "contents")
    assert listed.startswith("Part 0Part 1")
    assert len(tags.find("a")) == 40


def places(made):
    """Return the points of a chart's first curve: fractions of its width and height, from the bottom left."""
    found = re.search(r'<polyline class="c0[^"]*" points="([^"]*)"', made)[1].split()
    return [(float(x) / 1000, 1 - float(y) / 1000) for x, y in (point.split(",") for point in found)]


def ticks(made, side):
    return [said for _, said in Tags(made).find("text", side)]


def test_axes_are_linear_from_zero():
    linear = lines({"a": [(0, 0.0), (5, 50.0), (10, 100.0)]}, "y", across="x", limits=(0, 200))
    assert places(linear) == [(0, 0), (0.5, 0.25), (1, 0.5)]
    assert ticks(linear, "end") == ["0", "50", "100", "150", "200"]
    clips = lines({"a": [(0, 2e-5), (2.5e9, 4e-5)]}, "y", across="clips")
    assert ticks(clips, "middle") == ["0", "500 M", "1 G", "1.5 G", "2 G", "2.5 G"]
    assert ticks(clips, "end") == ["0", "1e-05", "2e-05", "3e-05", "4e-05"]
    epochs = lines({"a": [(1, 1.0), (2, -1.0)]}, "y", across="x", whole_x=True)
    assert ticks(epochs, "middle") == ["0", "1", "2"]
    assert ticks(epochs, "end") == ["-1", "-0.5", "0", "0.5", "1"]


def test_values_that_are_not_finite_are_not_drawn():
    points = [(1, math.nan), (2, 0.0), (3, 4.0), (4, 5.0), (5, math.inf)]
    assert len(places(lines({"a": points}, "y", across="x"))) == 3
    Tags(lines({"a": [], "b": [(1, math.nan)]}, "y", across="x"))
    Tags(lines({"a": [(3, 7.0)]}, "y", across="x"))
    Tags(lines({"a": [(0, 0.0), (0, 0.0)]}, "y", across="x"))


def test_a_long_curve_keeps_its_peaks():
    points = [(float(step), 1.0) for step in range(50_000)]
    points[31_234], points[31_235] = (31_234.0, 9.0), (31_235.0, 0.0)
    made = lines({"a": points}, "loss", across="steps", limits=(0, 10))
    assert len(made) < 60_000
    heights = [y for _, y in places(made)]
    assert (max(heights), min(heights)) == (pytest.approx(0.9), pytest.approx(0.0))
    assert "<summary>Numbers, 50 of 50,000 rows</summary>" in made


@pytest.mark.parametrize("channels", [3, 4])
def test_picture_decodes_to_its_pixels(channels):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels), dtype=np.uint8)
    with av.open(io.BytesIO(png(pixels))) as container:
        frame = next(container.decode(video=0))
    assert (frame.to_ndarray(format="rgba" if channels == 4 else "rgb24") == pixels).all()
    frames = np.stack([pixels[..., :3]] * 3)
    joined = film_strip(frames)
    assert joined.shape == (5, 3 * 7 + 2 * 3, 3)
    assert (joined[:, 10:17] == frames[1]).all()
    assert (joined[:, 7:10] == 255).all()


class Evaluated:
    protocol, num_views = "10x3", 30
    score = types.SimpleNamespace(numbers={"loss": 0.5, "top1_percent": 75.0, "top5_percent": 100.0}, scored=4, total=5)

    def __init__(self, confusion):
        self.confusion = np.asarray(confusion)
        self.names = [f"<class {n}>" for n in range(len(confusion))]

    @property
    def rows(self):
        return [
            {"class": name, "videos": int(line.sum()), "top1_percent": 50.0, "taken_for": QUOTES, "taken_for_videos": 1}
            for name, line in zip(self.names, self.confusion, strict=True)
        ]


def test_confusion_matrix_is_a_table_for_few_classes_and_a_picture_for_many():
    tags = Tags(results.page(Evaluated([[3, 1], [0, 4]])))
    assert [said for _, said in tags.find("td")][:6] == ["<class 0>", "3", "1", "<class 1>", "", "4"]
    assert tags.find("td")[1][0]["data-tip"] == "<class 0> taken for <class 0>: 3, 75 %"
    many = Tags(results.page(Evaluated(2 * np.eye(40, dtype=int) + 2 * np.eye(40, k=1, dtype=int))))
    ((attrs, _),) = many.find("img")
    with av.open(io.BytesIO(base64.b64decode(attrs["src"].partition(",")[2]))) as container:
        alpha = next(container.decode(video=0)).to_ndarray(format="rgba")[..., 3]
    assert (alpha[0, 0], alpha[0, 1], alpha[0, 2], alpha[39, 39]) == (180, 180, 0, 255)
    assert len(many.find("tr")) == 41


def test_an_evaluation_that_scored_no_video_shows_no_score():
    nothing = Evaluated([[0, 0], [0, 0]])
    nothing.score = types.SimpleNamespace(numbers={"loss": math.nan, "top1_percent": 0.0}, scored=0, total=5)
    tags = Tags(results.page(nothing))
    assert [said for _, said in tags.find("div", "label")] == ["Videos scored", "Protocol"]
    assert "No video was scored." in [said for _, said in tags.find("p")]
    assert not tags.find("table")


def test_classes_without_videos_are_counted_and_left_out():
    tags = Tags(results.page(Evaluated([[3, 1], [0, 0]])))
    (section,) = [said for attrs, said in tags.find("section") if attrs["id"] == "by-class"]
    assert "Worst first. 1 without videos left out." in section
    assert "<class 1>" not in section


def test_predictions_show_frames_and_shares(tmp_path):
    seen = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3), dtype=np.uint8)
    one = types.SimpleNamespace(
        video=HOSTILE, top=[("jump", 0.905), (QUOTES, 0.05)], frames=[0, 9], pictures=seen, probabilities=True
    )
    results.write(tmp_path / "seen.html", [one, one])
    tags = Tags((tmp_path / "seen.html").read_text())
    assert [said for _, said in tags.find("h3")] == [HOSTILE] * 2
    assert [said for _, said in tags.find("span", "value")] == ["90.5 %", "5.0 %"] * 2
    results.write(tmp_path / "seen.png", [one, one])
    with av.open(str(tmp_path / "seen.png")) as container:
        frame = next(container.decode(video=0)).to_ndarray(format="rgb24")
    assert frame.shape == (4 + 3 + 4, 4 + 3 + 4, 3)
    assert (frame[7:, 7:] == seen[1]).all()
    with pytest.raises(UsageError, match="cannot be written"):
        results.write(tmp_path / "nowhere" / "seen.png", [one])
