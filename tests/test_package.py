"""The package as a whole: layers, public names, import cost, error messages."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import fastvid
from fastvid import errors

ROOT = Path(fastvid.__file__).parent

# Each layer may import those before it. runtime and report stand beside errors; models stand beside load.
LAYERS = [
    "errors",
    "runtime",
    "report",
    "storage",
    "format",
    "decode",
    "media",
    "sharding",
    "load",
    "measure",
    "tune",
    "train",
    "demo",
    "cli",
]
BESIDE = {"models": {"errors"}}


def imported_layers(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            modules = [node.module] if node.module != "fastvid" else [f"fastvid.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        names |= {module.split(".")[1] for module in modules if module.startswith("fastvid.")}
    return names


def test_imports_go_one_way():
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        layer = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if layer in ("__init__", "__main__"):
            continue
        if layer in BESIDE:
            allowed = BESIDE[layer] | {layer}
        elif layer in LAYERS:
            allowed = set(LAYERS[: LAYERS.index(layer) + 1]) | (
                set(BESIDE) if layer in ("train", "demo", "cli") else set()
            )
        else:
            allowed = {layer}
            wrong.append(f"{path.name} belongs to no layer")
        extra = imported_layers(path) - allowed - {"__version__"}
        wrong += [f"{path.relative_to(ROOT)} imports {name}" for name in sorted(extra)]
    assert not wrong


def test_only_the_storage_layer_opens_files_of_a_dataset():
    # pathlib and open() in format/ and load/ would bypass object stores.
    for folder in ("format", "load"):
        for path in (ROOT / folder).rglob("*.py"):
            calls = [
                node.func.id
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            ]
            assert "open" not in calls, path


def test_files_stay_small():
    long = {
        str(path.relative_to(ROOT)): lines
        for path in ROOT.rglob("*.py")
        if (lines := path.read_text().count("\n")) > 400
    }
    assert not long


def test_public_names_are_sorted_and_real():
    assert fastvid.__all__ == sorted(fastvid.__all__)
    for name in fastvid.__all__:
        assert getattr(fastvid, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        fastvid.nonsense  # noqa: B018


def test_import_loads_neither_torch_nor_a_decoder():
    code = (
        "import sys, fastvid, fastvid.cli.main\n"
        "print([m for m in ('torch', 'nvidia.dali', 'av', 'pyarrow', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_error_crosses_a_process():
    def tree(kind: type[errors.FastvidError]) -> list[type[errors.FastvidError]]:
        return [kind, *(sub for child in kind.__subclasses__() for sub in tree(child))]

    for kind in tree(errors.FastvidError):
        extra = {"reason": "timeout", "transient": True} if kind is errors.SourceError else {}
        error = kind("it broke", hint="mend it", key="a/b", shard=None, **extra)
        copy = pickle.loads(pickle.dumps(error))
        assert str(copy) == str(error) == "it broke [key=a/b]\n  hint: mend it"
        assert vars(copy) == vars(error)


def test_outer_layers_add_places_and_keep_inner_ones():
    error = errors.DecodeError("bad", key="inner").at(key="outer", shard="data-000000")
    assert error.where == {"key": "inner", "shard": "data-000000"}


def test_a_command_whose_extra_is_not_installed_names_it():
    hidden = "import sys; sys.modules['torch'] = None\n"
    for code in (
        "from fastvid.cli.main import main; sys.exit(main(['train', 'motion_tsm']))",
        "import fastvid; fastvid.ClipLoader",
    ):
        out = subprocess.run([sys.executable, "-c", hidden + code], capture_output=True, text=True, check=False)
        assert out.returncode == 1
        assert "hint: pip install 'fastvid-toolkit[torch]'" in out.stderr


def test_unknown_command_names_the_known_ones():
    out = subprocess.run([sys.executable, "-m", "fastvid", "shrad"], capture_output=True, text=True, check=False)
    assert out.returncode == 2
    assert "'shrad'" in out.stderr
    assert "shard" in out.stderr
    assert not out.stdout
