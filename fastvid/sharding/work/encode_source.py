"""One source and its clips: fetched, hashed and probed once, then encoded. The work of a worker of any engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from fastvid.errors import SourceError
from fastvid.media.probe import probe
from fastvid.media.reasons import Reason
from fastvid.media.source_file import OpenSource, private_copy
from fastvid.runtime.hashing import sha256_of_file
from fastvid.sharding.encode.salvage import SALVAGEABLE, salvage
from fastvid.sharding.work.attempt import Report, attempt, failure, refuse_blocked
from fastvid.sharding.work.download import open_task
from fastvid.sharding.work.encode_clip import ClipFile, Encoded, PlannedClip
from fastvid.sharding.work.messages import Outcome, Settings, SourceTask

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
