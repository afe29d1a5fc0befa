"""One source from file to verified samples: the work of a worker, whatever engine runs it."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, Final

from fastvid.errors import SourceError
from fastvid.shard.probe import OpenSource, SourceInfo, open_source, probe
from fastvid.shard.profiles import Profile, written_timing
from fastvid.shard.reasons import Reason
from fastvid.shard.transcode import transcode
from fastvid.shard.verify import Verified, verify
from fastvid.shard.wire import EncodedSample, Outcome, Settings, Task

Report = Callable[[str, float], None]
"""Called when a phase begins, with its name and the seconds it may take."""

_CHUNK: Final = 1 << 20
# Frames that resampling may add or drop at the ends of a stream.
_RESAMPLED_SLACK: Final = 2


def encode_source(task: Task, settings: Settings, report: Report) -> Outcome:
    """Probes, encodes and verifies one source. Never raises for what a source does."""
    started = time.monotonic()
    try:
        samples, warnings = _encode(task, settings, report)
    except SourceError as error:
        return Outcome(
            index=task.index,
            reason=Reason(error.reason),
            message=error.message,
            transient=error.transient,
            seconds=time.monotonic() - started,
        )
    except MemoryError:
        return Outcome(
            index=task.index,
            reason=Reason.MEMORY,
            message="the worker ran out of memory",
            seconds=time.monotonic() - started,
        )
    return Outcome(task.index, samples, seconds=time.monotonic() - started, warnings=warnings)


def plan_parts(
    info: SourceInfo, start: float | None, end: float | None, max_seconds: float
) -> list[tuple[int, int] | None]:
    """The frames of each sample of a source, as half-open ranges at the written rate; None for all frames.

    A long video is split into the fewest parts of equal length that keep the bound.

    Raises:
        SourceError: The clip lies outside the video.
    """
    total, rate = info.timing.frames, info.timing.rate
    first = 0 if start is None else max(0, round(Fraction(start) * rate))
    # Annotated ends are rounded to seconds and may lie behind the last frame.
    last = total if end is None else min(total, round(Fraction(end) * rate))
    if first >= last:
        raise SourceError(
            f"the clip {start} s to {end} s is not in {float(total / rate):.2f} s of video", reason=Reason.OUT_OF_RANGE
        )
    most = max(1, int(Fraction(max_seconds) * rate))
    count = -(-(last - first) // most)
    if count == 1:
        return [None] if (first, last) == (0, total) else [(first, last)]
    cuts = [first + (last - first) * number // count for number in range(count + 1)]
    return list(pairwise(cuts))


def _encode(task: Task, settings: Settings, report: Report) -> tuple[tuple[EncodedSample, ...], tuple[str, ...]]:
    limits, profile = settings.limits, settings.profile
    report("probe", task.patience * limits.read_seconds(task.size))
    with open_source(task.path) as source:
        digest = _sha256(source)
        info = probe(source, limits)
        written = replace(info, timing=written_timing(info.timing, profile))
        parts = plan_parts(written, task.start, task.end, settings.max_seconds)
        seconds = limits.transcode_seconds(frames=info.timing.shown, pixels=info.width * info.height)
        # ffmpeg has its own clock; the one outside strikes only when that one is stuck.
        report("encode", task.patience * seconds + limits.seconds)
        result = transcode(settings.build, profile, source, info, parts, limits, patience=task.patience)
    report("verify", task.patience * (limits.seconds + seconds))
    samples = []
    for number, (part, video) in enumerate(zip(parts, result.videos, strict=True)):
        verified = verify(video, profile, frames=_expected(written, part))
        meta = _meta(task, written, verified, digest, full_range=profile.full_range)
        key = task.key
        if part is not None:
            meta |= {"parent": task.source_id, "start_seconds": float(part[0] / written.timing.rate)}
            key = task.key if len(parts) == 1 else f"{task.key}/{number:04d}"
        samples.append(EncodedSample(key, meta, {"rgb": video}))
    return tuple(samples), tuple(_changes(info, profile))


def _expected(info: SourceInfo, part: tuple[int, int] | None) -> tuple[int, int]:
    first, last = part or (0, info.timing.frames)
    count = last - first
    if info.timing.input_rate is not None:
        return count, count
    return max(1, count - _RESAMPLED_SLACK), count + _RESAMPLED_SLACK


def _meta(task: Task, info: SourceInfo, verified: Verified, digest: str, *, full_range: bool) -> dict[str, Any]:
    timing = info.timing
    return {
        "source_id": task.source_id,
        "source_sha256": digest,
        "num_frames": verified.num_frames,
        "fps": str(timing.rate),
        "width": verified.width,
        "height": verified.height,
        "pix_fmt": "yuvj420p" if full_range else "yuv420p",
        "conforms": True,
        "source": {
            "container": info.container,
            "codec": info.codec,
            "width": info.width,
            "height": info.height,
            "pix_fmt": info.pix_fmt,
            "num_frames": timing.shown,
            "timing": timing.kind,
        },
    }


def _changes(info: SourceInfo, profile: Profile) -> Iterator[str]:
    """What was done to the picture and its clock beyond scaling down."""
    if info.timing.kind != "constant":
        yield f"timing-{info.timing.kind}"
    if info.timing.input_rate is not None and info.timing.input_rate != info.timing.rate:
        yield "rate-divided"
    if info.hdr:
        yield "tone-mapped"
    if info.interlaced:
        yield "deinterlaced"
    if info.rotation:
        yield "rotated"
    if profile.fps and Fraction(profile.fps) != info.timing.rate:
        yield "rate-changed"
    if min(info.width, info.height) < profile.short_side:
        yield "enlarged"


def _sha256(source: OpenSource) -> str:
    digest, position = hashlib.sha256(), 0
    while chunk := os.pread(source.descriptor, _CHUNK, position):
        digest.update(chunk)
        position += len(chunk)
    return digest.hexdigest()
