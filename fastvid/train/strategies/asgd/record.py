"""What a parameter server knows about a client."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ClientRecord:
    """A server's record of a client."""

    clock: int = 0
    pushes: int = 0
    clips: int = 0
    active: bool = True
    # whether it waits for samples. An idle client delays no other, because others may have to push before samples
    # become available.
    idle: bool = False
