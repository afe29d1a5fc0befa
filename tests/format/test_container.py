"""demux and bitstream compared with FFmpeg, and what is read from the heads of packets."""

import subprocess
import tracemalloc
import zlib
from fractions import Fraction

import av
import numpy as np
import pytest

from fastvid.errors import FastvidError, FormatError
from fastvid.format.bitstream import has_arithmetic_coding, nal_length_size, nal_units, packet_flags
from fastvid.format.headers import HEAD_BYTES, WHOLE_PACKETS, declared_size, flags_of_heads
from fastvid.format.mp4 import index_mp4
from fastvid.format.packets import PacketTable
from fastvid.format.presentation import Times
from fastvid.format.schema import Codec, PacketFlag, StreamFlag
from fastvid.media.ffmpeg import find_ffmpeg
from tests import makers
from tests.makers import Video, encode, opened, packets_of, texture

FFMPEG = find_ffmpeg().path

X264 = ["-c:v", "libx264", "-threads", "1", "-preset", "veryfast"]
ENCODINGS = {
    "pattern": [*X264, "-x264-params", "keyint=32:min-keyint=32:scenecut=0:bframes=7:b-adapt=0:b-pyramid=none"],
    "pyramid": [*X264, "-x264-params", "keyint=24:bframes=5:b-pyramid=normal"],
    "intra": [*X264, "-x264-params", "keyint=1"],
    "open-gop": [*X264, "-x264-params", "keyint=12:min-keyint=12:scenecut=0:bframes=3:open-gop=1"],
    "no-b": [*X264, "-x264-params", "bframes=0:keyint=16"],
    "hevc": [
        "-c:v",
        "libx265",
        "-x265-params",
        "log-level=none:keyint=16:bframes=4:b-adapt=0:b-pyramid=0:open-gop=0:pools=1",
    ],
    "hevc-open": ["-c:v", "libx265", "-x265-params", "log-level=none:keyint=12:bframes=4:open-gop=1:pools=1"],
    "vp9": ["-c:v", "libvpx-vp9", "-g", "12", "-auto-alt-ref", "0", "-lag-in-frames", "0", "-cpu-used", "8"],
    "vp9-altref": ["-c:v", "libvpx-vp9", "-g", "20", "-b:v", "300k", "-cpu-used", "5", "-lag-in-frames", "16"],
    "mjpeg": ["-pix_fmt", "yuvj420p", "-c:v", "mjpeg", "-q:v", "5"],
}


@pytest.fixture(scope="module", params=ENCODINGS)
def encoded(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("encoded") / f"{request.param}.mp4"
    source = "testsrc2=s=160x96:r=30000/1001:d=1.5,noise=alls=20:allf=t"
    command = [FFMPEG, "-v", "error", "-f", "lavfi", "-i", source, "-pix_fmt", "yuv420p", *ENCODINGS[request.param]]
    subprocess.run([*command, str(path)], check=True)
    return request.param, path


def demuxed(path):
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        return [p for p in container.demux(stream) if p.size], stream.codec_context.extradata or b""


def test_index_matches_the_packets_of_ffmpeg(encoded):
    _, path = encoded
    data = path.read_bytes()
    info, records = index_mp4(data)
    packets, extradata = demuxed(path)
    assert [(p.pos, p.size) for p in packets] == list(zip(records["offset"], records["size"], strict=True))
    assert info.extradata == extradata or info.codec in (Codec.VP9, Codec.MJPEG)
    assert info.fps == Fraction(30000, 1001)
    assert (info.width, info.height) == (160, 96)
    shown = [i for i, r in enumerate(records) if r["frame"] >= 0]
    order = sorted(shown, key=lambda i: packets[i].pts)
    assert [records["frame"][i] for i in order] == list(range(info.num_frames))


def test_dropping_every_droppable_packet_changes_no_other_frame(encoded):
    name, path = encoded
    _, records = index_mp4(path.read_bytes())
    droppable = (records["flags"] & PacketFlag.DROPPABLE) != 0
    if name in ("pattern", "hevc"):
        assert 0.6 < droppable.mean() < 0.9, "the pattern has seven B frames in eight, or four in five"
    if name == "vp9":
        assert not droppable.any()
    full, thinned = decode(path, np.ones(len(records), bool)), decode(path, ~droppable)
    expected = {int(r["frame"]) for r, drop in zip(records, droppable, strict=True) if not drop and r["frame"] >= 0}
    if name in ("mjpeg", "intra"):
        assert (records["flags"] & PacketFlag.KEY).all()
    if not expected:
        return
    assert set(thinned) == expected
    assert all((thinned[frame] == full[frame]).all() for frame in expected)


def test_decoding_may_start_at_every_key_packet(encoded):
    _, path = encoded
    _, records = index_mp4(path.read_bytes())
    full = decode(path, np.ones(len(records), bool))
    keys = np.flatnonzero(records["flags"] & PacketFlag.KEY)
    for start in keys.tolist():
        feed = np.arange(len(records)) >= start
        part = decode(path, feed)
        expected = {int(f) for f in records["frame"][start:] if f >= 0}
        assert set(part) == expected
        assert all((part[frame] == full[frame]).all() for frame in expected)


def decode(path, feed):
    """Decode only the packets marked in `feed` with a new FFmpeg context; return frames by display index."""
    _, records = index_mp4(path.read_bytes())
    frames = {}
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.options = {"strict": "1"}
        packets = [p for p in container.demux(stream) if p.size]
        by_pts = {packets[i].pts: int(r["frame"]) for i, r in enumerate(records)}
        for packet, wanted in zip(packets, feed, strict=True):
            if wanted:
                for frame in packet.decode():
                    frames[by_pts[frame.pts]] = frame.to_ndarray()
        for frame in stream.codec_context.decode(None):
            frames[by_pts[frame.pts]] = frame.to_ndarray()
    return frames


def test_real_footage_is_indexed_like_ffmpeg_or_rejected(footage):
    """MP4s of other tools have the packets, display order and edit lists that FFmpeg reads, or a clear error."""
    agreed, refused = 0, []
    for path in sorted([*footage.glob("clean/*.mp4"), *footage.glob("odd/*.mp4")]):
        try:
            info, records = index_mp4(path.read_bytes())
        except FastvidError as error:
            refused.append((path.name, error.message))
            continue
        with opened(str(path)) as container:
            stream = container.streams.video[0]
            packets = [p for p in container.demux(stream) if p.size]
        if len(packets) != len(records):
            refused.append((path.name, "packet count"))
            continue
        assert [(p.pos, p.size) for p in packets] == list(zip(records["offset"], records["size"], strict=True)), path
        discarded = [bool(p.is_discard) for p in packets]
        hidden = [bool(f & PacketFlag.HIDDEN) for f in records["flags"]]
        if info.codec is not Codec.VP9:
            assert hidden == discarded, path
        order = sorted((i for i, h in enumerate(hidden) if not h), key=lambda i: packets[i].pts)
        assert [records["frame"][i] for i in order] == list(range(info.num_frames)), path
        PacketTable(records, whole=bool(info.flags & StreamFlag.WHOLE))
        agreed += 1
    assert agreed >= 60
    allowed = (
        "fragmented",
        "codec",
        "same presentation time",
        "edit list",
        "packet count",
        "no H.264 slice",
        "MP4 has no",
        "NAL unit",
    )
    assert all(any(word in message for word in allowed) for _, message in refused), refused


def test_nal_lengths_are_read_from_the_configuration_record():
    assert nal_length_size(Codec.H264, bytes([1, 100, 0, 13, 0xFC, 0xE1, 0])) == 1
    assert nal_length_size(Codec.H264, bytes([1, 100, 0, 13, 0xFF, 0xE1, 0])) == 4
    assert nal_length_size(Codec.H264, b"\0\0\0\1\x67\x64\0\x0d") is None
    annex_b = b"\0\0\0\1\x67abc\0\0\1\x65slice"
    assert [bytes(u)[:1] for u in nal_units(annex_b, None)] == [b"\x67", b"\x65"]
    # The same slice with a two-byte prefix: parsed with four bytes it would look like another, droppable unit.
    avcc2 = (6).to_bytes(2, "big") + b"\x65slice"[:6]
    extradata = bytes([1, 100, 0, 13, 0xFD, 0xE1, 0])
    assert packet_flags(Codec.H264, extradata, [avcc2]).tolist() == [int(PacketFlag.KEY)]


def test_index_returns_a_table_or_raises_format_error_when_a_header_byte_is_flipped(tmp_path):
    path = tmp_path / "pattern.mp4"
    source = "testsrc2=s=160x96:r=25:d=1"
    subprocess.run([FFMPEG, "-v", "error", "-f", "lavfi", "-i", source, *ENCODINGS["pattern"], str(path)], check=True)
    data = bytearray(path.read_bytes())
    start = data.find(b"moov")
    for position in range(start - 4, len(data), 3):
        damaged = bytearray(data)
        damaged[position] ^= 0x5A
        try:
            index_mp4(bytes(damaged))
        except FormatError:
            continue


PROMISES = PacketFlag.KEY | PacketFlag.DROPPABLE


def flagged(video):
    """Return codec, header, packets, their sizes, and the flags of the whole packets."""
    codec, extradata, packets = video.info.codec, video.info.extradata, packets_of(video)
    return codec, extradata, packets, list(map(len, packets)), packet_flags(codec, extradata, packets)


@pytest.mark.parametrize("encoding", sorted(makers.ENCODINGS))
def test_flags_of_heads_equal_those_of_whole_packets(encoding, videos):
    codec, extradata, packets, sizes, expected = flagged(videos.painted(encoding))
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
    codec, extradata, packets, sizes, expected = flagged(videos.painted(encoding))
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


def test_arithmetic_coding_is_read_from_the_picture_parameters(videos, tmp_path):
    encode(tmp_path / "default.mp4", texture(2, (96, 160)), ["-c:v", "libx264"])
    default, plain = Video(tmp_path / "default.mp4").info.extradata, videos.textured("intra").info.extradata
    assert has_arithmetic_coding(default)
    assert not any(map(has_arithmetic_coding, (plain, b"", default[:12])))
