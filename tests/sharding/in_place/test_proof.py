"""What `index` finds out about a file with each proof: what it packs can be read, what cannot be read it refuses."""

import numpy as np
import pytest

import fastvid
from fastvid.decode.clips import read_clip
from fastvid.decode.pyav import PyAvDecoder
from fastvid.decode.request import Box, ClipRequest
from fastvid.errors import JobError, SourceError
from fastvid.format.bitstream import packet_flags
from fastvid.format.packets import PacketTable, packet_offsets
from fastvid.format.schema import Codec, PacketFlag, StreamFlag
from fastvid.media import checks
from fastvid.media.ffmpeg import Limits
from fastvid.media.file_tables import FileReader
from fastvid.media.index_video import Proof, index_in_place
from fastvid.media.prove import frame_digest
from fastvid.sharding.in_place import index_videos
from fastvid.sharding.verify.verify import verify_dataset
from fastvid.storage import LocalStorage
from tests.media.test_containers import trimmed
from tests.sharding.in_place import tools
from tests.sharding.shardtools import ffmpeg, make

X264 = ("-c:v", "libx264", "-pix_fmt", "yuv420p", "-preset", "veryfast", "-g", "20", "-bf", "2", "-sc_threshold", "0")
X265 = ("-c:v", "libx265", "-pix_fmt", "yuv420p", "-x265-params", "log-level=none:keyint=20:bframes=2:open-gop=0")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Files of 60 frames or fewer, all but `trimmed` and `one` by 25 a second."""
    folder = tmp_path_factory.mktemp("made")
    ordered = ("-c:v", "libx264", "-pix_fmt", "yuv420p", "-bf", "0", "-g", "20")
    make(folder / "plain.mp4", *X264, frames=120)
    (folder / "trimmed.mp4").write_bytes(trimmed((folder / "plain.mp4").read_bytes(), 40, 80))
    make(folder / "ordered.mp4", *ordered, frames=60)
    make(folder / "same-times.mkv", *ordered, "-bsf:v", "setts=ts=floor(N/2)*80", frames=60)
    make(folder / "late.mkv", *ordered, "-output_ts_offset", "0.5", frames=5)
    make(folder / "one.mp4", *X264, frames=1, rate="1/60")
    for name, options in (("h264", X264), ("hevc", X265)):
        make(folder / f"raw.{name}", *options, frames=60)
        for suffix in ("mp4", "mov"):
            # No times: the muxer counts packets in the order in which they are decoded.
            ffmpeg("-r", "25", "-i", str(folder / f"raw.{name}"), "-c", "copy", str(folder / f"{name}.{suffix}"))
    ffmpeg("-fflags", "+genpts", "-r", "25", "-i", str(folder / "raw.h264"), "-c", "copy", str(folder / "ticks.avi"))
    return folder


@pytest.mark.parametrize("proof", ["none", "sample", "all"])
@pytest.mark.parametrize(
    ("name", "frames", "rate"),
    [
        ("ordered.mp4", 60, 25),
        ("trimmed.mp4", 80, 25),
        ("late.mkv", 5, 25),
        ("one.mp4", 1, 1 / 60),
        ("ticks.avi", 60, 25),
        ("same-times.mkv", 60, 25),
        ("h264.mp4", None, 25),
        ("hevc.mov", None, 25),
    ],
)
def test_what_is_packed_is_what_ffmpeg_shows_by_every_proof(name, frames, rate, proof, made, tmp_path):
    out = tmp_path / "set"
    if proof != "all" and (frames is None or name == "same-times.mkv"):
        # Its times contradict the order of its pictures, which only decoding all of it tells.
        with pytest.raises(JobError, match="no-index"):
            index_videos([str(made / name)], out, proof=proof, workers=1)
        return
    assert index_videos([str(made / name)], out, proof=proof, workers=1).packed == 1
    dataset = fastvid.open(out)
    assert frames is None or dataset[0].num_frames == frames
    assert float(dataset[0].info.fps) == pytest.approx(rate, rel=0.002 if frames else 0.05)
    assert tools.wrong_frames(dataset, 0, made / name) == []
    assert verify_dataset(str(out), workers=1).problems == []


class Remote(LocalStorage):
    """A folder whose files are read like those of a store: in large ranges, and no more than needed."""

    concurrency = 8


@pytest.mark.parametrize("storage", [LocalStorage, Remote])
@pytest.mark.parametrize("name", ["h264.mp4", "h264.mov", "hevc.mp4", "hevc.mov"])
@pytest.mark.usefixtures("no_file_is_small")
def test_times_that_contradict_the_pictures_are_refused_without_proof(name, storage, made):
    with pytest.raises(SourceError, match="contradict the order of its pictures") as caught:
        index_in_place(opened(made / name, storage), Limits(), Proof.NONE)
    assert caught.value.reason == "no-index"


def test_sample_notices_a_decoder_that_what_it_decoded_before_changes(made, monkeypatch):
    file = opened(made / "plain.mp4")
    clips = checks.chosen_clips(index_in_place(file, Limits(), Proof.SAMPLE).records)
    assert len(clips) > 1

    class Kept(checks.PyAvDecoder):
        def __init__(self):
            super().__init__()
            self.clips = []

        def give(self, clip, write):
            self.clips.append(clip)
            super().give(self.clips[0], write)  # the first clip again

    monkeypatch.setattr(checks, "PyAvDecoder", Kept)
    with pytest.raises(SourceError, match="differs from the one a player shows"):
        index_in_place(file, Limits(), Proof.SAMPLE)


def opened(path, storage=LocalStorage):
    place = storage(str(path.parent))
    return FileReader(place, path.name, place.version(path.name))


def test_sample_reads_frames_around_a_key_packet_that_edits_do_not_hide(made, tmp_path):
    for skip, keep in ((40, 80), (75, 30), (0, 50), (118, 2)):
        (tmp_path / "edited.mp4").write_bytes(trimmed((made / "plain.mp4").read_bytes(), skip, keep))
        found = index_in_place(opened(tmp_path / "edited.mp4"), Limits(), Proof.SAMPLE)
        assert found.info.num_frames == keep
        assert len(packet_offsets(found.records)) == 120
        assert checks.chosen_clips(found.records)


LATE_FRAMES = 120
ENCODINGS = ("pyramid", "compact", "hevc", "vp9", "av1-layers", "h264-10bit")


@pytest.fixture
def no_file_is_small(monkeypatch):
    """Packet headers of remote videos are not read when they are indexed: the bytes of a clip tell what to decode."""
    monkeypatch.setattr("fastvid.media.index_video.SMALL_FILE", 0)


def reader(path):
    return opened(path, Remote)


def decoded(file, found, frames):
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
@pytest.mark.usefixtures("no_file_is_small")
def test_clips_are_those_a_player_shows_and_decode_as_few_packets_as_of_a_file_read_whole(encoding, videos):
    path = videos.painted(encoding, frames=LATE_FRAMES).path
    file, shown = reader(path), tools.played(path)
    late, whole = (index_in_place(file, Limits(), proof) for proof in (Proof.SAMPLE, Proof.ALL))
    assert late.info.flags & StreamFlag.LATE
    assert not whole.info.flags & StreamFlag.LATE
    draws, packets = np.random.default_rng(1), np.zeros(3, int)
    blind = index_in_place(file, Limits(), Proof.NONE)
    assert not blind.info.flags & StreamFlag.LATE
    for _ in range(60):
        frames = np.sort(draws.choice(LATE_FRAMES, draws.integers(1, 5), replace=False))
        for number, found in enumerate((late, whole, blind)):
            digests, count = decoded(file, found, frames)
            assert digests == [shown[frame] for frame in frames.tolist()]
            packets[number] += count
    assert packets[0] <= 1.05 * packets[1]
    if (whole.records["flags"] & PacketFlag.DROPPABLE).any():
        assert packets[0] < packets[2]  # there was something to leave out


@pytest.mark.usefixtures("no_file_is_small")
def test_headers_that_lie_are_found_by_the_sample(videos, tmp_path):
    """HEVC: every picture that others refer to is called one that none of its sub-layer refers to."""
    path = videos.painted("hevc", frames=LATE_FRAMES).path
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
    for frame in (0, 30, 77, LATE_FRAMES - 1):
        assert decoded(reader(lies), found, [frame])[0] == [shown[frame]]


@pytest.mark.usefixtures("no_file_is_small")
def test_a_packet_that_brings_parameter_sets_is_never_left_out(videos):
    path = videos.painted("pyramid", frames=LATE_FRAMES).path
    found = index_in_place(reader(path), Limits(), Proof.ALL)
    droppable = int(np.flatnonzero(found.records["flags"] & PacketFlag.DROPPABLE)[0])
    offset, size = packet_offsets(found.records)[droppable], int(found.records["size"][droppable])
    packet = path.read_bytes()[offset : offset + size]
    sets = bytes([0, 0, 0, 3, 0x68, 0xEB, 0xE3])  # a picture parameter set that the file does not have
    for brought, expected in ((b"", PacketFlag.DROPPABLE), (sets, 0)):
        (flags,) = packet_flags(Codec.H264, found.info.extradata, [brought + packet])
        assert flags & PacketFlag.DROPPABLE == expected


@pytest.mark.usefixtures("no_file_is_small")
def test_what_the_tables_call_disposable_is_not_read_unless_that_is_wrong(videos, tmp_path):
    path = videos.painted("pyramid", frames=LATE_FRAMES).path
    whole = index_in_place(reader(path), Limits(), Proof.ALL)
    droppable = whole.records["flags"] & PacketFlag.DROPPABLE != 0
    shown = tools.played(path)
    lies = [np.arange(LATE_FRAMES) % step == step - 1 for step in (1, 2, 3, 5)]
    for number, (claimed, believed) in enumerate([(droppable, True), *((lie, False) for lie in lies)]):
        told = tmp_path / f"{number}.mp4"
        told.write_bytes(with_sdtp(path.read_bytes(), claimed))
        found = index_in_place(reader(told), Limits(), Proof.SAMPLE)
        assert np.array_equal(found.records["flags"] & PacketFlag.DROPPABLE != 0, droppable & believed)
        for frame in (0, 50, LATE_FRAMES - 1):
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
