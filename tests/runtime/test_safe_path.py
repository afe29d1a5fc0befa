"""Children import nothing from the current folder: a folder of downloaded videos may contain av.py."""

import os
import subprocess
import sys

import pytest

from tests.datasets import REPOSITORY
from tests.sharding.shardtools import make
from tests.skips import soak_but

MODULES = ("av", "numpy", "argparse", "secrets", "pyarrow", "tempfile")


@pytest.fixture
def hostile(tmp_path):
    """A folder with a video and modules that leave a mark when they are imported."""
    make(tmp_path / "here" / "a.mp4", frames=10)
    for name in MODULES:
        (tmp_path / "here" / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r})\n")
    return tmp_path / "here"


def run(hostile, *words, safe=True):
    """Run Python in the folder; return the modules of it that were imported."""
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, *(["-P"] if safe else []), *map(str, words)],
        cwd=hostile,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    mark = hostile.parent / "imported"
    return done, mark.read_text() if mark.exists() else ""


def test_a_python_that_is_not_protected_imports_them(hostile):
    assert run(hostile, "-c", "import av", safe=False)[1] == "av"


@pytest.mark.parametrize("engine", soak_but(["local", "ray"], "local"))
def test_sharding_imports_nothing_from_the_folder(engine, hostile):
    """Nor does loading in processes what was sharded."""
    words = ["shard", ".", "--out", "../out", "--workers", "1", "--engine", engine]
    done, imported = run(hostile, "-m", "fastvid", *words)
    assert (done.returncode, imported) == (0, ""), done.stderr
    code = (
        "import fastvid\n"
        "loader = fastvid.ClipLoader(fastvid.open('../out'), frames=fastvid.Segments(2),\n"
        "    spatial=[fastvid.CenterCrop(64)], global_batch_size=1, decoder='pyav',\n"
        "    workers=fastvid.Workers('process', num_threads=1))\n"
        "print(sum(1 for _ in loader))\n"
    )
    done, imported = run(hostile, "-c", code)
    assert (done.stdout, imported) == ("1\n", ""), done.stderr


def test_measuring_in_processes_imports_nothing_from_the_folder(hostile):
    # Modules that are run by `multiprocessing` itself before it has restored the search path.
    (hostile / "pickle.py").write_text((hostile / "av.py").read_text())
    code = (
        "from fastvid.tune.measure import Contender, ProcessWorkers\n"
        "workers = ProcessWorkers(Contender('x', {}, dict, workers=1, processes=True))\n"
        "workers.round(0); workers.close(); print('done')\n"
    )
    # Like the command `fastvid`, and unlike `python -P`, whose children are protected by themselves.
    program = hostile.parent / "program.py"
    program.write_text(f"if __name__ == '__main__':\n    exec({code!r})\n")
    done, imported = run(hostile, program, safe=False)
    assert (done.stdout, imported) == ("done\n", ""), done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "from fastvid.demo import run; run._command([sys.executable, '-c', 'import av'])",
        pytest.param("from fastvid.demo import run; run._fastvid('doctor', '--help')", marks=pytest.mark.soak),
        "from fastvid.cli.main import main; main(['bench', 'report', '--help'])",
    ],
)
def test_commands_start_children_that_import_nothing_from_the_folder(code, hostile):
    done, imported = run(hostile, "-c", f"import sys; {code}")
    assert (done.returncode, imported) == (0, ""), done.stderr


def test_children_of_benchmarks_import_nothing_from_the_folder(hostile):
    code = (
        "import runpy, subprocess, sys\n"
        "sys.argv = ['bench']\n"
        "try:\n    runpy.run_module('bench', run_name='__main__')\n"
        "except SystemExit:\n    pass\n"
        "subprocess.run([sys.executable, '-c', 'import av, bench'], check=True)\n"
    )
    done, imported = run(hostile, "-c", code)
    assert (done.returncode, imported) == (0, ""), done.stderr
