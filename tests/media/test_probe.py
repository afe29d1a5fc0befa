"""Files are probed and opened: what they contain, which are refused and why, and what is taken from their tags."""

import os
import struct
import tarfile
from fractions import Fraction

import av
import pytest

import fastvid
from fastvid.errors import SourceError
from fastvid.format.schema import Matrix
from fastvid.media.container import fraction
from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.media.prove import index_video
from fastvid.media.reasons import Reason
from fastvid.sharding.encode.profiles import PROFILES, Settings, source_matrix
from fastvid.sharding.job.index import index_tars
from fastvid.sharding.job.job import run_job
from fastvid.sharding.verify.verify import verify_dataset
from fastvid.sharding.work.tasks import SourceTask
from tests.makers import framemd5
from tests.sharding.shardtools import HDR, encode_source, ffmpeg, ledger, look, make, turn
from tests.sharding.spatial import spatial_video


def reason_of(path, limits=None):
    with pytest.raises(SourceError) as caught:
        look(path, limits)
    return Reason(caught.value.reason)


def test_ordinary_video_is_probed(tmp_path):
    info = look(make(tmp_path / "a.mp4", size="128x72", frames=30, rate="30000/1001"))
    assert (info.container, info.codec, info.width, info.height) == ("mov", "h264", 128, 72)
    assert (info.sample_aspect, info.orientation.is_upright, info.interlaced, info.hdr) == (1, True, False, False)
    assert (info.timing.kind, info.timing.rate, info.timing.frames) == ("constant", Fraction(30000, 1001), 30)


def test_pixel_shape_colour_fields_and_rotation_are_read(tmp_path):
    anamorphic = look(make(tmp_path / "dvd.mkv", "-vf", "setsar=64/45", "-c:v", "mpeg4"))
    assert anamorphic.sample_aspect == Fraction(64, 45)
    full = look(make(tmp_path / "full.mp4", "-vf", "scale=out_range=full", "-pix_fmt", "yuvj420p"))
    assert full.full_range
    hdr = look(make(tmp_path / "hdr.mp4", "-vf", f"format=yuv420p10le,{HDR}"))
    assert hdr.hdr
    assert hdr.matrix == 9
    fields = look(make(tmp_path / "tv.ts", "-c:v", "mpeg2video", "-flags", "+ilme+ildct", "-vf", "setfield=tff"))
    assert fields.interlaced
    turned = look(turn(make(tmp_path / "phone.mp4"), tmp_path / "turned.mp4"))
    assert (turned.orientation.turn, turned.turned, turned.cropped) == (1, True, False)


@pytest.mark.parametrize(
    ("size", "tag", "shown"),
    [
        ("1280x720", (), (Matrix.BT709, "bt709")),
        ("320x180", (), (Matrix.UNKNOWN, "bt601")),
        ("1280x720", ("-colorspace", "smpte170m"), (Matrix.SMPTE170M, "bt601")),
    ],
)
def test_untagged_pictures_have_the_colours_of_their_size_in_place_and_encoded(size, tag, shown, tmp_path):
    path = make(tmp_path / "a.mp4", "-pix_fmt", "yuv420p", *tag, size=size, frames=3)
    assert (index_video(path.read_bytes(), Limits()).info.matrix, source_matrix(look(path))) == shown


def test_implausible_pixel_aspect_is_ignored(tmp_path):
    assert look(make(tmp_path / "a.mkv", "-vf", "setsar=400/1", "-c:v", "mpeg4")).sample_aspect == 1


def test_audio_and_cover_images_are_not_video(tmp_path):
    picture = make(tmp_path / "cover.png", "-frames:v", "1")
    sound = ["-f", "lavfi", "-i", "sine=duration=1"]
    ffmpeg(*sound, str(tmp_path / "sound.m4a"))
    assert reason_of(tmp_path / "sound.m4a") is Reason.NO_VIDEO_STREAM
    cover = ["-i", str(picture), "-map", "0", "-map", "1", "-c:v", "mjpeg", "-disposition:v:0", "attached_pic"]
    ffmpeg(*sound, *cover, str(tmp_path / "song.m4a"))
    assert reason_of(tmp_path / "song.m4a") is Reason.NO_VIDEO_STREAM
    ffmpeg("-i", str(make(tmp_path / "mute.mp4")), *sound, "-c:v", "copy", str(tmp_path / "both.mp4"))
    assert "aac" in look(tmp_path / "both.mp4").others


def milliseconds(source, target):
    """Write an IVF at 25 frames per second with the clock of a WebM, as some versions of ffmpeg remux it."""
    data = bytearray(source.read_bytes())
    rate, scale, steps = struct.unpack_from("<3I", data, 16)
    assert (rate, scale) == (25, 1)
    struct.pack_into("<3I", data, 16, 1000, 1, 40 * steps)
    at = 32
    while at < len(data):
        size, pts = struct.unpack_from("<IQ", data, at)
        struct.pack_into("<Q", data, at + 4, 40 * pts)
        at += 12 + size
    target.write_bytes(data)


@pytest.mark.parametrize("suffix", ["avi", "ivf"])
def test_file_is_whole_when_frames_take_many_clock_ticks(suffix, tmp_path):
    path = tmp_path / f"a.{suffix}"
    if suffix == "avi":
        # B-frames, for which AVI has no times; ffmpeg 9 counts 24 ticks per frame.
        source = make(tmp_path / "a.mp4", "-pix_fmt", "yuv420p", "-bf", "3", frames=70)
        ffmpeg("-i", str(source), "-c", "copy", str(path))
    else:
        milliseconds(make(tmp_path / "b.ivf", "-c:v", "libvpx", "-cpu-used", "8", frames=70), path)
    timing = look(path).timing
    assert (timing.kind, timing.rate, timing.frames) == ("constant", 25, 70)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert reason_of(path) is Reason.TRUNCATED


def test_exceeded_limit_has_its_reason(tmp_path):
    path = make(tmp_path / "a.mp4")
    assert reason_of(path, Limits(max_pixels=96 * 64 - 1)) is Reason.TOO_LARGE
    assert reason_of(path, Limits(max_frames=19)) is Reason.TOO_LONG
    assert look(path, Limits(max_pixels=96 * 64, max_frames=20)).timing.shown == 20


def test_unreadable_files_have_their_reason(tmp_path):
    assert reason_of(tmp_path / "absent.mp4") is Reason.MISSING
    os.mkfifo(tmp_path / "pipe.mp4")
    assert reason_of(tmp_path / "pipe.mp4") in (Reason.UNREADABLE, Reason.EMPTY)
    (tmp_path / "folder.mp4").mkdir()
    assert reason_of(tmp_path / "folder.mp4") is Reason.UNREADABLE
    (tmp_path / "half.mp4").write_bytes(make(tmp_path / "a.mp4").read_bytes()[:40])
    assert reason_of(tmp_path / "half.mp4") in (Reason.BROKEN_CONTAINER, Reason.NO_VIDEO_STREAM)


def test_playlist_after_mp4_magic_is_not_opened_as_playlist(tmp_path):
    # A playlist after the first bytes of an MP4 is a malformed MP4, because the demuxer is forced.
    secret = make(tmp_path / "secret.mp4")
    evil = tmp_path / "evil.mp4"
    evil.write_bytes(b"\0\0\0\x08free" + f"\n#EXTM3U\n#EXTINF:1,\n{secret}\n#EXT-X-ENDLIST\n".encode())
    assert reason_of(evil) in (Reason.BROKEN_CONTAINER, Reason.NO_VIDEO_STREAM)


def test_invalid_text_in_metadata_is_accepted(footage):
    path = footage / "clean" / "ROCm__vision__hmdb51_Turnk_r_Pippi_Michel_cartwheel_f_cm_np2_le_med_6.avi"
    info = look(path)
    # Its 84th packet is a placeholder.
    assert (info.timing.kind, info.timing.rate, info.timing.shown) == ("constant", 30, 83)


def test_mostly_unwritten_files_are_refused_before_they_are_read(tmp_path):
    path = make(tmp_path / "a.mp4", frames=5)
    assert look(path).timing.shown == 5
    with path.open("r+b") as file:
        file.truncate(3 << 30)
    with pytest.raises(SourceError, match="file is sparse") as caught:
        look(path)
    assert caught.value.reason == Reason.TRUNCATED


def test_sources_larger_than_the_limit_are_refused(tmp_path):
    path = make(tmp_path / "a.mp4", frames=5)
    task = SourceTask(0, "a", str(path), "a", path.stat().st_size)
    for allowed, reason in ((path.stat().st_size, None), (path.stat().st_size - 1, Reason.TOO_LARGE)):
        settings = Settings(PROFILES["intra"], find_ffmpeg(), Limits(source_bytes=allowed), 600.0)
        assert encode_source(task, settings).reason is reason


def test_video_without_a_clock_keeps_all_frames(tmp_path):
    path = make(tmp_path / "a.mp4", "-c:v", "libx264", "-bf", "0", frames=20)
    data = bytearray(path.read_bytes())
    at = data.index(b"stts") + 8
    for entry in range(struct.unpack_from(">I", data, at)[0]):
        struct.pack_into(">I", data, at + 8 + 8 * entry, 0)
    path.write_bytes(data)
    assert (look(path).timing.kind, look(path).timing.frames) == ("counted", 20)


LATIN = "Äpfel über Öl".encode("latin-1")
GARBAGE = bytes(range(0x80, 0x100)) + b"\xed\xa0\x80"


def tagged(path, tag, *options):
    """Write a video whose title consists of given bytes."""
    place = "T" * len(tag)
    make(path, "-pix_fmt", "yuv420p", *options, "-metadata", f"title={place}", "-metadata:s:v", f"handler_name={place}")
    data = path.read_bytes()
    assert place.encode() in data
    path.write_bytes(data.replace(place.encode(), tag))
    return path


def exif(path, orientation):
    """Write a video of JPEG pictures with an EXIF orientation, as cameras do."""
    plain = make(path.with_suffix(".mjpeg"), "-c:v", "mjpeg", "-pix_fmt", "yuvj420p", "-f", "mjpeg", frames=10)
    entry = b"\x12\x01\x03\0\x01\0\0\0" + bytes([orientation, 0, 0, 0])  # Orientation, one SHORT
    segment = b"Exif\0\0II*\0\x08\0\0\0\x01\0" + entry + bytes(4)
    segment = b"\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment
    turned = plain.read_bytes().replace(b"\xff\xd8", b"\xff\xd8" + segment)
    ffmpeg("-framerate", "25", "-f", "mjpeg", "-i", "-", "-c", "copy", str(path), data=turned)
    plain.unlink()
    return path


@pytest.mark.parametrize("tag", [LATIN, GARBAGE], ids=["latin-1", "garbage"])
def test_file_opens_when_tags_contain_any_bytes(tag, tmp_path):
    sources = tmp_path / "sources"
    for name, options in {"a.mp4": (), "b.mkv": (), "c.avi": ("-c:v", "mpeg4")}.items():
        assert look(tagged(sources / name, tag, *options)).timing.frames == 20
    run_job(sources, tmp_path / "copied", profile="copy", workers=1)
    assert [row["reason"] for row in ledger(tmp_path / "copied")] == [None] * 3
    assert verify_dataset(str(tmp_path / "copied"), workers=1).ok
    with tarfile.open(tmp_path / "foreign.tar", "w") as tar:
        tar.add(sources / "a.mp4", "a.mp4")
    index_tars([str(tmp_path / "foreign.tar")], str(tmp_path / "indexed"), workers=1)
    assert verify_dataset(str(tmp_path / "indexed"), workers=1).ok


def test_spatial_video_is_packed_by_its_base_view(tmp_path):
    path = spatial_video(tmp_path / "sources" / "spatial.mp4")
    info = look(path)
    assert (info.codec, info.width, info.height, info.orientation.is_upright) == ("hevc", 320, 192, True)
    assert (info.timing.kind, info.timing.frames) == ("constant", 40)
    for profile in ("compact", "copy"):
        run_job(tmp_path / "sources", tmp_path / profile, profile=profile, workers=1)
        assert [row["reason"] for row in ledger(tmp_path / profile)] == [None]
        assert verify_dataset(str(tmp_path / profile), workers=1).ok
    with tarfile.open(tmp_path / "foreign.tar", "w") as tar:
        tar.add(path, "a.mp4")
    index_tars([str(tmp_path / "foreign.tar")], str(tmp_path / "indexed"), workers=1)
    assert [row["reason"] for row in ledger(tmp_path / "indexed")] == [None]
    assert verify_dataset(str(tmp_path / "indexed"), workers=1).ok
    assert fastvid.open(str(tmp_path / "indexed"))[0].num_frames == len(set(framemd5(path))) == 40


@pytest.mark.parametrize("orientation", [6, 1])
def test_mjpeg_is_rotated_by_its_exif_orientation(orientation, tmp_path):
    (tmp_path / "sources").mkdir()
    path = exif(tmp_path / "sources" / "camera.mov", orientation)
    info = look(path)
    assert (info.codec, info.orientation.turn, info.timing.frames) == ("mjpeg", orientation == 6, 10)
    run_job(tmp_path / "sources", tmp_path / "out", workers=1)
    video = fastvid.open(str(tmp_path / "out"))[0]
    assert (video.width, video.height) == ((64, 96) if orientation == 6 else (96, 64))


def test_rates_are_fractions_and_none_where_not_set(tmp_path):
    timing = look(make(tmp_path / "a.mp4", "-pix_fmt", "yuv420p", rate="173/10")).timing
    assert (timing.kind, timing.rate, type(timing.rate)) == ("constant", Fraction(173, 10), Fraction)
    assert fraction(None) is None
    assert fraction(Fraction(30000, 1001)) == Fraction(30000, 1001)
    unset = getattr(av, "AVRational", Fraction)
    assert fraction(unset(0, 1)) is None
    if unset is not Fraction:
        assert fraction(unset(1, 0)) is None
        assert type(fraction(unset(25, 1))) is Fraction
