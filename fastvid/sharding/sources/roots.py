"""What users name as sources by mistake: paths that do not exist, lists of videos, LeRobot datasets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from fastvid.errors import UsageError
from fastvid.runtime.names import meant

LISTS: Final = {".csv": "csv", ".json": "json", ".jsonl": "jsonl", ".parquet": "parquet", ".txt": "list"}
"""The format of annotations that a file probably has, by its suffix."""

LEROBOT_INFO: Final = "meta/info.json"
"""The file that describes a LeRobot dataset, in its folder."""


def check_exists(path: str) -> None:
    """Raise UsageError unless there is a local file or folder, given by its absolute path."""
    if not os.path.exists(path):
        folder, name = os.path.split(path)
        near = meant(name, os.listdir(folder)) if os.path.isdir(folder) else None
        if name.startswith("lerobot:"):
            near = "give it to `fastvid index` or `shard`, alone, and join datasets by `fastvid merge`"
        raise UsageError("source does not exist", file=path, hint=near)


def check_root(root: str) -> None:
    """Raise UsageError for a local root that is no folder of videos and no video, but a list, or a LeRobot dataset."""
    check_exists(root)
    if (kind := LISTS.get(os.path.splitext(root)[1].lower())) and os.path.isfile(root):
        raise UsageError("source is a list, not a video", file=root, hint=f"name it with --annotations {kind}:{root}")
    if (info := Path(root, LEROBOT_INFO)).is_file():
        refuse_lerobot(root, info.read_bytes())


def refuse_lerobot(root: str, info: bytes) -> None:
    """Raise UsageError for the contents of LEROBOT_INFO of a root, unless another program wrote it."""
    if b'"codebase_version"' in info:
        hint = f"name it lerobot:{root}, or its folder videos to take the films as they are"
        raise UsageError("source is a LeRobot dataset, whose episodes share films", file=root, hint=hint)
