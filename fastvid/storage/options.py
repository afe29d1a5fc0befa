"""How remote storages behave: settings that do not change what is read."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastvid.errors import UsageError

CACHE_VARIABLE: Final = "FASTVID_CACHE"
CACHE_BYTES_VARIABLE: Final = "FASTVID_CACHE_BYTES"
DEFAULT_CACHE_BYTES: Final = 16 * 2**30
"""16 GiB: the sidecars of some ten thousand shards."""

_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Settings of `open_storage` for object stores and HTTP.

    Attributes:
        concurrency: Requests that one storage has in flight at most. 64 over 20 ms of latency is 3,200 ranges a second.
        connect_seconds: Longest wait for a connection.
        stall_seconds: Longest wait for the next bytes of an answer.
        patience_seconds: A request is tried again until so long after its first try. Object stores have hiccups of
            seconds; two minutes also bridge the restart of a server.
        cache: Node-local folder that keeps mapped files for all processes; None takes FASTVID_CACHE from the
            environment; "" keeps them in memory.
        cache_bytes: Size that the folder may have; None takes FASTVID_CACHE_BYTES (a number, or one with K, M, G or T
            for powers of 1,024), else 16 GiB.
    """

    concurrency: int = 64
    connect_seconds: float = 5.0
    stall_seconds: float = 10.0
    patience_seconds: float = 120.0
    cache: str | os.PathLike[str] | None = None
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("concurrency", "connect_seconds", "stall_seconds", "patience_seconds"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} is {getattr(self, name)}, must be above 0")

    def cache_folder(self) -> Path | None:
        """Where mapped files are kept, None for memory."""
        folder = os.environ.get(CACHE_VARIABLE, "") if self.cache is None else os.fspath(self.cache)
        return Path(folder).absolute() if folder else None

    def cache_limit(self) -> int:
        """Bytes that the cache folder may hold.

        Raises:
            UsageError: The environment's value is no size.
        """
        if self.cache_bytes is not None:
            return self.cache_bytes
        text = os.environ.get(CACHE_BYTES_VARIABLE, "")
        if not text:
            return DEFAULT_CACHE_BYTES
        found = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
        if not found:
            raise UsageError(f"{CACHE_BYTES_VARIABLE} is {text!r}, no size", hint="such as 20G or 500M")
        return int(found[1]) * _UNITS[found[2].upper()]
