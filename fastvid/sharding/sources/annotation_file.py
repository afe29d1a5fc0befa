"""Read annotation files where they lie: on a disk, in an object store, or on the web."""

from __future__ import annotations

import os
import posixpath
from dataclasses import dataclass

from fastvid.storage import RemoteOptions
from fastvid.storage.urls import FileUrl, is_remote, open_root


@dataclass(frozen=True, slots=True)
class AnnotationFile:
    """A file, or a folder of files."""

    place: str

    @property
    def name(self) -> str:
        """Its name in its folder."""
        return posixpath.basename((FileUrl.parse(self.place).name if is_remote(self.place) else self.place).rstrip("/"))

    @property
    def suffix(self) -> str:
        """The ending of its name in lower case, such as ``.csv``; empty if there is none."""
        return os.path.splitext(self.name)[1].lower()

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder. In a store, where folders are only prefixes, a name without an ending is one."""
        if not is_remote(self.place):
            return os.path.isdir(self.place)
        return self.place.endswith("/") or not self.suffix

    def read(self) -> bytes:
        """Return its bytes."""
        if is_remote(self.place):
            url = FileUrl.parse(self.place)
            return open_root(url, RemoteOptions()).read(url.name)
        with open(self.place, "rb") as file:
            return file.read()

    def text(self) -> str:
        """Return its text; bytes that are not UTF-8 become surrogates, as in names that `os.listdir` returns."""
        return self.read().decode("utf-8-sig", "surrogateescape")

    def folder(self) -> AnnotationFile:
        """Return the folder that contains it."""
        return AnnotationFile(posixpath.dirname(self.place.rstrip("/")) or ".")

    def files(self) -> list[AnnotationFile]:
        """Return the files in this folder, sorted by name; none if it cannot be listed, as on the web."""
        if not is_remote(self.place):
            found = [os.path.join(self.place, name) for name in sorted(os.listdir(self.place))]
            return [AnnotationFile(path) for path in found if os.path.isfile(path)]
        url = FileUrl.parse(self.place)
        if not url.is_listable:
            return []
        prefix = f"{url.name.rstrip('/')}/" if url.name else ""
        names = open_root(url, RemoteOptions()).list(prefix)
        return [AnnotationFile(f"{url.root}/{name}") for name in names if "/" not in name[len(prefix) :]]

    def beside(self, ending: str) -> AnnotationFile | None:
        """Return the first file in the same folder whose name ends so; None if there is none."""
        return next((file for file in self.folder().files() if file.name.endswith(ending)), None)
