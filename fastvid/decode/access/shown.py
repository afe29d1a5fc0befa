"""Show a dataset, a video or frames to a person: in a notebook, as a picture, or as a page."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from fastvid.errors import UsageError
from fastvid.report.fragment import page
from fastvid.report.markup import png
from fastvid.runtime.arrays import UInt8Array


class Shown:
    """Something that notebooks display, and that can be shown and saved elsewhere."""

    __slots__ = ()

    _NAME: ClassVar[str]

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: self-contained, escaped, without scripts, usually below 100 kB."""
        raise NotImplementedError

    def _picture(self) -> UInt8Array:
        """Return a contact sheet, uint8 [H, W, 3]."""
        raise NotImplementedError

    def _file(self, suffix: str) -> bytes | None:
        """Return the contents of a file to save, None for an unknown suffix."""
        if suffix == ".png":
            return png(self._picture())
        return page(self._repr_html_()).encode() if suffix == ".html" else None

    _SUFFIXES: ClassVar[tuple[str, ...]] = (".png", ".html")

    def show(self) -> None:
        """Display in a notebook; elsewhere write a PNG contact sheet to a temporary file and print its path."""
        shell = _notebook()
        if shell is not None:
            shell.display.display(shell.display.HTML(self._shown_html()))
        else:
            path = self.save(Path(tempfile.mkdtemp(prefix="fastvid-")) / f"{self._NAME}.png")
            sys.stdout.write(f"{path}\n")

    def _shown_html(self) -> str:
        return self._repr_html_()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a file of the kind that the suffix names, and return its path; an existing file is replaced.

        ``.png`` is a contact sheet: frames from left to right, their pixels unchanged unless a side would be longer
        than 2,048 pixels. ``.html`` is what a notebook displays, as a page that loads nothing.
        """
        target = Path(path)
        try:
            data = self.file(target.suffix.lower())
        except UsageError as error:
            raise error.at(file=target) from error
        try:
            target.write_bytes(data)
        except OSError as error:
            raise UsageError(
                f"cannot write the file: {error.strerror}", file=target, hint="choose a path that you can write"
            ) from error
        return target

    def file(self, suffix: str) -> bytes:
        """Return the bytes that `save` writes for a suffix, such as ``.png``."""
        data = self._file(suffix)
        if data is None:
            raise UsageError(
                f"cannot save {self._NAME} as {suffix or 'a file without a suffix'}",
                hint=f"use {' or '.join(self._SUFFIXES)}",
            )
        return data


def _notebook() -> Any:
    """Return the module IPython if a notebook's kernel runs this code, None elsewhere, as in IPython's terminal."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return module if hasattr(shell, "kernel") else None
