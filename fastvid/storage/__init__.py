"""Read and write the files of a dataset: ranges, listings, memory maps and atomic writes.

Nothing else in fastvid opens these files. A `Storage` is a folder, given by a path or URL; names inside it use forward
slashes.
"""

from __future__ import annotations

from fastvid.storage.local import LocalStorage
from fastvid.storage.protocol import RemoteOptions, Storage
from fastvid.storage.urls import open_storage

__all__ = ["LocalStorage", "RemoteOptions", "Storage", "open_storage"]
