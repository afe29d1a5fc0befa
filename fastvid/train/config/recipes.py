"""Recipes: Python files with a function ``recipe() -> Config``, found by name or path.

A sweep has a function ``sweep() -> list[Config]`` as well, or instead: one entry per model, for a strategy that trains
several.

Names refer to files in ``pipelines/``, which is next to the package in a checkout and inside it when installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import fastvid
from fastvid.errors import UsageError
from fastvid.train.config import overrides
from fastvid.train.config.config import Config

_SUFFIX = ".py"


def names() -> list[str]:
    """Return the names of the recipes that come with fastvid, sorted."""
    return sorted(path.stem for path in _folder().glob(f"*{_SUFFIX}"))


def load(recipe: str, changes: Sequence[str] = ()) -> Config:
    """Return the configuration of a recipe.

    Args:
        recipe: A name from `names`, or the path of a Python file. The file is executed.
        changes: ``key=value`` overrides, see `fastvid.train.config.overrides`.

    Raises:
        UsageError: If the recipe does not exist or does not return a Config, or an override is wrong. Exceptions raised
            by the file itself are not caught.
    """
    path = find(recipe)
    make = getattr(_module(path), "recipe", None)
    if not callable(make):
        raise UsageError("recipe has no function recipe()", file=path, hint="define recipe() -> Config in the file")
    config = make()
    if not isinstance(config, Config):
        raise UsageError(f"recipe() returned {type(config).__name__}, not fastvid.train.Config", file=path)
    return overrides.apply(config, changes)


def load_all(recipe: str, changes: Sequence[str] = ()) -> list[Config]:
    """Return the configurations of all models: from ``sweep()`` if defined, else that of `load`.

    Args:
        recipe: As in `load`.
        changes: Overrides, applied to every configuration.

    Raises:
        UsageError: As in `load`, or if ``sweep()`` does not return a non-empty list of Config.
    """
    path = find(recipe)
    make = getattr(_module(path), "sweep", None)
    if not callable(make):
        return [load(recipe, changes)]
    configs = make()
    if not isinstance(configs, list) or not configs or not all(isinstance(config, Config) for config in configs):
        raise UsageError("sweep() did not return a list of fastvid.train.Config", file=path)
    return [overrides.apply(config, changes) for config in configs]


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fastvid_recipe_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find(recipe: str) -> Path:
    """Return the file of a recipe.

    Raises:
        UsageError: If the recipe does not exist.
    """
    path = Path(recipe)
    if path.suffix == _SUFFIX or path.name != recipe:
        if path.is_file():
            return path
        raise UsageError("recipe does not exist", file=recipe)
    path = _folder() / f"{recipe}{_SUFFIX}"
    if not path.is_file():
        raise UsageError(f"unknown recipe {recipe!r}", hint=f"use one of {', '.join(names())}; or a file's path")
    return path


def _folder() -> Path:
    package = Path(fastvid.__file__).parent
    installed = package / "pipelines"
    return installed if installed.is_dir() else package.parent / "pipelines"
