"""The identity of a job: what must not change between its interruption and the run that resumes it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fastvid.format.schema import FORMAT_VERSION
from fastvid.runtime.file_names import encode_name
from fastvid.runtime.hashing import sha256
from fastvid.sharding.sources.sources import SourceList
from fastvid.sharding.work.messages import Settings


def job_identity(found: SourceList, settings: Settings, *, seed: int, samples_per_shard: int) -> dict[str, Any]:
    """Return everything that determines a job's output, under names that error messages quote."""
    tried = [source for source in found.sources if source.problem is None]
    files = [(encode_name(s.id), s.size, s.start, s.end, s.key, *([s.tag] if s.tag else [])) for s in tried]
    streams = settings.streams.to_json()
    damaged = settings.max_bad_frames
    notes = [(encode_name(s.id), s.label, dict(s.columns), s.problem) for s in found.sources]
    return (
        {
            "format": ".".join(map(str, FORMAT_VERSION)),
            "profile": settings.profile.to_json(),
            "encoder": settings.build.identity(),
            "sources": {"number": len(tried), "bytes": sum(s.size for s in tried), "sha256": digest(files)},
            "annotations": {"number": len(notes), "sha256": digest([notes, found.classes])},
            "order": {"seed": seed, "samples_per_shard": samples_per_shard},
            "max_seconds": settings.max_seconds,
        }
        | ({"streams": streams} if streams else {})
        | ({} if damaged is None else {"max_bad_frames": damaged})
    )


def digest(value: Any) -> str:
    """Return the SHA-256 of a value's JSON, in hex."""
    return sha256(json.dumps(value, sort_keys=True, default=str).encode())


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted names of the fields in which two identities differ, with both values."""
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from differences(before, after, f"{prefix}{name}.")
        elif before != after:
            yield f"{prefix}{name}", before, after
