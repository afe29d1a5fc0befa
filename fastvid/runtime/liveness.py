"""Whether the process that wrote a file is dead, judged only where it is certain: in the same PID namespace.

Containers may share a host name and a disk but not their process ids: process 7 of one is not process 7 of another.
"""

from __future__ import annotations

import os
import secrets
from functools import cache
from pathlib import Path

from fastvid.runtime.hashing import sha256

_DIGITS = 12


@cache
def namespace() -> str:
    """Return an id, in hex, of this boot of this machine and of the PID namespace of this process.

    No two namespaces that have a process at the same time share it. Where the kernel names neither, it is random.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        inode = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return secrets.token_hex(_DIGITS // 2)
    return sha256(f"{boot}:{inode}".encode())[:_DIGITS]


def is_dead(space: object, pid: object) -> bool:
    """Return whether a process has certainly ended; False for one of another namespace, or of another machine."""
    if space != namespace() or not str(pid).isdecimal() or int(str(pid)) < 1:
        return False
    try:
        # /proc may show another namespace than that of this process; signals go by its own.
        os.kill(int(str(pid)), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False
