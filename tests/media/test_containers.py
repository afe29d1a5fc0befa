"""Containers: recognised by their first bytes, played as ffmpeg does, truncated where they break off."""

import struct

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastvid.errors import SourceError
from fastvid.media.ffmpeg import Limits
from fastvid.media.file_tables import FileReader, read_tables
from fastvid.media.probe import HEAD_BYTES, sniff
from fastvid.media.prove import index_video, play
from fastvid.media.reasons import Reason
from fastvid.storage.urls import open_file
from tests.sharding.shardtools import ffmpeg, look, make

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
    assert all(reason.meaning and "\n" not in reason.meaning for reason in Reason)


X264 = ("-c:v", "libx264", "-pix_fmt", "yuv420p", "-preset", "veryfast", "-g", "20", "-bf", "2", "-sc_threshold", "0")
FRAMES = 120
TIMED = (".mp4", ".mkv", ".webm")


def tables(path):
    storage, name = open_file(str(path))
    return read_tables(FileReader(storage, name, storage.version(name)), Limits())


def play_file(path):
    data = path.read_bytes()
    return play(data, sniff(data[:HEAD_BYTES]), Limits())


# How each user of a file counts the frames that are shown.
USERS = {
    "source": lambda path: look(path).timing.shown,
    "tar": lambda path: len(play_file(path).digests),
    "in place": lambda path: int(tables(path).shown.sum()) if path.suffix in TIMED else len(play_file(path).digests),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    for name, options in {
        "plain.mp4": X264,
        "fragments.mp4": (*X264, "-movflags", "frag_keyframe+empty_moov"),
        "sized.mkv": X264,
        "live.mkv": (*X264, "-live", "1"),
        "endless.mkv": (*X264, "-flush_packets", "1", "-cluster_time_limit", "500"),
        "sized.webm": ("-c:v", "libvpx-vp9", "-cpu-used", "8", "-g", "20"),
        "first.mp4": (*X264, "-movflags", "+faststart"),
        "ticks.avi": ("-c:v", "mpeg4", "-b:v", "400k"),
        "timed.flv": X264,
        "ticks.ivf": ("-c:v", "libvpx", "-cpu-used", "8"),
    }.items():
        make(folder / name, *options, frames=FRAMES)
    data = bytearray((folder / "endless.mkv").read_bytes())
    at = data.index(b"\x18\x53\x80\x67") + 4
    data[at : at + 8] = b"\x01" + b"\xff" * 7  # the size of the segment: unknown
    (folder / "endless.mkv").write_bytes(data)
    return folder


def trimmed(data, skip, keep):
    """An MP4 whose only edit begins `skip` frames later and shows `keep` frames, as lossless trims write it."""
    data = bytearray(data)
    at, movie, media = (data.index(name) for name in (b"elst", b"mvhd", b"mdhd"))
    ticks = struct.unpack_from(">I", data, movie + 16)[0], struct.unpack_from(">I", data, media + 16)[0]
    begins = struct.unpack_from(">i", data, at + 16)[0] + skip * ticks[1] // 25
    struct.pack_into(">Ii", data, at + 12, keep * ticks[0] // 25, begins)
    return bytes(data)


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(
    ("skip", "keep"), [(75, 30), (75, 45), (5, 100), (0, 50), (20, 100), (21, 99), (40, 80), (118, 2)]
)
def test_a_file_is_whole_when_its_edits_hide_groups_of_pictures(user, skip, keep, made, tmp_path):
    (tmp_path / "a.mp4").write_bytes(trimmed((made / "plain.mp4").read_bytes(), skip, keep))
    assert USERS[user](tmp_path / "a.mp4") == keep


@pytest.mark.parametrize("user", USERS)
def test_a_copied_part_of_fragments_is_whole(user, made, tmp_path):
    ffmpeg("-ss", "3.1", "-i", str(made / "fragments.mp4"), "-t", "1", "-c", "copy", str(tmp_path / "a.mp4"))
    assert USERS[user](tmp_path / "a.mp4") == len(play_file(tmp_path / "a.mp4").digests) > 20


def test_frames_beside_a_hidden_one_of_the_same_time_keep_their_times(tmp_path):
    # In fragments of one frame, FFmpeg writes the picture before the sound with the time of the next one.
    options = {"movflags": "frag_every_frame+empty_moov"}
    with av.open(str(tmp_path / "a.mp4"), "w", options=options) as film:
        picture, sound = (
            film.add_stream("mpeg4", 60, options={"bf": "2"}),
            film.add_stream("aac", 44_100, layout="mono"),
        )
        picture.width, picture.height, picture.pix_fmt = 96, 64, "yuv420p"
        picture.codec_context.gop_size = 30
        for number in range(54):
            frame = av.VideoFrame.from_ndarray(np.full((96, 96), 4 * number, np.uint8), "yuv420p")
            frame.pts = number
            film.mux(picture.encode(frame))
        for start in range(0, 30 * 1024, 1024):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            frame.pts, frame.sample_rate = start, 44_100
            film.mux(sound.encode(frame))
        for stream in (sound, picture):
            film.mux(stream.encode(None))
    found = index_video((tmp_path / "a.mp4").read_bytes(), Limits())
    assert found.info.num_frames < 54
    assert found.times is not None
    assert float(found.info.num_frames / found.info.fps) == pytest.approx(0.9, abs=0.02)


# Bytes that are missing of a file, and what is said of it; None if it is whole.
CUTS = {
    "plain.mp4": ((0.4, "moov|Invalid data"), (0.9, "moov|Invalid data"), (1, None)),
    "sized.mkv": ((0.4, "segment at byte"), (0.999, "segment at byte"), (1, None)),
    "sized.webm": ((0.4, "segment at byte"), (0.999, "segment at byte"), (1, None)),
    "endless.mkv": ((0.5, "cluster at byte"), (0.7, "cluster at byte"), (1, None)),
    "first.mp4": ((0.5, "packet"), (0.95, "packet"), (1, None)),
    "ticks.avi": ((0.5, "packet|ticks"), (0.95, "packet|ticks"), (1, None)),
    "timed.flv": ((0.5, "ends at|packet"), (1, None)),
    "ticks.ivf": ((0.5, "packet|ticks"), (0.95, "packet|ticks"), (1, None)),
    "live.mkv": ((1, None),),
    "fragments.mp4": ((1, None),),
}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(("name", "part", "said"), [(name, *one) for name, cuts in CUTS.items() for one in cuts])
def test_a_file_that_breaks_off_is_truncated(user, name, part, said, made, tmp_path):
    data = (made / name).read_bytes()
    path = tmp_path / name
    path.write_bytes(data[: int(len(data) * part)] + (bytes(100) if part == 1 else b""))  # padding is no damage
    if said is None:
        assert USERS[user](path) == FRAMES
        return
    with pytest.raises(SourceError, match=said) as caught:
        USERS[user](path)
    assert caught.value.reason in ("truncated", "damaged", "broken-container")


@pytest.mark.parametrize("user", USERS)
def test_fragments_after_a_broken_box_are_noticed(user, made, tmp_path):
    data = bytearray((made / "fragments.mp4").read_bytes())
    second = data.index(b"moof", data.index(b"moof") + 4) - 4
    data[second : second + 40] = bytes(40)
    (tmp_path / "a.mp4").write_bytes(data)
    with pytest.raises(SourceError, match="contain fragments that cannot be read") as caught:
        USERS[user](tmp_path / "a.mp4")
    assert caught.value.reason == "truncated"


@pytest.mark.parametrize("user", USERS)
def test_elements_in_each_other_thousands_deep_are_passed_over(user, made, tmp_path):
    data, entry = (made / "endless.mkv").read_bytes(), b"\xae"  # TrackEntry
    nested = b""
    for _ in range(3000):
        nested = entry + (1 << 28 | len(nested)).to_bytes(4, "big") + nested
    tracks = b"\x16\x54\xae\x6b" + (1 << 28 | len(nested)).to_bytes(4, "big") + nested
    at = data.index(b"\x18\x53\x80\x67") + 12  # the first element of the segment
    (tmp_path / "a.mkv").write_bytes(data[:at] + tracks + data[at:])
    assert USERS[user](tmp_path / "a.mkv") == FRAMES
