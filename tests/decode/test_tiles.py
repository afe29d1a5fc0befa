"""Profile `tiles`: what is cut out of pictures before they are decoded equals the same part of the whole pictures."""

from __future__ import annotations

import io
import sys
import zlib
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

import fastvid
from fastvid.cli.main import main
from fastvid.decode import pyav
from fastvid.decode import tiles as cutting
from fastvid.decode.clips import read_clip, reader_of
from fastvid.decode.pyav import PyAvDecoder
from fastvid.decode.request import Box, ClipRequest, Planes, Rgb
from fastvid.decode.tiles import cut_tiles, reduced
from fastvid.errors import DecodeError, MissingDependency
from fastvid.format.mp4 import index_mp4
from fastvid.format.packets import PacketTable, packet_records
from fastvid.format.schema import StreamFlag
from fastvid.load.clips.crops import RandomResizedCrop
from fastvid.load.clips.sampling import Segments
from fastvid.media.checks import check_plans
from fastvid.media.prove import frame_digest
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.encode.tiles import interval
from fastvid.sharding.job.job import choose_settings
from tests.conformance import outputs
from tests.conformance.outputs import pictures
from tests.sharding.shardtools import encode, make, turn

Image = pytest.importorskip("PIL.Image", reason="tiles are written by Pillow")

TILES = PROFILES["tiles"]
# Width and height of pictures, and the width of their tiles: 21 blocks; 37, a prime; sides that are no multiples of 16.
SIZES = {(336, 256): 48, (592, 64): 592, (192, 96): 64, (130, 98): 48, (352, 80): 32}


class Sample:
    """An encoded sample, read as fastvid's own or as a foreign one, which is not cut."""

    def __init__(self, data):
        self.data = data
        self.info, self.records = index_mp4(data, conforms=True)

    def read(self, request, *, cuts=True, **options):
        info = self.info if cuts else replace(self.info, flags=StreamFlag.NONE)
        return read_clip(request, info, PacketTable(self.records), reader_of(self.data), key="k", shard="s", **options)

    def changed(self, change):
        """Return the sample with its first packet changed, and with the checksum that belongs to that."""
        columns = {name: self.records[name].tolist() for name in ("offset", "size")}
        packets = [self.data[at : at + size] for at, size in zip(*columns.values(), strict=True)]
        packets[0] = bytes(change(bytearray(packets[0])))
        other = Sample(self.data)
        sizes, other.data = list(map(len, packets)), b"".join(packets)
        crc32 = list(map(zlib.crc32, packets))
        offsets = np.cumsum(sizes) - sizes
        other.records = packet_records(offsets, sizes, crc32, self.records["frame"], self.records["flags"])
        return other


def decoded(decoder, clip, kind=Planes):
    return pictures(outputs.decoded(decoder, clip, kind))


class Counted:
    """A codec context that records its calls of `decode`."""

    def __init__(self, calls, context):
        self.calls, self.context = calls, context

    def decode(self, packet):
        self.calls.append(packet)
        return self.context.decode(packet)


def requests(rng, info, count):
    """Draw requests with any crop: tiny, whole, at the edges; resized or not, mirrored or not."""
    sides = np.array([info.height, info.width]) // 2
    for number in range(count):
        extent = sides if number % 50 == 0 else rng.integers(1, sides + 1)
        y, x = 2 * rng.integers(0, sides - extent + 1)
        height, width = (2 * extent).tolist()
        size = (height, width) if number % 2 else tuple(rng.integers(1, 250, 2).tolist())
        frames = rng.integers(0, info.num_frames, 1 + number % 3)
        yield ClipRequest(0, frames, Box(int(y), int(x), height, width), size, bool(number % 3))


def compare(sample, count, seed=0, decoder=PyAvDecoder):
    """Return how many of some random requests are cut, after checking that each equals the crop of the whole."""
    ours, theirs, cut = decoder(), decoder(), 0
    for number, request in enumerate(requests(np.random.default_rng(seed), sample.info, count)):
        clip, whole = sample.read(request), sample.read(request, cuts=False)
        part = reduced(clip)
        kind = Planes if number % 4 == 0 and Planes in decoder.outputs else Rgb
        assert np.array_equal(decoded(ours, clip, kind), decoded(theirs, whole, kind)), request
        cut += part.info.width * part.info.height < whole.info.width * whole.info.height
        assert part.sizes.sum() <= whole.sizes.sum()
    return cut


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("tiles"), {}
    for width, height in SIZES:
        source = make(folder / f"{width}.mp4", size=f"{width}x{height}", frames=6)
        found[width, height] = Sample(encode(source, replace(TILES, short_side=height, multiple=2))[0])
    return found


@pytest.mark.parametrize("size", SIZES)
def test_a_crop_is_cut_and_equals_that_of_the_whole_picture(samples, size):
    sample = samples[size]
    assert (sample.info.width, sample.info.height) == size
    assert 16 * interval(size[0]) == SIZES[size]
    assert compare(sample, 100) > 50


@pytest.mark.parametrize("count", [40, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_crops_of_real_videos_equal_those_of_the_whole_pictures(footage, count):
    videos = sorted((footage / "clean").glob("*.mp4"))
    videos = videos if count > 40 else videos[::24]
    for number, path in enumerate(videos):
        sample = Sample(encode(path, TILES)[0])
        assert compare(sample, -(-count // len(videos)), number) > count / len(videos) / 2


def test_dali_crops_tiles_as_whole_pictures(samples):
    """DALI interpolates chroma, so a cut without its margin differs; its resize rounds by the place of the crop."""
    pytest.importorskip("nvidia.dali", reason="DALI is not installed")
    from fastvid.decode.dali import DaliCpuDecoder

    decoder, sample = DaliCpuDecoder(), samples[336, 256]
    request = ClipRequest(0, np.array([3, 5]), Box(32, 96, 64, 96), (64, 96))
    whole = decoded(decoder, sample.read(request, cuts=False), Rgb)
    assert np.array_equal(decoded(decoder, sample.read(request), Rgb), whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "_MARGIN", 0)
        assert not np.array_equal(decoded(decoder, sample.read(request), Rgb), whole)
    with pytest.raises(DecodeError, match=r"does not have the 16 x \d tiles") as caught:
        decoded(decoder, sample.changed(renumbered).read(replace(request, frames=np.array([3, 0]))), Rgb)
    assert {"key": "k", "shard": "s", "frame": 0}.items() <= caught.value.where.items()


def test_a_cut_picture_is_a_jpeg_for_any_decoder(samples):
    sample, request = samples[336, 256], ClipRequest(0, np.array([2]), Box(64, 64, 60, 100), (60, 100))
    clip, whole = reduced(sample.read(request)), sample.read(request, cuts=False)
    pictures = [Image.open(io.BytesIO(bytes(one.data[: one.sizes[0]]))) for one in (clip, whole)]
    box = clip.request.box
    assert pictures[0].size == (clip.info.width, clip.info.height) == (144, 80)
    for picture in pictures:
        picture.draft("YCbCr", None)
    levels = [np.asarray(picture)[..., 0] for picture in pictures]
    assert np.array_equal(levels[0][box.y : box.y + 60, box.x : box.x + 100], levels[1][64:124, 64:164])


def test_a_crop_without_its_shift_differs(samples):
    sample, request = samples[336, 256], ClipRequest(0, np.array([0]), Box(64, 64, 60, 100), (60, 100))
    clip, whole = reduced(sample.read(request)), decoded(PyAvDecoder(), sample.read(request, cuts=False))
    assert np.array_equal(decoded(PyAvDecoder(), clip), whole)
    unshifted = replace(clip, request=replace(clip.request, box=Box(0, 0, 60, 100)))
    assert not np.array_equal(decoded(PyAvDecoder(), unshifted), whole)


@pytest.mark.parametrize(("most", "jpegs"), [(1, 6), (2, 3), (4, 2), (6, 1), (9, 1)])
def test_pictures_are_decoded_several_at_a_time(samples, monkeypatch, most, jpegs):
    """At the lower edge too, where the height of a part is no multiple of a block."""
    sample, decoder = samples[130, 98], PyAvDecoder()
    request = ClipRequest(0, np.array([4, 0, 0, 5, 1, 2, 3]), Box(40, 20, 58, 70), (58, 70))
    whole = decoded(decoder, sample.read(request, cuts=False))
    monkeypatch.setattr(cutting, "_PIXELS", most * 80 * 96)
    clip, calls = sample.read(request), []
    assert len(cut_tiles(clip).sizes) == jpegs
    opened = PyAvDecoder._open
    monkeypatch.setattr(PyAvDecoder, "_open", lambda self, info: Counted(calls, opened(self, info)))
    assert np.array_equal(decoded(PyAvDecoder(), clip), whole)
    assert len(calls) == jpegs


def test_a_cut_that_does_not_decode_as_expected_is_not_used(samples, monkeypatch):
    sample = samples[336, 256]
    request = ClipRequest(0, np.arange(3), Box(64, 64, 60, 100), (60, 100))
    whole = decoded(PyAvDecoder(), sample.read(request, cuts=False))
    cut = cut_tiles(sample.read(request))
    for wrong in (cut._replace(rows=cut.rows + 16), cut._replace(sizes=[cut.sizes[0] // 2])):
        monkeypatch.setattr(pyav, "cut_tiles", lambda clip, wrong=wrong: wrong)
        assert np.array_equal(decoded(PyAvDecoder(), sample.read(request)), whole)


def test_damage_between_markers_is_an_error_that_names_the_sample(samples):
    def damage(packet):
        packet[marker(packet, 36) + 2 : marker(packet, 37)] = b"\xfe" * 8  # a tile in both crops
        return packet

    wrong = samples[336, 256].changed(damage)
    for box in (Box(64, 64, 60, 100), Box(0, 0, 256, 336)):
        with pytest.raises(DecodeError, match="mjpeg decoder") as caught:
            decoded(PyAvDecoder(), wrong.read(ClipRequest(0, np.array([3, 0, 1]), box, (60, 100))))
        assert {"key": "k", "shard": "s"}.items() <= caught.value.where.items()


def test_bytes_between_packets_are_not_taken_for_markers(samples):
    sample, request = samples[336, 256], ClipRequest(0, np.array([0, 2, 5]), Box(64, 64, 60, 100), (60, 100))
    apart, together = reduced(sample.read(request)), reduced(sample.read(request, gap=10**6))
    assert bytes(apart.data) == bytes(together.data)


def marker(packet, number):
    """Return where a picture has one of its restart markers."""
    at = packet.index(b"\xff\xda")
    for _ in range(number):
        at = min(found for code in range(0xD0, 0xD8) if (found := packet.find(bytes([0xFF, code]), at + 2)) > 0)
    return at


def renumbered(packet):
    packet[marker(packet, 9) + 1] ^= 1
    return packet


def without_marker(packet):
    at = marker(packet, 9)
    return packet[:at] + packet[at + 2 :]


def without_tile(packet):
    return packet[: marker(packet, 9)] + packet[marker(packet, 17) :]


def with_other_interval(packet):
    at = packet.index(b"\xff\xdd") + 4
    packet[at : at + 2] = (7).to_bytes(2, "big")
    return packet


LIES = {
    "renumbered": renumbered,
    "without a marker": without_marker,
    "without a row": without_tile,
    "interval": with_other_interval,
    "bytes after the end": lambda packet: packet + b"\0\0",
    "cut short": lambda packet: packet[:-40],
    "header alone": lambda packet: packet[: packet.index(b"\xff\xda") + 4],
}


@pytest.mark.parametrize("lie", LIES)
def test_markers_that_lie_are_an_error_that_names_the_sample(samples, lie):
    wrong, decoder, box = samples[336, 256].changed(LIES[lie]), PyAvDecoder(), Box(64, 64, 60, 100)
    for frames in ([0], [3, 0, 1]):
        with pytest.raises(DecodeError, match=r"does not have the 16 x \d tiles") as caught:
            decoded(decoder, wrong.read(ClipRequest(0, np.array(frames), box, (60, 100))))
        assert {"key": "k", "shard": "s", "frame": 0}.items() <= caught.value.where.items()
    # Other pictures are not affected.
    decoded(decoder, wrong.read(ClipRequest(0, np.array([3]), box, (60, 100))))


def test_verify_notices_a_wrong_cut(samples, monkeypatch):
    sample, decoder, whole = samples[336, 256], PyAvDecoder(), {}
    request = ClipRequest(0, np.arange(3), Box(0, 0, 256, 336), (256, 336))
    decoder.give(sample.read(request), lambda frame, place: whole.update({place: frame_digest(frame)}))

    def findings():
        table, read, clips = PacketTable(sample.records), reader_of(sample.data), [[frame] for frame in whole]
        return list(check_plans(sample.info, table, read, clips, whole, decoder))

    assert not findings()
    monkeypatch.setattr(cutting, "Box", lambda y, x, *size: Box(max(y - 2, 0), max(x - 2, 0), *size))
    ((check, message),) = findings()
    assert check == "plan"
    assert "that is decoded from its tiles differs" in message


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """A dataset of an upright and a turned video."""
    folder = tmp_path_factory.mktemp("made")
    flat = make(folder / "videos" / "flat.mp4", size="336x256", frames=30)
    turn(flat, folder / "videos" / "turned.mp4")
    fastvid.shard([folder / "videos"], out=folder / "shards", profile="tiles", workers=1)
    return folder / "shards"


def test_a_loader_delivers_the_same_clips_from_tiles_as_from_whole_pictures(dataset, monkeypatch):
    def batches():
        loader = fastvid.ClipLoader(
            fastvid.open(dataset),
            frames=Segments(4),
            spatial=[RandomResizedCrop(64, scale=(0.05, 0.5))],
            global_batch_size=2,
            order=fastvid.Order(clips_per_video=2),
            seed=1,
        )
        with closing(loader):
            return [batch.video.numpy().copy() for _ in range(3) for batch in loader]

    cut = []
    monkeypatch.setattr(pyav, "cut_tiles", lambda clip: cut.append(cutting.cut_tiles(clip)) or cut[-1])
    ours = batches()
    assert any(one.part.width < 256 for one in cut)
    monkeypatch.setattr(pyav, "cut_tiles", lambda clip: None)
    for mine, whole in zip(ours, batches(), strict=True):
        assert np.array_equal(mine, whole)


def test_a_dataset_of_tiles_is_upright_verified_and_read_by_other_tools(dataset, capsys):
    sizes = {video.key: (video.width, video.height) for video in fastvid.open(dataset)}
    assert sorted(sizes.values()) == [(256, 336), (336, 256)]
    assert main(["verify", str(dataset)]) == 0
    assert main(["inspect", str(dataset)]) == 0
    assert "tiles" in capsys.readouterr().out


def test_the_encoder_of_tiles_is_part_of_the_build_of_tiles_alone(monkeypatch):
    assert "libjpeg-turbo" in choose_settings("tiles").build.identity()["jpeg"]
    assert "jpeg" not in choose_settings("intra").build.identity()
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingDependency, match="fastvid-toolkit\\[prepare\\]"):
        choose_settings("tiles")
    choose_settings("intra")
