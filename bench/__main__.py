"""``python -m bench QUESTION``: run one benchmark, print a table, write JSON.

A benchmark is a module with ``add_arguments(parser)`` and ``run(args) -> int``.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fastvid.errors import FastvidError, naming_extras
from fastvid.runtime.names import parse
from fastvid.runtime.processes import SAFE_PATH

BENCHES: Final = {
    "averaging": "bench.strategies.averaging",
    "batches": "bench.batches.batches",
    "clients": "bench.strategies.clients",
    "cold": "bench.load.cold",
    "load": "bench.load.load",
    "decode": "bench.decode.decode",
    "footage": "bench.common.footage",
    "gpu": "bench.gpu.gpu",
    "model_speed": "bench.train.model_speed",
    "motion_sync": "bench.strategies.motion_sync",
    "elastic": "bench.elastic.elastic",
    "index": "bench.shard.in_place",
    "lerobot": "bench.load.lerobot",
    "launch": "bench.elastic.launch",
    "quality": "bench.shard.quality",
    "report": "bench.report",
    "reads": "bench.load.reads",
    "resume": "bench.load.resume",
    "scale": "bench.scaling.scale",
    "shard": "bench.shard.shard",
    "small": "bench.load.small",
    "stores": "bench.load.stores",
    "tiles": "bench.decode.tiles",
    "trace": "bench.trace",
    "train": "bench.train.train",
    "two_stream": "bench.train.two_stream",
}
"""Modules by the name of their question; the first line of a module's docstring says what it is."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark and return its exit code: 0, or 1 if it fails or an output is wrong."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in BENCHES:
        asked = bool(arguments) and arguments[0] in ("-h", "--help")
        listing = "\n".join(f"  {name:11} {_summary(module)}" for name, module in BENCHES.items())
        print(f"usage: python -m bench QUESTION [options]\n\n{listing}", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        with naming_extras():
            module = importlib.import_module(BENCHES[arguments[0]])
            parser = argparse.ArgumentParser(prog=f"python -m bench {arguments[0]}", description=module.__doc__)
            parser.formatter_class = argparse.RawDescriptionHelpFormatter
            module.add_arguments(parser)
            return int(module.run(parse(parser, arguments[1:])))
    except FastvidError as error:
        print(f"bench {arguments[0]}: {error}", file=sys.stderr)
        return 1


def _summary(module: str) -> str:
    """Return the first sentence of a module's docstring, without importing the module."""
    path = Path(__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py")
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


if __name__ == "__main__":
    # Children import this copy of the benchmarks, and nothing from the current folder.
    search_path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ.update(SAFE_PATH | {"PYTHONPATH": os.pathsep.join(search_path)})
    sys.exit(main())
