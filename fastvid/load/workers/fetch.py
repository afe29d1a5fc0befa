"""Reads and checks the packets of a clip."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial

from fastvid.audio.packets import EncodedAudio
from fastvid.decode.clips import PacketBuffer, coalesce, read_clip
from fastvid.decode.request import ClipRequest, EncodedClip
from fastvid.errors import FastvidError
from fastvid.format.packets import StreamInfo, packet_offsets
from fastvid.format.schema import INPUT_PADDING
from fastvid.format.shard import Shard
from fastvid.load.clips.clip import Clip
from fastvid.load.clips.sound import SoundTask
from fastvid.load.workers.stats import Counters


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
