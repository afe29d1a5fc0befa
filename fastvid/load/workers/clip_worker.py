"""Plans, fetches and decodes clips, in a decode thread or in a worker process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol, cast

from fastvid.decode.clips import PacketBuffer
from fastvid.decode.request import Decoder, DecoderOutput, EncodedClip
from fastvid.load.clips.clip import BatchRow, Clip
from fastvid.load.clips.planner import ClipPlanner
from fastvid.load.clips.sound import SoundTask
from fastvid.load.memory.row_layout import SharedRow
from fastvid.load.workers.fetch import fetch_clip, fetch_sounds
from fastvid.load.workers.stats import Counters
from fastvid.runtime.arrays import IntArray

FETCH_CLIPS: Final = 4
"""Clips that a thread fetches before it decodes them one by one. Decoding fills the CPU caches with its own code and
data, so that fetching after each decoded clip takes longer than fetching several in a row."""


class Target(Protocol):
    """Memory that clips are written into, for example a `fastvid.load.batch.canvas.Canvas`."""

    def output(self, row: int, kinds: Set[type], /) -> DecoderOutput | SharedRow:
        """Return where to write a clip: memory for a decoder that supports `kinds`, or a row shared with processes."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ClipTask:
    """One clip to make."""

    row: int  # its row of the target
    source: BatchRow | EncodedClip  # A row to plan, a `Clip` to fetch, or packets to decode
    target: Target
    # sounds to make with it, one for each of the batch's rows that it becomes.
    sounds: Sequence[SoundTask] = field(default=(), kw_only=True)


class ClipResult(NamedTuple):
    """The result of a task."""

    number: int
    error: Exception | None
    frames: IntArray | None  # frames shown, int64 [T]; None if the worker did not plan the clip
    counters: Counters | None


KeepGoing = Callable[[Sequence[int]], bool]
"""Called with the numbers of the tasks that are processed next; returns False if their results are no longer needed."""


class Lane(Protocol):
    """Makes clips for one decode thread at a time: a `ClipWorker`, or a worker process that runs one."""

    max_clips: int
    """Maximum number of clips decoded in one call."""
    at_once: int
    """Preferred number of tasks per call of `make`."""

    def make(
        self, tasks: Sequence[ClipTask], keep_going: KeepGoing, planner: ClipPlanner | None
    ) -> Iterator[ClipResult]:
        """Yield a result as each task finishes, in any order; `planner` plans rows that are not planned yet."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


class ClipWorker:
    """A decoder and the memory that clips are read into. For one thread at a time."""

    at_once: int = FETCH_CLIPS

    def __init__(self, decoder: Decoder, max_clips: int | None = None) -> None:
        self.max_clips = max_clips or decoder.max_clips
        self._decoder = decoder
        self._scratches: list[PacketBuffer] = []

    def make(
        self, tasks: Sequence[ClipTask], keep_going: KeepGoing, planner: ClipPlanner | None = None
    ) -> Iterator[ClipResult]:
        """See `Lane`. All clips are fetched before the first is decoded, see `FETCH_CLIPS`."""
        fetched: list[tuple[ClipResult, ClipTask, EncodedClip]] = []
        for number, task in enumerate(tasks):
            if not keep_going([number]):
                return
            source, frames, counters = task.source, None, Counters()
            try:
                if not isinstance(source, EncodedClip):
                    begun = time.perf_counter()
                    clip = source
                    if not isinstance(clip, Clip):
                        assert planner is not None
                        (clip,) = planner.decide(clip)
                        frames = clip.frames
                    source, counters = fetch_clip(clip, self._scratch(number))
                    if task.sounds:
                        task = replace(task, sounds=fetch_sounds(task.sounds, counters))
                    counters.fetch_seconds = time.perf_counter() - begun
            except Exception as error:  # noqa: BLE001 - belongs to this clip; the consumer handles it
                yield ClipResult(number, error, None, counters)
            else:
                fetched.append((ClipResult(number, None, frames, counters), task, source))
        for first in range(0, len(fetched), self.max_clips):
            group = fetched[first : first + self.max_clips]
            if not keep_going([made.number for made, _, _ in group]):
                return
            yield from self._decode(group)

    def close(self) -> None:
        """Close the decoder."""
        self._decoder.close()

    def _decode(self, group: Sequence[tuple[ClipResult, ClipTask, EncodedClip]]) -> Iterator[ClipResult]:
        errors: Sequence[Exception | None]
        begun = time.perf_counter()
        try:
            outputs = [
                cast("DecoderOutput", task.target.output(task.row, self._decoder.outputs)) for _, task, _ in group
            ]
            errors = self._decoder.decode([clip for _, _, clip in group], outputs)
        except Exception as problem:  # noqa: BLE001 - a decoder that raises has failed all its clips
            errors = [problem] * len(group)
        share = (time.perf_counter() - begun) / len(group)
        for (made, task, _), failure in zip(group, errors, strict=True):
            assert made.counters is not None
            error, seconds = _sounded(task.sounds) if failure is None else (failure, 0.0)
            made.counters.clips, made.counters.decode_seconds = int(error is None), share + seconds
            made.counters.audio_seconds += seconds
            yield made._replace(error=error, frames=None if error else made.frames)

    def _scratch(self, number: int) -> PacketBuffer:
        while number >= len(self._scratches):
            self._scratches.append(PacketBuffer())
        return self._scratches[number]


def _sounded(sounds: Sequence[SoundTask]) -> tuple[Exception | None, float]:
    """Decode sounds; return the error of the first that fails, and the seconds it took."""
    if not sounds:
        return None, 0.0
    begun = time.perf_counter()
    try:
        for sound in sounds:
            sound.decode()
    except Exception as error:  # noqa: BLE001 - belongs to this clip; the consumer handles it
        return error, time.perf_counter() - begun
    return None, time.perf_counter() - begun
