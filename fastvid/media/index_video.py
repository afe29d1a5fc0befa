"""Index a video where it is: packets, sizes and dependencies, reading as little of the file as possible.

There are three levels of proof. "none" trusts the container and the headers of the packets that were read. "sample"
also decodes some frames from their planned packets and compares them with the frames that FFmpeg alone decodes from the
file. "all" reads the file once and proves every frame, as `fastvid.media.prove` does for the videos of tars. "none" and
"sample" do the same as "all" for containers other than MP4 and Matroska, whose times do not say which packet shows
which frame, and for codecs whose packets fastvid does not parse.

If it is unknown which packets a frame depends on, the frame is decoded from its key packet; if it is not proven that
decoding may begin there, from the start of the stream.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from fractions import Fraction
from typing import Final

import numpy as np
from av.video.frame import VideoFrame

from fastvid.errors import FormatError, SourceError
from fastvid.format.bitstream import can_plan, changes_parameters
from fastvid.format.headers import HEAD_BYTES, KEY_HEAD_BYTES, WHOLE_PACKETS, FieldPairs, flags_of_heads
from fastvid.format.packets import PacketTable, StreamInfo, packet_offsets
from fastvid.format.presentation import frame_bounds
from fastvid.format.schema import Codec, PacketFlag, StreamFlag
from fastvid.media.checks import Comparison, Finding, check_packets, chosen_clips
from fastvid.media.describe import TONE_MAP, present, with_times
from fastvid.media.ffmpeg import Limits
from fastvid.media.file_tables import FileReader, Tables, read_tables, with_heads
from fastvid.media.probe import HEAD_BYTES as CONTAINER_BYTES
from fastvid.media.probe import sniff
from fastvid.media.prove import IndexedVideo, index_video, shown_times, usable_records
from fastvid.media.reasons import Reason, unusable
from fastvid.runtime.arrays import IntArray, RecordArray, UInt8Array

# Rounding error of a duration between two frames in seconds; and the relative difference at which rates count as equal.
_ROUNDED: Final = 2e-3
_SAME_RATE: Final = 1e-3


def cut_index(found: IndexedVideo, first: int, count: int) -> IndexedVideo:
    """Return the index of some consecutive frames of a video, numbered from 0.

    Earlier packets on which these frames depend are kept, but marked as showing no frame.

    `first`: number of the first frame. `count`: number of frames, at least 1.
    """
    total = found.info.num_frames
    if count < 1 or first < 0 or first + count > total:
        raise SourceError(
            f"the part of frames {first} to {first + count - 1} is not in the {total} frames of the video",
            reason=Reason.OUT_OF_RANGE,
        )
    if (first, count) == (0, total):
        return found
    whole = bool(found.info.flags & StreamFlag.WHOLE)
    packets = PacketTable(found.records, whole=whole).plan(range(first, first + count)).packets
    records = found.records[packets].copy()
    frames = records["frame"].astype(np.int64) - first
    outside = (records["frame"] < 0) | (frames < 0) | (frames >= count)
    records["frame"] = np.where(outside, -1, frames)
    records["flags"] |= np.where(outside, _HIDDEN, 0)
    start, end = clip_seconds(found, first, count)
    rate = part_rate(found.info.fps, count, end - start)
    info = replace(found.info, num_frames=count, fps=rate, flags=found.info.flags | StreamFlag.PART)
    times = None if found.times is None else found.times[first : first + count]
    info = with_times(info, times, found.tick)
    return replace(found, info=info, records=records, times=times, digests=found.digests[first : first + count])


def part_rate(rate: Fraction, count: int, seconds: float) -> Fraction:
    """Return the frames per second of a part: the whole video's rate if it explains the part's times, else its mean.

    `count`: frames of the part. `seconds`: how long it lasts.
    """
    expected = count / float(rate)
    if abs(seconds - expected) <= max(_ROUNDED, expected * _SAME_RATE):
        return rate
    return Fraction(count / seconds).limit_denominator(100_000)


def clip_seconds(found: IndexedVideo, first: int, count: int) -> tuple[float, float]:
    """Return when the first of some frames of a video is shown, and when the last one ends, in seconds."""
    bounds = frame_bounds(found.seconds, float(1 / found.info.fps))
    return float(bounds[first]), float(bounds[first + count])


SMALL_FILE: Final = 4 << 20
"""Remote files up to this size are read whole, which takes one request."""

KEYS_READ: Final = 16
"""Maximum number of key packets of a remote file whose first bytes are read; if there are more, they are sampled."""

# Demuxers of containers whose times say in which order frames are shown.
_TIMED: Final = frozenset({"mov", "matroska"})
_KEY: Final = np.uint8(PacketFlag.KEY)
_DROPPABLE: Final = np.uint8(PacketFlag.DROPPABLE)
_HIDDEN: Final = np.uint8(PacketFlag.HIDDEN)


class Proof(StrEnum):
    """How much of a video is compared with an independent decode."""

    NONE = "none"
    SAMPLE = "sample"
    ALL = "all"


def index_in_place(file: FileReader, limits: Limits, proof: Proof, *, hdr: str = TONE_MAP) -> IndexedVideo:
    """Index the first video stream of a file.

    `limits`: limits on its size and number of frames. `hdr`: see `fastvid.media.describe.present`.
    """
    if proof is Proof.ALL or sniff(file.part(0, CONTAINER_BYTES)) not in _TIMED:
        return _index_whole(file, limits, hdr)
    tables = read_tables(file, limits)
    if not can_plan(tables.codec):
        return _index_whole(file, limits, hdr)
    return Indexing(file, _with_read_heads(tables, file)).indexed(proof, hdr)


def _index_whole(file: FileReader, limits: Limits, hdr: str = TONE_MAP) -> IndexedVideo:
    if file.size > limits.output_bytes:
        raise SourceError(
            f"video has {file.size} bytes, at most {limits.output_bytes} are allowed to prove every frame",
            reason=Reason.TOO_LONG,
            hint="an MP4 or Matroska file of another codec than MPEG-4 part 2 is indexed by --prove sample",
        )
    return index_video(file.whole(), limits, hdr=hdr)


def _with_read_heads(tables: Tables, file: FileReader) -> Tables:
    """Return tables with the first bytes of all packets, if reading them is cheap; else those of some key packets."""
    if tables.checksums is not None:
        return tables
    places = list(zip(tables.offsets.tolist(), tables.sizes.tolist(), strict=True))
    if file.is_local or file.size <= SMALL_FILE:
        most = file.size if tables.codec in WHOLE_PACKETS or file.size <= SMALL_FILE else HEAD_BYTES
        longest = np.where(tables.sync, max(most, KEY_HEAD_BYTES), most).tolist()
        ranges = [(offset, min(size, head)) for (offset, size), head in zip(places, longest, strict=True)]
        heads: list[bytes | None] = list(file.parts(ranges))
        return with_heads(tables, heads)
    keys = np.flatnonzero(tables.sync)
    if len(keys) > KEYS_READ:
        # The same sample for the same file, always with the first key packet.
        rng = np.random.default_rng(zlib.crc32(tables.offsets.tobytes()))
        keys = np.union1d(keys[:1], rng.choice(keys, KEYS_READ - 1, replace=False))
    # In HEVC the packet after a key packet shows whether decoding may start at the key packet.
    following = keys + 1 if tables.codec is Codec.HEVC else keys
    read = np.union1d(keys, following[following < len(places)]).tolist()
    heads = [None] * len(places)
    ranges = [(places[number][0], min(places[number][1], KEY_HEAD_BYTES)) for number in read]
    for number, head in zip(read, file.parts(ranges), strict=True):
        heads[number] = head
    return with_heads(tables, heads)


def choose_flags(tables: Tables) -> tuple[UInt8Array, list[str], str]:
    """Return the PacketFlag of each packet, uint8 [P]; notes; and why all must be decoded from the start, else ""."""
    try:
        flags = flags_of_heads(tables.codec, tables.extradata, tables.heads, tables.sizes.tolist())
    except FormatError as error:
        return np.zeros(len(tables.heads), np.uint8), [], error.message
    notes, read = list[str](), np.asarray([head is not None for head in tables.heads])
    if not read.all():
        # Trust the container about key packets that were not read, if those that were read are all key packets.
        if (flags[tables.sync & read] & _KEY).all():
            flags[tables.sync] |= _KEY
        notes.append("from-key-frames")
    why = "" if flags[0] & _KEY else "the first packet is no key packet"
    return flags, notes, why or _why_changed(tables, flags)


def _why_changed(tables: Tables, flags: UInt8Array) -> str:
    """Return why decoding cannot start at every key packet; empty if it can.

    It cannot if parameter sets change in the stream and a later key packet does not repeat them.
    """
    changed = False
    for head, is_key in zip(tables.heads, (flags & _KEY).tolist(), strict=True):
        if head is None:
            continue
        try:
            brings = changes_parameters(tables.codec, tables.extradata, head, whole=False)
        except FormatError:
            brings = False
        if changed and is_key and not brings:
            return "parameter sets change inside the stream"
        changed |= brings
    return ""


class Indexing(Comparison):
    """Makes the index of a file from its packet tables."""

    def indexed(self, proof: Proof, hdr: str) -> IndexedVideo:
        """Return the index."""
        tables = self.tables
        flags, notes, why = choose_flags(tables)
        flags[0] |= _KEY
        frames = self._frames(flags)
        flags = np.where(frames < 0, flags | _HIDDEN, flags & ~_HIDDEN)
        checksums = np.zeros(len(flags), np.uint32) if tables.checksums is None else tables.checksums
        records = usable_records(tables.offsets, tables.sizes, checksums, frames, flags)
        self.check_order(records)
        first, aspect = self._first(records, proof)
        flag = StreamFlag.NONE if tables.checksums is not None else StreamFlag.UNCHECKED
        count = int((frames >= 0).sum())
        info = StreamInfo(tables.codec, 2, 2, count, tables.rate, tables.extradata, flags=flag)
        info, shown = present(info, first, tables.declared, aspect, hdr=hdr)
        times = shown_times(tables.pts.tolist(), records["frame"].astype(np.int64))
        info = with_times(info, times, tables.time_base)
        if proof is Proof.SAMPLE and not self.ends_alike():
            raise unusable("FFmpeg finds other frames at its end than in its tables")
        if proof is Proof.SAMPLE and not why:
            info, records, why = self._proved(info, records, notes)
        if why:
            info = replace(info, flags=info.flags | StreamFlag.WHOLE)
            notes.append(f"whole: {why}")
            if proof is Proof.SAMPLE and (wrong := self._differs(info, records, _early(records))):
                raise unusable(wrong)
        notes = [*shown, *([] if tables.shown.all() else ["edit-list"]), *notes]
        return IndexedVideo(
            info, records, first.format.name, tables.container, tuple(notes), (), times, tables.time_base
        )

    def _frames(self, flags: UInt8Array) -> IntArray:
        """Return the frame that each packet shows, in display order, -1 for none; int64 [P]."""
        shown = np.flatnonzero(self.tables.shown & ((flags & _HIDDEN) == 0))
        if not len(shown):
            raise SourceError(f"none of the {len(flags)} packets shows a frame", reason=Reason.NO_FRAMES)
        order = shown[np.argsort(self.tables.pts[shown], kind="stable")]
        if (np.diff(self.tables.pts[order]) <= 0).any():
            raise SourceError(
                "two of its packets have the same time",
                reason=Reason.NO_INDEX,
                hint="use --prove all, which orders the frames by decoding them",
            )
        frames = np.full(len(flags), -1, np.int64)
        frames[order] = np.arange(len(order))
        return frames

    def _first(self, records: RecordArray, proof: Proof) -> tuple[VideoFrame, Fraction | None]:
        """Return the first shown frame, and the width of a pixel divided by its height.

        Without proof, only the bytes that were read already are decoded: the frame then has no meaningful pixels.
        """
        head = self.tables.heads[0]
        first = self.begun(head) if proof is Proof.NONE and head is not None else None
        if first is None:
            decoded = self.decoded(PacketTable(records).plan([0]).packets, records)
            first = next((frame for _, frame in decoded), None)
        if first is None:
            raise SourceError("its first packets decode to no frame", reason=Reason.DAMAGED)
        return first, self.tables.aspect or self.aspect

    def _proved(self, info: StreamInfo, records: RecordArray, notes: list[str]) -> tuple[StreamInfo, RecordArray, str]:
        """Compare some frames, decoded from as few packets as possible; if they are wrong, from more and more packets.

        Returns the stream and the records with which the frames are right, and "". If they never are, returns the
        arguments, and why the stream must be decoded from its start.
        """
        clips, wrong = chosen_clips(records), ""
        for way, packets, note in self._ways(info, records):
            wrong = self._differs(way, packets, clips)
            if not wrong:
                notes += note
                return way, packets, ""
        return info, records, wrong

    def _ways(self, info: StreamInfo, records: RecordArray) -> Iterator[tuple[StreamInfo, RecordArray, list[str]]]:
        """Yield variants of the stream and its records, those that skip most packets first; each with its notes."""
        tables = self.tables
        unread = np.asarray([head is None for head in tables.heads])
        # Not for pictures of two packets, one per field: others may refer to the second even if not to the first.
        if unread.any() and not FieldPairs(tables.codec.label, tables.extradata).possible:
            late = replace(info, flags=info.flags | StreamFlag.LATE)
            if tables.disposable is not None and (unread & tables.disposable).any():
                told = records.copy()
                told["flags"][unread & tables.disposable] |= _DROPPABLE
                yield late, told, []
            yield late, records, []
        yield info, records, []
        if (records["flags"] & _DROPPABLE).any():
            careful = records.copy()
            careful["flags"] &= ~_DROPPABLE
            yield info, careful, ["from-key-frames"]

    def _differs(self, info: StreamInfo, records: RecordArray, clips: Sequence[Sequence[int]]) -> str:
        """Return how frames of some clips differ from those that FFmpeg shows; empty if they do not."""
        return next((message for _, message in self.check(info, records, clips)), "")


def _early(records: RecordArray) -> list[list[int]]:
    """Return some early frames, which need little decoding from the start of the stream, as a clip each."""
    last = int(records["frame"].max())
    return [[frame] for frame in sorted({0, min(last, 7), min(last, 30)})]


def check_index(file: FileReader, info: StreamInfo, records: RecordArray, limits: Limits) -> Iterator[Finding]:
    """Yield what is wrong with the index of a file, or of a part of it.

    `records`: its PACKET_DTYPE records [P]. `limits`: limits on the size and number of frames.
    """
    if not info.flags & StreamFlag.UNCHECKED and (wrong := list(check_packets(file.part, records))):
        yield from wrong
        return
    tables = _told(file, limits, records)
    if tables is None:
        found = _index_whole(file, limits, "keep")
        places = dict(zip(packet_offsets(found.records), found.records["frame"].tolist(), strict=True))
        shown = records[records["frame"] >= 0]
        frames = [places.get(offset, -1) for offset in packet_offsets(shown)]
        if len({frame - now for frame, now in zip(frames, shown["frame"].tolist(), strict=True)}) != 1:
            yield "index", "indexing the video again gives a different index"
        return
    yield from Comparison(file, tables).check(info, records, chosen_clips(records))


def _told(file: FileReader, limits: Limits, records: RecordArray) -> Tables | None:
    """Return the packet tables of a file; None if their times do not tell which packet shows which frame."""
    if sniff(file.part(0, CONTAINER_BYTES)) not in _TIMED:
        return None
    try:
        tables = read_tables(file, limits)
    except SourceError as error:
        if error.reason is Reason.NO_INDEX:
            return None
        raise
    times = dict(zip(tables.offsets.tolist(), tables.pts.tolist(), strict=True))
    shown = records[records["frame"] >= 0]
    known = [times.get(offset, -1) for offset in packet_offsets(shown[np.argsort(shown["frame"])])]
    return tables if (np.diff(known) > 0).all() else None
