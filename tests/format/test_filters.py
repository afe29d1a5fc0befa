"""Samples are selected by a condition in SQL."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastvid
from fastvid.errors import UsageError
from fastvid.format.selection import matching_rows
from tests.datasets import make_clip, pack

PAGE = Path(__file__).parents[2] / "docs" / "sets.md"

TABLE = pa.table(
    {
        "key": ["c/0", "c/1", "c/2", "c/3"],
        "class": ["archery", "bowling", "archery", None],
        "label": pa.array([0, 1, 0, None], pa.int32()),
        "split1": ["train", "test", "train", "train"],
        "num_frames": pa.array([64, 100, 40, 300], pa.int32()),
        "fps": [25.0, 24.0, 12.5, 30.0],
        "duration": [2.56, 4.17, 3.2, 10.0],
        "height": pa.array([240, 256, 128, 720], pa.int32()),
        "caption": ["a dog runs over the field", "a hot dog", None, "it's a cat; DROP TABLE x --"],
        "tags": [["outdoor", "day"], [], None, ["outdoor"]],
        "parent": ["films/one.mp4", None, "films/one.mp4", "two.mp4"],
        "ünï côl": [1, 2, 3, 4],
    }
)

# The conditions of the tutorial, with the rows that match.
DOCUMENTED = {
    "class = 'archery'": [0, 2],
    "split1 = 'train' AND num_frames >= 64": [0, 3],
    "fps >= 24 AND height >= 240": [0, 1, 3],
    "caption LIKE '%dog%'": [0, 1],
    "'outdoor' IN tags": [0, 3],
    "parent = 'films/one.mp4'": [0, 2],
}


def test_every_condition_of_the_tutorial_selects_what_it_says():
    shown = [row.split("`")[1] for row in PAGE.read_text().splitlines() if row.startswith("| `") and "| of" in row]
    shown += [
        row.split("`")[1] for row in PAGE.read_text().splitlines() if re.match(r"\| `.*` \| (whose|that|by|cut)", row)
    ]
    assert set(shown) == set(DOCUMENTED)
    for condition, rows in DOCUMENTED.items():
        assert matching_rows(TABLE, condition).tolist() == rows, condition


@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        ("class IN ('archery', 'bowling')", [0, 1, 2]),
        ("duration BETWEEN 2 AND 10", [0, 1, 2, 3]),
        ("caption IS NOT NULL", [0, 1, 3]),
        ("length(caption) > 20", [0, 3]),
        ("label == 0", [0, 2]),
        ("label != 0", [1]),  # NULL is not different from 0
        ("not (label = 0)", [1]),
        ("label is null", [3]),
        ('"ünï côl" > 2 or fps < 24', [2, 3]),
        ("caption = 'it''s a cat; DROP TABLE x --'", [3]),
        ("num_frames / fps > 5", [3]),
        ("key IN ('c/1', 'nothing')", [1]),
        ("false", []),
    ],
)
def test_conditions_follow_sql(condition, rows):
    found = matching_rows(TABLE, condition)
    assert (found.dtype, found.tolist()) == (np.int64, rows)


@pytest.mark.parametrize("other", [{}, {"source_class": ["x", "y"]}])
def test_the_class_is_that_of_the_label_also_where_a_table_said_another(other, tmp_path):
    clip = make_clip(tmp_path / "clip.mp4")
    # Earlier versions stored a column of this name.
    pack(tmp_path / "d", [[("a", clip, 0), ("b", clip, 1)]], columns={"class": ["one", "left"], **other})
    assert fastvid.open(tmp_path / "d", where="class = 'left'").keys.to_pylist() == ["a"]
    theirs = "source_source_class" if other else "source_class"
    assert fastvid.open(tmp_path / "d", where=f"{theirs} = 'left'").keys.to_pylist() == ["b"]


@given(
    numbers=st.lists(st.none() | st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=300),
    bound=st.integers(-(2**31), 2**31 - 1),
)
def test_rows_are_those_that_python_would_choose_in_order(numbers, bound):
    table = pa.table({"x": pa.array(numbers, pa.int32())})
    wanted = [row for row, number in enumerate(numbers) if number is not None and number >= bound]
    assert matching_rows(table, f"x >= {bound}").tolist() == wanted


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        ("clas = 'archery'", r'"clas" not found.*hint: did you mean class\? use the columns caption, class'),
        ("num_frame > 3", r"hint: did you mean num_frames\? use the columns caption"),
        ("Durations > 3", r"hint: did you mean duration\?"),
        ("zzzz > 3", r"hint: use the columns caption"),
        ('class = "archery"', "hint: write text in single quotes: 'archery'"),
        ("num_frames >", "syntax error"),
        ("", "where="),
        ("key = 1", "Could not convert string 'c/0'"),
        ("sum(label) > 1", "aggregates"),
        ("1=1); DROP TABLE x", "syntax error"),
        ("caption is None", 'syntax error at or near "None"'),
    ],
)
def test_a_wrong_condition_says_what_is_wrong_and_what_exists(condition, says):
    with pytest.raises(UsageError) as caught:
        matching_rows(TABLE, condition)
    assert repr(condition) in str(caught.value)
    assert re.search(says, f"{caught.value} hint: {caught.value.hint}".replace("\n", " ")), caught.value


def test_a_condition_reads_no_file_and_no_variable(tmp_path):
    secret = tmp_path / "secret.csv"
    secret.write_text("x\n1\n")
    outside = pa.table({"x": [1]})
    assert outside.num_rows == 1
    for inner in (f"read_csv('{secret}')", f"'{secret}'", "outside", "TABLE"):
        with pytest.raises(UsageError):
            matching_rows(TABLE, f"exists(select * from {inner})")
    with pytest.raises(UsageError):
        matching_rows(TABLE, f"length(content) > 0 from read_text('{secret}')")


@pytest.mark.parametrize(
    "condition",
    [
        "random() < 0.5",
        "uuid() is null",
        "now() > DATE '2020-01-01'",
        "current_date > DATE '2020-01-01'",
        "current_timestamp is null",
        "row_number() over () < 2",
        "key in (select key from range(100000000000))",
        "exists(with recursive t as (select 1 union all select 1 from t) select * from t)",
        "label = 1 union select 1",
        "current_setting('threads') = '2'",
    ],
)
def test_a_condition_is_a_function_of_the_row(condition):
    """Otherwise every process selects other samples, or a query runs for ever."""
    with pytest.raises(UsageError, match=r"depends on more than the row of a sample|Parser Error"):
        matching_rows(TABLE, condition)


@pytest.mark.parametrize(
    "condition",
    [
        "len(range(100000000000)) > 1",
        "repeat('x', 100000000000) = 'a'",
        "(" * 40_000 + "1=1" + ")" * 40_000,
        "1=1 " * 10**6,
    ],
)
def test_a_condition_takes_neither_all_memory_nor_for_ever(condition):
    with pytest.raises(UsageError):
        matching_rows(TABLE, condition)


def test_a_dataset_has_class_names_and_facts_to_select_by(tmp_path):
    clips = [make_clip(tmp_path / f"{n}.mp4", frames=10 + 5 * n) for n in range(4)]
    samples = [(f"c/{n}", clip, [0, 1, 1, None][n]) for n, clip in enumerate(clips)]
    url = pack(tmp_path / "set", [samples[:2], samples[2:]], classes=("up", "down")).url
    assert fastvid.open(url, where="class = 'down'").keys.to_pylist() == ["c/1", "c/2"]
    assert fastvid.open(url, where="class is null").keys.to_pylist() == ["c/3"]
    with pytest.raises(UsageError, match="no sample matches"):
        fastvid.open(url, where="class = 'Down'")
