"""Flags read from the first bytes of packets never claim more than those read from whole packets."""

from __future__ import annotations

import numpy as np
import pytest

from fastvid.format.bitstream import has_arithmetic_coding, packet_flags
from fastvid.format.headers import HEAD_BYTES, WHOLE_PACKETS, flags_of_heads
from fastvid.format.schema import PacketFlag
from tests import makers
from tests.makers import Video, encode, packets_of, texture

PROMISES = PacketFlag.KEY | PacketFlag.DROPPABLE


@pytest.mark.parametrize("encoding", sorted(makers.ENCODINGS))
def test_flags_of_heads_equal_those_of_whole_packets(encoding, videos):
    video = videos.painted(encoding)
    codec, extradata, packets = video.info.codec, video.info.extradata, packets_of(video)
    sizes = [len(packet) for packet in packets]
    expected = packet_flags(codec, extradata, packets)
    heads = packets if codec in WHOLE_PACKETS else [packet[:HEAD_BYTES] for packet in packets]
    found = flags_of_heads(codec, extradata, heads, sizes)
    # x264 writes its options before the first slice, longer than a head.
    unknown = 1 if encoding in ("compact", "intra", "pyramid", "h264-422", "h264-10bit") or "hevc" in encoding else 0
    assert found[unknown:].tolist() == expected[unknown:].tolist()
    assert not (found & ~expected & PROMISES).any()
    # With longer heads everything is known.
    assert flags_of_heads(codec, extradata, packets, sizes).tolist() == expected.tolist()


@pytest.mark.parametrize("encoding", sorted(makers.ENCODINGS))
def test_unread_and_short_heads_promise_nothing_wrong(encoding, videos):
    video = videos.painted(encoding)
    codec, extradata, packets = video.info.codec, video.info.extradata, packets_of(video)
    sizes = [len(packet) for packet in packets]
    expected = packet_flags(codec, extradata, packets)
    rng = np.random.default_rng(0)
    for _ in range(20):
        heads = [
            None if cut < 0 else packet[:cut]
            for packet, cut in zip(packets, rng.integers(-8, 24, len(packets)), strict=True)
        ]
        found = flags_of_heads(codec, extradata, heads, sizes)
        assert not (found & ~expected & PROMISES).any()


def test_arithmetic_coding_is_read_from_the_picture_parameters(videos, tmp_path):
    encode(tmp_path / "default.mp4", texture(2, (96, 160)), ["-c:v", "libx264"])
    default, plain = Video(tmp_path / "default.mp4").info.extradata, videos.textured("intra").info.extradata
    assert has_arithmetic_coding(default)
    assert not any(map(has_arithmetic_coding, (plain, b"", default[:12])))
