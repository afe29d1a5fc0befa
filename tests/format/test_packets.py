"""plan() is sufficient and minimal for any reference structure; frames and times of a stream; what was used last."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastvid.errors import FormatError, UsageError
from fastvid.format.packets import PacketTable, Recent, packet_offsets, packet_records, stream_info
from fastvid.format.presentation import Times
from fastvid.format.schema import Codec, PacketFlag

KEY, DROP, HIDDEN = int(PacketFlag.KEY), int(PacketFlag.DROPPABLE), int(PacketFlag.HIDDEN)


def table(frames, flags, *, whole=False):
    n = len(frames)
    return PacketTable(packet_records(np.arange(n) * 10, [10] * n, [0] * n, frames, flags), whole=whole)


@st.composite
def streams(draw):
    """Random streams: GOPs of references and droppable packets in a random display order, some packets hidden."""
    gops = draw(st.lists(st.lists(st.sampled_from([0, 0, DROP, HIDDEN]), max_size=12), min_size=1, max_size=5))
    flags, frames, shown = [], [], 0
    for gop in gops:
        gop_flags = [KEY, *gop]
        visible = [i for i, flag in enumerate(gop_flags) if not flag & HIDDEN]
        order = draw(st.permutations(range(len(visible))))
        numbers = dict(zip(visible, [shown + place for place in order], strict=True))
        frames += [numbers.get(i, -1) for i in range(len(gop_flags))]
        flags += gop_flags
        shown += len(visible)
    return table(frames, flags)


@given(streams(), st.data())
def test_plan_matches_its_definition(stream, data):
    wanted = data.draw(st.lists(st.integers(0, stream.num_frames - 1), min_size=1, max_size=10))
    records = stream.records
    expected = set()
    for frame in wanted:
        target = int(np.flatnonzero(records["frame"] == frame)[0])
        key = max(i for i in range(target + 1) if records["flags"][i] & KEY)
        expected |= {i for i in range(key, target) if not records["flags"][i] & DROP} | {target}
    plan = stream.plan(wanted)
    assert plan.packets.tolist() == sorted(expected)
    assert plan.frames.tolist() == sorted(set(wanted))
    from_keys = set()
    for target in (int(np.flatnonzero(records["frame"] == frame)[0]) for frame in wanted):
        from_keys |= set(range(max(i for i in range(target + 1) if records["flags"][i] & KEY), target + 1))
    assert plan.packets_from_keys == len(from_keys)


@given(streams(), st.data())
def test_plan_does_not_depend_on_order_or_repeats(stream, data):
    wanted = data.draw(st.lists(st.integers(0, stream.num_frames - 1), min_size=1, max_size=10))
    shuffled = data.draw(st.permutations(wanted + wanted))
    assert stream.plan(wanted).packets.tolist() == stream.plan(shuffled).packets.tolist()


@given(streams())
def test_plan_of_all_frames_feeds_all_packets_except_trailing_hidden_ones(stream):
    planned = set(stream.plan(range(stream.num_frames)).packets.tolist())
    left = set(range(len(stream))) - planned
    assert all(stream.records["flags"][i] & HIDDEN for i in left)


def test_plan_skips_unwanted_b_frames_of_the_compact_pattern():
    # One GOP of I and three P with seven B before each P, in decode order: I P b b b b b b b P b ...
    frames, flags = [0], [KEY]
    for p in (8, 16, 24):
        frames += [p, *range(p - 7, p)]
        flags += [0] + [DROP] * 7
    stream = table(frames, flags)
    assert stream.plan([3]).packets.tolist() == [0, 1, 4]
    assert stream.plan([24]).packets.tolist() == [0, 1, 9, 17]
    assert stream.plan([0]).packets.tolist() == [0]
    assert stream.plan([23]).packets_from_keys == 25


def test_plan_starts_at_the_first_packet_when_stream_is_whole():
    stream = table([0, 1, 2, 3], [KEY, 0, KEY, 0], whole=True)
    assert stream.plan([2]).packets.tolist() == [0, 1, 2]
    assert table([0, 1, 2, 3], [KEY, 0, KEY, 0]).plan([2]).packets.tolist() == [2]
    assert table([0, 1, 2], [KEY, KEY, KEY], whole=True).plan([1]).packets.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ([-1], "frame -1 is outside the stream"),
        ([2, -3, -1], "frame -3 is outside the stream"),
        ([4], "frame 4 is outside the stream"),
        ([0, 5, 99], "frame 99 is outside the stream"),
        ([], "no frame requested"),
    ],
)
def test_plan_rejects_frames_outside_the_stream(wanted, message):
    with pytest.raises(UsageError, match=message) as caught:
        table([0, 1, 2, 3], [KEY, 0, 0, 0]).plan(wanted)
    assert not wanted or caught.value.hint == "give frames from 0 to 3"


def test_a_stream_is_all_key_packets_only_if_each_of_them_is_one():
    assert table([-1, 0], [KEY | HIDDEN, 0]).plan([0]).packets.tolist() == [0, 1]
    assert table([0, 1], [KEY, KEY]).plan([1]).packets.tolist() == [1]


def test_a_hidden_packet_shows_no_frame_even_if_it_has_the_next_number():
    stream = table([0, 1, 1], [KEY, HIDDEN, 0])
    assert stream.num_frames == 2
    assert stream.plan([1]).packets.tolist() == [0, 1, 2]
    with pytest.raises(FormatError, match=r"frame index 2 is outside 0\.\.1: 2 packets show a frame"):
        table([0, 1, 2], [KEY, HIDDEN, 0])


@pytest.mark.parametrize(
    ("frames", "flags", "message"),
    [
        ([0, 1], [0, 0], "first packet"),
        ([], [], "first packet"),
        ([0, 0], [KEY, 0], "no packet shows frame 1"),
        ([0, 2], [KEY, 0], r"frame index 2 is outside 0\.\.1: 2 packets show a frame"),
        ([0, 7], [KEY, 0], r"frame index 7 is outside 0\.\.1: 2 packets show a frame"),
        ([0, -1], [KEY, 0], r"frame index -1 is outside 0\.\.1: 2 packets show a frame"),
    ],
)
def test_packet_table_rejects_invalid_records(frames, flags, message):
    with pytest.raises(FormatError, match=message):
        table(frames, flags)


def test_packet_table_rejects_arrays_that_are_no_packet_records():
    records = packet_records([0, 10], [10, 10], [0, 0], [0, 1], [KEY, 0])
    for other in (records[0], records.reshape(1, 2), records["frame"], records[["offset", "flags"]]):
        with pytest.raises(FormatError, match=r"packet records are .*, expected .* \[P\]"):
            PacketTable(other)


def test_offsets_have_48_bits():
    offsets = [0, 2**32 - 1, 2**32, 2**40 + 5, 2**48 - 1]
    records = packet_records(offsets, [1] * 5, [0] * 5, range(5), [KEY] * 5)
    assert packet_offsets(records) == offsets
    assert packet_offsets(records[:2]) == offsets[:2]
    assert PacketTable(records).plan([3]).packets.tolist() == [3]
    with pytest.raises(FormatError, match=r"packet starts 281474976710656 bytes .* too far"):
        packet_records([2**48], [1], [0], [0], [KEY])


def stream_at(rate, num_frames, ticks=None):
    times = b"" if ticks is None else Times.pack(ticks, Fraction(1, 1000)).data
    return stream_info((Codec.H264, 64, 48, num_frames, *rate.as_integer_ratio(), 1, 6, 0, 0.0), b"", None, times)


def test_the_frame_shown_at_a_time_is_the_last_that_has_begun():
    steady, film = stream_at(Fraction(25), 10), stream_at(Fraction(30000, 1001), 90_000)
    varying = stream_at(Fraction(10), 4, [0, 100, 500, 520])
    assert steady.seconds(np.array([0, 3])).tolist() == [0, 0.12]
    assert varying.seconds(np.array([3, 1, 2])).tolist() == [0.52, 0.1, 0.5]
    assert steady.frames_at(np.array([0.0, 0.039, 0.0389, 0.04, 0.2, -1.0, 99.0])).tolist() == [0, 1, 0, 1, 5, 0, 9]
    assert varying.frames_at(np.array([0.0, 0.0989, 0.099, 0.4, 0.5, 0.6])).tolist() == [0, 0, 1, 1, 2, 3]
    frames = np.arange(film.num_frames)
    for early in (0.0, 0.0009):
        assert (film.frames_at(film.seconds(frames) - early) == frames).all()


@given(st.integers(0, 30), st.lists(st.tuples(st.sampled_from("abcd"), st.none() | st.integers(0, 20)), max_size=40))
def test_what_was_used_last_is_kept_within_a_limit(limit, steps):
    memory, kept, dropped = {}, {}, False  # `kept`: bytes by key, the key that was used last at the end
    cache = Recent(limit, memory.__getitem__)
    for key, size in steps:
        if size is None:
            assert cache.get(key) == (key if key in kept else None)
        else:
            memory[key] = size
            assert cache.add(key, key) == key
        if size is not None or key in kept:
            before = kept.pop(key, 0)
            kept[key] = before if size is None else size
        while sum(kept.values()) > limit and len(kept) > 1:
            del kept[next(iter(kept))]
            dropped = True
        assert {name for name in "abcd" if name in cache} == kept.keys()
        assert (len(cache), cache.was_full) == (len(kept), dropped)


def test_of_two_values_for_a_key_the_first_stays():
    cache = Recent(100, len)
    first = cache.add("key", [1])
    assert cache.add("key", [2]) is first
    assert cache.get("key") is first
