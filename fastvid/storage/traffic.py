"""Counts what this process requests from object stores and web servers."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prices:
    """What a store charges, in dollars."""

    request: float = 0.4e-6
    gigabyte: float = 0.0  # per 10^9 bytes that leave the store; reading inside one region is free in most clouds


class StoreTraffic:
    """Sums of requests and bytes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = self._bytes = 0

    def sent(self) -> None:
        """Count a request, also one that fails."""
        with self._lock:
            self._requests += 1

    def received(self, data: memoryview) -> memoryview:
        """Count the bytes of a response, and return them."""
        with self._lock:
            self._bytes += len(data)
        return data

    def take(self) -> tuple[int, int]:
        """Return the requests and bytes since the last call."""
        with self._lock:
            taken = self._requests, self._bytes
            self._requests = self._bytes = 0
        return taken


TRAFFIC = StoreTraffic()
"""Of all storages of this process."""
