"""The identity of a job, and the assignment of its sources to shards.

The identity must not change between an interruption and the run that resumes the job. Sources are assigned before
anything is encoded, so that a failed source never moves another sample. The unit is a file: clips of one file are
fetched and probed together, see `fastvid.sharding.work.tasks`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, islice, pairwise
from typing import Any, Final

from fastvid.errors import UsageError
from fastvid.format.schema import FORMAT_VERSION
from fastvid.runtime.names import encode_name
from fastvid.runtime.values import sha256, sha256_of_pieces
from fastvid.sharding.encode.profiles import Settings
from fastvid.sharding.sources.sources import Source, SourceList
from fastvid.sharding.sources.spool import Spool, sort


def job_identity(found: SourceList, settings: Settings, *, seed: int, samples_per_shard: int) -> dict[str, Any]:
    """Return everything that determines the output of an encoding job; error messages quote the names of the fields."""
    files = ((encode_name(s.id), s.size, s.start, s.end, s.key, *filter(None, (s.etag, s.inside))) for s in found.tried)
    optional = {"streams": settings.streams.to_json() or None, "max_bad_frames": settings.max_bad_frames}
    return {
        **list_identity(found, files, seed=seed, samples_per_shard=samples_per_shard),
        "profile": settings.profile.to_json(),
        "encoder": settings.build.identity(),
        "max_seconds": settings.max_seconds,
        **{name: value for name, value in optional.items() if value is not None},
    }


def list_identity(
    found: SourceList, files: Iterable[tuple[object, ...]], *, seed: int, samples_per_shard: int
) -> dict[str, Any]:
    """Return the fields of an identity about the sources, and how they are assigned to shards."""
    order = {"seed": seed, "samples_per_shard": samples_per_shard}
    own = {"format": ".".join(map(str, FORMAT_VERSION)), "order": order}
    if found.listed:
        return {**found.listed, **own}
    sizes = array("q", (source.size for source in found.tried))
    notes = ((encode_name(s.id), s.label, dict(s.columns), s.problem) for s in found.sources)
    told = sha256_of_pieces(chain([b"["], _pieces(notes), [f", {_json(found.classes)}]".encode()]))
    return {
        **own,
        "sources": {"number": len(sizes), "bytes": sum(sizes), "sha256": sha256_of_pieces(_pieces(files))},
        "annotations": {"number": len(found.sources), "sha256": told},
    }


def _pieces(items: Iterable[Any]) -> Iterator[bytes]:
    """Yield the JSON of a list in pieces, so that it need not fit into memory at once."""
    items, mark = iter(items), "["
    while some := list(islice(items, 256)):
        yield f"{mark}{_json(some)[1:-1]}".encode()
        mark = ", "
    yield b"[]" if mark == "[" else b"]"


_json: Final = json.JSONEncoder(sort_keys=True, default=str).encode


def digest(value: Any) -> str:
    """Return the SHA-256 of a value's JSON, in hex."""
    return sha256(_json(value).encode())


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted names of the fields in which two identities differ, with both values."""
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from differences(before, after, f"{prefix}{name}.")
        elif before != after:
            yield f"{prefix}{name}", before, after


SAMPLES_PER_SHARD: Final = 1000
# Maximum bytes of sources in a shard. It is twice the usual size of a shard, because on real footage the compact
# profile writes half as many bytes as the sources have.
SOURCE_BYTES_PER_SHARD: Final = 2 << 30


@dataclass(frozen=True, slots=True)
class JobPart:
    """One of several jobs that divide the shards of a plan among them."""

    index: int  # number of the part, from 0
    of: int

    @classmethod
    def parse(cls, text: str) -> JobPart:
        """Parse a part such as ``3/8``; ``auto`` or ``auto/8`` take the number of this process from `_PLACES`."""
        name, _, number = text.partition("/")
        if name == "auto":
            index, count = _place(number)
            text = f"{index}/{number or count}"
        found = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
        if not found or int(found[1]) >= int(found[2]):
            raise UsageError(f"invalid part {text!r}", hint="use I/N with I from 0 to N - 1, such as 0/8 to 7/8")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.of}"

    def has(self, shard: int) -> bool:
        """Return whether this part includes the shard: part I of N has shards I, I + N, I + 2 N, ..."""
        return shard % self.of == self.index


# Environment variables with the number of this process, and the count of processes: of a Slurm array, an indexed job of
# Kubernetes, and torchrun.
_PLACES: Final = (
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"),
    ("JOB_COMPLETION_INDEX", ""),
    ("RANK", "WORLD_SIZE"),
)
_FIRST: Final = "SLURM_ARRAY_TASK_MIN"


def _place(number: str) -> tuple[str, str]:
    """Return the number of this process and the count of processes, from the environment.

    `number`: the count if the user gave it, else empty.
    """
    index, count = next((pair for pair in _PLACES if pair[0] in os.environ), ("", ""))
    if not index:
        names = ", ".join(name for name, _ in _PLACES)
        raise UsageError(f"--part auto found none of the variables {names}", hint="give the part, such as --part 0/8")
    found = os.environ.get(count, "")
    # The count is not the number of parts if only some tasks of an array were started, such as 3,7-9.
    if not number and (not found or int(os.environ[index]) >= int(found) or os.environ.get(_FIRST, "0") != "0"):
        raise UsageError(
            f"--part auto: {index} is {os.environ[index]}, of an unknown number of parts",
            hint="give the number of parts, such as --part auto/64",
        )
    return os.environ[index], found


def plan_shards(
    sources: Iterable[Source],
    *,
    seed: int = 0,
    samples: int = SAMPLES_PER_SHARD,
    source_bytes: int = SOURCE_BYTES_PER_SHARD,
) -> list[Sequence[Source]]:
    """Assign sources to shards, classes mixed, each limited in its number of sources and the bytes of their files.

    The clips of a file are in one shard where they fit, otherwise in consecutive shards, so that few workers read it.
    Files, and the sources of a shard, are in the order of a keyed hash: it depends on the sources and the seed, not on
    how they were listed.

    `source_bytes`: maximum total bytes of the files of a shard; a single file may exceed it.
    """
    mixed, ends = Spool[Source](), [0]

    def shards() -> Iterator[list[Source]]:
        shard, room, weight = list[Source](), 0, 0
        for _, group in groupby(sort(sources, partial(file_order, seed=seed)), key=_file):
            clips = list(group)
            if room < len(clips) <= samples or weight + clips[0].size > source_bytes:
                room = 0
            for clip in clips:
                if room == 0:
                    yield shard
                    shard, room, weight = [], samples, 0
                if clip is clips[0] or not shard:
                    weight += clip.size
                shard.append(clip)
                room -= 1
        yield shard

    for shard in filter(None, shards()):
        mixed.extend(sorted(shard, key=lambda source: (rank(source.key, seed), source.key)))
        ends.append(len(mixed))
    return [mixed[start:end] for start, end in pairwise(ends)]


def file_order(source: Source, seed: int) -> tuple[bytes, str, float, str]:
    """Return the sort key by which sources are assigned and encoded: by file, then by the start of the clip."""
    return rank(source.parent or source.key, seed), _file(source), source.start or 0.0, source.key


def _file(source: Source) -> str:
    return source.parent or source.key


def rank(name: str, seed: int, of: str = "shards") -> bytes:
    """Return the place of a name in a random order that depends on names and the seed alone; `of`: what is ordered."""
    text = f"fastvid-{of}-1:{seed}:{name}"
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest()
