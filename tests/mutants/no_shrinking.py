"""A pytest plug-in: hypothesis reports the first example that fails, because simplifying it takes long."""

import pytest
from hypothesis import Phase, settings


def pytest_configure(config: pytest.Config) -> None:
    """Replace the profile that conftest.py chose."""
    settings.register_profile("mutants", settings.get_profile("fastvid"), phases=(Phase.explicit, Phase.generate))
    settings.load_profile("mutants")
