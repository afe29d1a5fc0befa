"""Limits on the time, memory and size of one source, and their enforcement."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits per source."""

    seconds: float = 60.0
    seconds_per_frame: float = 0.5
    max_seconds: float = 6 * 3600.0
    memory_bytes: int = 4 << 30
    # pixels of a decoded frame. 8192x4352 covers all common levels of H.264, HEVC, VP9 and AV1.
    max_pixels: int = 8192 * 4352
    max_frames: int = 24 * 3600 * 60  # frames of a source: 24 hours at 60 per second
    output_bytes: int = 2 << 30  # size of one encoded sample in bytes. Packet offsets have 32 bits
    source_bytes: int = 64 << 30  # size in bytes of a source; one that is downloaded is stored on the local disk

    def read_seconds(self, size: int) -> float:
        """Return the wall time to read `size` bytes twice, at a slow 4 MB/s, and decode one frame."""
        return min(self.max_seconds, self.seconds + 2 * size / 4e6)

    def transcode_seconds(self, *, frames: int, pixels: int) -> float:
        """Return the wall time to decode and encode a source: about twenty times what a slow core needs."""
        return min(self.max_seconds, self.seconds + self.seconds_per_frame * frames * max(pixels / 1e6, 0.25))


def confine(limits: Limits) -> None:
    """Permanently limit the memory of this process and its future children, and disable core files."""
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _lower(resource.RLIMIT_AS, mapped + limits.memory_bytes)
    _lower(resource.RLIMIT_CORE, 0)


def confine_child(pid: int, limits: Limits, *, cpu_seconds: float) -> None:
    """Limit a running child's file size, and its CPU time in case the process that watches it dies."""
    ceiling = int(cpu_seconds) + 1
    resource.prlimit(pid, resource.RLIMIT_CPU, (ceiling, ceiling))
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limits.output_bytes, limits.output_bytes))


def _lower(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
