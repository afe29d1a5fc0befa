"""Encoded samples are decoded and checked; every violation is detected."""

from __future__ import annotations

import pytest

from fastvid.errors import SourceError
from fastvid.format.mp4 import index_mp4
from fastvid.media.reasons import Reason
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.encode.transcode import verify
from tests.sharding.shardtools import encode, make

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
