"""Which version of a remote file was read."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Version:
    """What tells one version of a file from another.

    Attributes:
        tag: The server's entity tag, None when it gives none.
        modified: When the file was changed; the epoch when the server does not say.
        size: Bytes.
        number: The version where the store numbers them.
    """

    tag: str | None
    modified: datetime
    size: int
    number: str | None = None

    def same(self, other: Version) -> bool:
        """Whether both can be one version. Tags decide; servers behind one address may disagree about dates."""
        if self.tag and other.tag:
            return (self.tag, self.size) == (other.tag, other.size)
        return (self.modified, self.size) == (other.modified, other.size)
