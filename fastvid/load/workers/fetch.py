"""Reads and checks the packets of a clip."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fastvid.audio.packets import EncodedAudio
from fastvid.decode.clips import PacketBuffer, read_clip
from fastvid.decode.request import ClipRequest, EncodedClip
from fastvid.errors import FastvidError
from fastvid.format.packets import StreamInfo
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

    Args:
        shard: Shard that contains the sample.
        row: Row of the sample in the shard.
        request: Frames and crop to decode.
        key: The sample's key, for messages.
        info: The stream, if the caller has it already.
        gap: Packets at most this many bytes apart are read together; by default the storage's own value.
        scratch: Memory to read into; by default new memory.

    Raises:
        StorageError: If the shard is missing or ends inside a packet.
        ChecksumError: If a packet differs from the indexed one.
        FormatError: If the packet table points outside the sample's bytes.
        UsageError: If a frame or the crop is outside the stream.
    """
    try:
        reader, table = shard.reader(row, request.stream), shard.table(row, request.stream)
        plan = table.plan(request.frames)
        clip = read_clip(
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


def fetch_sounds(sounds: Sequence[SoundTask], counters: Counters) -> tuple[SoundTask, ...]:
    """Read and check the packets of sounds, and add their cost, without `fetch_seconds`, to `counters`.

    Raises:
        FastvidError: See `fastvid.audio.packets.fetch_audio`.
    """
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
