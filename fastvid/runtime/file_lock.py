"""Locks a file whose only purpose is its lock, and which disappears with its last holder.

A lock belongs to the inode, so a file that was removed while it was waited for is created and locked again.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def lock_file(path: Path, *, shared: bool = False, wait: bool = True) -> int:
    """Create a file with its folder, if necessary, and lock it. The kernel releases the lock of a killed process.

    Over NFS only a file that is open for writing can be locked.

    Returns its descriptor; closing it releases the lock. Whoever holds an exclusive lock may remove the file
    before.
    """
    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    while True:
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, how)
            if _lies_at(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _open(path: Path) -> int:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            continue  # its last holder has just removed the folder


def _lies_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
