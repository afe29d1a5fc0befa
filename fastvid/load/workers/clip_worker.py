"""Decides, fetches and decodes clips: what a decode thread calls, and what a worker process loops over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, cast

from fastvid.decode.clips import PacketBuffer
from fastvid.decode.request import Decoder, EncodedClip, Output
from fastvid.load.clips.clip import Clip, Row
from fastvid.load.clips.planner import ClipPlanner
from fastvid.load.memory.row_layout import SharedRow
from fastvid.load.workers.fetch import fetch_clip
from fastvid.load.workers.stats import Counters
from fastvid.runtime.arrays import IntArray

FETCH_CLIPS: Final = 4
"""Clips that a thread fetches before it decodes them one by one. A decoder fills the caches with its own code and data,
after which fetching a single clip takes 2 to 3 times as long as fetching the next one."""


class Target(Protocol):
    """The memory that clips are written into, such as a `fastvid.load.batch.canvas.Canvas`."""

    def output(self, row: int, kinds: Set[type], /) -> Output | SharedRow:
        """Where a decoder that writes some of `kinds` puts a clip, or a process the whole row."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One clip to make.

    Attributes:
        row: Its row of the target.
        source: What it is made of: a row to decide, a `Clip` to fetch, or packets to decode.
        target: Where it goes.
    """

    row: int
    source: Row | EncodedClip
    target: Target


class Made(NamedTuple):
    """What became of a task.

    Attributes:
        number: Which task.
        error: Why it failed, if it did.
        frames: Frames that it shows, int64 [T], where the worker decided them.
        counters: What it cost, or what several did of which this is the first; None where they were counted before.
    """

    number: int
    error: Exception | None
    frames: IntArray | None
    counters: Counters | None


At = Callable[[Sequence[int]], bool]
"""Told the numbers of the tasks that are worked on from now on; returns whether anybody still wants them."""


class Lane(Protocol):
    """Makes clips for one decode thread at a time: a `ClipWorker`, or a process that runs one."""

    max_clips: int
    """The most clips that are decoded in one call."""
    at_once: int
    """Clips that it takes best at once."""

    def make(self, tasks: Sequence[Task], at: At, planner: ClipPlanner | None) -> Iterator[Made]:
        """Yields each task as it is done, in any order; the planner decides rows that are not decided yet."""
        ...

    def close(self) -> None:
        """Frees everything."""
        ...


class ClipWorker:
    """A decoder with the memory that clips are read into. For one thread at a time.

    Args:
        decoder: Decodes, and is closed with the worker.
        max_clips: The most clips of one call of the decoder; by default as many as it takes.
    """

    at_once: int = FETCH_CLIPS

    def __init__(self, decoder: Decoder, max_clips: int | None = None) -> None:
        self.max_clips = max_clips or decoder.max_clips
        self._decoder = decoder
        self._scratches: list[PacketBuffer] = []

    def make(self, tasks: Sequence[Task], at: At, planner: ClipPlanner | None = None) -> Iterator[Made]:
        """See `Lane`. All clips are fetched before the first one is decoded, see `FETCH_CLIPS`."""
        fetched: list[tuple[Made, Task, EncodedClip]] = []
        for number, task in enumerate(tasks):
            if not at([number]):
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
                    counters.fetch_seconds = time.perf_counter() - begun
            except Exception as error:  # noqa: BLE001 - belongs to this clip; the consumer decides
                yield Made(number, error, None, counters)
            else:
                fetched.append((Made(number, None, frames, counters), task, source))
        for first in range(0, len(fetched), self.max_clips):
            group = fetched[first : first + self.max_clips]
            if not at([made.number for made, _, _ in group]):
                return
            yield from self._decode(group)

    def close(self) -> None:
        """Closes the decoder."""
        self._decoder.close()

    def _decode(self, group: Sequence[tuple[Made, Task, EncodedClip]]) -> Iterator[Made]:
        errors: Sequence[Exception | None]
        begun = time.perf_counter()
        try:
            outputs = [cast("Output", task.target.output(task.row, self._decoder.outputs)) for _, task, _ in group]
            errors = self._decoder.decode([clip for _, _, clip in group], outputs)
        except Exception as problem:  # noqa: BLE001 - a decoder that raises has failed all its clips
            errors = [problem] * len(group)
        share = (time.perf_counter() - begun) / len(group)
        for (made, _, _), error in zip(group, errors, strict=True):
            assert made.counters is not None
            made.counters.clips, made.counters.decode_seconds = int(error is None), share
            yield made._replace(error=error, frames=None if error else made.frames)

    def _scratch(self, number: int) -> PacketBuffer:
        while number >= len(self._scratches):
            self._scratches.append(PacketBuffer())
        return self._scratches[number]
