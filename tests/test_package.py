"""The package as a whole: layers, public names, import cost, error messages."""

import ast
import json
import os
import pickle
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Set
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fastvid
import fastvid.train
from fastvid import errors
from fastvid.cli.main import COMMANDS, main
from fastvid.load.clips import crops, sampling
from fastvid.train.strategies import BUILT_IN
from tests.conftest import LONG
from tests.datasets import make_clip, pack

ROOT = Path(fastvid.__file__).parent

REPOSITORY = ROOT.parent

# The contents of each folder from low to high: a file or sub-folder may import only those before it, also inside
# functions. Folders that are not listed have no sub-folders. Files that start something may import everything.
ORDER = {
    folder: order.split()
    for folder, order in {
        "fastvid": "errors runtime report storage format decode media videos sharding load tune models train demo cli",
        "fastvid/sharding": "sources encode work engines job in_place lerobot verify change sets page",
        "fastvid/load": "options stats order clips memory device after batch workers trainers loader clip_dataset",
        "fastvid/train": "tasks config ranks records parts loop run strategies",
        "fastvid/train/strategies": "link average ddp kavg adaptive_batch asgd relay",
        "bench/batches": "rivals batches",
        "bench": "common batches decode load shard train gpu scaling strategies elastic trace report",
    }.items()
}
# Folders outside the order, and the parts of fastvid that they may import.
BESIDE = {"fastvid/models": {"errors", "runtime"}}
FREE = {"__init__", "__main__"}


@cache
def modules() -> dict[str, Path]:
    """The files of fastvid and bench by their dotted names."""
    found = {}
    for path in sorted([*ROOT.rglob("*.py"), *(REPOSITORY / "bench").rglob("*.py")]):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: Mapping[str, Path]) -> set[str]:
    """The modules of `known` that a file imports: at its top, in functions, and for type checkers alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & known.keys()


@cache
def graph() -> dict[str, set[str]]:
    """Each module of fastvid and bench, and those of them that it imports."""
    return {module: imports(path, modules()) for module, path in modules().items()}


def upward(imported: Mapping[str, Set[str]]) -> list[str]:
    """Imports against the order."""
    wrong = []
    for module, other in [(module, other) for module, others in imported.items() for other in sorted(others)]:
        mine, theirs = module.split("."), other.split(".")
        depth = next((n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        if depth is None or mine[depth] in FREE:  # a package and its contents
            continue
        if depth == 0:
            allowed = mine[0] == "bench"
        elif (folder := "/".join(mine[:depth])) in ORDER:
            allowed = theirs[depth] in ORDER[folder][: ORDER[folder].index(mine[depth])]
            allowed &= theirs[depth] in BESIDE.get(f"{folder}/{mine[depth]}", {theirs[depth]})
        else:
            allowed = True
        wrong += [] if allowed else [f"{module} imports {other}"]
    return wrong


def test_imports_go_one_way_between_and_within_folders():
    assert not upward(graph())


def test_every_file_and_folder_has_a_place_in_the_order():
    listed = {f"{folder}/{name}" for folder, order in ORDER.items() for name in order}
    there = set()
    for path in modules().values():
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        folders = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
        there |= {f"{folder}/{parts[depth]}" for depth, folder in enumerate(folders, 1) if folder in ORDER}
        # A folder with sub-folders has its own order.
        assert all(folder in ORDER for folder in folders[:-1]), path
    assert {name for name in there if name.rpartition("/")[2] not in FREE} == listed


def test_there_are_no_circular_imports():
    # Without the top-level package, which re-exports names and from which modules import only a version or a path.
    modules = {module: others - {"fastvid"} for module, others in graph().items() if module != "fastvid"}
    TopologicalSorter(modules).prepare()  # raises an error that names the modules of a circle


def test_each_public_class_name_is_defined_once():
    names = Counter(
        node.name
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not {name for name, number in names.items() if number > 1}


def test_no_file_outside_the_strategies_names_one():
    # A strategy that anybody writes can then do all that those of the package can.
    folder = ROOT / "train" / "strategies"
    names = re.compile(rf"\b(?:{'|'.join(BUILT_IN)}|strategies\.[a-z]\w*)\b")
    found = [path for path in ROOT.rglob("*.py") if names.search(path.read_text())]
    assert len(found) > len(BUILT_IN)
    assert not [str(path) for path in found if folder not in path.parents]


def test_recipes_can_import_every_sampler_and_transform():
    for module in (sampling.__name__, crops.__name__, "fastvid.load.after."):
        named = {name: getattr(getattr(fastvid, name), "__module__", "") for name in fastvid.__all__}
        public = {name for name, home in named.items() if home.startswith(module)} - {"Native", "VideoInfo"}
        assert public
        assert public <= set(fastvid.train.__all__)


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


def test_files_listed_as_long_exist_exactly_once():
    files = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert {name: files.count(name) for name in LONG} == dict.fromkeys(LONG, 1)


@pytest.mark.parametrize("package", [fastvid, fastvid.train])
def test_public_names_are_sorted_and_exist(package):
    assert package.__all__ == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'nonsense'"):
        package.nonsense  # noqa: B018


def test_import_loads_neither_torch_nor_a_decoder():
    code = (
        "import sys, fastvid, fastvid.cli.main, fastvid.train\n"
        "print([m for m in ('torch', 'nvidia.dali', 'av', 'pyarrow', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_dataset_opens_and_gives_its_first_batch_without_pandas(tmp_path, videos):
    pytest.importorskip("pandas")
    pack(tmp_path, [[("a", videos.textured("intra").data, 0)], [("b", videos.textured("intra").data, 1)]])
    code = (
        "import sys, fastvid\n"
        f"dataset = fastvid.open({str(tmp_path)!r})\n"
        "loader = fastvid.ClipLoader(dataset, frames=fastvid.Segments(2), spatial=[fastvid.RandomCrop(64)],"
        " global_batch_size=2)\n"
        "next(iter(loader)), print('pandas' in sys.modules)\n"
        "dataset.annotations['label'].fill_null(0), print('pandas' in sys.modules)  # what was avoided"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "True"]


def test_every_error_can_be_pickled():
    def tree(kind: type[errors.FastvidError]) -> list[type[errors.FastvidError]]:
        return [kind, *(sub for child in kind.__subclasses__() for sub in tree(child))]

    for kind in tree(errors.FastvidError):
        extra = {"reason": "timeout", "transient": True} if kind is errors.SourceError else {}
        error = kind("it broke", hint="mend it", key="a/b", shard=None, **extra)
        plain = json.loads(json.dumps(errors.error_to_json(error)))
        for copy in (pickle.loads(pickle.dumps(error)), errors.error_from_json(plain)):
            assert type(copy) is kind
            assert str(copy) == str(error) == "it broke [key=a/b]\n  hint: mend it"
            assert vars(copy) == vars(error)


def test_errors_of_others_cross_as_the_built_in_ones_that_they_are():
    class Theirs(LookupError):
        pass

    for error, kind, text in (
        (ZeroDivisionError("by zero"), ZeroDivisionError, "by zero"),
        (KeyError("name"), KeyError, "'name'"),
        (Theirs("lost", Path("x")), LookupError, f"('lost', {Path('x')!r})"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), Exception, "UnicodeDecodeError: 'utf-8' codec can't decode"),
    ):
        copy = errors.error_from_json(json.loads(json.dumps(errors.error_to_json(error))))
        assert type(copy) is kind
        assert str(copy).startswith(text)


def test_outer_layers_add_locations_and_keep_inner_ones():
    error = errors.DecodeError("bad", key="inner").at(key="outer", shard="data-000000")
    assert error.where == {"key": "inner", "shard": "data-000000"}


def test_a_command_whose_extra_is_not_installed_names_it(tmp_path):
    hidden = "import sys; sys.modules |= dict.fromkeys(('torch', 'duckdb', 'imageio_ffmpeg'))\n"
    data = pack(tmp_path / "data", [[("a", make_clip(tmp_path / "clip.mp4"), 0)]]).url
    for code, extra in {
        "from fastvid.cli.main import main; sys.exit(main(['train', 'motion_tsm']))": "torch",
        "import fastvid; fastvid.ClipLoader": "torch",
        f"import fastvid; fastvid.open({data!r}, where='label = 0')": "prepare",
        "import os; os.environ['PATH'] = ''; from fastvid.media.ffmpeg import find_ffmpeg; find_ffmpeg()": "prepare",
    }.items():
        out = subprocess.run([sys.executable, "-c", hidden + code], capture_output=True, text=True, check=False)
        assert out.returncode == 1
        assert f"pip install 'fastvid-toolkit[{extra}]'" in out.stderr


def test_unknown_command_names_the_known_ones():
    out = subprocess.run([sys.executable, "-m", "fastvid", "shrad"], capture_output=True, text=True, check=False)
    assert out.returncode == 2
    assert "'shrad'" in out.stderr
    assert "shard" in out.stderr
    assert not out.stdout


TESTS = str(Path(__file__).parent)
LIST, LEROBOT = f"{TESTS}/sharding/job/verdicts.csv", f"{TESTS}/sharding/lerobot/fixture/v3"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["shrad", "videos"], "did you mean shard?"),
        (["shard", "videos", "--ouput", "o"], "did you mean --out?"),
        (["merge", "a"], "required: --out"),
        (["export", "a", "--out", "o", "--to", "webdatset"], "choose from 'wds'"),
        (["remove", "a", "key"], "unrecognized arguments: key"),
        (["inspect", "nowhere"], "there is no such folder"),
        (["Doctor"], "did you mean doctor?"),
        (["shard", TESTS, "--out", "o", "--crf", "99"], "outside 0 to 51"),
        (["shard", TESTS, "--out", "o", "--profile", "Compact"], "did you mean compact?"),
        (["shard", TESTS, "--out", "o", "--annotations", "l.csv"], "did you mean csv:l.csv?"),
        (["shard", TESTS, "--out", "o", "--annotations", f"json:{LIST}"], f"did you mean csv:{LIST}?"),
        (["shard", TESTS, "--out", "o", "--annotations", f"kinetics:{LIST}"], "label,youtube_id,time_start"),
        (["shard", TESTS, "--out", "o", "--annotations", f"list:{LIST}"], "use csv:FILE"),
        (["index", LIST, "--out", "o"], f"name it with --annotations csv:{LIST}"),
        (["index", LEROBOT, "--out", "o"], f"name it lerobot:{LEROBOT}"),
        (["shard", LEROBOT, "--out", "o", "--part", "0/2"], f"name it lerobot:{LEROBOT}"),
        (["shard", f"{TESTS}s", "--out", "o"], "did you mean tests?"),
        (["train", "kinetics400_tsm"], "did you mean kinetics400_tsm_r50?"),
        (["train", "x" * 300], "File name too long"),
        (["inspect", "http://[::1/a"], "storage URL is invalid"),
    ],
)
def test_a_mistyped_line_is_answered_in_two_lines(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) in (1, 2)
    printed = capsys.readouterr()
    assert said in printed.err
    assert (printed.err.count("\n"), printed.out, list(tmp_path.iterdir())) == (2, "", [])


def test_the_line_that_raised_an_error_of_the_system_can_be_logged(tmp_path):
    """It may be in the user's own code, of which a message alone says nothing."""
    (tmp_path / "recipe.py").write_text("open('nothing')\n")
    for level, is_told in (("info", False), ("debug", True)):
        words = [sys.executable, "-m", "fastvid", "train", str(tmp_path / "recipe.py")]
        environment = os.environ | {"FASTVID_LOG": level}
        out = subprocess.run(words, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
        assert "fastvid train: No such file or directory" in out.stderr
        assert "FASTVID_LOG=debug" in out.stderr
        assert ('recipe.py", line 1' in out.stderr) == is_told, out.stderr


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("log DATA | true; exit ${PIPESTATUS[0]}", 1, ""),
        ("find --help | true; exit ${PIPESTATUS[0]}", 1, ""),
        ("inspect DATA > /dev/full", 1, "fastvid inspect: the output cannot be written: No space left on device\n"),
        ("get DATA a -o - > /dev/full", 1, "fastvid get: the output cannot be written: No space left on device\n"),
        ("get DATA a -o - >&-", 0, ""),
        ("remove DATA --keys-file - <&-", 2, "fastvid remove: no keys given\n"),
        ("find DATA $'\\xff'", 2, "fastvid find: '\\udcff' is no text in UTF-8\n"),
        ("inspect DATA | grep -q u2588", 0, ""),
    ],
)
def test_streams_that_are_closed_full_or_of_another_encoding_are_no_traceback(line, code, said, tmp_path):
    data = pack(tmp_path / "data", [[("a", make_clip(tmp_path / "clip.mp4"), 0)]]).url
    # Without PYTHONUNBUFFERED the interpreter writes what is printed when it exits.
    environment = {**os.environ, "PYTHONUNBUFFERED": "", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"}
    words = ["bash", "-c", f"{sys.executable} -m fastvid {line.replace('DATA', data)}"]
    out = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert (out.returncode, out.stderr[out.stderr.find("fastvid ") :] if said else out.stderr) == (code, said)


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"bench"}))
def test_every_command_prints_its_help(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: fastvid {command} ")


def test_options_may_be_between_the_arguments_of_any_command(tmp_path):
    given = [sys.executable, "-m", "fastvid", "shard", "nowhere-1", "--out", "nowhere", "nowhere-2", "--workers", "2"]
    out = subprocess.run(given, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert out.returncode == 2
    assert "source does not exist" in out.stderr
    assert "nowhere-1" in out.stderr


def test_arguments_of_a_benchmark_are_passed_on_unchanged():
    given = [sys.executable, "-m", "fastvid", "bench", "scale", "--help"]
    out = subprocess.run(given, capture_output=True, text=True, check=False)
    assert out.returncode == 0
    assert out.stdout.startswith("usage: python -m bench scale")
