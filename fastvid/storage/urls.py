"""URLs of single files on object stores and web servers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from fastvid.errors import MissingDependency
from fastvid.storage.local import LocalStorage
from fastvid.storage.options import RemoteOptions

if TYPE_CHECKING:
    from fastvid.storage.objects import ObjectStorage

_REMOTE: Final = re.compile(r"(s3|gs|hf|https?)://", re.IGNORECASE)
_STORAGES: Final = 64
"""Number of servers whose connections stay open; a list of web URLs may name thousands of servers."""


@dataclass(frozen=True, slots=True)
class FileUrl:
    """The parts of one file's URL."""

    root: str
    name: str
    query: str = ""

    @classmethod
    def parse(cls, url: str) -> FileUrl:
        """Split a URL; percent-decode the path of a web URL, but not the name in an object store."""
        scheme, _, rest = url.partition("://")
        host, _, path = rest.partition("/")
        root = f"{scheme.lower()}://{host}"
        if scheme.lower() == "hf":
            # A repository is a store of its own: hf://datasets/OWNER/NAME@REVISION.
            owner, _, path = path.partition("/")
            name, _, path = path.partition("/")
            return cls(f"{root}/{owner}/{name}", path)
        if not scheme.lower().startswith("http"):
            return cls(root, path)
        path, _, query = path.partition("#")[0].partition("?")
        return cls(root, unquote(path), query)

    def __str__(self) -> str:
        return f"{self.root}/{self.name}"

    @property
    def is_listable(self) -> bool:
        """Whether the file is in an object store, which lists its files; a web server does not."""
        return not self.root.startswith("http")


def is_remote(text: str) -> bool:
    """Return whether a text is a URL that `open_storage` reads over the network."""
    return _REMOTE.match(text) is not None


def open_root(url: FileUrl, options: RemoteOptions) -> ObjectStorage:
    """Return the storage that contains a file; its connections stay open for the next call."""
    return _open(url.root, url.query, options)


def open_file(location: str) -> tuple[LocalStorage | ObjectStorage, str]:
    """Return the storage that contains a file, given by its absolute path or URL, and the file's name there."""
    if is_remote(location):
        url = FileUrl.parse(location)
        return open_root(url, RemoteOptions()), url.name
    return _disk(), location.lstrip("/")


@lru_cache(maxsize=1)
def _disk() -> LocalStorage:
    """Return the storage of all local files; it keeps the last ones that were read open."""
    return LocalStorage("/")


@lru_cache(maxsize=_STORAGES)
def _open(root: str, query: str, options: RemoteOptions) -> ObjectStorage:
    try:
        from fastvid.storage.objects import ObjectStorage
    except ImportError as error:
        raise MissingDependency(
            f"{root} needs a package that fails to import: {error}",
            hint="pip install 'fastvid-toolkit[object-stores]'",
        ) from error
    return ObjectStorage(root, options, query=query)
