"""What a container declares against what is there, as sources, in tars and in place: whole files are whole."""

import struct

import pytest

from fastvid.errors import SourceError
from fastvid.media.ffmpeg import Limits
from fastvid.media.file_tables import FileReader, read_tables
from fastvid.media.probe import HEAD_BYTES, sniff
from fastvid.media.prove import play
from fastvid.storage.urls import open_file
from tests.sharding.shardtools import ffmpeg, look, make

X264 = ("-c:v", "libx264", "-pix_fmt", "yuv420p", "-preset", "veryfast", "-g", "20", "-bf", "2", "-sc_threshold", "0")
FRAMES = 120
TIMED = (".mp4", ".mkv", ".webm")


def tables(path):
    storage, name = open_file(str(path))
    return read_tables(FileReader(storage, name, storage.version(name)), Limits())


def play_file(path):
    data = path.read_bytes()
    return play(data, sniff(data[:HEAD_BYTES]), Limits())


# How each user of a file counts the frames that are shown.
USERS = {
    "source": lambda path: look(path).timing.shown,
    "tar": lambda path: len(play_file(path).digests),
    "in place": lambda path: int(tables(path).shown.sum()) if path.suffix in TIMED else len(play_file(path).digests),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    for name, options in {
        "plain.mp4": X264,
        "fragments.mp4": (*X264, "-movflags", "frag_keyframe+empty_moov"),
        "sized.mkv": X264,
        "live.mkv": (*X264, "-live", "1"),
        "endless.mkv": (*X264, "-flush_packets", "1", "-cluster_time_limit", "500"),
        "sized.webm": ("-c:v", "libvpx-vp9", "-cpu-used", "8", "-g", "20"),
        "first.mp4": (*X264, "-movflags", "+faststart"),
        "ticks.avi": ("-c:v", "mpeg4", "-b:v", "400k"),
        "timed.flv": X264,
        "ticks.ivf": ("-c:v", "libvpx", "-cpu-used", "8"),
    }.items():
        make(folder / name, *options, frames=FRAMES)
    data = bytearray((folder / "endless.mkv").read_bytes())
    at = data.index(b"\x18\x53\x80\x67") + 4
    data[at : at + 8] = b"\x01" + b"\xff" * 7  # the size of the segment: unknown
    (folder / "endless.mkv").write_bytes(data)
    return folder


def trimmed(data, skip, keep):
    """An MP4 whose only edit begins `skip` frames later and shows `keep` frames, as lossless trims write it."""
    data = bytearray(data)
    at, movie, media = (data.index(name) for name in (b"elst", b"mvhd", b"mdhd"))
    ticks = struct.unpack_from(">I", data, movie + 16)[0], struct.unpack_from(">I", data, media + 16)[0]
    begins = struct.unpack_from(">i", data, at + 16)[0] + skip * ticks[1] // 25
    struct.pack_into(">Ii", data, at + 12, keep * ticks[0] // 25, begins)
    return bytes(data)


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(
    ("skip", "keep"), [(75, 30), (75, 45), (5, 100), (0, 50), (20, 100), (21, 99), (40, 80), (118, 2)]
)
def test_a_file_is_whole_when_its_edits_hide_groups_of_pictures(user, skip, keep, made, tmp_path):
    (tmp_path / "a.mp4").write_bytes(trimmed((made / "plain.mp4").read_bytes(), skip, keep))
    assert USERS[user](tmp_path / "a.mp4") == keep


@pytest.mark.parametrize("user", USERS)
def test_a_copied_part_of_fragments_is_whole(user, made, tmp_path):
    ffmpeg("-ss", "3.1", "-i", str(made / "fragments.mp4"), "-t", "1", "-c", "copy", str(tmp_path / "a.mp4"))
    assert USERS[user](tmp_path / "a.mp4") == len(play_file(tmp_path / "a.mp4").digests) > 20


# Bytes that are missing of a file, and what is said of it; None if it is whole.
CUTS = {
    "plain.mp4": ((0.4, "moov|Invalid data"), (0.9, "moov|Invalid data"), (1, None)),
    "sized.mkv": ((0.4, "segment at byte"), (0.999, "segment at byte"), (1, None)),
    "sized.webm": ((0.4, "segment at byte"), (0.999, "segment at byte"), (1, None)),
    "endless.mkv": ((0.5, "cluster at byte"), (0.7, "cluster at byte"), (1, None)),
    "first.mp4": ((0.5, "packet"), (0.95, "packet"), (1, None)),
    "ticks.avi": ((0.5, "packet|ticks"), (0.95, "packet|ticks"), (1, None)),
    "timed.flv": ((0.5, "ends at|packet"), (1, None)),
    "ticks.ivf": ((0.5, "packet|ticks"), (0.95, "packet|ticks"), (1, None)),
    "live.mkv": ((1, None),),
    "fragments.mp4": ((1, None),),
}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize(("name", "part", "said"), [(name, *one) for name, cuts in CUTS.items() for one in cuts])
def test_a_file_that_breaks_off_is_truncated(user, name, part, said, made, tmp_path):
    data = (made / name).read_bytes()
    path = tmp_path / name
    path.write_bytes(data[: int(len(data) * part)] + (bytes(100) if part == 1 else b""))  # padding is no damage
    if said is None:
        assert USERS[user](path) == FRAMES
        return
    with pytest.raises(SourceError, match=said) as caught:
        USERS[user](path)
    assert caught.value.reason in ("truncated", "damaged", "broken-container")


@pytest.mark.parametrize("user", USERS)
def test_fragments_after_a_broken_box_are_noticed(user, made, tmp_path):
    data = bytearray((made / "fragments.mp4").read_bytes())
    second = data.index(b"moof", data.index(b"moof") + 4) - 4
    data[second : second + 40] = bytes(40)
    (tmp_path / "a.mp4").write_bytes(data)
    with pytest.raises(SourceError, match="contain fragments that cannot be read") as caught:
        USERS[user](tmp_path / "a.mp4")
    assert caught.value.reason == "truncated"
