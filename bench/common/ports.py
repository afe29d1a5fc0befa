"""A TCP port of this machine for a server that is started later, and perhaps again after its death."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port that the kernel gives to nobody else while the block runs.

    A socket stays bound to it and never listens. Who asks for any port is not given this one, while a server that asks
    for it by number can listen on it, because it sets SO_REUSEADDR, as servers do. Until then connections are refused.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]
