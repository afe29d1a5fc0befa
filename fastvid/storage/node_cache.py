"""The cache of this node for files that are mapped from local disks as well as from object stores."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from fastvid.storage.cache import NodeCache
from fastvid.storage.options import CACHE_VARIABLE, RemoteOptions

# The first process of a node may sort ten million keys and write gigabytes to a slow disk.
_PATIENCE: Final = 600.0


def node_cache() -> NodeCache | None:
    """Return the cache, or None if FASTVID_CACHE is set to nothing, which switches it off.

    Its folder is FASTVID_CACHE; otherwise ``fastvid`` in XDG_CACHE_HOME, which is ``~/.cache`` unless set. Its size is
    limited by FASTVID_CACHE_BYTES as in `RemoteOptions`.
    """
    options = RemoteOptions()
    if CACHE_VARIABLE in os.environ:
        folder = options.cache_folder()
    else:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        # Without a home folder, "~" stays: do not create a folder of that name.
        folder = Path(base) / "fastvid" if os.path.isabs(base) else None
    return NodeCache(folder, options.cache_limit(), _PATIENCE) if folder else None
