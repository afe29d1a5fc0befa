"""The documentation builds without warnings and without a network, and the reference has every public name."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import re
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastvid
import fastvid.train
from tests.docs import reference

pytest.importorskip("mkdocs")

ROOT = Path(__file__).parents[2]
SECTIONS = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$", re.MULTILINE)
MOST_WORDS = 18_000  # of all pages but the generated reference
MOST_WORDS_OF_GUARANTEES = 1_200  # without the names of tests


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; a build with a warning fails."""
    folder = tmp_path_factory.mktemp("site")
    # A dead proxy, so that any download fails.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)], cwd=ROOT, capture_output=True,
        text=True, check=False, timeout=560, env=os.environ | nowhere | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_pages_load_nothing_from_elsewhere(site):
    for page in (ROOT / "docs").rglob("*.md"):
        text = (site / page.relative_to(ROOT / "docs").with_suffix(".html")).read_text()
        assert not re.search(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"', text), page


def documented(site: Path) -> set[str]:
    """Return the names in the inventory that other projects link to."""
    data = (site / "objects.inv").read_bytes()
    header, mark, packed = data.partition(b"zlib.\n")
    assert mark, header
    return {line.split()[0] for line in zlib.decompress(packed).decode().splitlines()}


def members(kind: type) -> Iterator[str]:
    """Yield the public methods and properties of a class that fastvid defines.

    One that overrides another and says nothing new is described where it is declared, in the base class.
    """
    for name, value in inspect.getmembers(kind):
        owners = [base for base in kind.__mro__ if name in vars(base)]
        is_code = callable(value) or (not inspect.ismemberdescriptor(value) and hasattr(value, "__get__"))
        overrides = len(owners) > 1 and not vars(owners[0])[name].__doc__ and inspect.getdoc(value)
        ours = bool(owners) and owners[0].__module__.startswith("fastvid.")
        if not name.startswith("_") and ours and is_code and not overrides:
            yield name


def test_the_reference_has_every_public_name_with_its_members(site):
    names = documented(site)
    wanted = {f"{module.__name__}.{name}" for module in (fastvid, fastvid.train) for name in module.__all__}
    wanted |= {
        f"{name}.{member}" for name, found in reference.public() if isinstance(found, type) for member in members(found)
    }
    wanted |= {f"fastvid.ClipLoader.{name}" for name in ("stats", "world", "labels")}  # set when it is made
    assert wanted - names == {"fastvid.__version__"}


def test_every_field_of_a_public_class_is_described():
    for name, found in reference.public():
        if isinstance(found, type) and dataclasses.is_dataclass(found):
            text = "\n".join(base.__doc__ or "" for base in found.__mro__)
            fields = {field.name for field in dataclasses.fields(found) if not field.name.startswith("_")}
            missing = {field for field in fields if not re.search(rf"^ +{field}: ", text, re.MULTILINE)}
            assert not missing, name


def test_docstrings_of_other_names_have_no_sections():
    # A sentence says what an internal function does; a unit or shape stands beside its field.
    shown = {(kind.__module__, kind.__qualname__) for name in reference.names() for kind in reference.homes(name)}
    found = []
    for path in (ROOT / "fastvid").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for name, docstring in docstrings(ast.parse(path.read_text())):
            owners = [name.rpartition(".")[0], name]
            if SECTIONS.search(docstring) and not shown & {(module, owner) for owner in owners}:
                found.append(f"{module}.{name}")
    assert not [name for name in found if not name.startswith("fastvid.cli.")]


def docstrings(node: ast.AST, inside: str = "") -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield inside + child.name, ast.get_docstring(child) or ""
            yield from docstrings(child, f"{inside}{child.name}.")


def test_the_reference_says_what_the_docstrings_say():
    for file, text in reference.files().items():
        assert file.read_text() == text, "run `python -m tests.docs.reference`"
    assert {file.name for file in reference.FOLDER.iterdir()} == {file.name for file in reference.files()}


def test_each_public_name_is_on_one_page_of_the_reference():
    names = Counter(" ".join(" ".join(sections.values()) for _, sections in reference.PAGES.values()).split())
    assert {name for name, _ in reference.public()} <= names.keys()
    assert set(names.values()) == {1}


def test_the_docs_stay_short():
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.parent != reference.FOLDER]
    words = {page.name: len(page.read_text().split()) for page in pages}
    assert sum(words.values()) <= MOST_WORDS, f"{sum(words.values())} words; shorten a page for what was added: {words}"
    plain = re.sub(r"`test_\w+`,?", "", (ROOT / "docs" / "guarantees.md").read_text())
    assert len(plain.split()) <= MOST_WORDS_OF_GUARANTEES


def test_every_page_can_be_read_in_a_clone():
    for page in (ROOT / "docs").rglob("*.md"):
        assert "--8<--" not in page.read_text(), page
        assert page.parent == reference.FOLDER or ":::" not in page.read_text(), page


def test_the_tests_that_the_guarantees_and_the_table_of_attacks_name_exist():
    pages = (ROOT / "docs" / "guarantees.md", ROOT / "tests" / "attacks.md")
    named = [name for page in pages for name in re.findall(r"`(test_\w+)`", page.read_text())]
    defined = {
        name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }
    assert named
    assert not set(named) - defined
