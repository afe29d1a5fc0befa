"""Reads and checks the packets of a clip.

Plans, fetches and decodes clips, in a decode thread or in a worker process.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple, Protocol, cast

from fastvid.decode.clips import PacketBuffer, coalesce, read_clip
from fastvid.decode.request import ClipRequest, Decoder, DecoderOutput, EncodedClip
from fastvid.decode.sound import EncodedAudio
from fastvid.errors import FastvidError
from fastvid.format.packets import StreamInfo, packet_offsets
from fastvid.format.schema import INPUT_PADDING
from fastvid.format.shard import Shard
from fastvid.load.clips.clip import BatchRow, Clip
from fastvid.load.clips.plan import ClipPlanner, SoundTask
from fastvid.load.memory import SharedRow
from fastvid.load.workers.stats import Counters
from fastvid.runtime.arrays import IntArray


def fetch(
    shard: Shard,
    row: int,
    request: ClipRequest,
    *,
    key: str,
    info: StreamInfo | None = None,
    gap: int | None = None,
    scratch: PacketBuffer | None = None,
) -> tuple[EncodedClip, Counters]:
    """Read and check the packets needed to decode a request; return them and their cost without times.

    `row`: row of the sample in the shard. `request`: frames and crop to decode. `gap`: packets at most this many
    bytes apart are read together; by default the storage's own value.
    """
    try:
        reader, table = shard.reader(row, request.stream), shard.table(row, request.stream)
        plan = table.plan(request.frames)
        read_all = partial(
            read_clip,
            request,
            info or shard.info(row, request.stream),
            table,
            reader,
            gap=reader.gap if gap is None else gap,
            limit=reader.size,
            plan=plan,
            scratch=scratch,
            key=key,
            shard=shard.stem,
        )
        clip = reader.checked(read_all)
    except FastvidError as error:
        error.at_sample(shard.stem, key)
        raise
    read, fed = len(clip.data) - INPUT_PADDING, len(plan.packets)
    return clip, Counters(
        bytes_read=read,
        bytes_whole=reader.size,
        requests=reader.requests,
        packets=fed,
        packets_from_keys=plan.packets_from_keys,
    )


def fetch_clip(clip: Clip, scratch: PacketBuffer | None = None) -> tuple[EncodedClip, Counters]:
    """Run `fetch` for a clip of a loader."""
    return fetch(clip.shard, clip.shard_row, clip.request, key=clip.key, info=clip.info, scratch=scratch)


def are_near(one: Clip, other: Clip) -> bool:
    """Return whether `fetch_together` may save requests for two clips."""
    shard = one.shard
    if other.shard is not shard or shard.storage.units is not None:
        return False
    return shard.are_near((one.shard_row, one.request.stream), (other.shard_row, other.request.stream))


def fetch_together(clips: Sequence[Clip]) -> list[tuple[EncodedClip, Counters]]:
    """Run `fetch_clip` for clips of one file: bytes that several need, or that are near each other, are read once."""
    shard = clips[0].shard
    readers = [shard.reader(clip.shard_row, clip.request.stream) for clip in clips]
    tables = [shard.table(clip.shard_row, clip.request.stream) for clip in clips]
    plans = [table.plan(clip.request.frames) for clip, table in zip(clips, tables, strict=True)]
    offsets, sizes = list[int](), list[int]()
    for reader, table, plan in zip(readers, tables, plans, strict=True):
        records = table.records[plan.packets]
        offsets += [reader.start + offset for offset in packet_offsets(records)]
        sizes += records["size"].tolist()
    gap = readers[0].gap
    runs = coalesce(offsets, sizes, gap)[1]
    data = [memoryview(bytearray(length)) for _, length in runs]
    readers[0].read_file([(start, view) for (start, _), view in zip(runs, data, strict=True)])
    starts = [start for start, _ in runs]
    found = []
    for clip, reader, table, plan in zip(clips, readers, tables, plans, strict=True):

        def read(ranges: Sequence[tuple[int, memoryview]], first: int = reader.start) -> None:
            for offset, view in ranges:
                run = bisect_right(starts, first + offset) - 1
                at = first + offset - starts[run]
                view[:] = data[run][at : at + len(view)]

        encoded = read_clip(
            clip.request,
            clip.info,
            table,
            read,
            gap=gap,
            limit=reader.size,
            plan=plan,
            key=clip.key,
            shard=shard.stem,
        )
        cost = Counters(bytes_whole=reader.size, packets=len(plan.packets), packets_from_keys=plan.packets_from_keys)
        found.append((encoded, cost))
    # What was read is counted with the first.
    found[0][1].bytes_read, found[0][1].requests = sum(map(len, data)), len(runs)
    return found


def fetch_sounds(sounds: Sequence[SoundTask], counters: Counters) -> tuple[SoundTask, ...]:
    """Read and check the packets of sounds, and add their cost, without `fetch_seconds`, to `counters`."""
    if not sounds:
        return ()
    begun = time.perf_counter()
    fetched = tuple(sound.fetched() for sound in sounds)
    for sound in fetched:
        if isinstance(sound.source, EncodedAudio):
            counters.bytes_read += sound.source.bytes_read
            counters.requests += sound.source.requests
    counters.audio_seconds += time.perf_counter() - begun
    return fetched


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
