"""Open folders given by their URLs, and open, copy, link and hash whole files."""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from fastvid.errors import FormatError, MissingDependency, UsageError
from fastvid.runtime.values import path_text, sha256_of_pieces
from fastvid.storage.local import LocalStorage
from fastvid.storage.protocol import RemoteOptions, Storage

if TYPE_CHECKING:
    from fastvid.storage.objects import ObjectStorage


_REMOTE: Final = re.compile(r"(s3|gs|hf|https?)://", re.IGNORECASE)
_DISK: Final = LocalStorage("/")
"""The storage of all local files; the files that were read last stay open in it."""

_STORAGES: Final = 64
"""Maximum number of servers whose connections stay open: a list of web URLs may name thousands of servers."""


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
            # The root is a repository at a revision: hf://datasets/OWNER/NAME@REVISION.
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
    return _open(url.root, options, url.query)


def open_file(location: str) -> tuple[LocalStorage | ObjectStorage, str]:
    """Return the storage that contains a file, given by its absolute path or URL, and the file's name there."""
    if is_remote(location):
        url = FileUrl.parse(location)
        return open_root(url, RemoteOptions()), url.name
    return _DISK, location.lstrip("/")


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


def open_remote(url: str, options: RemoteOptions | None, query: str = "") -> ObjectStorage:
    """Return the storage of a remote folder; imports obstore, which is an optional package."""
    try:
        from fastvid.storage.objects import ObjectStorage
    except ImportError as error:
        raise MissingDependency(
            f"{url} needs a package that fails to import: {error}", hint="pip install 'fastvid-toolkit[object-stores]'"
        ) from error
    return ObjectStorage(url, options, query=query)


_open = lru_cache(maxsize=_STORAGES)(open_remote)


PIECE_BYTES: Final = 16 * 2**20
"""Bytes read at a time: the size of one part of an upload."""


def copy_file(
    source: Storage, name: str, target: Storage, target_name: str | None = None, sha256: str | None = None
) -> None:
    """Copy a file from one storage to another; it appears whole or not at all, and not if it differs from `sha256`."""
    digest = hashlib.sha256()
    with target.create(target_name or name) as file:
        for piece in read_pieces(source, name):
            file.write(piece)
            if sha256 is not None:
                digest.update(piece)
        if sha256 not in (None, digest.hexdigest()):
            raise FormatError(
                "file differs from its checksum; copying it would hide the damage",
                file=f"{source.url}/{name}",
                hint="run `fastvid verify` to see what is damaged",
            )


def link_or_copy(source: Storage, name: str, target: Storage, target_name: str, sha256: str | None = None) -> None:
    """Make a file appear in another folder: by a hard link on one local disk, else as a copy.

    For files that never change. A link costs no space; deleting one name leaves the other.
    """
    if not _link(source, name, target, target_name):
        copy_file(source, name, target, target_name, sha256)


def _link(source: Storage, name: str, target: Storage, target_name: str) -> bool:
    """Link a file atomically; return whether both folders are on local disks whose file systems allow it."""
    if not isinstance(source, LocalStorage) or not isinstance(target, LocalStorage):
        return False
    path = target.path(target_name)
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(source.path(name), new)
        try:
            os.replace(new, path)  # does nothing if both are links to one file
        finally:
            new.unlink(missing_ok=True)
    except OSError:  # another file system, or one without links: if neither, the copy raises the error
        return False
    return True


def sha256_of(storage: Storage, name: str) -> str:
    """Return the SHA-256 of a file, in hex."""
    return sha256_of_pieces(read_pieces(storage, name))


def read_pieces(storage: Storage, name: str) -> Iterator[bytes]:
    """Yield a file's bytes in order, all from one version."""
    size = storage.size(name)
    for start in range(0, size, PIECE_BYTES):
        piece = bytearray(min(PIECE_BYTES, size - start))
        storage.read_into(name, [(start, memoryview(piece))])
        yield bytes(piece)
