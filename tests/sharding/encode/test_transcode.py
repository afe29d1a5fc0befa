"""Transcoding one source with ffmpeg: output frames, detection of damage, and limits."""

from __future__ import annotations

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
    """Return the frame numbers painted on an encoded sample, in display order."""
    with av.open(io.BytesIO(data)) as container:
        frames = [frame.to_ndarray()[: frame.height] for frame in container.decode(video=0)]
    return read_numbers(np.stack(frames))


def reason_of(path, **options):
    with pytest.raises(SourceError) as caught:
        encode(path, SMALL, **options)
    return Reason(caught.value.reason)


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


def test_gaps_are_filled_with_the_previous_frame(videos, tmp_path):
    path = tmp_path / "holes.mkv"
    drop = r"select='not(eq(n\,10)+eq(n\,30)+eq(n\,31))'"
    ffmpeg("-i", str(videos.painted("compact").path), "-vf", drop, "-fps_mode", "passthrough", "-crf", "18", str(path))
    found = numbers(encode(path, SMALL)[0])
    assert len(found) == 70
    assert [n for n in range(70) if found[n] != n] == [10, 30, 31]
    assert [found[n] for n in (10, 30, 31)] == [9, 29, 29]


def test_variable_rate_source_keeps_its_order_and_length(videos, tmp_path):
    path = tmp_path / "variable.mp4"
    jitter = r"setpts='(N*N/40+N)/(25*TB)'"
    ffmpeg("-i", str(videos.painted("compact").path), "-vf", jitter, "-fps_mode", "vfr", "-crf", "18", str(path))
    found = numbers(encode(path, SMALL)[0])
    assert found == sorted(found)
    assert abs(len(found) - 70) <= 2


def test_high_rate_sources_are_subsampled_evenly(videos, tmp_path):
    path = tmp_path / "fast.mp4"
    clock = ["-r", "120", "-i", str(videos.painted("intra").path), "-fps_mode", "passthrough"]
    ffmpeg(*clock, "-crf", "18", str(path))
    data = encode(path, SMALL)[0]
    assert numbers(data) == list(range(0, 70, 2))
    assert index_mp4(data)[0].fps == 60


def test_parts_are_exact_and_written_in_one_pass(videos):
    parts = [(0, 23), (23, 46), (60, 70)]
    result = encode(videos.painted("compact").path, SMALL, parts)
    assert [numbers(video) for video in result] == [list(range(first, last)) for first, last in parts]


def damaged(path, tmp_path, *, position=0.6, size=40):
    data = bytearray(path.read_bytes())
    start = int(len(data) * position)
    data[start : start + size] = bytes(255 - b for b in data[start : start + size])
    target = tmp_path / f"damaged{path.suffix}"
    target.write_bytes(data)
    return target


def test_damaged_video_is_rejected_although_ffmpeg_exits_with_zero(videos, tmp_path):
    assert reason_of(damaged(videos.textured("compact").path, tmp_path)) is Reason.DAMAGED


def test_truncated_matroska_is_rejected_by_ffmpegs_last_messages(videos, tmp_path):
    path = tmp_path / "whole.mkv"
    ffmpeg("-i", str(videos.painted("compact").path), "-c", "copy", str(path))
    (tmp_path / "cut.mkv").write_bytes(path.read_bytes()[: int(path.stat().st_size * 0.9)])
    assert reason_of(tmp_path / "cut.mkv") in (Reason.DAMAGED, Reason.TRUNCATED)


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
    with pytest.raises(SourceError, match="error while decoding") as caught:
        encode(path, SMALL)
    assert caught.value.reason is Reason.DAMAGED


def test_hanging_ffmpeg_is_killed_at_the_limit(tmp_path):
    path = make(tmp_path / "a.mp4", frames=3)
    build = replace(find_ffmpeg(), path=stub(tmp_path / "ffmpeg", f"echo $$ > {tmp_path}/pid; exec sleep 600"))
    with pytest.raises(SourceError) as caught:
        encode(path, SMALL, build=build, limits=Limits(seconds=0.5, seconds_per_frame=0))
    assert (caught.value.reason, caught.value.transient) == (Reason.TIMEOUT, True)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_endless_log_is_truncated(tmp_path):
    path = make(tmp_path / "a.mp4", frames=3)
    build = replace(
        find_ffmpeg(), path=stub(tmp_path / "ffmpeg", "yes '[h264 @ 0x1] [error] broken' | head -c 50000000 >&2")
    )
    with pytest.raises(SourceError) as caught:
        encode(path, SMALL, build=build)
    assert len(caught.value.message) < 500


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
def test_every_exit_of_ffmpeg_has_a_reason(body, reason, transient, tmp_path):
    path = make(tmp_path / "a.mp4", frames=3)
    with pytest.raises(SourceError) as caught:
        encode(path, SMALL, build=replace(find_ffmpeg(), path=stub(tmp_path / "ffmpeg", body)))
    assert (caught.value.reason, caught.value.transient) == (reason, transient)


def test_output_size_is_limited(videos):
    assert reason_of(videos.textured("compact").path, limits=Limits(output_bytes=4096)) is Reason.TOO_LONG


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


def test_valid_sample_passes(good):
    found = verify(good.read_bytes(), SMALL, frames=(40, 40), rate=25)
    assert (found.num_frames, found.width, found.height) == (40, 160, 96)


def test_wrong_number_of_frames_fails(good):
    assert "40 frames, expected 41" in failure(good.read_bytes(), frames=(41, 45))


def test_wrong_size_structure_or_file_fails(good):
    data = good.read_bytes()
    assert "expected 128 on the shorter side" in failure(data, SMALL.changed(short_side=128))
    assert "key frames" in failure(data, SMALL.changed(gop=16))
    assert "index" in failure(data[:1000])
    assert "index" in failure(b"")


def test_another_rate_than_the_job_promises_is_seen(good):
    message = failure(good.read_bytes(), rate=30)
    assert message == "the encoded sample is wrong: 12800/512 frames a second, but 30 are promised"


def test_references_that_should_not_be_there_are_seen(tmp_path):
    # x264's own defaults refer to every frame of so short a clip without B-frames.
    path = make(
        tmp_path / "a.mp4", "-bf", "0", "-g", "32", "-keyint_min", "32", "-sc_threshold", "0", size="160x96", frames=40
    )
    assert "every frame is a reference frame" in failure(path.read_bytes())


def test_damage_in_any_packet_fails_or_is_invisible_to_libavcodec(good):
    data = good.read_bytes()
    _, records = index_mp4(data)
    caught = 0
    for record in records:
        broken = bytearray(data)
        middle = int(record["offset"]) + int(record["size"]) // 2
        broken[middle : middle + 8] = bytes(255 - b for b in broken[middle : middle + 8])
        try:
            verify(bytes(broken), SMALL, frames=(40, 40), rate=25)
        except SourceError:
            caught += 1
    # Decoders conceal some damage, which is why packets have checksums. Most must be detected.
    assert caught >= len(records) // 2
