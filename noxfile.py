"""The core tests in throw-away environments: `make matrix` for all of them, `nox -s lowest` for one.

Every session runs a user's first steps (`tests/test_first_steps.py`: doctor, shard, index, verify, load) and the tests
of decoding; those with other versions also the tests of the format and of loading, and the one with Debian's ffmpeg
those of sharding and, because Chromium is there, of pages. The last line it prints is the environment: versions and
counts.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = True

PRODUCT = ".[torch,dali-cuda13,object-stores,flow]"
TOOLS = ".[dev]"
TESTS = (
    "tests/test_first_steps.py",
    "tests/test_package.py",
    "tests/format",
    "tests/decode",
    "tests/conformance",
    "tests/load",
)
# What depends on the ffmpeg that encodes: sharding itself, and the decoders, which get its videos.
ENCODING = (
    "tests/test_first_steps.py",
    "tests/decode",
    "tests/conformance",
    "tests/media",
    "tests/sharding",
    "tests/demo",
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
    session.install("--upgrade", PRODUCT, TOOLS)
    _test(session, TESTS)


@nox.session(python="3.11")
def lowest(session: nox.Session) -> None:
    """The lowest versions that pyproject.toml admits."""
    session.install("--resolution", "lowest-direct", PRODUCT)
    session.install(TOOLS)  # leaves what is installed as it is
    _test(session, TESTS)


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
