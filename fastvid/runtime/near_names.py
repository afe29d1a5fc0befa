"""Find names that resemble one that does not exist, for hints."""

from __future__ import annotations

import difflib
from pathlib import PurePosixPath
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

_MOST: Final = 3
_COMPARED: Final = 5_000  # names compared letter by letter: a hint may take a tenth of a second, not minutes


def near_names(names: pa.ChunkedArray, name: str) -> list[str]:
    """Return up to three names that a user may have meant by `name`, the likeliest first.

    These are names that contain the last component of `name` without its suffix, as when a folder was forgotten or a
    suffix added; if there is none, names that start like it and differ in few letters.
    """
    stem = PurePosixPath(name).stem
    inside = names.filter(pc.match_substring(names, stem, ignore_case=True)) if len(stem) > 2 else names[:0]
    if len(inside):
        return sorted(inside[:_COMPARED].to_pylist(), key=len)[:_MOST]
    for length in (len(name) * 3 // 4, len(name) // 2, len(name) // 4, 0):
        alike = names.filter(pc.starts_with(names, name[:length]))[:_COMPARED].to_pylist()
        if near := difflib.get_close_matches(name, alike, _MOST):
            return near
    return []
