"""Reserve a TCP port for a server that starts later and may be restarted."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a free port while the block runs.

    A socket stays bound to the port and never listens, so the kernel does not assign the port to anyone who asks for
    port 0. A server that sets SO_REUSEADDR, as servers do, can still listen on it. Until then connections are refused.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]
