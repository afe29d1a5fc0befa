"""Addresses of single files on object stores and web servers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from fastvid.errors import MissingDependency
from fastvid.storage.options import RemoteOptions

if TYPE_CHECKING:
    from fastvid.storage.objects import ObjectStorage

_REMOTE: Final = re.compile(r"(s3|gs|https?)://", re.IGNORECASE)
_STORAGES: Final = 64
"""Servers whose connections are kept; lists of the web name thousands."""


@dataclass(frozen=True, slots=True)
class FileUrl:
    """The address of one file, taken apart.

    Attributes:
        root: Scheme and bucket or host, such as ``s3://bucket``.
        name: Path below it, as the storage takes it.
        query: What a web address has behind its question mark, which may hold a signature: it is never printed.
    """

    root: str
    name: str
    query: str = ""

    @classmethod
    def parse(cls, url: str) -> FileUrl:
        """Takes an address apart; object stores' names are taken as they are, web addresses are decoded."""
        scheme, _, rest = url.partition("://")
        host, _, path = rest.partition("/")
        root = f"{scheme.lower()}://{host}"
        if not scheme.lower().startswith("http"):
            return cls(root, path)
        path, _, query = path.partition("#")[0].partition("?")
        return cls(root, unquote(path), query)

    def __str__(self) -> str:
        return f"{self.root}/{self.name}"

    @property
    def listed(self) -> bool:
        """Whether it lies in a store that lists its files, under one account; a web server is one of many."""
        return not self.root.startswith("http")


def is_remote(text: str) -> bool:
    """Whether a text is an address that `open_storage` reads over the network."""
    return _REMOTE.match(text) is not None


def open_root(url: FileUrl, options: RemoteOptions) -> ObjectStorage:
    """The storage that holds a file, with connections that are kept.

    Raises:
        UsageError: The address is wrong.
        MissingDependency: The package for remote storages is absent.
    """
    return _open(url.root, url.query, options)


@lru_cache(maxsize=_STORAGES)
def _open(root: str, query: str, options: RemoteOptions) -> ObjectStorage:
    try:
        from fastvid.storage.objects import ObjectStorage
    except ImportError as error:
        raise MissingDependency(
            f"{root} needs a package that does not load: {error}", hint="pip install 'fastvid-toolkit[object-stores]'"
        ) from error
    return ObjectStorage(root, options, query=query)
