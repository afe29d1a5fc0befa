"""Which files are accepted, and which demuxer opens them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastvid.errors import SourceError
from fastvid.media.probe import HEAD_BYTES, sniff
from fastvid.media.reasons import MEANING, Reason
from tests.sharding.shardtools import make

MUXERS = {
    "mp4": ("mov", ()),
    "mov": ("mov", ()),
    "3gp": ("mov", ("-c:v", "libx264")),
    "mkv": ("matroska", ()),
    "webm": ("matroska", ("-c:v", "libvpx-vp9", "-cpu-used", "8")),
    "avi": ("avi", ("-c:v", "mpeg4")),
    "flv": ("flv", ("-c:v", "flv1")),
    "asf": ("asf", ("-c:v", "msmpeg4")),
    "ogv": ("ogg", ("-c:v", "libtheora")),
    "ivf": ("ivf", ("-c:v", "libvpx", "-cpu-used", "8")),
    "ts": ("mpegts", ()),
    "m2ts": ("mpegts", ()),
    "mpg": ("mpeg", ("-c:v", "mpeg1video")),
    "m1v": ("mpegvideo", ("-c:v", "mpeg1video")),
    "m4v": ("m4v", ("-c:v", "mpeg4", "-f", "m4v")),
    "h264": ("h264", ("-c:v", "libx264")),
    "hevc": ("hevc", ("-c:v", "libx265", "-x265-params", "log-level=none")),
    "mxf": ("mxf", ("-c:v", "mpeg2video")),
    "gif": ("gif", ()),
    "y4m": ("yuv4mpegpipe", ("-pix_fmt", "yuv420p")),
}


@pytest.mark.parametrize("suffix", sorted(MUXERS))
def test_container_is_recognised_by_its_first_bytes(suffix, tmp_path):
    expected, options = MUXERS[suffix]
    path = make(tmp_path / f"video.{suffix}", *options, frames=3)
    # The file name does not matter.
    assert sniff(path.read_bytes()[:HEAD_BYTES]) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"#EXTM3U\n#EXTINF:1,\nfile:secret.mp4\n", Reason.PLAYLIST),
        (b"ffconcat version 1.0\nfile secret.mp4\n", Reason.PLAYLIST),
        (b"file 'secret.mp4'\n", Reason.PLAYLIST),
        (b"\xef\xbb\xbf  #EXTM3U\n", Reason.PLAYLIST),
        (b'<?xml version="1.0"?>\n<MPD xmlns="urn:mpeg:dash:schema:mpd:2011">', Reason.PLAYLIST),
        (b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:secret.mp4"/></svg>', Reason.PLAYLIST),
        (b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\n", Reason.PLAYLIST),
        (b"[playlist]\nFile1=http://127.0.0.1/x\n", Reason.PLAYLIST),
        (b"", Reason.EMPTY),
        (b"this is a bad video\n", Reason.NOT_VIDEO),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), Reason.NOT_VIDEO),
        (b"\xff\xd8\xff\xe0" + bytes(100), Reason.NOT_VIDEO),
        (b"G" + bytes(400), Reason.NOT_VIDEO),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", Reason.NOT_VIDEO),
    ],
)
def test_playlists_pictures_and_text_are_rejected_with_their_reason(text, reason):
    with pytest.raises(SourceError) as caught:
        sniff(text)
    assert caught.value.reason == reason


@given(st.text(min_size=1).filter(lambda text: not text.startswith(("OggS", "DKIF", "GIF8", "YUV4", "FLV"))))
def test_ordinary_text_is_not_recognised_as_video(text):
    data = text.encode("utf-8", "surrogatepass")
    if data[4:8] in (b"ftyp", b"moov", b"free", b"skip", b"wide", b"mdat"):
        return
    with pytest.raises(SourceError):
        sniff(data.replace(b"\x00", b" "))


def test_every_reason_has_an_explanation():
    assert set(MEANING) == set(Reason)
    assert all(line and "\n" not in line for line in MEANING.values())
