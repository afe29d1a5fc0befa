"""Encodes one source and its clips into verified samples. The source is fetched, hashed and probed once.

Runs in the workers of every engine. A source that cannot be encoded becomes an outcome with a reason.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import copy
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar

import numpy as np

from fastvid.errors import SourceError
from fastvid.format.packets import StreamInfo
from fastvid.media.describe import TONE_MAP
from fastvid.media.probe import OpenSource, SourceInfo, private_copy, probe
from fastvid.media.reasons import Reason
from fastvid.runtime.values import sha256_of_file
from fastvid.sharding.encode.audio import DAMAGED, SampleAudio, audio_seconds, extract_audio, take_over_audio
from fastvid.sharding.encode.parts import (
    PartEnd,
    SourceFrames,
    compare_parts,
    numbered_part,
    part_ends,
    plan_parts,
    plan_runs,
    plan_window,
)
from fastvid.sharding.encode.profiles import DecodeWindow, Settings, upright_geometry, written_seconds, written_timing
from fastvid.sharding.encode.salvage import SALVAGEABLE, Salvaged, salvage
from fastvid.sharding.encode.transcode import decode_fully, decode_seconds, encode_flow, flow_seconds, transcode, verify
from fastvid.sharding.work.index import CopiedSource
from fastvid.sharding.work.tasks import (
    EncodedSample,
    Outcome,
    Report,
    SourceTask,
    open_task,
    refuse_blocked,
    stream_meta,
)

# Number of frames that frame-rate resampling may add or drop at the ends of a stream.
_RESAMPLED_SLACK: Final = 2
# Fraction of the frames that may be dropped without a warning when a variable rate becomes constant.
_MOST_DROPPED: Final = 0.1
# How often copying a source decodes it at most, for the time limit: to prove it unchanged, to find its packets, and to
# prove them in their new MP4.
_COPY_DECODES: Final = 15
# Maximum number of clips whose sound one run of ffmpeg extracts: each needs an encoder and a temporary file.
_SOUNDS: Final = 16

Begin = Callable[[Sequence[int]], None]
"""Called with the indices of the tasks that the worker works on from now on."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class PlannedClip:
    """A task, and the frames of each of its samples, see `plan_parts`."""

    task: SourceTask
    parts: Sequence[tuple[int, int] | None]


@dataclass(frozen=True, slots=True)
class Encoded:
    """The encoded parts of a clip."""

    videos: tuple[bytes, ...]
    window: DecodeWindow
    seconds: float


def encode_clips(tasks: Sequence[SourceTask], settings: Settings, report: Report, begin: Begin) -> Iterator[Outcome]:
    """Encode and verify clips of one source, and yield the outcome of each as soon as it is known.

    Fetches, hashes and probes the source once. Outcomes are the same as if each clip were encoded alone: if a run of
    ffmpeg over several clips fails, each clip is tried by itself. A bad source never raises; its errors are outcomes.
    """
    waiting = {
        task.index: task
        for task in sorted(tasks, key=lambda task: (task.start or 0.0, task.end or math.inf, task.index))
    }
    file: _ClipFile | None = None
    try:
        with ExitStack() as stack:
            source = stack.enter_context(open_task(tasks[0], settings.limits, report))
            file = _ClipFile(source, settings, tasks[0].patience, report, begin, stack)
            for outcome in file.outcomes(list(waiting.values())):
                del waiting[outcome.index]
                yield replace(outcome, source_sha256=file.digest)
    except (SourceError, MemoryError) as error:
        for task in waiting.values():
            yield replace(task.failure(error), source_sha256="" if file is None else file.digest)


class _ClipFile:
    """An open source, and what all clips of it share.

    If it seems to be damaged, the work is repeated on a copy, because FFmpeg reports disk errors like damage.
    """

    info: SourceInfo
    written: SourceInfo  # `info` with the frame rate and number of frames that are written

    def __init__(
        self, source: OpenSource, settings: Settings, patience: float, report: Report, begin: Begin, stack: ExitStack
    ) -> None:
        self.source, self.settings, self.digest = source, settings, ""
        self._patience, self._report, self._begin, self._stack = patience, report, begin, stack
        self._salvaged: Salvaged | None = None  # if this is the part that was salvaged from a damaged source
        self._first = 0  # then the number of its first frame in the damaged source
        self._frames: SourceFrames | None = None  # decodes the source's frames, once it is open
        self._sounds: dict[int, SampleAudio] = {}
        self._copied: CopiedSource | None = None

    def outcomes(self, tasks: Sequence[SourceTask]) -> Iterator[Outcome]:
        """Yield the outcome of each task; if damage rejects some, try them again with what can be salvaged."""
        damaged: dict[int, Outcome] = {}
        for outcome in self._outcomes(tasks):
            if outcome.reason in SALVAGEABLE and self.settings.max_bad_frames is not None:
                damaged[outcome.index] = outcome
            else:
                yield outcome
        if damaged:
            yield from self._salvage([task for task in tasks if task.index in damaged], damaged)

    def _outcomes(self, tasks: Sequence[SourceTask]) -> Iterator[Outcome]:
        try:
            self._judge(lambda: None)
        except SourceError as error:
            yield from (task.failure(error) for task in tasks)
            return
        if self.settings.profile.copies or tasks[0].copies:
            for task in tasks:
                self._begin([task.index])
                yield task.attempt(partial(self._judge, partial(self._copy, task)))
            return
        clips: list[PlannedClip] = []
        for task in tasks:
            try:
                clips.append(self._judge(partial(self._plan, task)))
            except SourceError as error:
                yield task.failure(error)
        for number, (clip, encoded) in enumerate(self._encoded(clips)):
            self._begin([clip.task.index])
            if number % _SOUNDS == 0:
                self._prepare_sound(clips[number : number + _SOUNDS])
            yield clip.task.attempt(partial(self._finish, clip, encoded))

    def _salvage(self, tasks: Sequence[SourceTask], rejected: Mapping[int, Outcome]) -> Iterator[Outcome]:
        settings = self.settings
        self._begin([task.index for task in tasks])
        try:
            kept = self._stack.enter_context(
                salvage(
                    self.source,  # a copy since it was found to be damaged, see `_judge`
                    settings.limits,
                    truncated=any(outcome.reason is Reason.TRUNCATED for outcome in rejected.values()),
                    sound=settings.streams.audio != "drop",
                    report=lambda seconds: self._report("salvage", self._patience * seconds),
                )
            )
        except SourceError as error:
            outcomes: Iterable[Outcome] = [task.failure(error) for task in tasks]
        else:
            file = copy(self)
            file.source, file._salvaged, file._frames = kept.source, kept, None
            outcomes = file._outcomes(tasks)
        for outcome in outcomes:
            before = rejected[outcome.index]
            if outcome.reason is None:
                yield replace(outcome, bytes_in=self.source.size)
            elif outcome.transient:
                yield outcome
            else:
                yield replace(before, message=f"{before.message}; {outcome.message}")

    def _judge(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work`; if the source seems to be damaged, copy it and call `work` again."""
        try:
            self._open()
            return work()
        except SourceError as error:
            if error.transient or self.source.private or error.reason == Reason.BLOCKED:
                raise
        seconds = self._patience * self.settings.limits.read_seconds(self.source.size)
        self._report("copy", seconds)
        self.source, self._frames = self._stack.enter_context(private_copy(self.source)), None
        self._report("probe", seconds)
        self._open()
        return work()

    def _open(self) -> None:
        if self._frames is not None:
            return
        profile = self.settings.profile
        if self._salvaged is None:
            self.digest = sha256_of_file(self.source.descriptor)
            refuse_blocked(self.digest, self.settings.blocked)
            self.info = probe(self.source, self.settings.limits)
        else:
            self.info = self._salvaged.info
            self._first = round(self._salvaged.begins * written_timing(self.info.timing, profile).rate)
        self.written = replace(self.info, timing=written_timing(self.info.timing, profile))
        self._frames, self._sounds, self._copied = SourceFrames(self.source, self.info), {}, None
        self._stack.callback(self._frames.close)

    def _plan(self, task: SourceTask) -> PlannedClip:
        """Return a task with the frames of its samples."""
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

    def _encoded(self, clips: Sequence[PlannedClip]) -> Iterator[tuple[PlannedClip, Encoded | None]]:
        """Yield each clip with its encoded parts; None if it did not share a run of ffmpeg, or that run failed."""
        for places in plan_runs(self.info, self.settings.profile, [clip.parts for clip in clips]):
            run = clips[places.start : places.stop]
            encoded: Sequence[Encoded | None] = [None] * len(run)
            if len(run) > 1:
                self._begin([clip.task.index for clip in run])
                with suppress(SourceError):  # then encode each clip by itself, to find out which one fails
                    self._open()
                    encoded = self._encode(run)
            yield from zip(run, encoded, strict=True)

    def _encode(self, clips: Sequence[PlannedClip], window: DecodeWindow | None = None) -> list[Encoded]:
        """Encode clips in one run of ffmpeg."""
        settings, patience = self.settings, self._patience
        parts = [part for clip in clips for part in clip.parts]
        window = window or plan_window(self.info, settings.profile, parts)
        # Allow more than ffmpeg's own time limit: the engine should kill this worker only if that limit does not work.
        self._report("encode", patience * decode_seconds(settings, self.info) + settings.limits.seconds)
        started = time.monotonic()
        videos = iter(transcode(settings, self.source, self.info, parts, window=window, patience=patience))
        share = (time.monotonic() - started) / len(clips)
        return [Encoded(tuple(islice(videos, len(clip.parts))), window, share) for clip in clips]

    def _finish(self, clip: PlannedClip, encoded: Encoded | None) -> Outcome:
        if encoded is not None:
            with suppress(SourceError):
                self._open()
                return replace(self._verify(clip, encoded), seconds=encoded.seconds)
        return self._judge(partial(self._encode_alone, clip))

    def _encode_alone(self, clip: PlannedClip) -> Outcome:
        """Encode one clip and verify it."""
        window = plan_window(self.info, self.settings.profile, clip.parts)
        if window.seek is not None:
            try:
                return self._verify(clip, self._encode([clip], window)[0])
            except SourceError as error:
                if error.transient:
                    raise
            # The container's index may be wrong: decode again from the first packet. That result is final.
        return self._verify(clip, self._encode([clip], window.from_start())[0])

    def _verify(self, clip: PlannedClip, encoded: Encoded) -> Outcome:
        """Verify the samples of a clip, and add their sound and flow."""
        task, settings, rate = clip.task, self.settings, self.written.timing.rate
        salvaged = self._salvaged if task.start is None and task.end is None else None
        seconds = settings.limits.seconds + decode_seconds(settings, self.info)
        self._report("verify", self._patience * 2 * seconds)
        checked = self._check(clip.parts, encoded)
        sound = None if settings.streams.audio == "drop" else self._sound(clip)
        made = []
        for number, (part, video, shape) in enumerate(zip(clip.parts, encoded.videos, checked, strict=True)):
            facts = stream_meta(shape, rate, settings.profile.pix_fmt, conforms=not (shape.width | shape.height) % 16)
            meta = _origin(task, self.info, self.digest) | facts
            if part is not None or self._salvaged is not None or task.parent is not None:
                start, end = part or (0, shape.num_frames)
                meta |= task.place(float((self._first + start) / rate), float((self._first + end) / rate))
            if salvaged is not None:
                meta["bad_frames"] = salvaged.bad_frames
            streams = {"rgb": video}
            if settings.streams.flow is not None:
                how = settings.streams.flow
                # The time limit of ffmpeg, and as much to decode what it wrote.
                allowed = 2 * flow_seconds(settings, how, shape) + settings.limits.seconds
                self._report("flow", self._patience * allowed)
                streams["flow"] = encode_flow(settings, how, video, shape, rate, self._patience)
                meta["flow"] = asdict(how)
            if sound and (track := sound.tracks[number]) is not None:
                streams["audio"], heard = track
                facts = {name: getattr(heard, name) for name in ("codec", "sample_rate", "channels")}
                meta["audio"] = {**facts, "copied": sound.copied}
            made.append(EncodedSample(_key(task, number, len(checked)), meta, streams))
        # No warning for a clip of a salvaged source: `_plan` accepts it only if it is inside.
        timing = self.written.timing
        short = task.cut_short((timing.frames + 1) / timing.rate) if self._salvaged is None else ()
        noted = () if salvaged is None else ("salvaged",)
        return Outcome(
            task.index,
            tuple(made),
            message="" if salvaged is None else salvaged.note,
            warnings=(*self._changes(), *short, *noted, *(sound.warnings if sound else ())),
            bytes_in=self.source.size,
        )

    def _changes(self) -> Iterator[str]:
        """Yield warnings for the ledger: changes to pictures and times other than scaling down."""
        info, profile = self.info, self.settings.profile
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
            yield "enlarged" if profile.enlarge else "kept-small"

    def _check(self, parts: Sequence[tuple[int, int] | None], encoded: Encoded) -> list[StreamInfo]:
        """Check each encoded part, and compare the ends of those that were cut with the source."""
        checked: list[StreamInfo] = []
        ends: list[PartEnd] = []
        rate, profile = self.written.timing.rate, self.settings.profile
        for part, video in zip(parts, encoded.videos, strict=True):
            shown: dict[bool, Any] = {}  # True: the first frame; False: the last one

            def keep(number: int, frame: Any, shown: dict[bool, Any] = shown) -> None:
                shown[number == 0] = frame

            frames = _expected(self.written, part)
            if part is not None and encoded.window.seek is not None:
                # Decoding from a key frame could miss frames, so the number must be exact.
                frames = (part[1] - part[0],) * 2
            size = upright_geometry(self.info, profile).cropped
            checked.append(verify(video, profile, frames=frames, rate=rate, size=size, on_frame=keep))
            if part is not None:
                ends += part_ends(self.info, self.written, part, (shown[True], shown.get(False, shown[True])))
        assert self._frames is not None
        compare_parts(self._frames, profile, ends)
        return checked

    def _copy(self, task: SourceTask) -> Outcome:
        """Copy a clip without encoding it."""
        settings, info, patience = self.settings, self.info, self._patience
        seconds = decode_seconds(settings, info)
        if self._copied is None:
            self._report("decode", patience * seconds + settings.limits.seconds)
            decode_fully(settings, self.source, info, patience)
            self._copied = CopiedSource(self.source, settings.limits, settings.profile.hdr)
        self._report("copy", patience * _COPY_DECODES * (settings.limits.seconds + seconds))
        copied = self._copied.cut(task.start, task.end, max_seconds=settings.max_seconds, frames=task.frames)
        samples, warnings = [], dict.fromkeys(note.partition(":")[0] for one in copied for note in one.notes)
        for number, one in enumerate(copied):
            meta = _origin(task, info, self.digest) | one.meta()
            if one.place is not None:
                meta |= task.place(*one.place)
            samples.append(EncodedSample(_key(task, number, len(copied)), meta, {"rgb": one.video}))
        remuxed = ["remuxed"] if any(one.remuxed for one in copied) else []
        notes = (*warnings, *task.cut_short((info.timing.frames + 1) / info.timing.rate), *remuxed)
        return Outcome(task.index, tuple(samples), warnings=notes, bytes_in=self.source.size)

    def _sound(self, clip: PlannedClip) -> SampleAudio:
        """Return the sound of each part of a clip."""
        if clip.task.sound is not None:
            data = clip.task.read_sound(self.settings.limits, self._report)
            return take_over_audio(data, len(clip.parts), float(self.written.timing.frames / self.written.timing.rate))
        return self._sounds.pop(clip.task.index, None) or self._extract([clip])

    def _prepare_sound(self, clips: Sequence[PlannedClip]) -> None:
        """Extract the sound of several clips in one run; if it is damaged anywhere, leave it to later runs per clip."""
        if self.settings.streams.audio == "drop" or len(clips) < 2:
            return
        with suppress(SourceError):
            self._open()
            sound = self._extract(clips)
            if DAMAGED not in sound.warnings:
                counts = [len(clip.parts) for clip in clips]
                self._sounds = {clip.task.index: one for clip, one in zip(clips, sound.split(counts), strict=True)}

    def _extract(self, clips: Sequence[PlannedClip]) -> SampleAudio:
        rate, frames = self.written.timing.rate, self.written.timing.frames
        parts = [part or (0, frames) for clip in clips for part in clip.parts]
        spans = [(first / rate, last / rate) for first, last in parts]
        limits, size = self.settings.limits, self.source.size
        # Allow time for two tries: if audio seems to be damaged, the source is copied, and the audio extracted again.
        seconds = 2 * (audio_seconds(self.source, spans, limits) + 2 * limits.seconds) + limits.read_seconds(size)
        self._report("audio", self._patience * seconds)
        return extract_audio(self.settings, self.source, spans, self._patience)


def _key(task: SourceTask, number: int, count: int) -> str:
    return task.key if count == 1 else f"{task.key}/{number:04d}"


def _expected(info: SourceInfo, part: tuple[int, int] | None) -> tuple[int, int]:
    first, last = part or (0, info.timing.frames)
    count = last - first
    if info.timing.input_rate is not None:
        return count, count
    return max(1, count - _RESAMPLED_SLACK), count + _RESAMPLED_SLACK


def _origin(task: SourceTask, info: SourceInfo, digest: str) -> dict[str, Any]:
    """Return the fields of a sample's JSON about its source: name, hash and properties."""
    facts = {name: getattr(info, name) for name in ("container", "codec", "width", "height", "pix_fmt")}
    facts |= {"num_frames": info.timing.shown, "timing": info.timing.kind}
    return {"source_id": task.source_id, "source_sha256": digest, "source": facts}
