"""What a parameter server knows about a client."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ClientRecord:
    """A server's record of a client.

    Attributes:
        clock: Pushes; a client that joins late or was idle starts with the clock of the slowest one.
        pushes: Pushes of this client alone.
        merged: How many of its pushes are in the weights.
        clips: Clips in its pushes.
        active: Whether it is connected.
        idle: Whether it waits for samples. An idle client delays no other, because others may have to push before
            samples become available.
    """

    clock: int = 0
    pushes: int = 0
    merged: int = 0
    clips: int = 0
    active: bool = True
    idle: bool = False
