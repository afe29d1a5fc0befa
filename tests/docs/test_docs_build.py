"""The documentation builds without warnings and without a network, and the reference has every public name."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastvid
import fastvid.train

pytest.importorskip("mkdocs")

ROOT = Path(__file__).parents[2]


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


def public() -> Iterator[tuple[str, object]]:
    """Yield each public name and what it is, under the first module that exports it."""
    for module in (fastvid, fastvid.train):
        for name in module.__all__:
            if module is fastvid or name not in fastvid.__all__:
                yield f"{module.__name__}.{name}", getattr(module, name)


def test_the_reference_has_every_public_name_with_its_members(site):
    names = documented(site)
    wanted = {f"{module.__name__}.{name}" for module in (fastvid, fastvid.train) for name in module.__all__}
    wanted |= {f"{name}.{member}" for name, found in public() if isinstance(found, type) for member in members(found)}
    wanted |= {f"fastvid.ClipLoader.{name}" for name in ("stats", "world", "labels")}  # set when it is made
    assert wanted - names == {"fastvid.__version__"}


def test_every_field_of_a_public_class_is_described():
    for name, found in public():
        if isinstance(found, type) and dataclasses.is_dataclass(found):
            text = "\n".join(base.__doc__ or "" for base in found.__mro__)
            fields = {field.name for field in dataclasses.fields(found) if not field.name.startswith("_")}
            missing = {field for field in fields if not re.search(rf"^ +{field}: ", text, re.MULTILINE)}
            assert not missing, name


def test_the_overview_links_every_public_name():
    text = (ROOT / "docs/reference/index.md").read_text()
    linked = set(re.findall(r"\]\[(fastvid\.[\w.]+)\]", text))
    assert linked == {name for name, _ in public()} - {"fastvid.__version__"}
