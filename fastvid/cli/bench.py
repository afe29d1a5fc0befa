"""Measures: decoding, loading, sharding, training, strategies, scale. `fastvid bench` alone lists the questions.

The same as `python -m bench QUESTION` in a checkout.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import fastvid

HANDS_ON: Final = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything behind the question belongs to it."""
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="QUESTION [options]", help="see `fastvid bench`")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark in a process of its own, so that nothing of this one is measured."""
    places = [str(folder()), *filter(None, [os.environ.get("PYTHONPATH")])]
    # -P: a folder called bench where the user stands is not ours.
    command = [sys.executable, "-P", "-m", "bench", *args.words]
    return subprocess.call(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(places)})


def folder() -> Path:
    """The folder in which the package ``bench`` lies: inside fastvid when installed, beside it in a checkout."""
    package = Path(fastvid.__file__).parent
    installed = package / "bundled"
    return installed if installed.is_dir() else package.parent
