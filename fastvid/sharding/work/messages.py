"""Tasks, outcomes and their bytes: what travels between a job and its workers, and what waits on disk to be packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fastvid.errors import FormatError, UsageError
from fastvid.media.ffmpeg import FfmpegBuild
from fastvid.media.in_place.index_video import Proof
from fastvid.media.limits import Limits
from fastvid.media.reasons import Reason
from fastvid.runtime.messages import pack, unpack
from fastvid.sharding.encode.profile import Profile
from fastvid.sharding.encode.salvage import allowed_frames
from fastvid.sharding.encode.streams import PICTURES, Streams


@dataclass(frozen=True, slots=True)
class Settings:
    """What all tasks of a job have in common."""

    profile: Profile  # how samples are encoded
    build: FfmpegBuild
    limits: Limits
    max_seconds: float  # longer videos are split into parts of at most this length, in seconds
    streams: Streams = PICTURES
    blocked: tuple[str, ...] = ()
    # the most frames that may be left out of a damaged source, such as "100" or "5%" of its frames; None rejects
    # every damaged source. See `fastvid.sharding.encode.salvage`.
    max_bad_frames: str | None = None
    proof: Proof | None = None

    def __post_init__(self) -> None:
        if self.max_bad_frames is not None:
            allowed_frames(self.max_bad_frames, 0)
            if self.profile.copies:
                raise UsageError(
                    "profile 'copy' takes whole files over, so it cannot leave out damaged frames",
                    hint="remove max_bad_frames, or use --profile compact",
                )

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Settings:
        """From `to_json`'s result."""
        build = dict(record["build"])
        build["encoders"] = tuple(build["encoders"])
        return cls(
            Profile(**record["profile"]),
            FfmpegBuild(**build),
            Limits(**record["limits"]),
            record["max_seconds"],
            Streams.from_json(record["streams"]),
            tuple(record["blocked"]),
            record["max_bad_frames"],
            None if record["proof"] is None else Proof(record["proof"]),
        )


@dataclass(frozen=True, slots=True)
class SourceTask:
    """One source to encode."""

    index: int
    source_id: str
    path: str
    key: str  # name of its samples
    size: int = 0  # bytes; 0 where nobody has asked yet
    start: float | None = None  # seconds where the clip begins, or None
    end: float | None = None  # seconds where the clip ends, or None
    patience: float = 1.0
    member: tuple[int, int] | None = None  # first byte and bytes of the video when `path` is a tar
    # first byte and bytes of the M4A with its sound when that is another member of the tar.
    sound: tuple[int, int] | None = None
    indexes: bool = False
    tag: str | None = None
    parent: str | None = None
    # first frame and number of frames of a clip that is given in frames; None otherwise.
    frames: tuple[int, int] | None = None
    copies: bool = False

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """One sample, ready to be packed."""

    key: str
    meta: Mapping[str, Any]
    streams: Mapping[str, bytes]

    @property
    def num_frames(self) -> int:
        """Frames of its first video stream."""
        return int(self.meta["num_frames"])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a source: samples, or a reason."""

    index: int
    samples: tuple[EncodedSample, ...] = ()  # at least one when `reason` is None
    reason: Reason | None = None
    message: str = ""
    transient: bool = False
    seconds: float = 0.0
    warnings: tuple[str, ...] = field(default=())
    bytes_in: int = 0  # bytes of the source as it was read; 0 where that is not known
    source_sha256: str = ""  # SHA-256 of those bytes, hex; empty where they were not hashed

    def to_bytes(self) -> bytes:
        """One self-checking piece of bytes."""
        blobs = [data for sample in self.samples for data in sample.streams.values()]
        header = {
            "index": self.index,
            "reason": self.reason,
            "message": self.message,
            "transient": self.transient,
            "seconds": self.seconds,
            "warnings": list(self.warnings),
            "bytes_in": self.bytes_in,
            "source_sha256": self.source_sha256,
            "samples": [
                {
                    "key": sample.key,
                    "meta": dict(sample.meta),
                    "streams": {name: len(data) for name, data in sample.streams.items()},
                }
                for sample in self.samples
            ],
        }
        return pack(header, *blobs)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Outcome:
        """The outcome behind `to_bytes`' result."""
        return cls.from_parts(*unpack(data))

    @classmethod
    def from_parts(cls, header: Mapping[str, Any], blobs: memoryview) -> Outcome:
        """The outcome of an unpacked piece."""
        try:
            samples, position = [], 0
            for record in header["samples"]:
                streams = {}
                for name, size in record["streams"].items():
                    streams[name] = bytes(blobs[position : position + size])
                    position += size
                samples.append(EncodedSample(record["key"], record["meta"], streams))
            if position != len(blobs):
                raise FormatError(f"an outcome claims {position} bytes of streams and has {len(blobs)}")
            return cls(
                index=int(header["index"]),
                samples=tuple(samples),
                reason=None if header["reason"] is None else Reason(header["reason"]),
                message=str(header["message"]),
                transient=bool(header["transient"]),
                seconds=float(header["seconds"]),
                warnings=tuple(header["warnings"]),
                bytes_in=int(header["bytes_in"]),
                source_sha256=str(header["source_sha256"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"an outcome does not parse: {error!r}") from error
