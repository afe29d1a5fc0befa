"""Read and write the files of a dataset: ranges, listings, memory maps and atomic writes.

Nothing else in fastvid opens these files. A `Storage` is a folder, given by a path or URL; names inside it use forward
slashes.
"""

from __future__ import annotations

import os

from fastvid.errors import UsageError
from fastvid.runtime.values import path_text
from fastvid.storage.local import LocalStorage
from fastvid.storage.protocol import RemoteOptions, Storage
from fastvid.storage.urls import open_remote

__all__ = ["LocalStorage", "RemoteOptions", "Storage", "open_storage"]


def open_storage(url: str | os.PathLike[str], *, options: RemoteOptions | None = None) -> Storage:
    """Open a local folder, ``file://``, ``s3://`` or ``gs://``; ``http(s)://`` and ``hf://`` read-only.

    Args:
        url: The folder.
        options: Timeouts, concurrency and cache of remote storages; they do not change the bytes read.

    Raises:
        UsageError: If the URL is invalid or its scheme is unknown.
        MissingDependency: If the package for remote storages is missing.
    """
    text = path_text("folder", url)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return LocalStorage(text)
    if scheme == "file":
        return LocalStorage(rest)
    if scheme not in ("s3", "gs", "http", "https", "hf"):
        raise UsageError(
            f"unknown storage scheme {scheme!r}",
            file=text,
            hint="use a local path, file://, s3:// or gs://; http://, https:// and hf:// are read-only",
        )
    return open_remote(text, options)
