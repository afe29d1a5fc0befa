"""Options that several commands have, as groups."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from fastvid.cli.files import read_text
from fastvid.sharding.encode.profiles import PROFILES as PROFILES
from fastvid.sharding.encode.profiles import get_profile
from fastvid.sharding.engines.local import ENGINES as ENGINES
from fastvid.sharding.job.job import MAX_SECONDS
from fastvid.sharding.job.plan import SAMPLES_PER_SHARD
from fastvid.sharding.sources.annotations import FORMATS as FORMATS


@dataclass(frozen=True)
class Labels:
    """What is known about videos.

    Attributes:
        annotations (FORMAT:PATH): A format, {FORMATS}, and a file or folder, also s3:// and gs:// URLs; may be
            repeated.
        columns (NAME=COLUMN,...): Names for the columns of csv, json, jsonl, parquet and hf tables, such as
            path=videoid,start=t0,end=t1,caption=text; a.b is a nested value, segments=COLUMN a list of segments.
        classes (FILE): Class names for integer labels, one per line.
    """

    annotations: tuple[str, ...] = ()
    columns: str | None = None
    classes: str | None = None

    def options(self) -> dict[str, Any]:
        """As keyword arguments of a job."""
        names = [] if self.classes is None else read_text(self.classes, "class names").splitlines()
        return {"annotations": self.annotations, "columns": self.columns, "class_names": list(filter(None, names))}


@dataclass(frozen=True)
class Encoding:
    """How videos are encoded.

    Attributes:
        profile (NAME): One of {PROFILES}.
        short_side (PIXELS): Short side (default: 256).
        crf (N): Quality, lower is better (default: the profile's).
        gop (FRAMES): Key frame interval (default: the profile's).
        fps (RATE): Frame rate, such as 15 or 30000/1001 (default: each source's).
        hdr: Tone-map high dynamic range, or keep its values as they are (default: tonemap).
        streams (NAMES): rgb, or rgb,flow.
        flow: Optical flow method.
        flow_bound (PIXELS): Largest motion per frame (default: 20).
    """

    profile: str = "compact"
    short_side: int | None = None
    crf: int | None = None
    gop: int | None = None
    fps: str | None = None
    hdr: Literal["tonemap", "keep"] | None = None
    streams: str = "rgb"
    flow: Literal["dis", "tvl1"] = "dis"
    flow_bound: float | None = None

    def options(self) -> dict[str, Any]:
        """As keyword arguments of a job."""
        profile = get_profile(self.profile).changed(
            short_side=self.short_side, crf=self.crf, gop=self.gop, fps=self.fps, hdr=self.hdr
        )
        return {"profile": profile, "streams": self.streams, "flow": self.flow, "flow_bound": self.flow_bound}


@dataclass(frozen=True)
class Machines:
    """Where the work is done, of jobs that can be shared among machines.

    Attributes:
        engine ({ENGINES}): Where to process sources.
        ray_address (HOST:PORT): Address of the Ray cluster (default: RAY_ADDRESS, or a cluster on this machine).
        workers (N): Sources processed at once (default: one per core).
        part (I/N): Only write shards I, I+N, I+2N, ... (I counts from 0) and commit nothing; finish with the same
            command without --part.
    """

    engine: str = "local"
    ray_address: str | None = None
    workers: int | None = None
    part: str | None = None

    def options(self) -> dict[str, Any]:
        """As keyword arguments of a job."""
        return asdict(self)


@dataclass(frozen=True)
class Packing:
    """How sources become samples of new shards.

    Attributes:
        samples_per_shard (N): Most videos in one shard.
        max_seconds (S): Split longer videos into samples of at most S seconds.
        max_bad_frames (N|P%): Keep the longest run without damage of a damaged video if at most N frames, or P % of its
            frames, are left out (default: reject it).
        seed (N): Seed of the order in the new shards.
        drop_duplicates: Hide samples of files with the same bytes as an earlier one; `fastvid compact` frees their
            bytes.
    """

    samples_per_shard: int = SAMPLES_PER_SHARD
    max_seconds: float = MAX_SECONDS
    max_bad_frames: str | None = None
    seed: int = 0
    drop_duplicates: bool = False

    def options(self) -> dict[str, Any]:
        """As keyword arguments of a job."""
        return asdict(self)


@dataclass(frozen=True)
class Looking:
    """How videos are looked for in folders.

    Attributes:
        reject_unreadable: Reject sources that the disk does not deliver; without it the job stops at its end, to be
            resumed.
        follow_links: Accept links that point outside their folder.
    """

    reject_unreadable: bool = False
    follow_links: bool = False

    def options(self) -> dict[str, Any]:
        """As keyword arguments of a job."""
        return asdict(self)
