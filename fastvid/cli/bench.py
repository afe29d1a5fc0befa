"""Run benchmarks of decoding, loading, sharding, training, strategies and scaling.

`fastvid bench` alone lists them. Same as `python -m bench QUESTION` in a checkout.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import fastvid
from fastvid.runtime.processes import SAFE_PATH

RAW_ARGUMENTS: Final = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Pass all arguments to the benchmark."""
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="QUESTION [options]", help="see `fastvid bench`")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark in a separate process, so that the state of this one is not measured."""
    search_path = [str(folder()), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "bench", *args.words]
    return subprocess.call(command, env=os.environ | SAFE_PATH | {"PYTHONPATH": os.pathsep.join(search_path)})


def folder() -> Path:
    """Return the folder of the package ``bench``: inside fastvid if installed, beside it in a checkout."""
    package = Path(fastvid.__file__).parent
    installed = package / "bundled"
    return installed if installed.is_dir() else package.parent
