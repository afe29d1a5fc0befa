"""With CI=true a skip is a failure unless its reason is in the list."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = {
    "conftest.py": "from tests.skips import pytest_make_collect_report, pytest_runtest_makereport",
    "test_one.py": """
import pytest

@pytest.mark.skipif(True, reason="needs a CUDA device")
def test_allowed(): pass

def test_inside():
    pytest.skip("no time today")

@pytest.fixture
def absent():
    pytest.skip("needs a CUDA device and luck")

def test_setup(absent): pass

@pytest.mark.xfail
def test_expected(): assert False

def test_good(): pass
""",
    "test_whole.py": "import pytest; pytest.importorskip('no_such_module_here', reason='nobody installed it')",
}


def run(folder: Path, *options: str, **variables: str) -> tuple[int, list[str]]:
    for name, text in TESTS.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--continue-on-collection-errors", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run([*command, str(folder)], env=environment, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


def test_an_unlisted_skip_fails_in_ci(tmp_path):
    code, lines = run(tmp_path, "-n", "1", CI="true")
    assert code == 1
    assert "1 failed, 1 passed, 1 skipped, 1 xfailed, 2 errors" in lines[-1]
    for reason in ("no time today", "needs a CUDA device and luck", "nobody installed it"):
        assert any(line.endswith(f"skipped, which allowed_skips.txt does not allow in CI: {reason}") for line in lines)


def test_a_skip_is_not_a_failure_outside_ci(tmp_path):
    code, lines = run(tmp_path, CI="")
    assert code == 0
    assert "1 passed, 4 skipped, 1 xfailed" in lines[-1]
