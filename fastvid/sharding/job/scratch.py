"""Where a job works while its dataset lies in an object store: a local folder that the next run on this machine finds.

What is finished is in the store, so another machine can go on, and encodes anew what waited here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fastvid.errors import StorageError
from fastvid.runtime.hashing import sha256
from fastvid.storage import LocalStorage, Storage

_DIGITS: Final = 12


def scratch_folder(storage: Storage, folder: str | os.PathLike[str] | None = None) -> LocalStorage | None:
    """The local folder for work on a dataset; None where the dataset's own folder will do.

    Args:
        storage: The dataset's folder.
        folder: Where the folder is made; by default, for a dataset in an object store, the one that TMPDIR names.

    Raises:
        StorageError: It cannot be made, or belongs to someone else.
    """
    if folder is None:
        if isinstance(storage, LocalStorage):
            return None
        folder = tempfile.gettempdir()
    name = f"fastvid-{sha256(storage.url.encode())[:_DIGITS]}"
    path = Path(folder).absolute() / name
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise StorageError(f"scratch folder cannot be made: {error.strerror}", file=path) from error
    # The name can be guessed, and others may write to the folder for temporary files.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise StorageError("scratch folder belongs to someone else", file=path, hint="name another with --scratch")
    return LocalStorage(path)


def remove_scratch(scratch: LocalStorage | None) -> None:
    """Removes a scratch folder with everything in it."""
    if scratch is not None:
        shutil.rmtree(scratch.root, ignore_errors=True)


@contextlib.contextmanager
def short_scratch(storage: Storage) -> Iterator[LocalStorage | None]:
    """A scratch folder that ends with the block; None where the dataset's own folder will do."""
    if isinstance(storage, LocalStorage):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="fastvid-") as folder:
        yield LocalStorage(folder)
