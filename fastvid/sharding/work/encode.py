"""Which frames of its source a clip consists of.

The clips of one open source, from file to verified samples.

One source and its clips: fetched, hashed and probed once, then encoded. The work of a worker of any engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import islice, pairwise
from typing import Any, Final, TypeVar

import numpy as np

from fastvid.errors import SourceError
from fastvid.media.describe import TONE_MAP
from fastvid.media.probe import OpenSource, SourceInfo, private_copy, probe
from fastvid.media.reasons import Reason
from fastvid.media.timing import FrameTiming, clip_frames
from fastvid.runtime.arrays import FloatArray
from fastvid.runtime.values import sha256_of_file
from fastvid.sharding.encode.audio import DAMAGED, SampleAudio, audio_seconds, extract_audio, take_over_audio
from fastvid.sharding.encode.compare_parts import PartEnd, SourceFrames, compare_parts, part_ends
from fastvid.sharding.encode.profile import (
    DecodeWindow,
    Profile,
    plan_runs,
    plan_window,
    written_seconds,
    written_timing,
)
from fastvid.sharding.encode.salvage import SALVAGEABLE, Salvaged, salvage
from fastvid.sharding.encode.transcode import Verified, decode_fully, encode_flow, flow_seconds, transcode, verify
from fastvid.sharding.work.index import CopiedSource
from fastvid.sharding.work.tasks import (
    EncodedSample,
    Outcome,
    Report,
    Settings,
    SourceTask,
    attempt,
    failure,
    open_task,
    read_sound,
    refuse_blocked,
)


def plan_parts(
    timing: FrameTiming,
    start: float | None,
    end: float | None,
    max_seconds: float,
    seconds: FloatArray | None = None,
) -> list[tuple[int, int] | None]:
    """The frames of each sample of a source, as half-open ranges at the written rate; None for all frames.

    A long video is split into the fewest parts of equal length that keep the bound. `seconds`: when each frame is
    shown, float64 [N]; by default at the written rate.
    """
    total, rate = timing.frames, timing.rate
    seconds = np.arange(total) / float(rate) if seconds is None else seconds
    first, last = clip_frames(seconds, float(1 / rate), start, end)
    most = max(1, int(Fraction(max_seconds) * rate))
    count = -(-(last - first) // most)
    if count == 1:
        return [None] if (first, last) == (0, total) else [(first, last)]
    cuts = [first + (last - first) * number // count for number in range(count + 1)]
    return list(pairwise(cuts))


def numbered_part(info: SourceInfo, timing: FrameTiming, first: int, count: int) -> tuple[int, int] | None:
    """Return frames that are given by their numbers in the source, as `plan_parts` does."""
    if info.timing.input_rate is None or timing.rate != info.timing.input_rate:
        raise SourceError(
            f"frames cannot be numbered at a {info.timing.kind} rate that is written as {float(timing.rate):g} per"
            " second",
            reason=Reason.OUT_OF_RANGE,
        )
    if first + count > timing.frames:
        raise SourceError(
            f"frames {first} to {first + count} are not in a video of {timing.frames}", reason=Reason.OUT_OF_RANGE
        )
    return None if (first, count) == (0, timing.frames) else (first, first + count)


# Frames that resampling may add or drop at the ends of a stream.
_RESAMPLED_SLACK: Final = 2
# Part of the frames that a constant rate may drop from a variable one without a warning.
_MOST_DROPPED: Final = 0.1
# Decodes of a whole source that taking it over costs at most: to try it as it is, to find its packets, to prove them
# in their MP4.
_COPY_DECODES: Final = 15


@dataclass(frozen=True, slots=True)
class PlannedClip:
    """A task and the frames of its samples, see `plan_parts`."""

    task: SourceTask
    parts: Sequence[tuple[int, int] | None]


class ClipFile:
    """An open source, and what all clips of it share."""

    def __init__(
        self,
        source: OpenSource,
        digest: str,
        info: SourceInfo,
        settings: Settings,
        report: Report,
        salvaged: Salvaged | None = None,
    ) -> None:
        self.source, self.digest, self.info, self.settings, self.report = source, digest, info, settings, report
        self.written = replace(info, timing=written_timing(info.timing, settings.profile))
        self._salvaged = salvaged
        # Number of its first frame in the damaged source.
        self._first = 0 if salvaged is None else round(salvaged.begins * self.written.timing.rate)
        self._frames = SourceFrames(source, info)
        self._sounds: dict[int, SampleAudio] = {}
        self._copied: CopiedSource | None = None

    def close(self) -> None:
        """Close what has been opened besides the source."""
        self._frames.close()

    def clip(self, task: SourceTask) -> PlannedClip:
        """Return the frames of a task."""
        most, timing = self.settings.max_seconds, self.written.timing
        if self._salvaged is None or (task.start is None and task.end is None):
            if self._salvaged is not None:
                self._salvaged.check(self.settings.max_bad_frames or "0")
            if task.frames is not None:
                return PlannedClip(task, [numbered_part(self.info, timing, *task.frames)])
            seconds = written_seconds(self.info, timing)
            return PlannedClip(task, plan_parts(timing, task.start, task.end, most, seconds))
        ends = self._first + timing.frames
        parts = plan_parts(replace(timing, frames=ends), task.start, task.end, most)
        cut = [(first - self._first, last - self._first) for first, last in (part or (0, ends) for part in parts)]
        if cut[0][0] < 0 or task.end is None or round(Fraction(task.end) * timing.rate) > ends:
            raise SourceError("the clip lies outside the frames that are free of damage", reason=Reason.DAMAGED)
        return PlannedClip(task, cut)

    def runs(self, clips: Sequence[PlannedClip]) -> list[Sequence[PlannedClip]]:
        """Divide clips into those that one run of ffmpeg encodes; see `plan_runs`."""
        runs = plan_runs(self.info, self.settings.profile, [clip.parts for clip in clips])
        return [clips[run.start : run.stop] for run in runs]

    def encode(self, clips: Sequence[PlannedClip], window: DecodeWindow | None = None) -> list[Encoded]:
        """Encode clips in one run of ffmpeg."""
        limits, profile, patience = self.settings.limits, self.settings.profile, clips[0].task.patience
        parts = [part for clip in clips for part in clip.parts]
        window = window or plan_window(self.info, profile, parts)
        # ffmpeg has its own clock; the one outside strikes only when that one is stuck.
        self.report("encode", patience * self._seconds() + limits.seconds)
        result = transcode(
            self.settings.build, profile, self.source, self.info, parts, limits, window=window, patience=patience
        )
        videos, share = iter(result.videos), result.seconds / len(clips)
        return [Encoded(tuple(islice(videos, len(clip.parts))), window, share) for clip in clips]

    def encode_alone(self, clip: PlannedClip) -> Outcome:
        """Encode one clip and verify it."""
        window = plan_window(self.info, self.settings.profile, clip.parts)
        if window.seek is not None:
            try:
                return self.verify(clip, self.encode([clip], window)[0])
            except SourceError as error:
                if error.transient:
                    raise
            # The container's index may mislead. What a decode from the first packet says is final.
        return self.verify(clip, self.encode([clip], window.from_start())[0])

    def verify(self, clip: PlannedClip, encoded: Encoded) -> Outcome:
        """Verify the samples of a clip and add their other streams."""
        task, settings, written = clip.task, self.settings, self.written
        salvaged = self._salvaged if task.start is None and task.end is None else None
        self.report("verify", task.patience * (2 * settings.limits.seconds + 2 * self._seconds()))
        checked = self._check(clip.parts, encoded)
        sound = self._sound(clip)
        made = []
        for number, (part, video, verified) in enumerate(zip(clip.parts, encoded.videos, checked, strict=True)):
            meta = _meta(task, written, verified, self.digest, full_range=settings.profile.full_range)
            key = task.key
            if part is not None or self._salvaged is not None:
                start, end = part or (0, verified.num_frames)
                rate = written.timing.rate
                meta |= _place(task, float((self._first + start) / rate), float((self._first + end) / rate))
                key = task.key if len(clip.parts) == 1 else f"{task.key}/{number:04d}"
            if salvaged is not None:
                meta["bad_frames"] = salvaged.bad_frames
            streams = {"rgb": video}
            if settings.streams.flow is not None:
                streams["flow"] = _flow(video, verified, written, settings, task, self.report)
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
        changes = _changes(self.info, settings.profile)
        noted = [] if salvaged is None else ["salvaged"]
        # A clip of what is salvaged lies inside it.
        cut_short = _cut_short(task, written.timing) if self._salvaged is None else ()
        return Outcome(
            task.index,
            tuple(made),
            message="" if salvaged is None else salvaged.note,
            warnings=(*changes, *cut_short, *noted, *sound.warnings),
            bytes_in=self.source.size,
        )

    def copy(self, task: SourceTask) -> Outcome:
        """Take a clip over without encoding it."""
        limits, info = self.settings.limits, self.info
        seconds = self._seconds()
        if self._copied is None:
            self.report("decode", task.patience * seconds + limits.seconds)
            decode_fully(self.settings.build, self.source, info, limits, patience=task.patience)
            self._copied = CopiedSource(self.source, limits, self.settings.profile.hdr)
        self.report("copy", task.patience * _COPY_DECODES * (limits.seconds + seconds))
        copied = self._copied.cut(task.start, task.end, max_seconds=self.settings.max_seconds, frames=task.frames)
        samples, warnings = [], dict.fromkeys(note.partition(":")[0] for one in copied for note in one.notes)
        for number, one in enumerate(copied):
            meta = _origin(task, info, self.digest) | one.meta()
            if one.start is not None:
                meta |= _place(task, one.start, one.start + float(one.found.info.num_frames / one.found.info.fps))
            key = task.key if len(copied) == 1 else f"{task.key}/{number:04d}"
            samples.append(EncodedSample(key, meta, {"rgb": one.video}))
        remuxed = ["remuxed"] if any(one.remuxed for one in copied) else []
        notes = (*warnings, *_cut_short(task, info.timing), *remuxed)
        return Outcome(task.index, tuple(samples), warnings=notes, bytes_in=self.source.size)

    def prepare_sound(self, clips: Sequence[PlannedClip]) -> None:
        """Extract the sound of several clips in one pass; if it is damaged anywhere, of each by itself later."""
        if self.settings.streams.audio == "drop" or len(clips) < 2:
            return
        sound = self._extract([self._spans(clip) for clip in clips], clips[0].task.patience)
        if DAMAGED not in sound.warnings:
            counts = [len(clip.parts) for clip in clips]
            self._sounds = {clip.task.index: one for clip, one in zip(clips, sound.split(counts), strict=True)}

    def _seconds(self) -> float:
        """Return the time limit of one decode of the source."""
        pixels = self.info.width * self.info.height
        return self.settings.limits.transcode_seconds(frames=self.info.timing.shown, pixels=pixels)

    def _check(self, parts: Sequence[tuple[int, int] | None], encoded: Encoded) -> list[Verified]:
        """Check each encoded part, and compare the ends of those that were cut with the source."""
        checked: list[Verified] = []
        ends: list[PartEnd] = []
        for part, video in zip(parts, encoded.videos, strict=True):
            shown: dict[bool, Any] = {}  # whether it is the first frame -> that frame, or the last one

            def keep(number: int, frame: Any, shown: dict[bool, Any] = shown) -> None:
                shown[number == 0] = frame

            frames = _expected(self.written, part)
            if part is not None and encoded.window.seek is not None:
                # A frame that decoding from a key frame does not give would be missing.
                frames = (part[1] - part[0],) * 2
            rate, profile = self.written.timing.rate, self.settings.profile
            checked.append(verify(video, profile, frames=frames, rate=rate, on_frame=keep))
            if part is not None:
                ends += part_ends(self.info, self.written, part, (shown[True], shown.get(False, shown[True])))
        compare_parts(self._frames, self.settings.profile, ends)
        return checked

    def _sound(self, clip: PlannedClip) -> SampleAudio:
        """Return the sound of each part of a clip."""
        if self.settings.streams.audio == "drop":
            return SampleAudio.none(len(clip.parts))
        if clip.task.sound is not None:
            data = read_sound(clip.task, clip.task.sound, self.settings.limits, self.report)
            return take_over_audio(data, len(clip.parts), float(self.written.timing.frames / self.written.timing.rate))
        sound = self._sounds.pop(clip.task.index, None)
        return sound or self._extract([self._spans(clip)], clip.task.patience)

    def _spans(self, clip: PlannedClip) -> list[tuple[Fraction, Fraction]]:
        rate, frames = self.written.timing.rate, self.written.timing.frames
        return [(first / rate, last / rate) for first, last in (part or (0, frames) for part in clip.parts)]

    def _extract(self, spans: Sequence[Sequence[tuple[Fraction, Fraction]]], patience: float) -> SampleAudio:
        every = [span for one in spans for span in one]
        settings, limits, source = self.settings, self.settings.limits, self.source
        allowed = audio_seconds(source, every, limits)
        # Damaged audio is copied and extracted a second time.
        self.report("audio", patience * (2 * (allowed + 2 * limits.seconds) + limits.read_seconds(source.size)))
        return extract_audio(settings.build, settings.streams.audio, source, every, limits, patience=patience)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The encoded parts of a clip."""

    videos: tuple[bytes, ...]
    window: DecodeWindow
    seconds: float


def _flow(
    video: bytes, verified: Verified, info: SourceInfo, settings: Settings, task: SourceTask, report: Report
) -> bytes:
    """The flow stream of a verified picture stream."""
    limits, how = settings.limits, settings.streams.flow
    assert how is not None
    seconds = flow_seconds(how, limits, frames=verified.num_frames, pixels=verified.width * verified.height)
    # ffmpeg has its own clock; then what was written is decoded once.
    report("flow", task.patience * (2 * seconds + limits.seconds))
    rate = info.timing.rate
    return encode_flow(settings.build, settings.profile, how, video, verified, rate, limits, patience=task.patience)


def _place(task: SourceTask, start: float, end: float) -> dict[str, Any]:
    """Return where a part lies in its file."""
    return {"parent": task.parent or task.source_id, "start_seconds": start, "end_seconds": end}


def _cut_short(task: SourceTask, timing: FrameTiming) -> Iterator[str]:
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


def _meta(task: SourceTask, info: SourceInfo, verified: Verified, digest: str, *, full_range: bool) -> dict[str, Any]:
    timing = info.timing
    return _origin(task, info, digest) | {
        "num_frames": verified.num_frames,
        "fps": str(timing.rate),
        "width": verified.width,
        "height": verified.height,
        "pix_fmt": "yuvj420p" if full_range else "yuv420p",
        "conforms": True,
    }


def _origin(task: SourceTask, info: SourceInfo, digest: str) -> dict[str, Any]:
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
        yield "tone-mapped" if profile.hdr == TONE_MAP else "hdr-kept"
    if info.interlaced:
        yield "deinterlaced"
    if not info.orientation.is_upright:
        yield "rotated"
    if info.cropped:
        yield "cropped"
    if profile.fps and Fraction(profile.fps) != info.timing.rate:
        yield "rate-changed"
    if min(info.width, info.height) < profile.short_side:
        yield "enlarged"


Result = TypeVar("Result")
# Clips whose sound one pass extracts: each has an encoder and a temporary file.
_SOUNDS: Final = 16


def encode_source(task: SourceTask, settings: Settings, report: Report) -> Outcome:
    """Encode and verify one source, or one clip of it. Never raises for what a source does."""
    (outcome,) = encode_clips([task], settings, report, lambda _tasks: None)
    return outcome


def encode_clips(
    tasks: Sequence[SourceTask], settings: Settings, report: Report, begin: Callable[[Sequence[int]], None]
) -> Iterator[Outcome]:
    """Encode and verify clips of one source, and yield the outcome of each as soon as it is known.

    Fetches, hashes and probes the source once. The bytes of a clip and the verdict on it are those of the clip encoded
    alone: if a run over several clips fails, each is tried by itself. Never raises for what a source does.
    """
    waiting = {
        task.index: task
        for task in sorted(tasks, key=lambda task: (task.start or 0.0, task.end or math.inf, task.index))
    }
    judge: _Judge | None = None
    try:
        with ExitStack() as stack:
            source = stack.enter_context(open_task(tasks[0], settings.limits, report))
            judge = _Judge(source, tasks[0], settings, report, stack)
            for outcome in judge.outcomes(list(waiting.values()), begin):
                del waiting[outcome.index]
                yield replace(outcome, source_sha256=judge.digest)
    except (SourceError, MemoryError) as error:
        for task in waiting.values():
            yield replace(failure(task, error), source_sha256="" if judge is None else judge.digest)


class _Judge:
    """Judges a source, if it seems damaged, by a copy: FFmpeg takes an error of the disk for damage."""

    def __init__(
        self, source: OpenSource, task: SourceTask, settings: Settings, report: Report, stack: ExitStack
    ) -> None:
        self._source, self._task, self._settings, self._report, self._stack = source, task, settings, report, stack
        self._file: ClipFile | None = None
        self.digest = ""

    def outcomes(self, tasks: Sequence[SourceTask], begin: Callable[[Sequence[int]], None]) -> Iterator[Outcome]:
        """Yield the outcome of each task; those that damage rejects are tried again with what can be salvaged."""
        damaged: dict[int, Outcome] = {}
        for outcome in self._outcomes(tasks, begin):
            if outcome.reason in SALVAGEABLE and self._settings.max_bad_frames is not None:
                damaged[outcome.index] = outcome
            else:
                yield outcome
        if damaged:
            yield from self._salvaged([task for task in tasks if task.index in damaged], damaged, begin)

    def _salvaged(
        self, tasks: Sequence[SourceTask], rejected: Mapping[int, Outcome], begin: Callable[[Sequence[int]], None]
    ) -> Iterator[Outcome]:
        settings, size = self._settings, self._source.size
        begin([task.index for task in tasks])
        try:
            kept = self._stack.enter_context(
                salvage(
                    self._source,  # a copy since it was found to be damaged, see `_run`
                    settings.limits,
                    truncated=any(outcome.reason is Reason.TRUNCATED for outcome in rejected.values()),
                    sound=settings.streams.audio != "drop",
                    report=lambda seconds: self._report("salvage", self._task.patience * seconds),
                )
            )
        except SourceError as error:
            outcomes: Iterable[Outcome] = [failure(task, error) for task in tasks]
        else:
            self._source = kept.source
            self._file = ClipFile(kept.source, self.digest, kept.info, settings, self._report, kept)
            self._stack.callback(self._file.close)
            outcomes = self._outcomes(tasks, begin)
        for outcome in outcomes:
            before = rejected[outcome.index]
            if outcome.reason is None:
                yield replace(outcome, bytes_in=size)
            elif outcome.transient:
                yield outcome
            else:
                yield replace(before, message=f"{before.message}; {outcome.message}")

    def _outcomes(self, tasks: Sequence[SourceTask], begin: Callable[[Sequence[int]], None]) -> Iterator[Outcome]:
        try:
            self._run(lambda _file: None)
        except SourceError as error:
            yield from (failure(task, error) for task in tasks)
            return
        if self._settings.profile.copies or tasks[0].copies:
            for task in tasks:
                begin([task.index])
                yield attempt(task, partial(self._run, partial(ClipFile.copy, task=task)))
            return
        clips: list[PlannedClip] = []
        for task in tasks:
            try:
                clips.append(self._run(partial(ClipFile.clip, task=task)))
            except SourceError as error:
                yield failure(task, error)
        for number, (clip, encoded) in enumerate(self._encoded(clips, begin)):
            begin([clip.task.index])
            if number % _SOUNDS == 0:
                self._prepare_sound(clips[number : number + _SOUNDS])
            yield attempt(clip.task, partial(self._finish, clip, encoded))

    def _encoded(
        self, clips: Sequence[PlannedClip], begin: Callable[[Sequence[int]], None]
    ) -> Iterator[tuple[PlannedClip, Encoded | None]]:
        """Yield the clips, those that share a run of ffmpeg with what it encoded if nothing failed."""
        for run in self._run(partial(ClipFile.runs, clips=clips)):
            encoded: Sequence[Encoded | None] = [None] * len(run)
            if len(run) > 1:
                begin([clip.task.index for clip in run])
                with suppress(SourceError):  # each by itself shows whose fault it is
                    encoded = self._opened().encode(run)
            yield from zip(run, encoded, strict=True)

    def _finish(self, clip: PlannedClip, encoded: Encoded | None) -> Outcome:
        if encoded is not None:
            with suppress(SourceError):
                return replace(self._opened().verify(clip, encoded), seconds=encoded.seconds)
        return self._run(partial(ClipFile.encode_alone, clip=clip))

    def _prepare_sound(self, clips: Sequence[PlannedClip]) -> None:
        with suppress(SourceError):
            self._opened().prepare_sound(clips)

    def _run(self, work: Callable[[ClipFile], Result]) -> Result:
        """Run a function on the source, and if that seems damaged, on a copy."""
        try:
            return work(self._opened())
        except SourceError as error:
            if error.transient or self._source.private or error.reason == Reason.BLOCKED:
                raise
        seconds = self._task.patience * self._settings.limits.read_seconds(self._source.size)
        self._report("copy", seconds)
        self._source, self._file = self._stack.enter_context(private_copy(self._source)), None
        self._report("probe", seconds)
        return work(self._opened())

    def _opened(self) -> ClipFile:
        if self._file is None:
            self.digest = sha256_of_file(self._source.descriptor)
            refuse_blocked(self.digest, self._settings.blocked)
            info = probe(self._source, self._settings.limits)
            self._file = ClipFile(self._source, self.digest, info, self._settings, self._report)
            self._stack.callback(self._file.close)
        return self._file
