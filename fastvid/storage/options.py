"""Timeouts, concurrency and cache of remote storages; they do not change the bytes read."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastvid.errors import UsageError
from fastvid.storage.unit_cache import UnitCache

CACHE_VARIABLE: Final = "FASTVID_CACHE"
CACHE_BYTES_VARIABLE: Final = "FASTVID_CACHE_BYTES"
VIDEO_CACHE_VARIABLE: Final = "FASTVID_CACHE_VIDEO"
DEFAULT_CACHE_BYTES: Final = 16 * 2**30
"""16 GiB: the sidecars of about ten thousand shards."""

_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Settings of `open_storage` for object stores and HTTP.

    Attributes:
        concurrency: Maximum requests in flight per storage. 64 at 20 ms of latency is 3,200 ranges a second.
        connect_seconds: Maximum wait for a connection.
        stall_seconds: Maximum wait for the next bytes of a response.
        patience_seconds: A request is retried for this long after its first attempt. Object stores have outages of
            seconds; two minutes also cover the restart of a server.
        cache: Node-local folder that keeps mapped files for all processes; None uses the environment variable
            FASTVID_CACHE; "" keeps them in memory.
        cache_bytes: Maximum size of the folder; None uses FASTVID_CACHE_BYTES (a number, optionally with K, M, G or T
            for powers of 1,024), else 16 GiB.
        video_cache_bytes: Maximum size of the videos that the folder keeps as well, in addition; None uses
            FASTVID_CACHE_VIDEO, else 0: videos are read from the storage each time.
    """

    concurrency: int = 64
    connect_seconds: float = 5.0
    stall_seconds: float = 10.0
    patience_seconds: float = 120.0
    cache: str | os.PathLike[str] | None = None
    cache_bytes: int | None = None
    video_cache_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("concurrency", "connect_seconds", "stall_seconds", "patience_seconds"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} is {getattr(self, name)}, must be greater than 0")

    def cache_folder(self) -> Path | None:
        """Return the folder that keeps mapped files, or None to keep them in memory."""
        folder = os.environ.get(CACHE_VARIABLE, "") if self.cache is None else os.fspath(self.cache)
        return Path(folder).absolute() if folder else None

    def cache_limit(self) -> int:
        """Return the maximum size of the cache folder in bytes.

        Raises:
            UsageError: If FASTVID_CACHE_BYTES is not a size.
        """
        return _size(CACHE_BYTES_VARIABLE, DEFAULT_CACHE_BYTES) if self.cache_bytes is None else self.cache_bytes

    def units(self) -> UnitCache | None:
        """Return the cache of videos, or None if there is none.

        Raises:
            UsageError: If FASTVID_CACHE_VIDEO is not a size, or if there is no folder for it.
        """
        limit = self.video_cache_bytes
        if limit is None:
            limit = _size(VIDEO_CACHE_VARIABLE, 0)
        folder = self.cache_folder()
        if limit and folder is None:
            raise UsageError(
                f"{VIDEO_CACHE_VARIABLE} is set, but there is no folder for it",
                hint=f"set {CACHE_VARIABLE} to a folder on a fast local disk",
            )
        return UnitCache(folder / "video", limit) if limit and folder is not None else None


def _size(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    if not text:
        return default
    found = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise UsageError(f"{variable} is {text!r}, not a size", hint="write it like 20G or 500M")
    return int(found[1]) * _UNITS[found[2].upper()]
