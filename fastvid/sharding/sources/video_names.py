"""What file names tell: which are videos, and which split they belong to."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Final

VIDEO_SUFFIXES: Final = frozenset(
    {
        ".3g2", ".3gp", ".264", ".265", ".asf", ".avi", ".divx", ".dv", ".f4v", ".flv", ".gif", ".h264", ".h265",
        ".hevc", ".ivf", ".m1v", ".m2ts", ".m2v", ".m4s", ".m4v", ".mkv", ".mov", ".mp4", ".mpe", ".mpeg", ".mpg",
        ".mts", ".mxf", ".ogm", ".ogv", ".ts", ".vob", ".webm", ".wmv", ".y4m",
    }
)  # fmt: skip
"""File name suffixes of videos, in lower case."""

SPLITS: Final = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validate": "val",
    "validation": "val",
    "test": "test",
}
"""The names of splits in files and folders, and the split that each means."""


def split_of(name: str) -> str | None:
    """Return the split that a name mentions, such as "train" for ``hmdb51_train_split_1.txt``."""
    words = re.split(r"[^a-z]+", PurePath(name).stem.lower())
    found = {SPLITS[word] for word in words if word in SPLITS}
    return found.pop() if len(found) == 1 else None
