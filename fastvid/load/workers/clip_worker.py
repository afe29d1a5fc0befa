"""Fetches and decodes rows of batches, in a decode thread or in a worker process. A row is one clip of a batch."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from operator import add
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from fastvid.decode.clips import PacketBuffer, coalesce, read_clip, room_for, verified
from fastvid.decode.request import ClipRequest, Decoder, DecoderOutput, EncodedClip, Rgb
from fastvid.errors import FastvidError, FormatError
from fastvid.format.packets import PacketPlan, StreamInfo, packet_offsets
from fastvid.format.schema import INPUT_PADDING
from fastvid.format.shard import Shard, StreamReader
from fastvid.load.clips.plan import ClipPlace, SoundTask
from fastvid.load.memory import DecodeBuffer, RgbRow
from fastvid.load.stats import Counters
from fastvid.runtime.arrays import RecordArray


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
    """Read and check the packets needed to decode a request; return them and counters, without times.

    `row`: row of the sample in the shard. `request`: frames and crop to decode. `gap`: packets at most this many
    bytes apart are read together; by default the storage's own value. `scratch`: reused memory for the packets.
    """
    try:
        reader, table = shard.reader(row, request.stream), shard.table(row, request.stream)
        plan = table.plan(request.frames)
        info, gap = info or shard.info(row, request.stream), reader.gap if gap is None else gap
        read = partial(read_clip, request, info, table, reader, gap=gap, limit=reader.size, plan=plan)
        clip = reader.checked(partial(read, scratch=scratch, key=key, shard=shard.stem))
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


def are_near(one: ClipPlace, other: ClipPlace) -> bool:
    """Return whether `fetch_together` may save requests for two clips."""
    shard = one.shard
    if other.shard is not shard or shard.storage.units is not None:
        return False
    return shard.are_near((one.row, one.stream), (other.row, other.stream))


Fetched = tuple[EncodedClip, Counters] | Exception
"""The packets read for a row and their cost, or the error of the row."""

_FILE: Final = 1 << 64
"""More bytes than any file has. `fetch_together` gives each file such a range of offsets of its own."""


def fetch_rows(rows: Sequence[Row], scratch: PacketBuffer | None = None) -> list[Fetched]:
    """Read the packets of some rows, in one pass where that is possible, see `fetch_together`."""
    if len(rows) > 1:
        # If anything fails, read clip by clip, so that each clip gets its own error.
        with contextlib.suppress(Exception):
            return list(fetch_together(rows, scratch))
        scratch = None
    return [_fetch_one(row, scratch) for row in rows]


def _fetch_one(row: Row, scratch: PacketBuffer | None) -> Fetched:
    begun = time.perf_counter()
    try:
        place, request = row.target.place(row.row), row.target.request(row.row)
        clip, counters = fetch(place.shard, place.row, request, key=place.key, info=place.info, scratch=scratch)
        if row.row in row.target.sounds:
            fetch_sounds(row, place, counters)
    except Exception as error:  # noqa: BLE001 - belongs to this clip; the consumer handles it
        return error
    counters.fetch_seconds = time.perf_counter() - begun
    return clip, counters


def _part_of(row: Row) -> tuple[Row, ClipPlace, ClipRequest, StreamReader, PacketPlan, RecordArray]:
    """Return what `fetch_together` reads for one row."""
    place, request = row.target.place(row.row), row.target.request(row.row)
    reader, table = place.shard.stream(place.row, place.stream)
    plan = table.plan(request.frames)
    return row, place, request, reader, plan, table.records[plan.packets]


def fetch_together(rows: Sequence[Row], scratch: PacketBuffer | None = None) -> list[tuple[EncodedClip, Counters]]:
    """Read the packets of several rows in one pass: bytes that several need, or that are near, are read once.

    `scratch`: reused memory for the packets. Raises an error if any row fails, or if this node caches videos' bytes.
    """
    begun, parts = time.perf_counter(), list(map(_part_of, rows))
    files = {reader.source: reader for _, _, _, reader, _, _ in parts}
    firsts = {source: number * _FILE for number, source in enumerate(files)}
    offsets, sizes = list[int](), list[int]()
    for _, _, _, reader, _, records in parts:
        own, lengths = packet_offsets(records), records["size"].tolist()
        if reader.source is None or max(map(add, own, lengths)) > reader.size:
            raise FormatError("packets are cached, or outside the sample's bytes")
        offsets += map((firsts[reader.source] + reader.start).__add__, own)
        sizes += lengths
    starts, runs = coalesce(offsets, sizes, min(reader.gap for reader in files.values()))
    data, ranges = room_for(runs, scratch)
    readers = list(files.values())
    for number, some in itertools.groupby(ranges, key=lambda one: one[0] // _FILE):
        readers[number].read_file([(at % _FILE, view) for at, view in some])
    stop, found = 0, list[tuple[EncodedClip, Counters]]()
    for row, place, request, reader, plan, records in parts:
        at, stop = stop, stop + len(records)
        info = place.info or place.shard.info(place.row, place.stream)
        # Only the bytes between its own packets: what searches or sends a clip must not do so with those of the others.
        own, lengths = starts[at:stop], sizes[at:stop]
        first, end = min(own), max(map(add, own, lengths))
        part = data[first : end + INPUT_PADDING]
        places = np.array([[start - first for start in own], lengths], dtype=np.int64)
        clip = verified(request, info, plan, records, part, places, place.key, place.shard.stem)
        cost = Counters(bytes_whole=reader.size, packets=len(clip.starts), packets_from_keys=plan.packets_from_keys)
        if row.row in row.target.sounds:
            fetch_sounds(row, place, cost)
        found.append((clip, cost))
    # What all clips read together is counted with the first.
    cost = found[0][1]
    cost.bytes_read, cost.requests = cost.bytes_read + len(data) - INPUT_PADDING, cost.requests + len(runs)
    cost.fetch_seconds = time.perf_counter() - begun
    return found


def fetch_sounds(row: Row, place: ClipPlace, counters: Counters) -> None:
    """Read and check the packets of a row's sounds; add their cost to `counters`, with `audio_seconds` as the time."""
    begun = time.perf_counter()
    for sound in row.target.sounds[row.row]:
        sound.read(place)
        if sound.packets is not None:
            counters.bytes_read += sound.packets.bytes_read
            counters.requests += sound.packets.requests
    counters.audio_seconds += time.perf_counter() - begun


FETCH_CLIPS: Final = 16
"""Clips that a thread fetches before it decodes them. Decoding fills the CPU caches with its own code and data, so
fetching a clip after each decoded one takes longer than fetching several in a row."""

_CACHED: Final = 1 << 19
"""Most pixels decoded in one call on the host, summed over clips, so that they are converted while in the CPU cache."""


class Target(Protocol):
    """A batch whose rows are to be made: a `fastvid.load.batch.canvas.Canvas`, or the rows sent to a worker process."""

    packets: dict[int, EncodedClip]
    """Packets that were fetched in advance, by row; those of other rows are read when they are made."""
    sounds: dict[int, Sequence[SoundTask]]
    """Sounds that are decoded together with a row, by row."""

    def place(self, row: int, /) -> ClipPlace:
        """Return the sample and shard from which the packets of a row are read."""
        ...

    def request(self, row: int, /) -> ClipRequest:
        """Return what to decode for a row."""
        ...

    def output(self, row: int, kinds: Set[type], /) -> DecoderOutput | RgbRow:
        """Return where to write a clip: memory for a decoder that supports the output types `kinds`."""
        ...

    def keep(self, row: int, clip: EncodedClip, cost: Counters, /) -> None:
        """Store packets that were read for a row which is made later, and what that cost."""
        ...


class Row(NamedTuple):
    """A clip to make: a row number of a batch."""

    target: Target
    row: int
    number: int = 0  # counts the rows of an iteration in order


class Watch(Protocol):
    """Tells another thread or process which rows are being made: a `Watched`, or a worker process's state."""

    rows: Sequence[Row]
    """The rows being processed now; set by the lane."""

    @property
    def is_over(self) -> bool:
        """Whether the iteration has ended, so that the remaining rows are no longer needed."""
        ...


@dataclass(slots=True, eq=False)
class Watched:
    """A `Watch` for threads of the same process."""

    rows: Sequence[Row] = ()
    is_over: bool = False


Done = Callable[[Row, Exception | None, Counters], None]
"""Called with each row once it is made or has failed, its error or None, and its cost."""


class Lanes:
    """A pool of lanes of one back-end, kept open between iterations. A lane is a `ClipWorker`, or a worker process."""

    def __init__(self, open_lane: Callable[[], Any]) -> None:
        self._open = open_lane
        self._idle: list[Any] = []  # appending and popping are atomic

    def take(self) -> Any:
        """Return a lane for exclusive use by the calling thread."""
        try:
            return self._idle.pop()
        except IndexError:
            return self._open()

    def put_back(self, lane: Any) -> None:
        """Return a lane to the pool."""
        self._idle.append(lane)

    def close(self) -> None:
        """Close the idle lanes."""
        while self._idle:
            self._idle.pop().close()


class ClipWorker:
    """Makes clips by a decoder in this process, with memory that packets are read into. For one thread at a time."""

    at_once: int = FETCH_CLIPS
    """Preferred number of rows per call of `make`."""

    def __init__(self, decoder: Decoder, max_clips: int | None = None) -> None:
        self._decoder, self._most = decoder, max_clips or decoder.max_clips
        is_on_host = Rgb in decoder.outputs
        # Fewest rows per call of `make`, if so many are queued, even if none then remain for other lanes.
        self.least = 1 if is_on_host else self._most
        self._pixels: float = _CACHED if is_on_host else math.inf
        self._scratches: list[PacketBuffer] = []
        self._buffers = [DecodeBuffer() for _ in range(self._most)]

    def make(self, rows: Sequence[Row], watch: Watch, done: Done) -> None:
        """Make rows, in any order, and call `done` for each; once `watch.is_over`, the rest may be left undone.

        All clips are fetched before the first is decoded, see `FETCH_CLIPS`.
        """
        # With max_clips=1, as in a worker process, clips are read one by one, so that `watch` names the one being read.
        at_once = 1 if self._most == 1 else len(rows)
        self._scratches += [PacketBuffer() for _ in range(len(rows) // at_once - len(self._scratches))]
        fetched, clips, costs = list[Row](), list[EncodedClip](), list[Counters]()
        for first, scratch in zip(range(0, len(rows), at_once), self._scratches, strict=False):
            some = watch.rows = rows[first : first + at_once]
            if watch.is_over:
                break
            given = [row.target.packets.pop(row.row, None) for row in some]
            read = iter(fetch_rows([row for row, clip in zip(some, given, strict=True) if clip is None], scratch))
            for row, clip in zip(some, given, strict=True):
                found = next(read) if clip is None else (clip, Counters())
                if isinstance(found, Exception):
                    done(row, found, Counters())
                else:
                    fetched.append(row)
                    clips.append(found[0])
                    costs.append(found[1])
        for call in self._calls(clips):
            watch.rows = fetched[call]
            if watch.is_over:
                self._keep(fetched[call.start :], clips[call.start :], costs[call.start :])
                return
            self._decode(fetched[call], clips[call], costs[call], done)

    def close(self) -> None:
        """Close the decoder."""
        self._decoder.close()

    def _keep(self, rows: Sequence[Row], clips: Sequence[EncodedClip], costs: Sequence[Counters]) -> None:
        """Leave packets that are not decoded to their batches, with the memory that they were read into."""
        self._scratches.clear()
        for row, clip, cost in zip(rows, clips, costs, strict=True):
            row.target.keep(row.row, clip, cost)

    def _calls(self, clips: Sequence[EncodedClip]) -> Iterator[slice]:
        """Yield the slice of clips to decode in each call of the decoder."""
        first, pixels = 0, 0
        for number, clip in enumerate(clips):
            own = len(clip.request.frames) * math.prod(clip.request.size)
            if number > first and (number - first == self._most or pixels + own > self._pixels):
                yield slice(first, number)
                first, pixels = number, 0
            pixels += own
        if clips:
            yield slice(first, len(clips))

    def _decode(self, rows: Sequence[Row], clips: Sequence[EncodedClip], costs: Sequence[Counters], done: Done) -> None:
        errors: Sequence[Exception | None]
        begun, outputs, staged = time.perf_counter(), list[DecoderOutput](), dict[int, RgbRow]()
        try:
            for number, row in enumerate(rows):
                output = row.target.output(row.row, self._decoder.outputs)
                if isinstance(output, RgbRow):
                    staged[number] = output
                    output = self._buffers[number].open(output)
                outputs.append(output)
            errors = self._decoder.decode(clips, outputs)
        except Exception as problem:  # noqa: BLE001 - a decoder that raises has failed all its clips
            errors = [problem] * len(rows)
        share = (time.perf_counter() - begun) / len(rows)
        for number, (row, counters, failure) in enumerate(zip(rows, costs, errors, strict=True)):
            error, begun = failure, time.perf_counter()
            if error is None and number in staged:
                self._buffers[number].finish(staged[number])
                counters.finish_seconds = time.perf_counter() - begun
            if error is None and row.row in row.target.sounds:
                error = _sounded(row.target.sounds[row.row], counters)
            counters.clips = int(error is None)
            counters.decode_seconds += share
            done(row, error, counters)


def _sounded(sounds: Sequence[SoundTask], counters: Counters) -> Exception | None:
    """Decode sounds; return the error of the first that fails. Adds the seconds that it took to `counters`."""
    error: Exception | None = None
    begun = time.perf_counter()
    try:
        for sound in sounds:
            sound.decode()
    except Exception as problem:  # noqa: BLE001 - belongs to this clip; the consumer handles it
        error = problem
    spent = time.perf_counter() - begun
    counters.audio_seconds += spent
    counters.decode_seconds += spent
    return error
