"""Reads command lines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parses a command line whose options may stand between its other words; a wrong one ends the process with code 2.

    Words after ``--`` are no options, as usual; with ``--`` all other words stand together.
    """
    # Python 3.11's parse_intermixed_args takes what follows "--" for options.
    return parser.parse_args(words) if "--" in words else parser.parse_intermixed_args(words)
