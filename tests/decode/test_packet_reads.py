"""Packets of a stream in memory: exactly those that were indexed, whatever the buffer contained before."""

from __future__ import annotations

import struct
import zlib
from fractions import Fraction

import numpy as np
import pytest

from fastvid.decode.clips import PacketBuffer, read_clip, reader_of, reading
from fastvid.decode.request import Box, ClipRequest
from fastvid.errors import ChecksumError, FormatError
from fastvid.format.packets import PacketTable, StreamInfo, packet_records
from fastvid.format.schema import INPUT_PADDING, Codec, PacketFlag, StreamFlag

INFO = StreamInfo(Codec.H264, 16, 16, 6, Fraction(25))
DATA = np.random.default_rng(0).bytes(600)
# The last packet in decode order is the first in the file, and ends before the others begin.
OFFSETS, SIZES = [100, 200, 300, 400, 500, 0], [50, 100, 100, 60, 100, 50]


def table(offsets=OFFSETS, sizes=SIZES):
    checksums = [zlib.crc32(DATA[at : at + size]) for at, size in zip(offsets, sizes, strict=True)]
    flags = [PacketFlag.KEY, 0, PacketFlag.DROPPABLE, PacketFlag.KEY, 0, PacketFlag.KEY]
    return PacketTable(packet_records(offsets, sizes, checksums, range(6), flags))


def read(frames, packets=None, data=DATA, **options):
    request = ClipRequest(0, np.array(frames, dtype=np.int64), Box(0, 0, 16, 16), (16, 16))
    return read_clip(request, INFO, packets or table(), reader_of(data), **options)


def packets_of(clip):
    places = zip(clip.starts.tolist(), clip.sizes.tolist(), strict=True)
    return [bytes(clip.data[start : start + size]) for start, size in places]


@pytest.mark.parametrize("gap", [0, 49, 50, 51, 10_000])
@pytest.mark.parametrize("view", [bytes, memoryview])
def test_a_clip_has_the_planned_packets_in_decode_order(gap, view):
    clip = read([1, 4, 5], data=view(DATA), gap=gap)
    assert packets_of(clip) == [DATA[OFFSETS[n] : OFFSETS[n] + SIZES[n]] for n in (0, 1, 3, 4, 5)]
    assert clip.shows.tolist() == [0, 1, 3, 4, 5]
    assert clip.keys.tolist() == [True, False, True, False, True]
    assert read([2]).keys.tolist() == [True, False, False]
    # Nothing but the padding follows the last byte that was read.
    assert bytes(clip.data[-INPUT_PADDING:]) == bytes(INPUT_PADDING)
    assert len(clip.data) - INPUT_PADDING == {0: 360, 49: 400, 50: 500, 51: 500, 10_000: 600}[gap]


def test_a_stream_may_end_with_its_last_packet_but_not_before():
    assert packets_of(read([5, 4], limit=600))[-1] == DATA[:50]
    for frames in ([4], [5, 4], [0, 4]):
        with pytest.raises(FormatError, match="points outside the sample's bytes"):
            read(frames, limit=599)
    assert packets_of(read([0, 5], limit=150)) == [DATA[100:150], DATA[:50]]


def test_a_stream_in_memory_that_is_too_short_is_an_error_with_the_place():
    assert packets_of(read([0], data=DATA[:150])) == [DATA[100:150]]
    for length in (149, 120, 100, 0):
        with pytest.raises(ChecksumError, match=rf"packet at 100\+50 is outside the {length} bytes of the stream"):
            read([0], data=DATA[:length])


def test_a_damaged_packet_is_named_by_its_number():
    for packet in (3, 4):
        damaged = bytearray(DATA)
        damaged[OFFSETS[packet] + SIZES[packet] - 1] ^= 1
        assert packets_of(read([1, 5], data=bytes(damaged)))
        with pytest.raises(ChecksumError, match="packet has checksum") as caught:
            read([1, 4, 5], data=bytes(damaged))
        assert caught.value.where["packet"] == packet


@pytest.mark.parametrize(
    ("flags", "damaged", "left"),
    [
        (StreamFlag.NONE, False, [0, 1, 2, 3, 4]),
        (StreamFlag.PART, False, [0, 1, 2, 3, 4]),
        (StreamFlag.LATE, False, [0, 1, 4]),
        (StreamFlag.LATE, True, [0, 1, 2, 3, 4]),
    ],
)
def test_packets_whose_own_header_says_that_nothing_refers_to_them_are_left_out(flags, damaged, left):
    """If one of them cannot be read, none is left out."""
    record = bytes([1, 100, 0, 30, 0xFF, 0xE0, 0])
    # An IDR picture, a picture that others refer to, two that none refers to, and another that others refer to.
    packets = [struct.pack(">IB", 5, kind) + b"\x88abc" for kind in (0x65, 0x41, 0x01, 0x01, 0x41)]
    if damaged:
        packets[1] = b"\xff" + packets[1][1:]
    data, sizes = b"".join(packets), [len(packet) for packet in packets]
    offsets, checksums = [0, *np.cumsum(sizes)[:-1].tolist()], list(map(zlib.crc32, packets))
    info = StreamInfo(Codec.H264, 16, 16, 5, Fraction(25), record, flags=flags)
    known = PacketTable(packet_records(offsets, sizes, checksums, range(5), [PacketFlag.KEY, 0, 0, 0, 0]))
    request = ClipRequest(0, np.array([4]), Box(0, 0, 16, 16), (16, 16))
    clip = read_clip(request, info, known, reader_of(data))
    assert packets_of(clip) == [packets[number] for number in left]
    assert clip.shows.tolist() == left
    request = ClipRequest(0, np.array([2, 4]), Box(0, 0, 16, 16), (16, 16))
    assert 2 in read_clip(request, info, known, reader_of(data)).shows.tolist()


def test_errors_name_the_shard_and_the_sample():
    with pytest.raises(ChecksumError) as caught, reading("data-000007", "walking/3"):
        read([0], data=DATA[:100])
    assert (caught.value.where["shard"], caught.value.where["key"]) == ("data-000007", "walking/3")


def test_a_buffer_is_reused_and_nothing_of_its_last_clip_remains():
    scratch = PacketBuffer()
    large = read([1, 2, 4, 5], scratch=scratch)
    at = np.frombuffer(large.data, dtype=np.uint8).ctypes.data
    large.data[:] = b"\xff" * len(large.data)
    small = read([0], scratch=scratch)
    assert np.frombuffer(small.data, dtype=np.uint8).ctypes.data == at
    assert packets_of(small) == [DATA[100:150]]
    assert bytes(small.data[50:]) == bytes(INPUT_PADDING)


def test_a_buffer_grows_by_half_so_that_slightly_larger_clips_need_no_new_memory():
    scratch = PacketBuffer()
    sizes = []
    for frames in ([0], [0, 5], [5], [1, 4]):  # 50, 100, 50 and 310 bytes, and the padding
        read(frames, scratch=scratch)
        sizes.append(len(scratch.data))
    assert sizes == [171, 171, 171, 561]
