"""Remote videos whose packet headers were not read when they were indexed: the bytes of a clip tell what to decode."""

import numpy as np
import pytest

from fastvid.decode.clips import read_clip
from fastvid.decode.pyav import PyAvDecoder
from fastvid.decode.request import Box, ClipRequest
from fastvid.format.bitstream import packet_flags
from fastvid.format.packets import PacketTable, packet_offsets
from fastvid.format.schema import Codec, PacketFlag, StreamFlag
from fastvid.media.ffmpeg import Limits
from fastvid.media.file_tables import FileReader
from fastvid.media.index_video import Proof, index_in_place
from fastvid.media.prove import frame_digest
from tests.sharding.in_place import tools
from tests.sharding.in_place.test_proof import Remote

FRAMES = 120
ENCODINGS = ("pyramid", "compact", "hevc", "vp9", "av1-layers", "h264-10bit")


@pytest.fixture(autouse=True)
def _no_file_is_small(monkeypatch):
    monkeypatch.setattr("fastvid.media.index_video.SMALL_FILE", 0)


def reader(path):
    place = Remote(str(path.parent))
    return FileReader(place, path.name, place.version(path.name))


def decoded(file, found, frames):
    """Return the digests of frames, and how many packets were decoded for them."""
    info = found.info
    box = Box(0, 0, info.height, info.width)

    def read(ranges):
        for offset, target in ranges:
            target[:] = file.part(offset, len(target))

    clip = read_clip(ClipRequest(0, np.asarray(frames), box, (32, 32)), info, PacketTable(found.records), read)
    digests = {}
    PyAvDecoder().give(clip, lambda frame, place: digests.update({place: frame_digest(frame)}))
    return [digests[place] for place in range(len(frames))], len(clip.starts)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_clips_are_those_a_player_shows_and_decode_as_few_packets_as_of_a_file_read_whole(encoding, videos):
    path = videos.painted(encoding, frames=FRAMES).path
    file, shown = reader(path), tools.played(path)
    late, whole = (index_in_place(file, Limits(), proof) for proof in (Proof.SAMPLE, Proof.ALL))
    assert late.info.flags & StreamFlag.LATE
    assert not whole.info.flags & StreamFlag.LATE
    draws, packets = np.random.default_rng(1), np.zeros(3, int)
    blind = index_in_place(file, Limits(), Proof.NONE)
    assert not blind.info.flags & StreamFlag.LATE
    for _ in range(60):
        frames = np.sort(draws.choice(FRAMES, draws.integers(1, 5), replace=False))
        for number, found in enumerate((late, whole, blind)):
            digests, count = decoded(file, found, frames)
            assert digests == [shown[frame] for frame in frames.tolist()]
            packets[number] += count
    assert packets[0] <= 1.05 * packets[1]
    if (whole.records["flags"] & PacketFlag.DROPPABLE).any():
        assert packets[0] < packets[2]  # there was something to leave out


def test_headers_that_lie_are_found_by_the_sample(videos, tmp_path):
    """HEVC: every picture that others refer to is called one that none of its sub-layer refers to."""
    path = videos.painted("hevc", frames=FRAMES).path
    found = index_in_place(reader(path), Limits(), Proof.ALL)
    data = bytearray(path.read_bytes())
    for offset, size in zip(packet_offsets(found.records), found.records["size"].tolist(), strict=True):
        at = offset
        while at < offset + size:
            if data[at + 4] >> 1 & 63 == 1:  # TRAIL_R becomes TRAIL_N
                data[at + 4] &= ~0b10
            at += 4 + int.from_bytes(data[at : at + 4], "big")
    lies = tmp_path / "lies.mp4"
    lies.write_bytes(data)
    shown = tools.played(lies)
    found = index_in_place(reader(lies), Limits(), Proof.SAMPLE)
    assert not found.info.flags & StreamFlag.LATE
    for frame in (0, 30, 77, FRAMES - 1):
        assert decoded(reader(lies), found, [frame])[0] == [shown[frame]]


def test_a_packet_that_brings_parameter_sets_is_never_left_out(videos):
    path = videos.painted("pyramid", frames=FRAMES).path
    found = index_in_place(reader(path), Limits(), Proof.ALL)
    droppable = int(np.flatnonzero(found.records["flags"] & PacketFlag.DROPPABLE)[0])
    offset, size = packet_offsets(found.records)[droppable], int(found.records["size"][droppable])
    packet = path.read_bytes()[offset : offset + size]
    sets = bytes([0, 0, 0, 3, 0x68, 0xEB, 0xE3])  # a picture parameter set that the file does not have
    for brought, expected in ((b"", PacketFlag.DROPPABLE), (sets, 0)):
        (flags,) = packet_flags(Codec.H264, found.info.extradata, [brought + packet])
        assert flags & PacketFlag.DROPPABLE == expected


def test_what_the_tables_call_disposable_is_not_read_unless_that_is_wrong(videos, tmp_path):
    path = videos.painted("pyramid", frames=FRAMES).path
    whole = index_in_place(reader(path), Limits(), Proof.ALL)
    droppable = whole.records["flags"] & PacketFlag.DROPPABLE != 0
    shown = tools.played(path)
    for claimed, believed in ((droppable, True), (np.ones_like(droppable), False)):
        told = tmp_path / f"{believed}.mp4"
        told.write_bytes(with_sdtp(path.read_bytes(), claimed))
        found = index_in_place(reader(told), Limits(), Proof.SAMPLE)
        assert np.array_equal(found.records["flags"] & PacketFlag.DROPPABLE != 0, droppable & believed)
        for frame in (0, 50, FRAMES - 1):
            assert decoded(reader(told), found, [frame])[0] == [shown[frame]]
        blind = index_in_place(reader(told), Limits(), Proof.NONE)
        assert not (blind.records["flags"] & PacketFlag.DROPPABLE).any()


def with_sdtp(data, disposable):
    """Return an MP4 whose tables say of each packet whether others depend on it (ISO/IEC 14496-12, 8.6.4)."""
    body = bytes(4) + np.where(disposable, 2 << 2, 1 << 2).astype(np.uint8).tobytes()
    box = (8 + len(body)).to_bytes(4, "big") + b"sdtp" + body
    moov = data.index(b"moov") - 4
    assert moov > data.index(b"mdat")  # no offset of a packet changes
    tables = bytearray(data[moov:])
    for name in (b"moov", b"trak", b"mdia", b"minf", b"stbl"):
        at = tables.index(name) - 4
        tables[at : at + 4] = (int.from_bytes(tables[at : at + 4], "big") + len(box)).to_bytes(4, "big")
    after = tables.index(b"stbl") + 4
    return data[:moov] + bytes(tables[:after]) + box + bytes(tables[after:])
