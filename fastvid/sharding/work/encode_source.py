"""One source from file to verified samples: the work of a worker, whatever engine runs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, Final

import numpy as np

from fastvid.errors import SourceError
from fastvid.media.probe import SourceInfo, probe
from fastvid.media.reasons import Reason
from fastvid.media.source_file import OpenSource, private_copy
from fastvid.media.timing import FrameTiming
from fastvid.runtime.hashing import sha256_of_file
from fastvid.sharding.encode.audio import SampleAudio, audio_seconds, extract_audio
from fastvid.sharding.encode.check_encoded import Verified, verify
from fastvid.sharding.encode.compare_parts import PartEnd, compare_parts, part_ends
from fastvid.sharding.encode.flow_encode import encode_flow, flow_seconds
from fastvid.sharding.encode.profile import Profile
from fastvid.sharding.encode.profiles import written_timing
from fastvid.sharding.encode.transcode import decode_fully, transcode
from fastvid.sharding.work.attempt import Report, attempt
from fastvid.sharding.work.copy_source import copy_video
from fastvid.sharding.work.download import open_task
from fastvid.sharding.work.messages import EncodedSample, Outcome, Settings, Task

# Frames that resampling may add or drop at the ends of a stream.
_RESAMPLED_SLACK: Final = 2
# Part of the frames that a constant rate may drop from a variable one without a warning.
_MOST_DROPPED: Final = 0.1
# Decodes of a whole source that taking it over costs at most: to try it as it is, to find its packets, to prove them
# in their MP4.
_COPY_DECODES: Final = 15


def encode_source(task: Task, settings: Settings, report: Report) -> Outcome:
    """Probes, encodes and verifies one source. Never raises for what a source does."""

    def work() -> Outcome:
        with open_task(task, settings.limits, report) as source:
            try:
                return _encode(source, task, settings, report)
            except SourceError as error:
                if error.transient or source.private:
                    raise
            # FFmpeg takes an error of the disk for damage, so a source is judged by a copy without one.
            report("copy", task.patience * settings.limits.read_seconds(source.size))
            with private_copy(source) as copy:
                report("probe", task.patience * settings.limits.read_seconds(source.size))
                return _encode(copy, task, settings, report)

    return attempt(task, work)


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


def _encode(source: OpenSource, task: Task, settings: Settings, report: Report) -> Outcome:
    limits, profile = settings.limits, settings.profile
    size = source.size
    digest = sha256_of_file(source.descriptor)
    info = probe(source, limits)
    if profile.copies:
        samples, warnings = _copy(task, settings, source, info, digest, report)
        return Outcome(task.index, samples, warnings=warnings, bytes_in=size)
    written = replace(info, timing=written_timing(info.timing, profile))
    parts = plan_parts(written, task.start, task.end, settings.max_seconds)
    seconds = limits.transcode_seconds(frames=info.timing.shown, pixels=info.width * info.height)
    # ffmpeg has its own clock; the one outside strikes only when that one is stuck.
    report("encode", task.patience * seconds + limits.seconds)
    result = transcode(settings.build, profile, source, info, parts, limits, patience=task.patience)
    sound = _sound(source, settings, written, parts, task, report)
    report("verify", task.patience * (2 * limits.seconds + 2 * seconds))
    checked = _verify(source, info, written, profile, parts, result.videos)
    made = []
    for number, (part, video, verified) in enumerate(zip(parts, result.videos, checked, strict=True)):
        meta = _meta(task, written, verified, digest, full_range=profile.full_range)
        key = task.key
        if part is not None:
            start, end = (float(frame / written.timing.rate) for frame in part)
            meta |= _place(task, start, end)
            key = task.key if len(parts) == 1 else f"{task.key}/{number:04d}"
        streams = {"rgb": video}
        if settings.streams.flow is not None:
            streams["flow"] = _flow(video, verified, written, settings, task, report)
            meta["flow"] = asdict(settings.streams.flow)
        if (member := sound.members[number]) is not None and (heard := sound.infos[number]) is not None:
            streams["audio"] = member
            meta["audio"] = {
                "codec": heard.codec,
                "sample_rate": heard.sample_rate,
                "channels": heard.channels,
                "copied": sound.copied,
            }
        made.append(EncodedSample(key, meta, streams))
    warnings = (*_changes(info, profile), *_cut_short(task, written.timing), *sound.warnings)
    return Outcome(task.index, tuple(made), warnings=warnings, bytes_in=size)


def _verify(
    source: OpenSource,
    info: SourceInfo,
    written: SourceInfo,
    profile: Profile,
    parts: Sequence[tuple[int, int] | None],
    videos: Sequence[bytes],
) -> list[Verified]:
    """Check each encoded part, and compare the ends of those that were cut with the source."""
    checked: list[Verified] = []
    ends: list[PartEnd] = []
    for part, video in zip(parts, videos, strict=True):
        shown: dict[bool, Any] = {}  # whether it is the first frame -> that frame, or the last one

        def keep(number: int, frame: Any, shown: dict[bool, Any] = shown) -> None:
            shown[number == 0] = frame

        frames = _expected(written, part)
        checked.append(verify(video, profile, frames=frames, rate=written.timing.rate, on_frame=keep))
        if part is not None:
            ends += part_ends(info, written, part, (shown[True], shown.get(False, shown[True])))
    compare_parts(source, info, profile, ends)
    return checked


def _sound(
    source: OpenSource,
    settings: Settings,
    info: SourceInfo,
    parts: list[tuple[int, int] | None],
    task: Task,
    report: Report,
) -> SampleAudio:
    """The sound of each part of a source."""
    if settings.streams.audio == "drop":
        return SampleAudio.none(len(parts))
    rate = info.timing.rate
    spans = [(first / rate, last / rate) for first, last in (part or (0, info.timing.frames) for part in parts)]
    limits = settings.limits
    allowed = audio_seconds(source, spans, limits)
    # Damaged audio is copied and extracted a second time.
    report("audio", task.patience * (2 * (allowed + 2 * limits.seconds) + limits.read_seconds(source.size)))
    return extract_audio(settings.build, settings.streams.audio, source, spans, limits, patience=task.patience)


def _flow(video: bytes, verified: Verified, info: SourceInfo, settings: Settings, task: Task, report: Report) -> bytes:
    """The flow stream of a verified picture stream."""
    limits, how = settings.limits, settings.streams.flow
    assert how is not None
    seconds = flow_seconds(how, limits, frames=verified.num_frames, pixels=verified.width * verified.height)
    # ffmpeg has its own clock; then what was written is decoded once.
    report("flow", task.patience * (2 * seconds + limits.seconds))
    rate = info.timing.rate
    return encode_flow(settings.build, settings.profile, how, video, verified, rate, limits, patience=task.patience)


def _copy(
    task: Task, settings: Settings, source: OpenSource, info: SourceInfo, digest: str, report: Report
) -> tuple[tuple[EncodedSample, ...], tuple[str, ...]]:
    """Takes a source over without encoding it."""
    limits = settings.limits
    seconds = limits.transcode_seconds(frames=info.timing.shown, pixels=info.width * info.height)
    report("decode", task.patience * seconds + limits.seconds)
    decode_fully(settings.build, source, info, limits, patience=task.patience)
    report("copy", task.patience * _COPY_DECODES * (limits.seconds + seconds))
    copied = copy_video(source, limits, start=task.start, end=task.end, max_seconds=settings.max_seconds)
    samples, warnings = [], dict.fromkeys(note.partition(":")[0] for one in copied for note in one.notes)
    for number, one in enumerate(copied):
        meta = _origin(task, info, digest) | one.meta()
        if one.start is not None:
            meta |= _place(task, one.start, one.start + float(one.found.info.num_frames / one.found.info.fps))
        key = task.key if len(copied) == 1 else f"{task.key}/{number:04d}"
        samples.append(EncodedSample(key, meta, {"rgb": one.video}))
    return tuple(samples), (
        *warnings,
        *_cut_short(task, info.timing),
        *(["remuxed"] if any(one.remuxed for one in copied) else []),
    )


def _place(task: Task, start: float, end: float) -> dict[str, Any]:
    """Return where a part lies in its file."""
    return {"parent": task.parent or task.source_id, "start_seconds": start, "end_seconds": end}


def _cut_short(task: Task, timing: FrameTiming) -> Iterator[str]:
    """Yield a warning if a clip should begin before the video does, or end more than a frame after it."""
    ends_late = task.end is not None and task.end > (timing.frames + 1) / timing.rate
    if ends_late or (task.start is not None and task.start < 0):
        yield "clip-cut-short"


def _expected(info: SourceInfo, part: tuple[int, int] | None) -> tuple[int, int]:
    first, last = part or (0, info.timing.frames)
    count = last - first
    if info.timing.input_rate is not None:
        return count, count
    return max(1, count - _RESAMPLED_SLACK), count + _RESAMPLED_SLACK


def _meta(task: Task, info: SourceInfo, verified: Verified, digest: str, *, full_range: bool) -> dict[str, Any]:
    timing = info.timing
    return _origin(task, info, digest) | {
        "num_frames": verified.num_frames,
        "fps": str(timing.rate),
        "width": verified.width,
        "height": verified.height,
        "pix_fmt": "yuvj420p" if full_range else "yuv420p",
        "conforms": True,
    }


def _origin(task: Task, info: SourceInfo, digest: str) -> dict[str, Any]:
    """Where a sample comes from, and what was found there."""
    return {
        "source_id": task.source_id,
        "source_sha256": digest,
        "source": {
            "container": info.container,
            "codec": info.codec,
            "width": info.width,
            "height": info.height,
            "pix_fmt": info.pix_fmt,
            "num_frames": info.timing.shown,
            "timing": info.timing.kind,
        },
    }


def _changes(info: SourceInfo, profile: Profile) -> Iterator[str]:
    """What was done to the picture and its clock beyond scaling down."""
    if info.timing.kind != "constant":
        yield f"timing-{info.timing.kind}"
    if info.timing.input_rate is None:
        grid = np.rint((info.times - info.times[0]) * float(info.time_base * info.timing.rate))
        if len(np.unique(grid)) < len(grid) * (1 - _MOST_DROPPED):
            yield "frames-dropped"
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
