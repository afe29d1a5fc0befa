"""Bytes: ranges, listings, maps and atomic writes. Nothing else in fastvid opens the files of a dataset.

A `Storage` is a folder, named by a path or URL; names inside it use forward slashes.
"""

from __future__ import annotations

import os

from fastvid.errors import MissingDependency, UsageError
from fastvid.storage.local import LocalStorage
from fastvid.storage.options import RemoteOptions
from fastvid.storage.protocol import Storage

__all__ = ["LocalStorage", "RemoteOptions", "Storage", "open_storage"]


def open_storage(url: str | os.PathLike[str], *, options: RemoteOptions | None = None) -> Storage:
    """The storage behind a path or URL: local folders, ``file://``, ``s3://``, ``gs://``, and to read ``http(s)://``.

    Args:
        url: The folder.
        options: Timeouts, concurrency and cache of remote storages; they do not change what is read.

    Raises:
        UsageError: The scheme of the URL is not known, or the URL is wrong.
        MissingDependency: The package for remote storages is absent.
    """
    text = os.fspath(url)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return LocalStorage(text)
    if scheme == "file":
        return LocalStorage(rest)
    if scheme not in ("s3", "gs", "http", "https"):
        raise UsageError(
            f"storage scheme {scheme!r} is not known",
            file=text,
            hint="known are local paths, file://, s3://, gs:// and, to read, http:// and https://",
        )
    try:
        from fastvid.storage.objects import ObjectStorage
    except ImportError as error:
        raise MissingDependency(
            f"storage {scheme}:// needs a package that does not load: {error}",
            hint="pip install 'fastvid-toolkit[object-stores]'",
        ) from error
    return ObjectStorage(text, options)
