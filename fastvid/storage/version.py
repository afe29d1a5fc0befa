"""The version of a remote file."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

_EPOCH: Final = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True)
class Version:
    """Identifies one version of a file."""

    tag: str | None
    modified: datetime
    size: int  # size in bytes
    number: str | None = None

    @classmethod
    def parse(cls, tag: str | None, modified: str | None, size: int) -> Version:
        """Return a version that was stored as text: its tag, or without one its date in ISO 8601."""
        return cls(tag, datetime.fromisoformat(modified) if modified else _EPOCH, size)

    def same(self, other: Version) -> bool:
        """Return whether both may be one version, by tags if both have one: replicas may differ in dates."""
        if self.tag and other.tag:
            return (self.tag, self.size) == (other.tag, other.size)
        return (self.modified, self.size) == (other.modified, other.size)
