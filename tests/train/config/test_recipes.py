"""The recipes that come with fastvid: their docstrings match their configurations."""

import ast
import re
import shlex

import pytest

from fastvid.models import zoo
from fastvid.runtime.names import check_keywords, import_name
from fastvid.train.config import config as recipes
from fastvid.train.config import overrides

NAMES = recipes.names()


def text_of(name):
    text = ast.get_docstring(ast.parse(recipes.find(name).read_text(encoding="utf-8")))
    assert text is not None
    return text.replace("\\\n", " ")


def commands(name, start):
    return [shlex.split(line) for line in text_of(name).splitlines() if line.strip().startswith(start)]


@pytest.mark.parametrize("name", [name for name in NAMES if commands(name, "fastvid shard")])
def test_the_documented_shard_command_matches_the_configuration(name):
    config = recipes.load(name)
    assert config.shard is not None, name
    (written,) = commands(name, "fastvid shard")
    configured = shlex.split(config.shard.command(config.data.path))
    assert sorted(written) == sorted(configured)


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_names_the_published_number_and_commands_with_existing_keys(name):
    if not name.startswith("motion"):
        assert re.search(r"\d\d\.\d+ %", text_of(name).splitlines()[0])
        assert re.search(r"commit|arXiv|\b20\d\d\b", text_of(name))
    found = commands(name, "torchrun")
    assert found
    for words in found:
        start = words.index("-m") + 2
        trained = words[words.index("-m") + 1] == "fastvid.train"
        recipe, *changes = words[start:] if trained else words[start + 1 :]
        assert recipe == name
        changes = [change for change in changes if "=" in change]
        overrides.apply(recipes.load(name), changes)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_imports_only_from_fastvid_train_and_its_model_accepts_its_options(name):
    tree = ast.parse(recipes.find(name).read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module for module in modules if str(module).startswith("fastvid")} == {"fastvid.train"}
    model = recipes.load(name).model
    if ":" in model.name:
        check_keywords(
            "model.options", model.name, import_name("model.name", model.name), model.arguments,
            always=("num_classes", "num_frames"),
        )  # fmt: skip
    else:
        assert set(model.arguments) <= set(zoo.options(model.name))
