"""The lists of the mutation tests fit the files that they name."""

import json

import pytest

from tests.datasets import REPOSITORY
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.subjects import SUBJECTS

RESULTS = json.loads((REPOSITORY / "bench" / "results" / "mutants.json").read_text())


def test_modules_and_tests_exist_and_results_are_of_listed_modules():
    for module, tests in SUBJECTS.items():
        assert tests[0].startswith("tests/")
        paths = [module, *(word for word in tests if word.startswith("tests/"))]
        assert all((REPOSITORY / path.partition("::")[0]).is_file() for path in paths), module
    assert set(RESULTS["modules"]) <= set(SUBJECTS)


@pytest.mark.parametrize("module", EQUIVALENT)
def test_lines_named_as_equivalent_are_in_their_module(module):
    lines = {line.strip() for line in (REPOSITORY / module).read_text().splitlines()}
    listed = [before for before, _, _ in EQUIVALENT[module]]
    assert not set(listed) - lines
    assert len({entry[:2] for entry in EQUIVALENT[module]}) == len(listed)


def test_results_add_up_and_at_least_nine_of_ten_mistakes_are_noticed():
    for module in RESULTS["modules"].values():
        assert module["run"] == module["killed"] + len(module["survivors"]) + len(module["equivalent"]) > 0
        assert all(row["reason"] for row in module["equivalent"])
    assert RESULTS["run"] == sum(module["run"] for module in RESULTS["modules"].values())
    assert RESULTS["noticed_percent"] >= 90
