"""What is read from the heads of packets and of files: flags, picture sizes, presentation times."""

import tracemalloc
import zlib
from fractions import Fraction

import numpy as np
import pytest

from fastvid.errors import FormatError
from fastvid.format.bitstream import packet_flags
from fastvid.format.headers import HEAD_BYTES, WHOLE_PACKETS, declared_size, flags_of_heads
from fastvid.format.presentation import Times
from fastvid.format.schema import Codec, PacketFlag
from tests import makers
from tests.makers import packets_of

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


@pytest.mark.parametrize("size", [(96, 160), (64, 176), (256, 336)])
@pytest.mark.parametrize("encoding", ["vp9", "vp9-intra", "mjpeg"])
def test_declared_size_matches_the_encoded_size(videos, encoding, size):
    video = videos.textured(encoding, size=size, frames=20)
    found = [declared_size(video.info.codec, packet) for packet in packets_of(video)]
    expected = size[::-1]
    if encoding == "vp9":
        # Inter pictures inherit the size of their reference.
        assert found == [expected if key else None for key in (video.records["flags"] & 1).tolist()]
    else:
        assert found == [expected] * 20


def test_declared_size_raises_when_headers_are_malformed(videos):
    vp9, jpeg = (packets_of(videos.textured(name, frames=20))[0] for name in ("vp9", "mjpeg"))
    for codec, packet in (
        (Codec.VP9, b"\0" * 20),
        (Codec.VP9, bytes(vp9[:1]) + b"\0" + bytes(vp9[2:])),
        (Codec.VP9, bytes([0x92]) + bytes(vp9[1:])),  # profile 1
        (Codec.MJPEG, bytes(jpeg[:12])),
        (Codec.MJPEG, b"\xff\xd8\xff\xda" + bytes(20)),
        (Codec.MJPEG, b""),
    ):
        with pytest.raises(FormatError):
            declared_size(codec, memoryview(packet))


TICK = (1).to_bytes(8, "little") + (1000).to_bytes(8, "little")


def test_times_are_those_that_were_packed():
    times = Times.pack([0, 40, 41, 1000], Fraction(1, 1000))
    times.check()
    assert times.seconds().tolist() == [0.0, 0.04, 0.041, 1.0]
    assert (times.tick, times.ticks().tolist()) == (Fraction(1, 1000), [0, 40, 41, 1000])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        TICK,
        TICK + b"no zlib",
        bytes(16) + zlib.compress(bytes(16)),
        TICK + zlib.compress(np.array([1, 0], "<i8").tobytes()),
        TICK + zlib.compress(np.array([1], "<i8").tobytes()),
        TICK + zlib.compress(np.array([1, 1, 1], "<i8").tobytes()),
        TICK + zlib.compress(np.ones(1 << 22, "<i8").tobytes(), 9),
    ],
    ids=["nothing", "a tick alone", "no zlib", "no clock", "equal", "too few", "too many", "a bomb"],
)
def test_other_times_are_refused_in_little_memory(data):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="times"):
            Times(data, 3).check()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
