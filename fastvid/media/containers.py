"""Recognise an accepted container format by a file's first bytes.

FFmpeg guesses formats, and some of them refer to other files: playlists, concat scripts, image sequences, SVG. Choosing
the demuxer from an allow-list, and forcing FFmpeg to use it, ensures that such files are never opened as what they are.
"""

from __future__ import annotations

from typing import Final

from fastvid.errors import SourceError
from fastvid.media.reasons import Reason

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
    """Return the FFmpeg demuxer for a file.

    `head`: the first HEAD_BYTES bytes of the file, or all of a shorter one. Returns the name of the demuxer to
    force when opening the file.
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
        return SourceError(
            "file is a git-lfs pointer, not the video", reason=Reason.NOT_VIDEO, hint="run `git lfs pull`"
        )
    return SourceError(
        f"file is not an accepted video container: it begins with {head[:12]!r}", reason=Reason.NOT_VIDEO
    )
