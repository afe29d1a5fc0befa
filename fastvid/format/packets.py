"""PacketTable and its plan: which packets decode the frames that are wanted, and no others.

Pure functions of arrays; the heart of fastvid. The rule, for a wanted frame shown by packet `t`:

    the last key packet `k` at or before `t` in decode order, every packet between `k` and `t` that others may refer
    to, and `t` itself.

A packet that nothing refers to is fed only when its own frame is wanted. The rule is exact for chains of references
(I, P) and sufficient for every structure in which a packet refers only to packets before it in decode order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from fastvid.errors import FormatError, UsageError
from fastvid.format.schema import PACKET_DTYPE, Codec, Matrix, PacketFlag, Range, StreamFlag

IntArray = npt.NDArray[np.int64]

_KEY, _DROPPABLE, _HIDDEN = (np.uint8(flag) for flag in (PacketFlag.KEY, PacketFlag.DROPPABLE, PacketFlag.HIDDEN))


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """What a decoder must know of a stream besides its packets.

    Attributes:
        codec: The codec.
        width: Width in pixels.
        height: Height in pixels.
        num_frames: Frames shown.
        fps: Frames per second, exact.
        extradata: The decoder's configuration record (avcC, hvcC, ...); may be empty.
        range: Sample range.
        matrix: Luma coefficients.
        flags: What is known of the stream as a whole.
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


@dataclass(frozen=True, slots=True)
class Plan:
    """The packets to feed for some frames.

    Attributes:
        packets: Rows of the packet table in decode order, int64 [P], unique.
        frames: The wanted frames, sorted and unique, int64 [F].
    """

    packets: IntArray
    frames: IntArray


class PacketTable:
    """The packets of one stream in decode order.

    Args:
        records: Array of PACKET_DTYPE [P]; kept, not copied, and never written.
        whole: Plan every packet from the first (`StreamFlag.WHOLE`).

    Raises:
        FormatError: The first packet is no key packet, or the shown frames are not 0..N-1, each once.
    """

    __slots__ = ("_keys", "_packet_of", "_reference", "num_frames", "records", "whole")

    def __init__(self, records: npt.NDArray[np.void], *, whole: bool = False) -> None:
        if records.dtype != PACKET_DTYPE or records.ndim != 1:
            raise FormatError(f"packet records are {records.dtype} {records.shape}, expected {PACKET_DTYPE} [P]")
        # One pass over the wide records; the checks below then run on small dense arrays.
        flags, frames = records["flags"].astype(np.uint8), records["frame"].astype(np.int64)
        if not len(records) or not flags[0] & _KEY:
            raise FormatError("the first packet of a stream must be a key packet")
        hidden = flags & _HIDDEN
        shown = np.flatnonzero(hidden == 0) if hidden.any() else None
        indices = frames if shown is None else frames[shown]
        count = len(indices)
        # Read as unsigned, a negative index is a huge one: one comparison finds both.
        if count and int(indices.view(np.uint64).max()) >= count:
            outside = indices[(indices < 0) | (indices >= count)][0]
            raise FormatError(f"frame index {outside} among {count} packets that show a frame")
        packet_of = np.full(count, -1, dtype=np.int64)
        packet_of[indices] = np.arange(count) if shown is None else shown
        if count and packet_of.min() < 0:
            raise FormatError(f"frame {int(np.argmax(packet_of < 0))} is shown by no packet")
        self.records = records
        self.whole = whole
        self.num_frames = count
        self._packet_of = packet_of
        self._keys = np.flatnonzero(flags & _KEY)
        self._reference = (flags & _DROPPABLE) == 0

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        keys = int(np.count_nonzero(self.records["flags"] & PacketFlag.KEY))
        droppable = len(self) - int(np.count_nonzero(self._reference))
        return f"PacketTable({len(self)} packets, {self.num_frames} frames, {keys} keys, {droppable} droppable)"

    def plan(self, frames: Sequence[int] | npt.ArrayLike) -> Plan:
        """The smallest set of packets that decodes `frames`.

        Args:
            frames: Indices in display order, 0 <= f < num_frames; any order, repeats allowed.

        Raises:
            UsageError: No frame is asked for, or one lies outside the stream.
        """
        wanted = np.asarray(sorted(set(np.asarray(frames, dtype=np.int64).tolist())), dtype=np.int64)
        if not len(wanted):
            raise UsageError("a plan needs at least one frame")
        if wanted[0] < 0 or wanted[-1] >= self.num_frames:
            outside = wanted[0] if wanted[0] < 0 else wanted[-1]
            raise UsageError(f"frame {outside} is outside the stream", num_frames=self.num_frames)
        targets = self._packet_of[wanted]
        if self.whole:
            return Plan(np.arange(int(targets.max()) + 1, dtype=np.int64), wanted)
        feed = np.zeros(len(self.records), dtype=bool)
        for start, stop in self._spans(targets):
            feed[start:stop] = self._reference[start:stop]
        feed[targets] = True
        return Plan(np.flatnonzero(feed), wanted)

    def from_keys(self, frames: Sequence[int] | npt.ArrayLike) -> IntArray:
        """The packets that a decoder without a plan feeds for `frames`: all from each key to the last target.

        The measure that plans are compared with; int64 [P] in decode order.
        """
        targets = self._packet_of[np.asarray(frames, dtype=np.int64)]
        return np.concatenate([np.arange(start, stop + 1) for start, stop in self._spans(targets)])

    def _spans(self, targets: IntArray) -> list[tuple[int, int]]:
        """For each GOP with a target its key packet and its last target, ascending."""
        last: dict[int, int] = {}
        gops = (np.searchsorted(self._keys, targets, side="right") - 1).tolist()
        for gop, target in zip(gops, targets.tolist(), strict=True):
            last[gop] = max(last.get(gop, 0), target)
        return [(int(self._keys[gop]), last[gop]) for gop in sorted(last)]


def packet_records(
    offsets: npt.ArrayLike,
    sizes: npt.ArrayLike,
    crc32: npt.ArrayLike,
    frames: npt.ArrayLike,
    flags: npt.ArrayLike,
) -> npt.NDArray[np.void]:
    """Builds records of PACKET_DTYPE from columns of equal length."""
    offsets = np.asarray(offsets, dtype=np.uint64)
    if len(offsets) and int(offsets.max()) >= 2**32:
        raise FormatError(
            f"a packet starts {int(offsets.max())} bytes into its member, 4 GiB at most",
            hint="split long videos into shorter samples (--max-seconds)",
        )
    records = np.zeros(len(offsets), dtype=PACKET_DTYPE)
    for name, column in (("offset", offsets), ("size", sizes), ("crc32", crc32), ("frame", frames), ("flags", flags)):
        records[name] = column
    return records
