"""Open and probe a source: container, stream, size, colour, orientation and timing.

The container is recognised by the file's first bytes. If FFmpeg guessed the format, a playlist, concat script, image
sequence or SVG could make it open other files. So the demuxer is chosen from an allow-list, and FFmpeg must use it.

All packets are read, and one frame is decoded. Disk errors are distinguished from damaged files.

Files are untrusted, and native code parses them. Call this in a process that may die and that has limits
(`fastvid.sharding.engines.local`), never in one with state worth keeping.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Final

import av
import numpy as np
from av.container import InputContainer
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from fastvid.errors import FormatError, SourceError
from fastvid.format.bitstream import packet_flags
from fastvid.format.headers import FieldPairs
from fastvid.format.presentation import Coded
from fastvid.format.schema import Codec, PacketFlag, Range
from fastvid.media.container import RAW, Demuxed, check_fragments, ffmpeg_message, fraction, open_demuxer, side_data
from fastvid.media.describe import HDR_TRANSFERS, Orientation, declared, plausible
from fastvid.media.ffmpeg import Limits, is_full, no_space, temporary_file
from fastvid.media.reasons import Reason
from fastvid.media.timing import FrameTiming, RandomAccess, choose_timing
from fastvid.runtime import faults
from fastvid.runtime.arrays import IntArray

HEAD_BYTES: Final = 4096
"""Bytes from the start of a file that `sniff` needs."""

# Allowed types of the first box or atom (ISO/IEC 14496-12; QuickTime File Format).
_ISO_BOXES: Final = {
    b"ftyp", b"styp", b"moov", b"moof", b"mdat", b"free", b"skip", b"wide", b"pnot", b"udta", b"sidx", b"uuid", b"emsg",
}  # fmt: skip

_MAGIC: Final = (
    (b"\x1a\x45\xdf\xa3", "matroska"),  # EBML
    (b"FLV\x01", "flv"),
    (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11\xa6\xd9\x00\xaa\x00\x62\xce\x6c", "asf"),  # ASF_Header_Object
    (b"OggS", "ogg"),
    (b"DKIF", "ivf"),
    (b"\x06\x0e\x2b\x34\x02\x05\x01\x01\x0d\x01\x02\x01\x01\x02", "mxf"),  # SMPTE 377M header partition
    (b"YUV4MPEG2 ", "yuv4mpegpipe"),
    (b"GIF87a", "gif"),
    (b"GIF89a", "gif"),
)

# Demuxers of raw streams by the byte after the start code 00 00 01.
_START_CODES: Final = {
    0xBA: "mpeg",  # MPEG program stream pack
    0xB3: "mpegvideo",  # MPEG-1/2 sequence header
    0xB0: "m4v",  # MPEG-4 part 2 visual object sequence
    0x27: "h264", 0x47: "h264", 0x67: "h264",  # sequence parameter set, nal_ref_idc 1 to 3
    0x06: "h264", 0x09: "h264",  # supplemental information, access unit delimiter
    0x40: "hevc", 0x42: "hevc", 0x46: "hevc",  # video and sequence parameter sets, access unit delimiter
}  # fmt: skip

_SCRIPTS: Final = (
    b"#extm3u", b"ffconcat", b"[playlist]", b"[reference]", b"rtsptext", b"smiltext",
    b"<svg", b"<mpd", b"<smil", b"<asx",
    b"v=0\r\n", b"v=0\n", b"file '", b"file ",
)  # fmt: skip
_XML_SCRIPTS: Final = (b"<svg", b"<mpd", b"<smil", b"<asx", b"<smoothstreamingmedia", b"<playlist")
_GIT_LFS: Final = b"version https://git-lfs"

_TS_SYNC: Final = 0x47
_TS_PACKETS: Final = ((188, 0), (192, 4))  # MPEG-TS; with the 4-byte time codes of M2TS


def sniff(head: bytes) -> str:
    """Return the name of the FFmpeg demuxer to open a file with; raise SourceError if it is no accepted container.

    `head`: the first HEAD_BYTES bytes of the file, or all of a shorter one.
    """
    if not head:
        raise SourceError("file is empty", reason=Reason.EMPTY)
    if head[4:8] in _ISO_BOXES:
        return "mov"
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if head[:4] == b"RIFF" and head[8:12] in (b"AVI ", b"AVI\x19"):
        return "avi"
    for start in (b"\x00\x00\x01", b"\x00\x00\x00\x01"):
        if head.startswith(start) and len(head) > len(start):
            name = _START_CODES.get(head[len(start)], "")
            if name:
                return name
    if _is_transport_stream(head):
        return "mpegts"
    raise _refusal(head)


def _is_transport_stream(head: bytes) -> bool:
    for size, first in _TS_PACKETS:
        positions = range(first, len(head), size)
        # A recording may be shorter than five packets, but a single sync byte is also the letter G.
        if len(positions) >= 2 and all(head[p] == _TS_SYNC for p in positions[:5]):
            return True
    return False


def _refusal(head: bytes) -> SourceError:
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(_SCRIPTS) or (text.startswith(b"<?xml") and any(word in text for word in _XML_SCRIPTS)):
        line = text.splitlines()[0][:40]
        return SourceError(f"file is a playlist or script: it begins with {line!r}", reason=Reason.PLAYLIST)
    if head.startswith(_GIT_LFS):
        return SourceError("file is a git-lfs pointer, no video", reason=Reason.NOT_VIDEO, hint="run `git lfs pull`")
    return SourceError(
        f"file is not an accepted video container: it begins with {head[:12]!r}", reason=Reason.NOT_VIDEO
    )


_CHUNK: Final = 1 << 20
# Only files of at least this many bytes are checked for holes; reading the zeros of smaller ones costs little.
_HOLES_FROM: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class OpenSource:
    """An open source file. It is used by its descriptor: its name, or replacing the file, has no effect any more."""

    descriptor: int
    size: int  # size in bytes
    container: str
    private: bool = False

    @property
    def url(self) -> str:
        """A URL for FFmpeg, valid in this process and in children that inherit the descriptor."""
        return f"file:/dev/fd/{self.descriptor}"


@contextmanager
def open_source(path: str, member: tuple[int, int] | None = None) -> Iterator[OpenSource]:
    """Open a source and recognise its container.

    `member`: offset and size in bytes of the source inside a tar; it is copied to a temporary file, because FFmpeg
    reads whole files.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise unreadable(error) from error
    try:
        faults.reach("source")
        if member is not None:
            tar, descriptor = descriptor, _copied_out(descriptor, *member)
            os.close(tar)
        size = os.fstat(descriptor).st_size
        if member is None:
            _check_holes(descriptor)
        head = os.pread(descriptor, HEAD_BYTES, 0)
        yield OpenSource(descriptor, size, sniff(head), private=member is not None)
    except OSError as error:
        if is_full(error):  # while the block wrote a file
            raise no_space(error) from error
        raise unreadable(error) from error
    finally:
        os.close(descriptor)


def unreadable(error: OSError) -> SourceError:
    """Return the transient error for a source that the disk does not deliver; its content may be fine."""
    if isinstance(error, FileNotFoundError):
        return SourceError("file does not exist", reason=Reason.MISSING, transient=True)
    message = f"cannot read the file: {error.strerror or error}"
    return SourceError(message, reason=Reason.UNREADABLE, transient=True)


@contextmanager
def private_copy(source: OpenSource) -> Iterator[OpenSource]:
    """Copy a source to an unlinked temporary file.

    FFmpeg reports a disk error like damage, or like the end of the file. In the copy it can only report real damage.
    """
    descriptor = _copied_out(source.descriptor, 0, source.size)
    try:
        yield replace(source, descriptor=descriptor, private=True)
    finally:
        os.close(descriptor)


def _check_holes(descriptor: int) -> None:
    """Raise a SourceError for a large file most of which was never written, such as an unfinished download."""
    found = os.fstat(descriptor)
    allocated = found.st_blocks * 512
    if found.st_size < _HOLES_FROM or 2 * allocated >= found.st_size:
        return
    # Compressing file systems also allocate fewer blocks, but their files have no holes.
    if os.lseek(descriptor, 0, os.SEEK_HOLE) < found.st_size:
        raise SourceError(
            f"file is sparse: {allocated} of its {found.st_size} bytes were written",
            reason=Reason.TRUNCATED,
            hint="download it again",
        )


def _copied_out(tar: int, offset: int, size: int) -> int:
    """Copy a range of a file, such as a member of a tar, to an unlinked file; return the copy's descriptor."""
    with temporary_file() as file:
        position = 0
        while position < size and (data := os.pread(tar, min(_CHUNK, size - position), offset + position)):
            file.write(data)
            position += len(data)
        if position < size:
            raise SourceError("file ends inside the video", reason=Reason.TRUNCATED)
        file.flush()
        return os.dup(file.fileno())


# Maximum size of a placeholder for a frame of an earlier packet; the smallest real MPEG-4 picture is larger.
_PLACEHOLDER_BYTES: Final = 2


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """The properties of a source."""

    container: str
    codec: str
    width: int  # coded width in pixels, before rotation
    height: int  # coded height in pixels, before rotation
    pix_fmt: str  # FFmpeg's pixel format
    sample_aspect: Fraction  # width of a pixel divided by its height; 1 if unknown or implausible
    orientation: Orientation
    crop: tuple[int, int, int, int]  # first row and column, height and width that the container shows, before rotation
    matrix: int
    full_range: bool  # whether luma ranges from 0 to 255
    transfer: int
    primaries: int
    interlaced: bool  # whether frames may consist of two fields
    timing: FrameTiming
    # presentation times of the shown frames in ticks, ascending, int64 [N]; frames without a time are left out.
    times: IntArray = field(compare=False, repr=False)
    time_base: Fraction  # seconds per tick
    # times of the packets at which decoding can begin, in ticks, ascending, int64 [K]; empty if it must begin at
    # the first packet. See `fastvid.media.timing`.
    keys: IntArray = field(compare=False, repr=False)
    others: frozenset[str]

    @property
    def turned(self) -> bool:
        """Whether display swaps width and height: only for rotations by exactly 90 or 270 degrees."""
        return self.orientation.is_exact and self.orientation.turn % 2 == 1

    @property
    def cropped(self) -> bool:
        """Whether the container crops the pictures."""
        return self.crop != (0, 0, self.height, self.width)

    @property
    def part(self) -> tuple[int, int, int, int]:
        """The shown part of the upright picture: first row and column, height and width, in pixels."""
        turn = self.orientation.turn if self.orientation.is_exact else 0
        return Coded(self.width, self.height, self.crop, turn, self.orientation.mirror).shown_part

    @property
    def hdr(self) -> bool:
        """Whether the picture must be tone-mapped."""
        return self.transfer in HDR_TRANSFERS


def probe(source: OpenSource, limits: Limits, *, whole: bool = True) -> SourceInfo:
    """Read all packets of a source and decode its first frame.

    `limits`: limits on its frames.
    """

    def read(at: int, count: int) -> bytes:
        return os.pread(source.descriptor, count, at)

    if source.container == "mov":
        check_fragments(read, source.size)
    with open_demuxer(source.url, source.container) as container:
        scan = _Scan(source.container, container, limits, whole=whole)
        scan.run()
        info = _describe(source, container, scan.stream, scan)
        if whole:
            scan.check(read, source.size)
        return info


class _Scan(Demuxed):
    """One pass over the packets that collects counts, times and the first frame."""

    def __init__(self, container: str, source: InputContainer, limits: Limits, *, whole: bool) -> None:
        super().__init__(container, source, limits, whole=whole)
        self.shown = 0
        self.pts: list[int | None] = []
        name = self.stream.codec_context.codec.canonical_name
        self._hiding = next((one for one in (Codec.VP8, Codec.VP9) if one.label == name), None)
        self.fields = FieldPairs(name, self.extradata)
        self.access = RandomAccess(container, name, self.extradata)
        self.frame: VideoFrame | None = None
        self.error = ""

    def run(self) -> None:
        for packet in self:
            if packet.size:
                self._take(packet)
        if self.frame is None:
            self._decode(None)

    def _take(self, packet: Packet[Any]) -> None:
        if self.frame is None:
            self._decode(packet)
        self.access.add(packet)
        # A frame of two fields may have two packets.
        second = self.fields.completes(memoryview(packet))
        if packet.is_discard or second or (self._hiding and _is_hidden(self._hiding, packet)):
            return
        # A placeholder takes a tick of the clock but contains no frame. AVI stores decode times only; for reordered
        # pictures libavformat invents presentation times, the last of them wrong.
        self.pts.append(packet.dts if self.container == "avi" else packet.pts)
        self.shown += packet.size > _PLACEHOLDER_BYTES

    def _decode(self, packet: Packet[VideoStream] | None) -> None:
        try:
            frames = self.stream.codec_context.decode(packet)
        except MemoryError as error:
            raise SourceError("decoding a frame exceeds the memory limit", reason=Reason.MEMORY) from error
        except av.FFmpegError as error:
            self.error = ffmpeg_message(error)
            return
        if frames:
            self.frame = frames[0]


def _describe(source: OpenSource, container: InputContainer, stream: VideoStream, scan: _Scan) -> SourceInfo:
    if not scan.count:
        raise SourceError("video stream has no packets", reason=Reason.NO_FRAMES)
    if scan.frame is None:
        cause = f": {scan.error}" if scan.error else ""
        raise SourceError(f"no frame decodes from {scan.count} packets{cause}", reason=Reason.NO_FRAMES)
    if not scan.shown:
        raise SourceError("edit list shows no frame", reason=Reason.NO_FRAMES)
    context, frame = stream.codec_context, scan.frame
    time_base = scan.time_base
    timing = choose_timing(
        [] if source.container in RAW else scan.pts,
        time_base,
        [fraction(rate) for rate in (stream.guessed_rate, stream.base_rate, stream.average_rate)],
        scan.shown,
    )
    pix_fmt = frame.format.name
    said = declared(source.container, lambda at, count: os.pread(source.descriptor, count, at), source.size)
    aspect = said.aspect(frame.height, frame.width) or fraction(stream.sample_aspect_ratio)
    times = np.sort(np.asarray([time for time in scan.pts if time is not None], np.int64))
    interlaced = bool(frame.interlaced_frame) or scan.fields.possible
    # Decoding cannot begin at a later packet if the video is deinterlaced, because that reads neighbouring frames, or
    # if there are no times to find frames by.
    from_any = not interlaced and timing.kind != "counted" and not (scan.access.old_x264 and "444" in pix_fmt)
    return SourceInfo(
        container=source.container,
        codec=context.name,
        width=frame.width,
        height=frame.height,
        pix_fmt=pix_fmt,
        sample_aspect=plausible(aspect),
        orientation=Orientation.of(said.matrix or side_data(frame, "DISPLAYMATRIX")),
        crop=said.crop(frame.height, frame.width),
        matrix=int(frame.colorspace),
        full_range=int(frame.color_range) == Range.FULL or pix_fmt.startswith("yuvj"),
        transfer=int(frame.color_trc),
        primaries=int(frame.color_primaries),
        interlaced=interlaced,
        timing=timing,
        times=times,
        time_base=time_base,
        keys=scan.access.keys(times, scan.shown) if from_any else np.zeros(0, np.int64),
        others=frozenset(_other_decoders(container, stream)),
    )


def _is_hidden(codec: Codec, packet: Packet[Any]) -> bool:
    """Return whether a VP8 or VP9 packet is decoded but never shown."""
    try:
        return bool(packet_flags(codec, b"", [memoryview(packet)])[0] & PacketFlag.HIDDEN)
    except FormatError:
        return False


def _other_decoders(container: InputContainer, stream: VideoStream) -> set[str]:
    """Return the decoder names that, in ffmpeg's log, cannot mean the decoder of the video stream."""
    own, others = set[str](), set[str]()
    for one in container.streams:
        context: Any = getattr(one, "codec_context", None)
        if context is not None:
            names = own if one.index == stream.index else others
            names |= {str(context.name), str(context.codec.canonical_name)}
    return others - own
