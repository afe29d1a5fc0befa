"""Parses command lines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line with options anywhere among its arguments; a wrong one exits the process with code 2.

    Words after ``--`` are arguments, not options. With ``--``, options may not be mixed with arguments.
    """
    if parser.usage is None:
        # parse_intermixed_args stores the usage unescaped, and --help would fail at a "%" in it.
        parser.usage = parser.format_usage().removeprefix("usage: ").replace("%", "%%")
    # Python 3.11's parse_intermixed_args treats words after "--" as options.
    return parser.parse_args(words) if "--" in words else parser.parse_intermixed_args(words)


def add_reason(parser: argparse.ArgumentParser) -> None:
    """Add ``--reason`` to a command that changes a dataset: `fastvid.cli.main` records it in the new generation."""
    parser.add_argument("--reason", default="", metavar="TEXT", help="why, for `fastvid log`")
