"""The version of a remote file."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Version:
    """Identifies one version of a file.

    Attributes:
        tag: The server's entity tag; None when it sends none.
        modified: When the file was last modified; the Unix epoch when the server does not say.
        size: Size in bytes.
        number: Version number, in stores that number their versions.
    """

    tag: str | None
    modified: datetime
    size: int
    number: str | None = None

    def same(self, other: Version) -> bool:
        """Return whether both may be one version, by tags if both have one: replicas may differ in dates."""
        if self.tag and other.tag:
            return (self.tag, self.size) == (other.tag, other.size)
        return (self.modified, self.size) == (other.modified, other.size)
