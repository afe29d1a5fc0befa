"""Fetches and decodes rows of batches, in a decode thread or in a worker process."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, Protocol

from fastvid.decode.clips import PacketBuffer, coalesce, read_clip
from fastvid.decode.request import ClipRequest, Decoder, DecoderOutput, EncodedClip
from fastvid.errors import FastvidError
from fastvid.format.packets import StreamInfo, packet_offsets
from fastvid.format.schema import INPUT_PADDING
from fastvid.format.shard import Shard
from fastvid.load.clips.plan import ClipPlace, SoundTask
from fastvid.load.memory import RgbRow, Stage
from fastvid.load.stats import Counters


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
    return clip, Counters(
        bytes_read=len(clip.data) - INPUT_PADDING,
        bytes_whole=reader.size,
        requests=reader.requests,
        packets=len(clip.starts),
        packets_from_keys=plan.packets_from_keys,
    )


def fetch_clip(row: Row, scratch: PacketBuffer | None = None) -> tuple[EncodedClip, Counters]:
    """Run `fetch` for a row of a batch, and read its sounds."""
    place = row.target.place(row.row)
    request = row.target.request(row.row)
    clip, counters = fetch(place.shard, place.row, request, key=place.key, info=place.info, scratch=scratch)
    if row.row in row.target.sounds:
        fetch_sounds(row, place, counters)
    return clip, counters


def are_near(one: ClipPlace, other: ClipPlace) -> bool:
    """Return whether `fetch_together` may save requests for two clips."""
    shard = one.shard
    if other.shard is not shard or shard.storage.units is not None:
        return False
    return shard.are_near((one.row, one.stream), (other.row, other.stream))


def fetch_together(rows: Sequence[Row]) -> list[tuple[EncodedClip, Counters]]:
    """Run `fetch_clip` for clips of one file: bytes that several need, or that are near each other, are read once."""
    places, requests = [row.target.place(row.row) for row in rows], [row.target.request(row.row) for row in rows]
    shard = places[0].shard
    readers = [shard.reader(place.row, place.stream) for place in places]
    tables = [shard.table(place.row, place.stream) for place in places]
    plans = [table.plan(request.frames) for request, table in zip(requests, tables, strict=True)]
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
    for row, place, request, reader, table, plan in zip(rows, places, requests, readers, tables, plans, strict=True):

        def read(ranges: Sequence[tuple[int, memoryview]], first: int = reader.start) -> None:
            for offset, view in ranges:
                run = bisect_right(starts, first + offset) - 1
                at = first + offset - starts[run]
                view[:] = data[run][at : at + len(view)]

        info, options = shard.info(place.row, place.stream), {"key": place.key, "shard": shard.stem}
        encoded = read_clip(request, info, table, read, gap=gap, limit=reader.size, plan=plan, **options)
        cost = Counters(bytes_whole=reader.size, packets=len(encoded.starts), packets_from_keys=plan.packets_from_keys)
        if row.row in row.target.sounds:
            fetch_sounds(row, place, cost)
        found.append((encoded, cost))
    # What was read is counted with the first.
    found[0][1].bytes_read += sum(map(len, data))
    found[0][1].requests += len(runs)
    return found


def fetch_sounds(row: Row, place: ClipPlace, counters: Counters) -> None:
    """Read and check the packets of a row's sounds, and add their cost, without `fetch_seconds`, to `counters`."""
    begun = time.perf_counter()
    for sound in row.target.sounds[row.row]:
        sound.read(place)
        if sound.packets is not None:
            counters.bytes_read += sound.packets.bytes_read
            counters.requests += sound.packets.requests
    counters.audio_seconds += time.perf_counter() - begun


FETCH_CLIPS: Final = 4
"""Clips that a thread fetches before it decodes them one by one. Decoding fills the CPU caches with its own code and
data, so that fetching after each decoded clip takes longer than fetching several in a row."""


class Target(Protocol):
    """A batch whose rows are made: a `fastvid.load.batch.canvas.Canvas`, or what a worker process has been sent."""

    packets: dict[int, EncodedClip]
    """What was read for rows before; others are read when they are made."""
    sounds: dict[int, Sequence[SoundTask]]
    """Sounds that are made together with a row."""

    def place(self, row: int, /) -> ClipPlace:
        """Return where the packets of a row are."""
        ...

    def request(self, row: int, /) -> ClipRequest:
        """Return what to decode for a row."""
        ...

    def output(self, row: int, kinds: Set[type], /) -> DecoderOutput | RgbRow:
        """Return where to write a clip: memory for a decoder that supports `kinds`."""
        ...


class Row(NamedTuple):
    """A clip to make: a row of a batch."""

    target: Target
    row: int
    number: int = 0  # counts the rows of an iteration in order


class Watch(Protocol):
    """What a lane is doing, for whoever waits for it: a `Watched`, or one that tells another process."""

    rows: Sequence[Row]
    """Those that are processed now; set by the lane."""

    @property
    def is_over(self) -> bool:
        """Whether the others are no longer needed."""
        ...


@dataclass(slots=True, eq=False)
class Watched:
    """A `Watch` in the same process."""

    rows: Sequence[Row] = ()
    is_over: bool = False


Done = Callable[[Row, Exception | None, Counters], None]
"""Called with a row once it is made, or with the error that it failed with, and what it cost."""


class Lane(Protocol):
    """Makes clips for one decode thread at a time: a `ClipWorker`, or a worker process that runs one."""

    max_clips: int
    """Maximum number of clips decoded in one call."""
    at_once: int
    """Preferred number of rows per call of `make`."""

    def make(self, rows: Sequence[Row], watch: Watch, done: Done) -> None:
        """Make rows, in any order; those that are not done are no longer needed."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


class Lanes:
    """A pool of lanes with one back-end, kept open between iterations."""

    def __init__(self, open_lane: Callable[[], Lane]) -> None:
        self._open = open_lane
        self._idle: list[Lane] = []
        self._lock = threading.Lock()

    def take(self) -> Lane:
        """Return a lane for exclusive use by the calling thread."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._open()

    def give(self, lane: Lane) -> None:
        """Return a lane to the pool."""
        with self._lock:
            self._idle.append(lane)

    def close(self) -> None:
        """Close the idle lanes."""
        with self._lock:
            idle, self._idle = self._idle, []
        for lane in idle:
            lane.close()


class ClipWorker:
    """A decoder and the memory that clips are read into. For one thread at a time."""

    at_once: int = FETCH_CLIPS

    def __init__(self, decoder: Decoder, max_clips: int | None = None) -> None:
        self.max_clips = max_clips or decoder.max_clips
        self._decoder = decoder
        self._scratches: list[PacketBuffer] = []
        self._stages = [Stage() for _ in range(self.max_clips)]

    def make(self, rows: Sequence[Row], watch: Watch, done: Done) -> None:
        """See `Lane`. All clips are fetched before the first is decoded, see `FETCH_CLIPS`."""
        self._scratches += [PacketBuffer() for _ in range(len(rows) - len(self._scratches))]
        fetched, clips, costs = list[Row](), list[EncodedClip](), list[Counters]()
        for row, scratch in zip(rows, self._scratches, strict=False):
            watch.rows = (row,)
            if watch.is_over:
                return
            counters, begun = Counters(), time.perf_counter()
            try:
                packets = row.target.packets.pop(row.row, None)
                if packets is None:
                    packets, counters = fetch_clip(row, scratch)
                    counters.fetch_seconds = time.perf_counter() - begun
            except Exception as error:  # noqa: BLE001 - belongs to this clip; the consumer handles it
                done(row, error, counters)
            else:
                fetched.append(row)
                clips.append(packets)
                costs.append(counters)
        for first in range(0, len(fetched), self.max_clips):
            some = slice(first, first + self.max_clips)
            watch.rows = fetched[some]
            if watch.is_over:
                return
            self._decode(fetched[some], clips[some], costs[some], done)

    def close(self) -> None:
        """Close the decoder."""
        self._decoder.close()

    def _decode(self, rows: Sequence[Row], clips: Sequence[EncodedClip], costs: Sequence[Counters], done: Done) -> None:
        errors: Sequence[Exception | None]
        begun, outputs, staged = time.perf_counter(), list[DecoderOutput](), dict[int, RgbRow]()
        try:
            for number, row in enumerate(rows):
                output = row.target.output(row.row, self._decoder.outputs)
                if isinstance(output, RgbRow):
                    staged[number] = output
                    output = self._stages[number].open(output)
                outputs.append(output)
            errors = self._decoder.decode(clips, outputs)
        except Exception as problem:  # noqa: BLE001 - a decoder that raises has failed all its clips
            errors = [problem] * len(rows)
        share = (time.perf_counter() - begun) / len(rows)
        for number, (row, counters, failure) in enumerate(zip(rows, costs, errors, strict=True)):
            error, begun = failure, time.perf_counter()
            if error is None and number in staged:
                self._stages[number].finish(staged[number])
                counters.finish_seconds = time.perf_counter() - begun
            if error is None and row.row in row.target.sounds:
                error, seconds = _sounded(row.target.sounds[row.row])
                counters.audio_seconds += seconds
                counters.decode_seconds += seconds
            counters.clips = int(error is None)
            counters.decode_seconds += share
            done(row, error, counters)


def _sounded(sounds: Sequence[SoundTask]) -> tuple[Exception | None, float]:
    """Decode sounds; return the error of the first that fails, and the seconds it took."""
    begun = time.perf_counter()
    try:
        for sound in sounds:
            sound.decode()
    except Exception as error:  # noqa: BLE001 - belongs to this clip; the consumer handles it
        return error, time.perf_counter() - begun
    return None, time.perf_counter() - begun
