"""Which bytes a clip needs, read from its shard and checked, and what that cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastvid.decode.clips import Scratch, read_clip
from fastvid.decode.request import ClipRequest, EncodedClip
from fastvid.errors import FastvidError
from fastvid.format.packets import StreamInfo
from fastvid.format.schema import INPUT_PADDING
from fastvid.format.shard import Shard


@dataclass(frozen=True, slots=True)
class Fetched:
    """A clip's packets, and what they cost.

    Attributes:
        clip: The packets, checked.
        bytes_read: Bytes that were read, gaps included.
        bytes_whole: Bytes of the whole video.
        requests: Reads that were made.
        packets: Packets to feed.
        packets_from_keys: Packets that a decoder without a plan would feed: all from each key to the last target.
    """

    clip: EncodedClip
    bytes_read: int
    bytes_whole: int
    requests: int
    packets: int
    packets_from_keys: int


def fetch(
    shard: Shard,
    row: int,
    request: ClipRequest,
    *,
    key: str,
    info: StreamInfo | None = None,
    gap: int | None = None,
    scratch: Scratch | None = None,
) -> Fetched:
    """Reads the packets that decode a request.

    Args:
        shard: Where the sample lies.
        row: Row of the sample in the shard.
        request: What is wanted.
        key: The sample's key, for messages.
        info: The stream, where the caller has it already.
        gap: Packets at most this many bytes apart are read together; by default what the storage says a read costs.
        scratch: Memory to read into; by default new memory.

    Raises:
        StorageError: The shard is missing, or ends inside a packet.
        ChecksumError: A packet differs from the one that was indexed.
        FormatError: The packet table leads outside the sample's bytes.
        UsageError: A frame or the crop lies outside the stream.
    """
    storage, requests = shard.storage, 0
    try:
        start, size = shard.member(row, request.stream)

        def read(ranges: Sequence[tuple[int, memoryview]]) -> None:
            nonlocal requests
            requests = len(ranges)
            storage.read_into(shard.tar, [(start + offset, view) for offset, view in ranges])

        table = shard.table(row, request.stream)
        plan = table.plan(request.frames)
        clip = read_clip(
            request,
            info or shard.info(row, request.stream),
            table,
            read,
            gap=storage.gap if gap is None else gap,
            limit=size,
            plan=plan,
            scratch=scratch,
            key=key,
            shard=shard.stem,
        )
    except FastvidError as error:
        error.at(shard=shard.stem, key=key)
        raise
    return Fetched(clip, len(clip.data) - INPUT_PADDING, size, requests, len(plan.packets), plan.packets_from_keys)
