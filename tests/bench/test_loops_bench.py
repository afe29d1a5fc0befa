"""The comparison of the same job in several libraries: what the page says is what was measured."""

from bench import report
from bench.common.harness import RESULTS
from bench.load.loop_programs import PROGRAMS
from bench.load.loops import lines_of


def test_the_programs_have_the_lines_that_the_result_says():
    for row in report.load(RESULTS / "loops.json")["rows"]:
        assert row["lines"] == lines_of(PROGRAMS[row["program"]])


def test_docstrings_and_blank_lines_are_not_counted():
    def program():
        """Two lines
        of text."""
        first = [1]

        first.append(2)

    assert lines_of(program) == 2
