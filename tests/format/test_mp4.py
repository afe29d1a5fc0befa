"""The minimal MP4 in PyAV, the ffmpeg program, DALI, and our own demuxer."""

import io
import subprocess
from dataclasses import replace
from fractions import Fraction

import av
import numpy as np
import pytest

from fastvid.decode.containers import minimal_mp4
from fastvid.errors import FormatError
from fastvid.format.mp4 import index_mp4
from fastvid.format.schema import Codec, Matrix, PacketFlag, Range
from tests.makers import ffmpeg, framemd5, read_numbers

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


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_pyav_reads_times_keys_size_and_colour_of_minimal_mp4(videos, encoding):
    video = videos.painted(encoding)
    info = replace(video.info, fps=Fraction(30000, 1001))
    for frames in WANTED:
        clip = video.clip(frames, info=info)
        with av.open(io.BytesIO(wrapped(clip))) as container:
            stream = container.streams.video[0]
            assert (stream.width, stream.height) == (info.width, info.height)
            assert stream.frames == len(clip.shows)
            packets = [packet for packet in container.demux(stream) if packet.size]
            assert [bytes(packet) for packet in packets] == [
                bytes(clip.data[s : s + z]) for s, z in zip(clip.starts.tolist(), clip.sizes.tolist(), strict=True)
            ]
            assert [packet.is_keyframe for packet in packets] == clip.keys.tolist()
            times = [packet.pts * packet.time_base for packet in packets]
            ranks = np.argsort(np.argsort(clip.shows))
            assert times == [Fraction(1001, 30000) * int(rank) for rank in ranks]
        with av.open(io.BytesIO(wrapped(clip))) as container:
            luma = np.stack([frame.to_ndarray()[: info.height] for frame in container.decode(video=0)])
            assert read_numbers(luma) == sorted(clip.shows.tolist())


@pytest.mark.parametrize("encoding", [name for name in ENCODINGS if name != "mjpeg"])
def test_minimal_mp4_is_indexed_as_written(videos, encoding):
    video = videos.painted(encoding)
    clip = video.clip([5, 18, 37, 63])
    info, records = index_mp4(wrapped(clip))
    assert info == replace(video.info, num_frames=len(clip.shows), flags=info.flags)
    assert records["size"].tolist() == clip.sizes.tolist()
    assert ((records["flags"] & PacketFlag.KEY) != 0).tolist() == clip.keys.tolist()
    assert records["frame"].tolist() == np.argsort(np.argsort(clip.shows)).tolist()


@pytest.mark.parametrize("encoding", ["vp9", "mjpeg"])
def test_dali_finds_frames_of_minimal_mp4_by_position(videos, encoding):
    fn = pytest.importorskip("nvidia.dali.fn")
    from nvidia.dali import types
    from nvidia.dali.pipeline import Pipeline

    video = videos.painted(encoding)
    clip = video.clip([5, 18, 37, 63])
    shown = sorted(clip.shows.tolist())
    for positions in ([shown.index(f) for f in (5, 18, 37, 63)], [0], [len(shown) - 1], list(range(len(shown)))):
        pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1)
        with pipeline:
            encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
            pipeline.set_outputs(fn.decoders.video(encoded, frames=positions, device="cpu", pad_mode="none"))
        pipeline.feed_input("encoded", [np.frombuffer(wrapped(clip), np.uint8)])
        (frames,) = pipeline.run()
        assert read_numbers(np.asarray(frames.at(0))[..., 1]) == [shown[position] for position in positions]


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
