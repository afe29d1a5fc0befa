"""Reading a clip's packets: the right bytes, few reads, and all damage detected."""

import pickle
import struct
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastvid.decode import clips
from fastvid.decode.clips import coalesce
from fastvid.decode.request import Box, ClipRequest, Rgb
from fastvid.errors import ChecksumError, DecodeError, FormatError, StorageError, UsageError
from fastvid.load.clips.plan import ClipPlace
from fastvid.load.memory import RgbRow, row_layout
from fastvid.load.workers import clip_worker
from fastvid.load.workers.clip_worker import ClipWorker, Row, Watched, fetch, fetch_together
from tests.load.fakes import FakeDataset, GroupDecoder, RgbDecoder, picture

SPANS = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 40)), min_size=1, max_size=60)


def request(sample, frames):
    return ClipRequest(sample, np.asarray(frames, dtype=np.int64), Box(0, 0, 8, 8), (8, 8))


def get(dataset, sample, frames, **options):
    (shard,), (row,) = dataset.locate([sample])
    return fetch(dataset.shard(shard), int(row), request(sample, frames), key=f"key{sample}", **options)


@given(SPANS, st.integers(0, 200))
def test_runs_cover_every_packet_and_places_lead_to_its_bytes(spans, gap):
    offsets, sizes = zip(*spans, strict=True)
    file = np.random.default_rng(0).integers(0, 256, 4000, dtype=np.uint8).tobytes()
    starts, runs = coalesce(offsets, sizes, gap)
    read = b"".join(file[begin : begin + length] for begin, length in runs)
    for start, offset, size in zip(starts, offsets, sizes, strict=True):
        assert read[start : start + size] == file[offset : offset + size]
    # Reads are further apart than the gap, so no two could have been merged.
    ends = [begin + length for begin, length in runs]
    assert all(begin - end > gap for end, (begin, _) in zip(ends[:-1], runs[1:], strict=True))


@given(SPANS)
def test_only_needed_bytes_are_read_without_a_gap(spans):
    offsets, sizes = zip(*spans, strict=True)
    wanted = {byte for offset, size in spans for byte in range(offset, offset + size)}
    assert sum(length for _, length in coalesce(offsets, sizes, 0)[1]) == len(wanted)


def test_clip_contains_exactly_the_planned_packets():
    dataset = FakeDataset(40)
    frames = [3, 0, 9, 3]
    clip, costs = get(dataset, 29, frames, gap=0)
    packets = [bytes(clip.data[a : a + n]) for a, n in zip(clip.starts.tolist(), clip.sizes.tolist(), strict=True)]
    assert [struct.unpack_from("<II", packet) for packet in packets] == [(29, 0), (29, 3), (29, 9)]
    assert clip.shows.tolist() == [0, 3, 9]
    assert clip.keys.tolist() == [True] * 3
    assert clip.request.frames.tolist() == frames
    assert (clip.key, clip.shard) == ("key29", "data-000001")
    end = int((clip.starts + clip.sizes).max())
    assert bytes(clip.data[end : end + 64]) == bytes(64)
    assert (costs.bytes_read, costs.requests, costs.packets) == (sum(map(len, packets)), 3, 3)


def test_packets_within_the_gap_are_read_together():
    dataset = FakeDataset(40)
    (together, few), (apart, many) = (get(dataset, 29, [0, 3, 9], gap=gap) for gap in (1000, 0))
    assert (few.requests, many.requests) == (1, 3)
    assert few.bytes_read > many.bytes_read
    for clip in (together, apart):
        places = zip(clip.starts.tolist(), clip.shows.tolist(), strict=True)
        assert all(struct.unpack_from("<II", clip.data, start) == (29, frame) for start, frame in places)


class Rows:
    """A target of clips of a fake dataset, one per sample."""

    def __init__(self, dataset):
        self.dataset, self.packets, self.sounds, self.costs = dataset, {}, {}, []
        self.made = np.zeros((len(dataset), 3, 2, 8, 8), dtype=np.uint8)

    def place(self, row):
        (shard,), (number,) = self.dataset.locate([row])
        return ClipPlace(self.dataset.shard(shard), int(number), "rgb", self.dataset.key(row))

    def request(self, row):
        return request(row, [0, 0])

    def output(self, row, kinds):
        return Rgb(self.made[row])

    def keep(self, row, clip, cost):
        self.packets[row] = clip
        self.costs.append(cost)


def test_clips_read_together_have_their_own_bytes_alone():
    """Otherwise, searching or sending one clip would cost as much as all of them."""
    rows = Rows(FakeDataset(9))
    found = fetch_together([Row(rows, number) for number in range(9)])
    assert sum(cost.requests for _, cost in found) < 9
    for number, (clip, _) in enumerate(found):
        start, size = int(clip.starts[0]), int(clip.sizes[0])
        assert (start, len(clip.data)) == (0, size + 64)
        assert struct.unpack_from("<II", clip.data) == (number, 0)
    assert len(pickle.dumps(found[0][0])) < 2000


@pytest.mark.parametrize("decoder", [RgbDecoder, GroupDecoder])
def test_what_was_read_for_rows_left_undone_is_kept_and_not_read_again(decoder, monkeypatch):
    monkeypatch.setattr(clip_worker, "_CACHED", 1)  # pixels: decode one clip in a call
    worker, watch, first, other = ClipWorker(decoder()), Watched(), Rows(FakeDataset(9)), Rows(FakeDataset(9))
    made, read = [], []

    def done(row, error, cost):
        assert error is None
        made.append(row.row)
        read.append(cost.packets)
        watch.is_over = made == [0]

    rows = [Row(first, number) for number in range(9)]
    worker.make(rows, watch, done)
    assert made == [0]
    assert sorted(first.packets) == list(range(1, 9))
    watch.is_over = False
    worker.make([Row(other, number) for number in range(9)], watch, done)  # must not overwrite what was kept
    monkeypatch.setattr(clip_worker, "fetch", None)
    del read[:]
    worker.make(rows[1:], watch, done)
    assert np.array_equal(first.made, other.made)
    assert sum(read) == 0
    assert sum(cost.packets for cost in first.costs) == 8


@pytest.mark.parametrize(
    ("most", "cached", "calls", "reads"),
    [
        (None, 10**6, [5, 4], [9]),
        (2, 10**6, [2, 2, 2, 2, 1], [9]),
        (None, 300, [2, 2, 2, 2, 1], [9]),
        (None, 256, [2, 2, 2, 2, 1], [9]),
        (None, 255, [1] * 9, [9]),
        (1, 10**6, [1] * 9, [1] * 9),
    ],
)
def test_a_call_decodes_as_many_clips_as_decoder_and_cache_take(most, cached, calls, reads, monkeypatch):
    read, groups, costs = [], [], {}  # a clip has 128 pixels
    fetch_rows = clip_worker.fetch_rows
    monkeypatch.setattr(
        clip_worker, "fetch_rows", lambda some, *more: read.append(len(some)) or fetch_rows(some, *more)
    )
    monkeypatch.setattr(clip_worker, "_CACHED", cached)
    monkeypatch.setattr(GroupDecoder, "groups", groups)
    rows = Rows(FakeDataset(9))

    def done(row, error, cost):
        assert error is None
        costs[row.row] = cost

    worker = ClipWorker(GroupDecoder(), most)
    worker.make([Row(rows, 0), Row(rows, 1)], Watched(), done)  # memory for nine reads is needed later
    for _ in range(2):
        del read[:], groups[:]
        worker.make([Row(rows, number) for number in range(9)], Watched(), done)
        assert (groups, read) == (calls, reads)
        assert [costs.pop(number).clips for number in range(9)] == [1] * 9
        shown = [list(picture(number, 0, Box(0, 0, 8, 8), False)) for number in range(9)]
        assert rows.made[:, :, 1, 7, 7].tolist() == shown


class OneFails(GroupDecoder):
    """Fails the clip of sample 7."""

    def decode(self, clips, outputs):
        super().decode(clips, outputs)
        return [DecodeError("broken") if clip.request.sample == 7 else None for clip in clips]


def test_levels_are_converted_into_the_rows_of_clips_that_were_decoded():
    class Normalised(Rows):
        layout = row_layout(2, (8, 8), "TCHW", ((0.5, 1.0),) * 3)
        memory = np.zeros((9, layout.nbytes), dtype=np.uint8)

        def output(self, row, kinds):
            return RgbRow(self.layout, self.memory[row])

    rows, costs = Normalised(FakeDataset(9)), {}
    worker = ClipWorker(OneFails())
    worker.make(
        [Row(rows, number) for number in range(9)], Watched(), lambda row, _, cost: costs.update({row.row: cost})
    )
    for number in range(9):
        shown = rows.layout.view(rows.memory[number])[:, 0, 3, 3].tolist()
        levels = picture(number, 0, Box(0, 0, 8, 8), False)
        assert shown == ([0, 0, 0] if number == 7 else [level / 2 + 1 for level in levels])
        assert (costs[number].finish_seconds > 0) == (number != 7)


class Sound:
    """A sound that counts how often it was decoded; it may be broken."""

    packets = None

    def __init__(self, error=None):
        self.error, self.at, self.decoded = error, None, 0

    def read(self, place):
        self.at = place.row

    def decode(self):
        self.decoded += 1
        if self.error is not None:
            raise self.error


def test_a_sound_is_decoded_with_its_clip_and_fails_with_it_alone():
    rows, broken, outcomes, costs = Rows(FakeDataset(9)), ValueError("noise"), {}, {}
    rows.sounds = {3: [Sound(), Sound()], 5: [Sound(broken)], 7: [Sound()]}

    def done(row, error, cost):
        outcomes[row.row], costs[row.row] = error, cost

    begun = time.perf_counter()
    ClipWorker(OneFails()).make([Row(rows, number) for number in range(9)], Watched(), done)
    spent = time.perf_counter() - begun
    assert {number: str(error) for number, error in outcomes.items() if error} == {5: "noise", 7: "broken"}
    assert [costs[number].clips for number in range(9)] == [number not in (5, 7) for number in range(9)]
    assert [[sound.decoded for sound in sounds] for sounds in rows.sounds.values()] == [[1, 1], [1], [0]]
    assert rows.sounds[3][1].at == rows.place(3).row
    assert 0 < sum(cost.decode_seconds + cost.fetch_seconds for cost in costs.values()) <= spent
    assert 0 < costs[3].audio_seconds <= spent


def test_every_flipped_bit_of_a_planned_packet_is_detected():
    dataset = FakeDataset(20)
    shard = dataset.shard(1)
    start, size = shard.members[2]
    data = dataset.storage.files[shard.data]
    planned = set()
    records = shard.table(2).records
    for frame in (1, 4):
        offset, length = int(records["offset"][frame]), int(records["size"][frame])
        planned |= set(range(start + offset, start + offset + length))
    for byte in range(start, start + size):
        for bit in range(8):
            data[byte] ^= 1 << bit
            if byte in planned:
                with pytest.raises(ChecksumError) as caught:
                    get(dataset, 18, [1, 4])
                assert caught.value.where["shard"] == "data-000001"
                assert caught.value.where["key"] == "key18"
                assert caught.value.where["packet"] in (1, 4)
            else:
                get(dataset, 18, [1, 4])
            data[byte] ^= 1 << bit


def test_damage_goes_undetected_without_the_checksum(monkeypatch):
    dataset = FakeDataset(20)
    monkeypatch.setattr(clips, "check_packets", lambda *arguments: None)
    whole = bytes(get(dataset, 3, [0])[0].data)
    dataset.damage(3)
    assert bytes(get(dataset, 3, [0])[0].data) != whole


def test_truncated_shard_is_a_storage_error_with_the_place():
    dataset = FakeDataset(20)
    del dataset.storage.files["data-000001.tar"][-4:]
    get(dataset, 16, [0])
    with pytest.raises(StorageError, match="key19") as caught:
        get(dataset, 19, [1])
    assert caught.value.where["shard"] == "data-000001"


def test_packet_table_pointing_outside_the_sample_is_refused():
    dataset = FakeDataset(20)
    shard = dataset.shard(0)
    shard.members[2] = (shard.members[2][0], 5)
    with pytest.raises(FormatError, match="points outside"):
        get(dataset, 2, [1])


def test_a_frame_outside_the_video_is_refused():
    with pytest.raises(UsageError, match="frame 12 is outside"):
        get(FakeDataset(20), 1, [12])
