"""Transcoding one source with ffmpeg: output frames, detection of damage, and limits."""

import io
import os
from dataclasses import replace

import av
import numpy as np
import pytest

from fastvid.errors import SourceError
from fastvid.format.mp4 import index_mp4
from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.media.reasons import Reason
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.encode.transcode import verify
from tests.makers import read_numbers
from tests.sharding.shardtools import encode, ffmpeg, make, stub

SMALL = PROFILES["compact"].changed(short_side=96)


def numbers(data):
    with av.open(io.BytesIO(data)) as container:
        frames = [frame.to_ndarray()[: frame.height] for frame in container.decode(video=0)]
    return read_numbers(np.stack(frames))


def rejected(path, **options):
    with pytest.raises(SourceError) as caught:
        encode(path, SMALL, **options)
    return caught.value


@pytest.mark.parametrize("name", sorted(PROFILES.keys() - {"copy"}))
def test_constant_rate_source_keeps_every_frame_in_order(name, videos):
    result = encode(videos.painted("pyramid").path, PROFILES[name].changed(short_side=96))
    assert numbers(result[0]) == list(range(70))


@pytest.mark.parametrize(
    ("suffix", "options"),
    [
        ("mkv", ("-c", "copy")),
        ("flv", ("-c", "copy")),
        ("ts", ("-c", "copy")),
        ("avi", ("-c", "copy")),
        ("h264", ("-c", "copy")),
        ("mp4", ("-c", "copy", "-movflags", "frag_keyframe+empty_moov", "-output_ts_offset", "5")),
        ("webm", ("-c:v", "libvpx", "-cpu-used", "8", "-b:v", "1M", "-auto-alt-ref", "1", "-lag-in-frames", "16")),
    ],
)
def test_rounded_late_or_missing_timestamps_lose_no_frame(suffix, options, videos, tmp_path):
    path = tmp_path / f"a.{suffix}"
    ffmpeg("-i", str(videos.painted("compact").path), *options, str(path))
    assert numbers(encode(path, SMALL)[0]) == list(range(70))


def filtered(videos, path, name, *options, rate="25"):
    source = str(videos.painted(name).path)
    ffmpeg("-r", rate, "-i", source, *options, "-fps_mode", "passthrough", "-crf", "18", str(path))
    return numbers(encode(path, SMALL)[0])


def test_gaps_are_filled_with_the_previous_frame(videos, tmp_path):
    drop = r"select='not(eq(n\,10)+eq(n\,30)+eq(n\,31))'"
    found = filtered(videos, tmp_path / "holes.mkv", "compact", "-vf", drop)
    assert len(found) == 70
    assert [n for n in range(70) if found[n] != n] == [10, 30, 31]
    assert [found[n] for n in (10, 30, 31)] == [9, 29, 29]


def test_variable_rate_source_keeps_its_order_and_length(videos, tmp_path):
    jitter = r"setpts='(N*N/40+N)/(25*TB)'"
    found = filtered(videos, tmp_path / "variable.mp4", "compact", "-vf", jitter)
    assert found == sorted(found)
    assert abs(len(found) - 70) <= 2


def test_high_rate_sources_are_subsampled_evenly(videos, tmp_path):
    path = tmp_path / "fast.mp4"
    assert filtered(videos, path, "intra", rate="120") == list(range(0, 70, 2))
    assert index_mp4(encode(path, SMALL)[0])[0].fps == 60


def test_parts_are_exact_and_written_in_one_pass(videos):
    parts = [(0, 23), (23, 46), (60, 70)]
    result = encode(videos.painted("compact").path, SMALL, parts)
    assert [numbers(video) for video in result] == [list(range(first, last)) for first, last in parts]


def test_damaged_video_is_rejected_although_ffmpeg_exits_with_zero(videos, tmp_path):
    data = bytearray(videos.textured("compact").path.read_bytes())
    start = int(len(data) * 0.6)
    data[start : start + 40] = bytes(255 - b for b in data[start : start + 40])
    (tmp_path / "damaged.mp4").write_bytes(data)
    assert rejected(tmp_path / "damaged.mp4").reason is Reason.DAMAGED
    # ffmpeg says only at its end that Matroska is cut.
    path = tmp_path / "whole.mkv"
    ffmpeg("-i", str(videos.painted("compact").path), "-c", "copy", str(path))
    (tmp_path / "cut.mkv").write_bytes(path.read_bytes()[: int(path.stat().st_size * 0.9)])
    assert rejected(tmp_path / "cut.mkv").reason in (Reason.DAMAGED, Reason.TRUNCATED)


def test_damaged_audio_does_not_reject_the_video(videos, tmp_path):
    path = tmp_path / "sound.mkv"
    noise = ["-f", "lavfi", "-i", "anoisesrc=duration=2.8"]
    ffmpeg("-i", str(videos.painted("compact").path), *noise, "-c:v", "copy", "-c:a", "libvorbis", str(path))
    data = bytearray(path.read_bytes())
    # Vorbis' set-up header is in the codec's private data; if damaged, libavcodec logs an error.
    start = data.index(b"\x05vorbis") + 7
    data[start : start + 64] = bytes(64)
    path.write_bytes(data)
    assert numbers(encode(path, SMALL)[0]) == list(range(70))


@pytest.mark.parametrize("tracks", [1, 2])
def test_damage_is_noticed_beside_another_stream_of_the_same_codec(tracks, videos, tmp_path):
    video = str(videos.textured("compact").path)
    path = tmp_path / "cameras.mkv"
    ffmpeg("-i", video, "-i", video, *("-map", "0", "-map", "1")[: 2 * tracks], "-c", "copy", str(path))
    assert len(encode(path, SMALL)) == 1
    # The picture's packets, not those of the other track, are damaged.
    data = bytearray(path.read_bytes())
    with av.open(str(path)) as container:
        packets = [packet for packet in container.demux(container.streams.video[0]) if packet.size]
    for packet in packets[20:40]:
        at = data.index(bytes(packet)) + len(bytes(packet)) // 2
        data[at : at + 20] = bytes(255 - b for b in data[at : at + 20])
    path.write_bytes(data)
    error = rejected(path)
    assert "error while decoding" in str(error)
    assert error.reason is Reason.DAMAGED


@pytest.fixture
def stubbed(tmp_path):
    def run(body, **options):
        build = replace(find_ffmpeg(), path=stub(tmp_path / "ffmpeg", body))
        return rejected(make(tmp_path / "a.mp4", frames=3), build=build, **options)

    return run


def test_hanging_ffmpeg_is_killed_at_the_limit(stubbed, tmp_path):
    limits = Limits(seconds=0.5, seconds_per_frame=0)
    error = stubbed(f"echo $$ > {tmp_path}/pid; exec sleep 600", limits=limits)
    assert (error.reason, error.transient) == (Reason.TIMEOUT, True)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_endless_log_is_truncated(stubbed):
    assert len(stubbed("yes '[h264 @ 0x1] [error] broken' | head -c 50000000 >&2").message) < 500


@pytest.mark.parametrize(
    ("body", "reason", "transient"),
    [
        ("kill -9 $$", Reason.CRASHED, True),
        ("kill -XFSZ $$", Reason.TOO_LONG, False),
        ("kill -XCPU $$", Reason.TIMEOUT, True),
        ("echo '[error] Error: Cannot allocate memory' >&2; exit 1", Reason.MEMORY, False),
        ("echo '[error] Decoder (codec vvc) not found for input stream #0:0' >&2; exit 1", Reason.NO_DECODER, False),
        ("exit 7", Reason.ENCODE_FAILED, False),
        ("exit 0", Reason.NO_FRAMES, False),
    ],
)
def test_every_exit_of_ffmpeg_has_a_reason(body, reason, transient, stubbed):
    error = stubbed(body)
    assert (error.reason, error.transient) == (reason, transient)


def test_output_size_is_limited(videos):
    assert rejected(videos.textured("compact").path, limits=Limits(output_bytes=4096)).reason is Reason.TOO_LONG


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    path = folder / "good.mp4"
    path.write_bytes(encode(make(folder / "a.mp4", size="160x96", frames=40), SMALL)[0])
    return path


def failure(data, profile=SMALL, frames=(40, 40), rate=25):
    with pytest.raises(SourceError) as caught:
        verify(data, profile, frames=frames, rate=rate)
    assert caught.value.reason == Reason.VERIFY_FAILED
    return caught.value.message


def test_only_a_sample_of_the_right_size_structure_and_length_passes(good):
    data = good.read_bytes()
    found = verify(data, SMALL, frames=(40, 40), rate=25)
    assert (found.num_frames, found.width, found.height) == (40, 160, 96)
    assert "40 frames, expected 41" in failure(data, frames=(41, 45))
    assert "expected 128 on the shorter side" in failure(data, SMALL.changed(short_side=128))
    assert "key frames" in failure(data, SMALL.changed(gop=16))
    assert "index" in failure(data[:1000])
    assert "index" in failure(b"")
    said = "the encoded sample is wrong: 12800/512 frames a second, but 30 are promised"
    assert failure(data, rate=30) == said


def test_references_that_should_not_be_there_are_seen(tmp_path):
    # x264's own defaults refer to every frame of so short a clip without B-frames.
    options = ("-bf", "0", "-g", "32", "-keyint_min", "32", "-sc_threshold", "0")
    path = make(tmp_path / "a.mp4", *options, size="160x96", frames=40)
    assert "every frame is a reference frame" in failure(path.read_bytes())
