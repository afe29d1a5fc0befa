"""Files that plain PyAV rejects: tags in any encoding, spatial videos, unknown types of side data."""

import tarfile
from fractions import Fraction

import av
import pytest

import fastvid
from fastvid.errors import SourceError
from fastvid.media.demuxer import fraction, open_demuxer
from fastvid.sharding.job.index import index_tars
from fastvid.sharding.job.job import run_job
from fastvid.sharding.verify.verify import verify_dataset
from tests.makers import framemd5
from tests.sharding.shardtools import ffmpeg, ledger, look, make
from tests.sharding.spatial import spatial_video

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
    assert (video.width, video.height) == ((256, 384) if orientation == 6 else (384, 256))


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


def test_playlist_opens_no_other_file_when_forced_to_a_container(tmp_path):
    """A playlist in memory fails to open with any forced container, and the file it names is not opened."""
    secret = make(tmp_path / "secret.mp4")
    for container in ("mov", "matroska"):
        with pytest.raises(SourceError, match=container):
            open_demuxer(f"#EXTM3U\n#EXTINF:1,\n{secret}\n#EXT-X-ENDLIST\n".encode(), container)
