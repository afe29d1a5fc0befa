"""Remove samples from a dataset at once, without rewriting shards.

This writes a new generation, which takes milliseconds; readers that open the dataset afterwards do not see the samples.
Their bytes stay in the tars, and in earlier generations, until `fastvid compact DIR` and `fastvid gc DIR --yes`. If a
key is unknown, nothing is removed and the command fails.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fastvid.errors import UsageError
from fastvid.runtime.units import count, things
from fastvid.sharding.change.edit import remove_samples
from fastvid.storage import open_storage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fastvid remove``."""
    parser.add_argument("dataset", metavar="DIR", help="folder of the dataset")
    parser.add_argument("--keys", nargs="+", default=[], metavar="KEY", help="keys of samples")
    parser.add_argument("--keys-file", metavar="FILE", help="a file with one key per line; - is stdin")


def run(args: argparse.Namespace) -> int:
    """Remove the samples and print the changes."""
    done = remove_samples(open_storage(args.dataset), [*args.keys, *_read_keys(args.keys_file)])
    before = f", {count(done.already)} already removed" if done.already else ""
    print(f"generation {done.generation}: {things(done.removed, 'sample')} removed{before}")
    return 0


def _read_keys(name: str | None) -> list[str]:
    if name is None:
        return []
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"keys cannot be read: {error}", file=name) from error
    return [line.strip() for line in text.splitlines() if line.strip()]
