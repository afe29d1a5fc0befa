"""Plan the smallest set of packets that decodes the wanted frames.

Pure functions of arrays; the core of fastvid. A wanted frame shown by packet `t` needs:

    the last key packet `k` at or before `t` in decode order, every packet between `k` and `t` that others may refer
    to, and `t` itself.

A packet that nothing refers to is fed only if its own frame is wanted. The rule is minimal for reference chains (I, P)
and sufficient for every structure in which a packet refers only to packets before it in decode order.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from fastvid.errors import FormatError, UsageError
from fastvid.format.presentation import EARLY, Coded, Times, clip_range
from fastvid.format.schema import PACKET_DTYPE, Codec, Matrix, PacketFlag, Range, StreamFlag
from fastvid.runtime.arrays import FloatArray, IntArray, RecordArray, UInt8Array

# Flags as bytes: all values of flags of key packets, and of packets that show a frame. Then translation tables that map
# flags to 1 for key packets, and for packets that others may refer to.
_KEYS: Final = bytes(flags for flags in range(256) if flags & PacketFlag.KEY)
_SHOWN: Final = bytes(flags for flags in range(256) if not flags & PacketFlag.HIDDEN)
_IS_KEY: Final = bytes(bool(flags & PacketFlag.KEY) for flags in range(256))
_IS_REFERRED_TO: Final = bytes(not flags & PacketFlag.DROPPABLE for flags in range(256))
# The column of frame indices of a stream whose packets show frames in decode order: 0, 1, 2, ...
_IN_ORDER: Final = np.arange(2**15, dtype="<i4").tobytes()
_HIDDEN: Final = np.uint8(PacketFlag.HIDDEN)
# Number of different offsets that a record can store.
_OFFSETS: Final = 2**48


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """What a stream shows, and what a decoder needs to know about it besides its packets.

    Attributes:
        codec: The codec.
        width: Width in pixels of the pictures as a player shows them: cropped, upright and with square pixels.
        height: Their height in pixels.
        num_frames: Number of shown frames.
        fps: Frames per second, exact; the mean if the frame rate varies.
        extradata: The decoder's configuration record (avcC, hvcC, ...); may be empty.
        range: Sample range.
        matrix: Luma coefficients.
        flags: Properties of the whole stream.
        flow_bound: For optical flow, pixels per frame at the outermost level (`fastvid.format.planes`); 0 for pictures.
        coded: How decoded pictures become the shown ones; None if they are the same.
        times: When each frame is shown; None if frame f is shown at f / fps seconds.
    """

    codec: Codec
    width: int
    height: int
    num_frames: int
    fps: Fraction
    extradata: bytes = b""
    range: Range = Range.LIMITED
    matrix: Matrix = Matrix.SMPTE170M
    flags: StreamFlag = StreamFlag.NONE
    flow_bound: float = 0.0
    coded: Coded | None = None
    times: Times | None = None

    @property
    def decoded(self) -> StreamInfo:
        """The stream as decoded, before its pictures are cropped, turned or stretched to be shown."""
        coded = self.coded
        return self if coded is None else replace(self, width=coded.width, height=coded.height, coded=None)

    def seconds(self, frames: IntArray) -> FloatArray:
        """Return when frames are shown, in seconds since the first one, float64 [T], nearest to the exact times."""
        if self.times is not None:
            return self.times.seconds()[frames]
        seconds: FloatArray = frames * self.fps.denominator / self.fps.numerator
        return seconds

    def frames_at(self, seconds: FloatArray) -> IntArray:
        """Return the frames shown at given times, int64 [T]: the last that begins at most `EARLY` seconds later."""
        if self.times is not None:
            return self.times.frames_at(seconds, float(1 / self.fps))
        early = min(EARLY, float(1 / self.fps) / 2)
        frames = np.floor((seconds + early) * float(self.fps)).astype(np.int64)
        return np.clip(frames, 0, self.num_frames - 1)

    def clip(self, start: float, end: float) -> tuple[int, int]:
        """Return the first frame of the clip from `start` to `end` seconds, and the frame after its last.

        See `clip_range`.
        """
        return clip_range(self.seconds(np.arange(self.num_frames)), float(1 / self.fps), start, end)


@dataclass(frozen=True, slots=True)
class PacketPlan:
    """The packets to feed for the wanted frames.

    Attributes:
        packets: Rows of the packet table in decode order, int64 [P], unique.
        frames: The wanted frames, sorted and unique, int64 [F].
        packets_from_keys: Number of packets that a decoder without a plan would feed: all packets from each key packet
            to the last wanted one of its GOP.
    """

    packets: IntArray
    frames: IntArray
    packets_from_keys: int


class PacketTable:
    """The packets of one stream in decode order.

    Args:
        records: PACKET_DTYPE [P]; referenced, not copied, and never modified.
        whole: Plan every packet from the first (`StreamFlag.WHOLE`).

    Raises:
        FormatError: If the first packet is not a key packet, or the shown frames are not 0..N-1, each once.
    """

    __slots__ = ("_alone", "_kinds", "_packet_of", "num_frames", "records", "whole")

    def __init__(self, records: RecordArray, *, whole: bool = False) -> None:
        if records.dtype != PACKET_DTYPE or records.ndim != 1:
            raise FormatError(f"packet records are {records.dtype} {records.shape}, expected {PACKET_DTYPE} [P]")
        # A table is created for every clip, right after a decoder has evicted this code from the caches, so fewer and
        # smaller functions are faster: bytes methods replace several numpy calls, ufunc reductions array methods.
        flags = np.ascontiguousarray(records["flags"])
        kinds = flags.tobytes()
        if not kinds or not kinds[0] & PacketFlag.KEY:
            raise FormatError("the first packet of a stream must be a key packet")
        self.records = records
        self.whole = whole
        self._kinds = kinds
        # If every packet is a key packet, as in all-intra streams, each frame needs only its own packet.
        self._alone = not kinds.translate(None, _KEYS)
        if _IN_ORDER.startswith(records["frame"].tobytes()) and not kinds.translate(None, _SHOWN):
            self.num_frames, self._packet_of = len(kinds), None
        else:
            self._packet_of = _packet_of(records["frame"].astype(np.int64), flags, kinds)
            self.num_frames = len(self._packet_of)

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        keys = int(np.count_nonzero(self.records["flags"] & PacketFlag.KEY))
        droppable = int(np.count_nonzero(self.records["flags"] & PacketFlag.DROPPABLE))
        return f"PacketTable({len(self)} packets, {self.num_frames} frames, {keys} keys, {droppable} droppable)"

    def plan(self, frames: Sequence[int] | npt.ArrayLike) -> PacketPlan:
        """Return the smallest set of packets that decodes `frames`.

        Args:
            frames: Frame indices in display order, 0 <= f < num_frames; in any order, repeats allowed.

        Raises:
            UsageError: If no frame is requested, or one is outside the stream.
        """
        unique = sorted(set(np.asarray(frames, dtype=np.int64).tolist()))
        if not unique:
            raise UsageError("no frame requested, at least one is required")
        if unique[0] < 0 or unique[-1] >= self.num_frames:
            outside = unique[0] if unique[0] < 0 else unique[-1]
            raise UsageError(
                f"frame {outside} is outside the stream",
                num_frames=self.num_frames,
                hint=f"give frames from 0 to {self.num_frames - 1}",
            )
        wanted = np.array(unique, dtype=np.int64)
        targets = unique if self._packet_of is None else self._packet_of[wanted].tolist()
        if self._alone and not self.whole:
            return PacketPlan(np.array(sorted(targets), dtype=np.int64), wanted, len(targets))
        spans = self._spans(targets)
        from_keys = sum(stop + 1 - start for start, stop in spans)
        if self.whole:
            return PacketPlan(np.arange(max(targets) + 1, dtype=np.int64), wanted, from_keys)
        feed, referred_to = bytearray(len(self._kinds)), self._kinds.translate(_IS_REFERRED_TO)
        for start, stop in spans:
            feed[start:stop] = referred_to[start:stop]
        for target in targets:
            feed[target] = 1
        return PacketPlan(np.frombuffer(feed, dtype=np.bool_).nonzero()[0], wanted, from_keys)

    def _spans(self, targets: list[int]) -> list[tuple[int, int]]:
        """Return for each GOP with a target its key packet and its last target, ascending. Targets are packets."""
        keys = self._kinds.translate(_IS_KEY)
        last: dict[int, int] = {}
        for target in targets:
            key = keys.rfind(1, 0, target + 1)
            if target > last.get(key, -1):
                last[key] = target
        return sorted(last.items())


def _packet_of(frames: IntArray, flags: UInt8Array, kinds: bytes) -> IntArray:
    """Return the packet that shows each frame, int64 [N]."""
    shown = np.flatnonzero((flags & _HIDDEN) == 0) if kinds.translate(None, _SHOWN) else None
    indices = frames if shown is None else frames[shown]
    count = len(indices)
    # Seen as unsigned numbers, negative indices are huge, so that one comparison finds both kinds of invalid ones.
    if count and np.maximum.reduce(indices.view(np.uint64)) >= count:
        outside = indices[(indices < 0) | (indices >= count)][0]
        raise FormatError(f"frame index {outside} is outside 0..{count - 1}: {count} packets show a frame")
    packet_of = np.full(count, -1, dtype=np.int64)
    packet_of[indices] = np.arange(count) if shown is None else shown
    if count and np.minimum.reduce(packet_of) < 0:
        raise FormatError(f"no packet shows frame {int(np.argmax(packet_of < 0))}")
    return packet_of


def packet_records(
    offsets: npt.ArrayLike,
    sizes: npt.ArrayLike,
    crc32: npt.ArrayLike,
    frames: npt.ArrayLike,
    flags: npt.ArrayLike,
) -> RecordArray:
    """Build PACKET_DTYPE records from columns of equal length."""
    offsets = np.asarray(offsets, dtype=np.uint64)
    if len(offsets) and int(offsets.max()) >= _OFFSETS:
        raise FormatError(f"packet starts {int(offsets.max())} bytes into its member, 256 TiB is too far")
    records = np.zeros(len(offsets), dtype=PACKET_DTYPE)
    records["offset_high"] = offsets >> np.uint64(32)
    records["offset"] = offsets & np.uint64(0xFFFFFFFF)
    records["size"], records["crc32"], records["frame"], records["flags"] = sizes, crc32, frames, flags
    return records


def packet_offsets(records: RecordArray) -> list[int]:
    """Return the offset in bytes of each packet within its tar member."""
    low: list[int] = records["offset"].tolist()
    high = records["offset_high"]
    if not high.any():
        return low
    return [offset + (above << 32) for offset, above in zip(low, high.tolist(), strict=True)]


# Cached: few combinations occur in a dataset, and each conversion to an enum costs as much as a cache look-up.
@functools.lru_cache(maxsize=4096)
def stream_info(
    numbers: tuple[int, int, int, int, int, int, int, int, int, float],
    extradata: bytes,
    coded: Coded | None = None,
    times: bytes = b"",
) -> StreamInfo:
    """Return the description of a stream from fields of its STREAM_DTYPE record; ValueError if they are invalid.

    `numbers`: codec, width, height, number of frames, numerator and denominator of the rate, range, matrix, flags and
    bound.
    """
    codec, width, height, num_frames, fps_num, fps_den, range_, matrix, flags, flow_bound = numbers
    if min(width, height) < 2 or fps_num < 1:
        raise ValueError(f"pictures of {width}x{height} at {fps_num}/{fps_den} frames per second")
    shown_at = Times(times, num_frames) if times else None
    for one in (coded, shown_at):
        if one is not None:
            one.check()
    kinds = Range(range_), Matrix(matrix), StreamFlag(flags)
    rate = Fraction(fps_num, fps_den)
    return StreamInfo(Codec(codec), width, height, num_frames, rate, extradata, *kinds, flow_bound, coded, shown_at)


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(eq=False, repr=False)
class Recent(Generic[K, V]):
    """Keeps the most recently used values, within a limit of their bytes of memory. Thread-safe."""

    limit: int  # total memory in bytes; at least one value is kept
    size: Callable[[V], int]  # returns the memory of a value
    was_full: bool = field(default=False, init=False)  # whether a value was dropped
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _values: OrderedDict[K, V] = field(default_factory=OrderedDict, init=False)
    _sizes: dict[K, int] = field(default_factory=dict, init=False)
    _bytes: int = field(default=0, init=False)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V | None:
        """Return a value that was added, or None."""
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def add(self, key: K, value: V) -> V:
        """Keep a value, unless there is one already; return the kept one. Its memory is determined anew."""
        with self._lock:
            value = self._values.setdefault(key, value)
            self._values.move_to_end(key)
            before, self._sizes[key] = self._sizes.get(key, 0), self.size(value)
            self._bytes += self._sizes[key] - before
            while self._bytes > self.limit and len(self._values) > 1:
                self._bytes -= self._sizes.pop(self._values.popitem(last=False)[0])
                self.was_full = True
        return value


_TABLE_MEMORY: Final = 16 * 2**20  # bytes of packet tables that a process keeps: of about 1,500 videos of 300 packets
_TABLE_BYTES: Final = 1000  # of the object itself
_PACKET_BYTES: Final = 32  # of a packet: its record, its flags, and its entry in the table of frames


def table_bytes(table: PacketTable) -> int:
    """Return the bytes of memory that a table takes."""
    return _TABLE_BYTES + _PACKET_BYTES * len(table)


TABLES: Final[Recent[Hashable, PacketTable]] = Recent(_TABLE_MEMORY, table_bytes)
"""The tables of all shards of this process that were used last, because the next clip of a video needs the same one.

If each frame of an episode is an item, the episode's table is used a thousand times an epoch; reading, checking and
parsing it takes as long as planning and reading the packets of a small clip. The key of a table includes the opened
shard, so that whoever opens a shard again reads and checks its tables again.
"""
