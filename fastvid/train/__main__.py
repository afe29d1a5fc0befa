"""``python -m fastvid.train RECIPE [key=value ...]``, alone or started by torchrun on every rank."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from fastvid.errors import FastvidError, UsageError
from fastvid.runtime.names import parse
from fastvid.runtime.progress import log_to_stderr
from fastvid.train.config import config as recipes
from fastvid.train.run.launch import rehearse, start


def main(argv: Sequence[str] | None = None) -> int:
    """Train a recipe; return 0, 1 (error), 2 (wrong usage), or 128 + number of the signal received."""
    parser = argparse.ArgumentParser(prog="python -m fastvid.train", description=__doc__)
    parser.add_argument("recipe", metavar="RECIPE", help=f"{', '.join(recipes.names())}; or a Python file")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="for example optim.base_lr=0.02")
    parser.add_argument("--dry-run", action="store_true", help="check files, steps and memory without training")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    args = parse(parser, sys.argv[1:] if argv is None else argv)
    log_to_stderr()
    try:
        configs = recipes.load_all(args.recipe, args.changes)
        if args.dry_run:
            return rehearse(configs, int(os.environ.get("WORLD_SIZE", "1")), as_json=args.json)
        return start(configs, as_json=args.json)
    except FastvidError as error:
        if not error.is_told:
            print(f"fastvid train: {error}", file=sys.stderr)  # noqa: T201
        return 2 if isinstance(error, UsageError) else 1


if __name__ == "__main__":
    sys.exit(main())
