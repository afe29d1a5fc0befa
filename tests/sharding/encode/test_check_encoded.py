"""Encoded samples are decoded and checked; every violation is detected."""

from __future__ import annotations

import pytest

from fastvid.errors import SourceError
from fastvid.format.mp4 import index_mp4
from fastvid.media.reasons import Reason
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.encode.transcode import verify
from tests.sharding.shardtools import encode, ffmpeg, make, turn

SMALL = PROFILES["compact"].changed(short_side=96)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    path = folder / "good.mp4"
    path.write_bytes(encode(make(folder / "a.mp4", size="160x96", frames=40), SMALL)[0])
    return path


def failure(data, profile=SMALL, frames=(40, 40), rate=25):
    with pytest.raises(SourceError) as caught:
        verify(data, profile, frames=frames, rate=rate)
    assert caught.value.reason == Reason.VERIFY_FAILED
    return caught.value.message


def test_valid_sample_passes(good):
    found = verify(good.read_bytes(), SMALL, frames=(40, 40), rate=25)
    assert (found.num_frames, found.width, found.height) == (40, 160, 96)


def test_wrong_number_of_frames_fails(good):
    assert "40 frames, expected 41" in failure(good.read_bytes(), frames=(41, 45))


def test_wrong_size_structure_or_file_fails(good):
    data = good.read_bytes()
    assert "expected 128 on the shorter side" in failure(data, SMALL.changed(short_side=128))
    assert "key frames" in failure(data, SMALL.changed(gop=16))
    assert "index" in failure(data[:1000])
    assert "index" in failure(b"")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-colorspace", "bt709"), "tagged"),
        (("-color_range", "pc"), "tagged"),
        (("-bsf:v", "h264_metadata=matrix_coefficients=1"), "frame 0 is tagged limited range, bt709 matrix"),
        (("-bsf:v", "h264_metadata=video_full_range_flag=1"), "frame 0 is tagged full range, smpte170m matrix"),
    ],
)
def test_wrong_tags_fail_in_container_and_stream(options, message, good, tmp_path):
    path = tmp_path / "tagged.mp4"
    ffmpeg("-i", str(good), "-c", "copy", *options, str(path))
    assert message in failure(path.read_bytes())


def test_display_matrix_fails(good, tmp_path):
    assert "display rotation of -90 degrees" in failure(turn(good, tmp_path / "turned.mp4").read_bytes())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-output_ts_offset", "0.2", "-use_editlist", "0"), "ticks after the start"),
        (("-bsf:v", "setts=duration=512:pts=PTS+512*gt(PTS\\,5120):dts=DTS"), "the frame rate is not constant"),
        (("-aspect", "4:3"), "pixels are 4/5 times as wide as high"),
    ],
)
def test_a_clock_or_pixels_that_a_dataset_does_not_promise_are_seen(options, message, good, tmp_path):
    path = tmp_path / "changed.mp4"
    ffmpeg("-i", str(good), "-c", "copy", *options, str(path))
    assert message in failure(path.read_bytes())


def test_another_rate_than_the_job_promises_is_seen(good):
    message = failure(good.read_bytes(), rate=30)
    assert message == "the encoded sample is wrong: 12800/512 frames a second, but 30 are promised"


def test_references_that_should_not_be_there_are_seen(tmp_path):
    # x264's own defaults refer to every frame of so short a clip without B-frames.
    path = make(
        tmp_path / "a.mp4", "-bf", "0", "-g", "32", "-keyint_min", "32", "-sc_threshold", "0", size="160x96", frames=40
    )
    assert "every frame is a reference frame" in failure(path.read_bytes())


def test_damage_in_any_packet_fails_or_is_invisible_to_libavcodec(good):
    data = good.read_bytes()
    _, records = index_mp4(data)
    caught = 0
    for record in records:
        broken = bytearray(data)
        middle = int(record["offset"]) + int(record["size"]) // 2
        broken[middle : middle + 8] = bytes(255 - b for b in broken[middle : middle + 8])
        try:
            verify(bytes(broken), SMALL, frames=(40, 40), rate=25)
        except SourceError:
            caught += 1
    # Decoders conceal some damage, which is why packets have checksums. Most must be detected.
    assert caught >= len(records) // 2
