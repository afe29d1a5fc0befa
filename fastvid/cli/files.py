"""Files that options name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from fastvid.errors import UsageError


def read_text(name: str, what: str) -> str:
    """Return the text of a file that an option names, or of stdin for ``-``."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{what} cannot be read: {error}", file=name) from error


def read_lines(name: str | None, what: str) -> list[str]:
    """Return the lines of a file of keys or sources, or of stdin for ``-``; an empty list without one."""
    lines = [] if name is None else read_text(name, what).splitlines()
    return [line.strip() for line in lines if line.strip()]


def write_file(name: str, data: bytes | str, what: str) -> None:
    """Write a file that an option names."""
    try:
        Path(name).write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise UsageError(
            f"{what} cannot be written: {error.strerror}", file=name, hint="choose a path that you can write"
        ) from error


def log_shards(log: Callable[..., None]) -> Callable[[int, int], None]:
    """Return a function that logs how many shards are finished."""
    return lambda number, total: log("%d of %d shards", number, total)
