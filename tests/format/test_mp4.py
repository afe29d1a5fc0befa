"""The minimal MP4 in the ffmpeg program and our own demuxer."""

import io
import struct
import subprocess
from dataclasses import replace
from fractions import Fraction

import av
import numpy as np
import pytest

from fastvid.decode.containers import minimal_mp4
from fastvid.errors import FormatError
from fastvid.format.mp4 import index_mp4, read_track
from fastvid.format.schema import Codec, Matrix, PacketFlag, Range
from tests.makers import ffmpeg, framemd5
from tests.truth.recipes import replaced

ENCODINGS = ("compact", "intra", "pyramid", "hevc", "hevc-cra", "vp9", "mjpeg")
WANTED = [[0], [69], [5, 18, 37, 63], [3, 4, 5, 60], list(range(70))]


def wrapped(clip) -> bytes:
    return minimal_mp4(clip.info, clip.data, clip.starts, clip.sizes, clip.shows, clip.keys)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_ffmpeg_decodes_minimal_mp4_to_the_same_frames(videos, tmp_path, encoding):
    video = videos.textured(encoding)
    for frames in WANTED:
        clip = video.clip(frames)
        path = tmp_path / "minimal.mp4"
        path.write_bytes(wrapped(clip))
        assert framemd5(path) == [video.framemd5[show] for show in sorted(clip.shows.tolist())]
        command = [ffmpeg(), "-v", "warning", "-i", str(path), "-f", "null", "-"]
        assert subprocess.run(command, check=True, capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize("encoding", [name for name in ENCODINGS if name != "mjpeg"])
def test_minimal_mp4_is_indexed_as_written(videos, encoding):
    video = videos.painted(encoding)
    clip = video.clip([5, 18, 37, 63], info=replace(video.info, fps=Fraction(30000, 1001)))
    info, records = index_mp4(wrapped(clip))
    assert info == replace(clip.info, num_frames=len(clip.shows), flags=info.flags)
    assert records["size"].tolist() == clip.sizes.tolist()
    assert ((records["flags"] & PacketFlag.KEY) != 0).tolist() == clip.keys.tolist()
    assert records["frame"].tolist() == np.argsort(np.argsort(clip.shows)).tolist()


def test_minimal_mp4_contains_the_colour(videos):
    clip = videos.painted("vp9").clip([0])
    for matrix, sample_range in ((Matrix.BT709, Range.FULL), (Matrix.SMPTE170M, Range.LIMITED)):
        info = replace(clip.info, matrix=matrix, range=sample_range)
        found, _ = index_mp4(wrapped(replace(clip, info=info)))
        assert (found.matrix, found.range) == (matrix, sample_range)


def test_minimal_mp4_rejects_unsupported_packets(videos):
    clip = videos.painted("compact").clip([5, 18])
    with pytest.raises(FormatError, match="no frame"):
        wrapped(replace(clip, shows=np.where(clip.shows == 18, -1, clip.shows)))
    with pytest.raises(FormatError, match="two packets show frame 5"):
        wrapped(replace(clip, shows=np.where(clip.shows == 18, 5, clip.shows)))
    with pytest.raises(FormatError, match="mpeg4"):
        wrapped(replace(clip, info=replace(clip.info, codec=Codec.MPEG4)))
    with pytest.raises(FormatError, match="avcC"):
        wrapped(replace(clip, info=replace(clip.info, extradata=b"\0\0\0\1\x67")))


@pytest.mark.parametrize("milliseconds", [399, 400, 401, 1, 2000])
def test_an_edit_shows_the_frames_that_ffmpeg_shows(videos, milliseconds):
    # 70 frames of 40 ms: an edit of 400 ms ends where the eleventh begins, one of 401 ms shows it.
    data = bytearray(videos.painted("compact").data)
    at = data.index(b"elst") + 12
    data[at : at + 4] = milliseconds.to_bytes(4, "big")
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        shown = [not packet.is_discard for packet in container.demux(stream) if packet.size]
    assert sum(shown) == min(70, -(-milliseconds // 40))
    _, records = index_mp4(bytes(data))
    # FFmpeg leaves out the packets behind the last that it needs.
    assert (records["frame"] >= 0).tolist() == shown + [False] * (70 - len(shown))


MANY = 60_000
# Half a megabyte that says of 60,000 packets 60,000 times over when each is decoded, and when each is shown.
TOLD_OFTEN = {
    b"stsz": (1, MANY),
    b"stsc": (1, 1, MANY, 1),
    b"stco": (1, 0),
    b"stts": (MANY, *(MANY, 512) * MANY),
    b"ctts": (MANY, *(MANY, 1024) * MANY),
}


def with_tables(data: bytes, tables: dict[bytes, tuple[int, ...]]) -> bytes:
    for name, numbers in tables.items():
        at = data.rindex(name) + 8
        size = int.from_bytes(data[at - 12 : at - 8], "big") - 12
        parents = (b"moov", b"trak", b"mdia", b"minf", b"stbl", name)
        data = replaced(data, at, size, struct.pack(f">{len(numbers)}I", *numbers), parents)
    return data + bytes(MANY)


def test_tables_that_tell_too_much_take_little_time_and_memory(videos):
    data = videos.textured("pyramid").data
    track = read_track(memoryview(with_tables(data, TOLD_OFTEN)))
    assert (np.diff(track.pts) == 512).all()
    assert len(track.pts) == MANY
    with pytest.raises(FormatError, match="4294967295 packets"):
        read_track(memoryview(with_tables(data, {b"stsz": (1, 2**32 - 1)})))
    # Runs that go through the same 100,000 chunks again and again, and find no packet in any of them.
    chunks = {b"stco": (100_000, *[0] * 100_000), b"stsc": (200_000, *(1, 0, 1, 100_001, 0, 1) * 100_000)}
    with pytest.raises(FormatError, match="do not ascend"):
        read_track(memoryview(with_tables(data, chunks)))
