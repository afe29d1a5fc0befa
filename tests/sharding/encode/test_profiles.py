"""Profiles: sizes that are never stretched, and streams with the structure that plans need."""

import io
import subprocess
from dataclasses import replace
from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastvid.errors import SourceError, UsageError
from fastvid.format.bitstream import nal_units
from fastvid.format.mp4 import index_mp4
from fastvid.format.schema import Matrix, PacketFlag, Range
from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.media.probe import open_source, probe
from fastvid.media.reasons import Reason
from fastvid.sharding.encode.profiles import PROFILES, Profile, build_command, get_profile, plan_geometry
from fastvid.sharding.encode.transcode import _sample
from fastvid.sharding.work.tasks import SourceTask
from tests.sharding.shardtools import HDR, encode, encode_source, ffmpeg, make, settings

COMPACT = PROFILES["compact"]
ENCODING = {name: profile for name, profile in PROFILES.items() if name != "copy"}
sides = st.integers(1, 8192)


@given(sides, sides, st.fractions(Fraction(1, 4), 4), st.booleans())
def test_geometry_keeps_the_aspect_ratio_and_the_multiple(width, height, aspect, enlarge):
    shape = width * aspect / height
    own = height if shape >= 1 else width
    side = 256 if enlarge or own >= 256 else max(16, own // 16 * 16)
    if max(shape, 1 / shape) * side >= 4112:
        with pytest.raises(SourceError) as caught:
            plan_geometry(width, height, aspect, COMPACT.changed(enlarge=enlarge))
        assert caught.value.reason == Reason.BAD_SHAPE
        return
    geometry = plan_geometry(width, height, aspect, COMPACT.changed(enlarge=enlarge))
    scaled, cropped = geometry.scaled, geometry.cropped
    assert min(cropped) == side
    assert all(side % 16 == 0 and side <= 4096 for side in cropped)
    # Rounding to even sizes may stretch by at most one pixel; cropping removes less than one step, on one side only.
    assert abs(scaled[0] - scaled[1] * shape) <= max(1, shape)
    assert all(0 <= s - c < 16 for s, c in zip(scaled, cropped, strict=True))
    assert min(scaled) == min(cropped)


@given(st.integers(2, 4097), st.integers(2, 4097))
def test_geometry_of_small_pictures_is_their_own(width, height):
    geometry = plan_geometry(width, height, Fraction(1), PROFILES["small"])
    assert geometry.scaled == (width, height)
    assert geometry.cropped == (width // 2 * 2, height // 2 * 2)


def test_invalid_profiles_raise():
    with pytest.raises(UsageError, match=r"use one of compact, copy, hevc, intra, mjpeg, small, tiles, vp9"):
        get_profile("fast")
    with pytest.raises(UsageError, match="a gop of 4 with 4 B-frames is invalid"):
        Profile("x", "h264", gop=4, bframes=4, crf=23, preset="fast")
    with pytest.raises(UsageError, match="not a multiple"):
        COMPACT.changed(short_side=100)
    for fps in ("0", "61", "-5", "fast", "1/0"):
        with pytest.raises(UsageError, match="frame rate"):
            COMPACT.changed(fps=fps)
    assert COMPACT.changed(gop=4).bframes == 3
    assert COMPACT.changed(crf=30, short_side=128) == replace(COMPACT, crf=30, short_side=128)


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    source = make(tmp_path_factory.mktemp("source") / "a.mp4", size="160x96", frames=70)
    return {name: encode(source, profile.changed(short_side=96))[0] for name, profile in ENCODING.items()}


def test_every_profile_has_the_expected_structure(encoded):
    for name in ("compact", "hevc"):
        _, records = index_mp4(encoded[name])
        flags, frames = records["flags"], records["frame"]
        assert frames[(flags & PacketFlag.KEY) != 0].tolist() == [0, 32, 64]
        # Seven non-reference frames between two references; a GOP's last frame is a reference.
        references = sorted(frames[(flags & PacketFlag.DROPPABLE) == 0].tolist())
        assert references == [0, 8, 16, 24, 31, 32, 40, 48, 56, 63, 64, 69]
    for name in ("intra", "mjpeg", "tiles"):
        _, records = index_mp4(encoded[name])
        assert ((records["flags"] & PacketFlag.KEY) != 0).all()
    _, records = index_mp4(encoded["vp9"])
    assert records["frame"][(records["flags"] & PacketFlag.KEY) != 0].tolist() == [0, 12, 24, 36, 48, 60]
    assert records["frame"].tolist() == list(range(70))
    assert not (records["flags"] & PacketFlag.HIDDEN).any()
    _, records = index_mp4(encoded["compact"])
    packets = [encoded["compact"][one["offset"] : one["offset"] + one["size"]] for one in records]
    assert {unit[0] & 31 for packet in packets for unit in nal_units(packet, 4)} == {1, 5}, "there is no SEI"


@pytest.mark.parametrize("name", sorted(ENCODING))
def test_colour_tags_are_right_in_container_and_stream_for_every_profile(encoded, name, tmp_path):
    info, _ = index_mp4(encoded[name])
    full = ENCODING[name].full_range
    assert (info.width, info.height, info.num_frames, info.fps) == (160, 96, 70, 25)
    assert info.range is (Range.FULL if full else Range.LIMITED)
    assert info.matrix in (Matrix.SMPTE170M, Matrix.BT470BG)
    path = tmp_path / "a.mp4"
    path.write_bytes(encoded[name])
    with av.open(str(path)) as container:
        frame = next(container.decode(video=0))
        assert frame.format.name == ("yuvj420p" if full else "yuv420p")
        assert (int(frame.color_range), int(frame.colorspace) in (5, 6)) == (2 if full else 1, True)
        assert container.streams.video[0].sample_aspect_ratio in (None, 1)
        assert not container.metadata.keys() & {"encoder", "title", "creation_time"}


def test_headers_are_equal_for_equal_sizes_of_any_source(tmp_path):
    sources = [
        make(tmp_path / "a.mp4", size="160x96", frames=40, rate="25"),
        make(tmp_path / "b.mkv", "-c:v", "mjpeg", size="320x192", frames=9, rate="30000/1001"),
        make(tmp_path / "c.avi", "-c:v", "mpeg4", size="240x144", frames=1, rate="12"),
        make(tmp_path / "d.mpg", "-c:v", "mpeg1video", size="160x96", frames=12, rate="50"),
    ]
    headers = {index_mp4(encode(path, COMPACT.changed(short_side=96))[0])[0].extradata for path in sources}
    assert len(headers) == 1


@pytest.mark.parametrize("name", sorted(ENCODING))
def test_bytes_are_equal_on_a_second_run_and_without_simd(name, tmp_path):
    # An odd size, ten bits and 4:4:4 exercise every branch of the scaler.
    source = make(tmp_path / "a.mkv", "-pix_fmt", "yuv444p10le", "-c:v", "ffv1", size="131x97", frames=12)
    first = encode(source, PROFILES[name].changed(short_side=96))[0]
    assert encode(source, PROFILES[name].changed(short_side=96))[0] == first
    target = tmp_path / "plain.mp4"
    with open_source(str(source)) as opened:
        info = probe(opened, Limits())
        how = settings(PROFILES[name].changed(short_side=96))
        command = build_command(how, info, opened.url, [(f"file:{target}", None)])
        plain = [command[0], "-cpuflags", "0", *command[1:]]
        subprocess.run(plain, check=True, capture_output=True, pass_fds=[opened.descriptor])
    with target.open("rb") as file:
        assert _sample(file.fileno(), PROFILES[name], info.timing.rate) == first


def middle(data):
    with av.open(io.BytesIO(data)) as container:
        planes = next(container.decode(video=0)).to_ndarray()
    height = planes.shape[0] * 2 // 3
    y = planes[height // 4 : height * 3 // 4].mean()
    chroma = planes[height:].reshape(2, -1)
    return y, chroma[0].mean(), chroma[1].mean()


@pytest.mark.parametrize(
    ("options", "rtol"),
    [
        (("-vf", "scale=out_color_matrix=bt709:out_range=limited", "-colorspace", "bt709"), 2),
        (("-vf", "scale=out_color_matrix=bt601:out_range=limited", "-colorspace", "smpte170m"), 2),
        (("-vf", "scale=out_color_matrix=bt601:out_range=full", "-colorspace", "smpte170m", "-color_range", "pc"), 2),
        (("-vf", "scale=out_color_matrix=bt709:out_range=full", "-colorspace", "bt709", "-color_range", "pc"), 2),
        (("-vf", "scale=out_color_matrix=bt2020", "-colorspace", "bt2020nc", "-pix_fmt", "yuv420p10le"), 2),
        (("-pix_fmt", "gbrp"), 2),
    ],
)
def test_every_matrix_and_range_becomes_bt601_limited(options, rtol, tmp_path):
    # Orange: its luma differs by 9 levels between BT.709 and BT.601, and by 15 between ranges.
    path = tmp_path / "a.mkv"
    source = ["-f", "lavfi", "-i", "color=c=0xE08020:size=96x96:rate=25,format=gbrp", "-frames:v", "3"]
    ffmpeg(*source, *options, "-c:v", "libx264", "-qp", "0", str(path))
    red, green, blue = 0xE0 / 255, 0x80 / 255, 0x20 / 255
    luma = 0.299 * red + 0.587 * green + 0.114 * blue
    expected = (16 + 219 * luma, 128 + 224 * (blue - luma) / 1.772, 128 + 224 * (red - luma) / 1.402)
    found = middle(encode(path, COMPACT.changed(short_side=96, crf=1))[0])
    np.testing.assert_allclose(found, expected, atol=rtol)


def test_hdr_is_tone_mapped_or_rejected_without_zscale(tmp_path):
    path = make(tmp_path / "a.mp4", "-vf", f"format=yuv420p10le,{HDR}", frames=3)
    luma, _, _ = middle(encode(path, COMPACT.changed(short_side=96))[0])
    assert 16 < luma < 235
    other = HDR.replace("primaries=bt2020", "primaries=bt470bg")
    odd = make(tmp_path / "odd.mp4", "-vf", f"format=yuv444p10le,crop=95:63,{other}", frames=3)
    assert index_mp4(encode(odd, PROFILES["small"])[0])[0].width == 94
    with open_source(str(path)) as opened:
        info = probe(opened, Limits())
        how = settings(build=replace(find_ffmpeg(), zscale=False))
        with pytest.raises(SourceError) as caught:
            build_command(how, info, opened.url, [("x", None)])
    assert caught.value.reason == Reason.HDR


@pytest.mark.parametrize(("rate", "fps", "frames"), [("25", "10", 16), ("25", "50", 80), ("30000/1001", "25", 33)])
def test_profile_rate_repeats_or_drops_frames(rate, fps, frames, tmp_path):
    path = make(tmp_path / "a.mp4", size="160x96", frames=40, rate=rate)
    how = settings(COMPACT.changed(short_side=96, fps=fps))
    for start, end, expected in ((None, None, frames), (0.4, 0.8, round(Fraction(fps) * Fraction("0.4")))):
        task = SourceTask(0, "a", str(path), "a", path.stat().st_size, start, end)
        outcome = encode_source(task, how)
        assert outcome.message == ""
        sample = outcome.samples[0]
        assert abs(sample.num_frames - expected) <= 1
        assert sample.meta["fps"] == fps
        info, _ = index_mp4(sample.streams["rgb"])
        assert info.fps == Fraction(fps)
        assert "rate-changed" in outcome.warnings
