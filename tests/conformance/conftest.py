"""Run a back-end's tests once for each output type that it writes."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.conformance.suite", "tests.conformance.outputs")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames and metafunc.cls is not None:
        kinds = metafunc.cls.kinds
        metafunc.parametrize("kind", kinds, ids=[kind.__name__.lower() for kind in kinds])
