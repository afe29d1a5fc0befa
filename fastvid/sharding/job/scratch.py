"""Local scratch folders for jobs whose dataset is in an object store; the next run on this machine finds them.

Finished shards are in the store, so another machine can resume the job; it encodes again what was waiting here.
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
    """Return the local folder for work on a dataset; None if the dataset's own folder is used."""
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
        raise StorageError(f"scratch folder cannot be created: {error.strerror}", file=path) from error
    # The name is predictable, and other users can write to the folder for temporary files.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise StorageError("scratch folder belongs to another user", file=path, hint="name another with --scratch")
    return LocalStorage(path)


def remove_scratch(scratch: LocalStorage | None) -> None:
    """Remove a scratch folder with its contents."""
    if scratch is not None:
        shutil.rmtree(scratch.root, ignore_errors=True)


@contextlib.contextmanager
def short_scratch(storage: Storage) -> Iterator[LocalStorage | None]:
    """Yield a scratch folder that is removed after the block; None if the dataset's own folder is used."""
    if isinstance(storage, LocalStorage):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="fastvid-") as folder:
        yield LocalStorage(folder)
