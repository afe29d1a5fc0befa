"""What one source may cost, and how that is enforced."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits per source.

    Attributes:
        seconds: Wall time for a source of no length; `seconds_per_frame` is added for every packet it holds.
        seconds_per_frame: Wall time per packet and megapixel.
        max_seconds: Wall time in the end, however long the source is.
        memory_bytes: Address space that a process may map on top of what it has when it starts on the source.
        max_pixels: Pixels of a decoded frame. 8192x4352 holds every level of H.264, HEVC, VP9 and AV1 in common use.
        max_frames: Frames of a source; 24 hours at 60 a second.
        output_bytes: Bytes of one encoded sample. Packet offsets have 32 bits.
        fetched_bytes: Bytes of a source that is fetched from elsewhere, which need room on the local disk.
    """

    seconds: float = 60.0
    seconds_per_frame: float = 0.5
    max_seconds: float = 6 * 3600.0
    memory_bytes: int = 4 << 30
    max_pixels: int = 8192 * 4352
    max_frames: int = 24 * 3600 * 60
    output_bytes: int = 2 << 30
    fetched_bytes: int = 64 << 30

    def read_seconds(self, size: int) -> float:
        """Wall time for reading a source of `size` bytes twice and decoding its first frame; 4 MB/s is a slow share."""
        return min(self.max_seconds, self.seconds + 2 * size / 4e6)

    def transcode_seconds(self, *, frames: int, pixels: int) -> float:
        """Wall time for decoding and encoding a source: about twenty times what a slow core needs."""
        return min(self.max_seconds, self.seconds + self.seconds_per_frame * frames * max(pixels / 1e6, 0.25))


def confine(limits: Limits) -> None:
    """Limits this process and its children for the rest of their lives: memory, and no core files."""
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _lower(resource.RLIMIT_AS, mapped + limits.memory_bytes)
    _lower(resource.RLIMIT_CORE, 0)


def confine_child(pid: int, limits: Limits, *, cpu_seconds: float) -> None:
    """Limits a running child: CPU time, for the case that nobody is left to watch the clock, and file size."""
    ceiling = int(cpu_seconds) + 1
    resource.prlimit(pid, resource.RLIMIT_CPU, (ceiling, ceiling))
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limits.output_bytes, limits.output_bytes))


def _lower(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
