"""What depends on versions, in throw-away environments: `make matrix` for all of them, `nox -s lowest` for one.

Python, torch, PyAV, NumPy, pyarrow and DALI can change how files are read, how videos are probed and decoded, and what
a model computes. The sessions with other versions run the tests of these (`VERSIONS`), a user's first steps (doctor,
shard, index, verify, load) and one run of training. Another ffmpeg can change what is encoded (`ENCODING`), and the
session that has Debian's has Chromium too, for the pages. The rest is the same everywhere, and `make test` runs it. The
last line a session prints is the environment: versions and counts.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = True

PRODUCT = ".[torch,prepare,dali-cuda13,object-stores,flow]"
# What those tests import, of the extra dev; its other packages take minutes to install.
TOOLS = (
    "aiohttp", "boto3", "hypothesis", "moto[server]", "psutil", "PyNvVideoCodec", "pytest", "pytest-timeout",
    "pytest-xdist", "torchcodec", "webdataset",
)  # fmt: skip
FIRST_STEPS = (
    "tests/docs/test_snippets.py::test_all_blocks_of_a_page_run",
    "tests/docs/test_snippets.py::test_the_readme_example_runs",
    "tests/sharding/job/test_index.py",
)
VERSIONS = (
    *FIRST_STEPS,
    "tests/format",
    "tests/media",
    "tests/decode",
    "tests/videos",
    "tests/conformance",
    "tests/train/run/test_run.py::test_lineage_contains_every_sample_at_its_position",
    "tests/train/run/test_run.py::test_separate_evaluation_equals_the_evaluation_of_the_run",
)
ENCODING = (
    *FIRST_STEPS,
    "tests/media",
    "tests/decode/test_planned.py",
    "tests/videos/test_shown.py",
    "tests/sharding/encode",
    "tests/sharding/in_place",
    "tests/sharding/page",
    "tests/report/test_page_in_a_browser.py",
)


@nox.session(venv_backend="none")
def debian(session: nox.Session) -> None:
    """This interpreter and the pinned versions, with the ffmpeg that the system has installed."""
    ffmpeg = shutil.which("ffmpeg")
    if ffmpeg is None:
        session.error("there is no ffmpeg on PATH; `apt-get install ffmpeg` first")
    _test(session, ENCODING, FASTVID_FFMPEG=ffmpeg)


@nox.session(python=["3.12", "3.13"])
def newest(session: nox.Session) -> None:
    """The newest version of everything that pyproject.toml admits."""
    session.install("--upgrade", PRODUCT, *TOOLS)
    _test(session, VERSIONS)


@nox.session(python="3.11")
def lowest(session: nox.Session) -> None:
    """The lowest versions that pyproject.toml admits."""
    session.install("--resolution", "lowest-direct", PRODUCT)
    session.install(*TOOLS)  # leaves what is installed as it is
    _test(session, VERSIONS)


@nox.session(default=False, reuse_venv=True)
def mutants(session: nox.Session) -> None:
    """Mutation testing (`tests/mutants`): its tool has an environment of its own, the tests run in this one."""
    session.install("cosmic-ray==8.7.0")
    session.run("python", "-m", "tests.mutants", "--python", sys.executable, *session.posargs)


def _test(session: nox.Session, tests: tuple[str, ...], **environment: str) -> None:
    report = Path(session.create_tmp()) / "junit.xml"
    arguments = session.posargs or tests
    options = ("-q", "-n", "auto", "--maxprocesses", "4", "--dist", "loadfile", f"--junitxml={report}")
    python = "python" if session.virtualenv.bin_paths else sys.executable
    try:
        session.run(python, "-m", "pytest", *options, *arguments, env=environment, external=True)
    finally:
        session.run(python, "-m", "tests.environment", session.name, str(report), env=environment, external=True)
        if session.virtualenv.bin_paths and "CI" in os.environ:
            shutil.rmtree(session.virtualenv.location)  # several GB that the next session needs
