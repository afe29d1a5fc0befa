import sys
from pathlib import Path

import pytest

from fastvid.errors import UsageError
from fastvid.runtime.names import accepted, check_keywords, import_name

CODE = """
class Net:
    class Small:
        pass

def make(num_classes, width=8, *, depth):
    pass

def anything(num_frames, **options):
    pass
"""


@pytest.fixture(autouse=True)
def _own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_code.py").write_text(CODE)
    (tmp_path / "needy_code.py").write_text("import a_package_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_code", None)


def test_returns_the_object_also_inside_a_class():
    assert import_name("model.name", "own_code:Net").__name__ == "Net"
    assert import_name("model.name", "own_code:Net.Small").__qualname__ == "Net.Small"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_code", "model.name is 'own_code'\n  hint: write it as module:name"),
        (":make", "write it as module:name"),
        ("own_cod:make", "there is no module 'own_cod'\n  hint: did you mean own_code?"),
        ("no.such.package:make", "there is no module 'no.such.package'\n  hint: add the folder"),
        ("own_code:mak", "module 'own_code' has no 'mak'"),
        ("own_code:mak", "hint: did you mean make?"),
        ("own_code:Net.Large", "module 'own_code' has no 'Net.Large'"),
    ],
)
def test_what_does_not_exist_is_named(name: str, message: str):
    with pytest.raises(UsageError) as refused:
        import_name("model.name", name)
    assert message in str(refused.value)


def test_an_import_that_fails_inside_the_module_is_not_hidden():
    with pytest.raises(ModuleNotFoundError, match="a_package_nobody_has"):
        import_name("model.name", "needy_code:make")


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (
            "make",
            {"depth": 1, "widht": 2},
            "model.options.widht: 'own_code:make' has no such option\n  hint: did you me",
        ),
        ("make", {"depth": 1, "num_classes": 2}, "model.options.num_classes: 'own_code:make' has no such option"),
        ("make", {}, "'own_code:make' requires depth\n  hint: set model.options.depth"),
        ("Net", {"width": 1}, "hint: remove it: it has no options"),
        ("anything", {"num_frames": 1}, "model.options.num_frames"),
    ],
)
def test_options_that_do_not_fit_are_named(make: str, given: dict[str, int], message: str):
    name = f"own_code:{make}"
    found = import_name("model.name", name)
    with pytest.raises(UsageError) as refused:
        check_keywords("model.options", name, found, given, always=("num_classes", "num_frames"))
    assert message in str(refused.value)


def test_options_that_fit_pass():
    always = ("num_classes", "num_frames")
    for make, given in (("make", {"depth": 1}), ("anything", {"whatever": 1}), ("Net", {})):
        check_keywords("o", make, import_name("m", f"own_code:{make}"), given, always=always)
    assert accepted(import_name("m", "own_code:make"), always) == {"num_classes"}
    assert accepted(import_name("m", "own_code:anything"), always) == set(always)
