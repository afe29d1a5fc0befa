"""Parts of streams that change on the way are the right frames, and parts that are not are refused."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from fastvid.media.reasons import Reason
from fastvid.sharding.encode import profiles
from fastvid.sharding.encode.parts import plan_window
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.work import encode as encode_clip
from fastvid.sharding.work.tasks import SourceTask
from tests.sharding.encode.test_transcode import numbers
from tests.sharding.shardtools import HDR, encode_source, ffmpeg, look, make, settings, turn

SMALL = PROFILES["compact"].changed(short_side=96)
CHANGES = {
    "size": "scale=240:144",
    "format": "format=yuv422p",
    "range": "scale=out_range=full,setparams=range=full",
    "matrix": "scale=out_color_matrix=bt709,setparams=colorspace=bt709",
}
START = "setpts=PTS-STARTPTS"


def pack(path, start=None, end=None, profile=SMALL, **options):
    task = SourceTask(0, "a", str(path), "a", path.stat().st_size, start, end)
    return encode_source(task, settings(profile, **options))


def halves(source, target, change, suffix, codec, clock=""):
    """Write a video whose parameters change at frame 10."""
    paths = [target.with_name(f"{name}.{suffix}") for name in "ab"]
    cuts = (f"trim=end_frame=10{clock}", f"trim=start_frame=10,{START},{change}{clock}")
    for path, cut in zip(paths, cuts, strict=True):
        ffmpeg("-i", str(source), "-vf", cut, "-fps_mode", "passthrough", *codec, str(path))
    return paths


@pytest.mark.parametrize("change", sorted(CHANGES))
@pytest.mark.parametrize("suffix", ["h264", "ts"])
def test_clips_after_a_change_of_the_stream_are_the_frames_asked_for(change, suffix, videos, tmp_path):
    codec = ("-c:v", "libx264", "-crf", "12", "-bf", "0")
    halved = halves(videos.painted("intra").path, tmp_path / "x", CHANGES[change], "h264", codec)
    raw, path = tmp_path / "raw.h264", tmp_path / f"changing.{suffix}"
    raw.write_bytes(b"".join(part.read_bytes() for part in halved))
    ffmpeg("-i", str(raw), "-c", "copy", str(path))
    (sample,) = pack(path, 1.2, 2.4).samples
    assert numbers(sample.streams["rgb"]) == list(range(30, 60))
    assert [numbers(s.streams["rgb"]) for s in pack(path, max_seconds=1.0).samples] == [
        list(range(23)), list(range(23, 46)), list(range(46, 70)),
    ]  # fmt: skip


VARIABLE = r",setpts='(N*N/40+N)/(25*TB)'"
VP9 = ("-c:v", "libvpx-vp9", "-cpu-used", "8", "-crf", "20", "-b:v", "0")


def test_clip_of_a_variable_rate_stream_is_a_slice_of_the_whole(videos, tmp_path):
    path = tmp_path / "a.webm"
    # The sound begins 1.5 s before the picture, so the file's clock is not the picture's.
    noise = ("-f", "lavfi", "-i", "anoisesrc=duration=6", "-itsoffset", "1.52")
    clock = (f"null{VARIABLE.replace('(25*TB)', '(25*TB)+1.53/TB')}", "-fps_mode", "vfr")
    ffmpeg(*noise, "-i", str(videos.painted("intra").path), "-vf", *clock, *VP9, "-c:a", "libvorbis", str(path))
    (whole,) = pack(path).samples
    (clip,) = pack(path, 2.0, 4.0).samples
    every, some = numbers(whole.streams["rgb"]), numbers(clip.streams["rgb"])
    first, last = (round(seconds * Fraction(clip.meta["fps"])) for seconds in (2, 4))
    assert len(some) == last - first
    # The whole is put on a grid that begins at the file's clock, so a frame may differ by one.
    assert max(abs(a - b) for a, b in zip(every[first:], some, strict=False)) <= 1


def test_clip_of_a_variable_rate_stream_whose_size_changes_is_right_or_refused(videos, tmp_path):
    source, change = videos.painted("intra").path, "scale=240:144"
    listed, path = tmp_path / "list", tmp_path / "a.webm"
    halved = halves(source, tmp_path / "x", change, "webm", VP9, VARIABLE)
    listed.write_text("".join(f"file '{part}'\n" for part in halved))
    ffmpeg("-f", "concat", "-safe", "0", "-i", str(listed), "-c", "copy", str(path))
    outcome, info = pack(path, 2.0, 4.0), look(path)
    if outcome.reason is None:
        shown = numbers(outcome.samples[0].streams["rgb"])
        seconds = (info.times - info.times[0]) * float(info.time_base)
        nearest = [int(np.abs(seconds - time).argmin()) for time in (2.0, 4.0 - 1 / float(info.timing.rate))]
        assert abs(shown[0] - nearest[0]) <= 1
        assert abs(shown[-1] - nearest[1]) <= 1
    else:
        assert outcome.reason is Reason.VERIFY_FAILED


def test_subsampled_clips_after_a_change_keep_every_second_frame(videos, tmp_path):
    codec = ("-c:v", "libx264", "-crf", "12", "-bf", "0")
    halved = halves(videos.painted("intra").path, tmp_path / "x", CHANGES["size"], "h264", codec)
    raw, path = tmp_path / "raw.h264", tmp_path / "fast.ts"
    raw.write_bytes(b"".join(part.read_bytes() for part in halved))
    ffmpeg("-r", "120", "-i", str(raw), "-c", "copy", str(path))
    (sample,) = pack(path, 0.25, 0.5).samples
    assert numbers(sample.streams["rgb"]) == list(range(30, 60, 2))


def count_frames(picture, rate, first, last):
    """Cut as version 0.1 did: by counting, which starts again when the stream changes."""
    return picture.trim(start_frame=first, end_frame=last).setpts("PTS-STARTPTS")


def test_part_that_begins_at_another_frame_is_refused(videos, tmp_path, monkeypatch):
    codec = ("-c:v", "libx264", "-crf", "12", "-bf", "0")
    halved = halves(videos.painted("intra").path, tmp_path / "x", CHANGES["size"], "h264", codec)
    path = tmp_path / "raw.h264"
    path.write_bytes(b"".join(part.read_bytes() for part in halved))
    monkeypatch.setattr(profiles, "_cut", count_frames)
    monkeypatch.setattr(encode_clip, "plan_window", lambda *given: replace(plan_window(*given), trims=False))
    outcome = pack(path, 1.2, 2.0)
    assert outcome.reason is Reason.VERIFY_FAILED
    assert "another picture than the source" in outcome.message


@pytest.mark.parametrize(
    "options",
    [
        ("-vf", HDR, "-pix_fmt", "yuv420p10le", "-c:v", "libx265", "-x265-params", "log-level=none"),
        ("-pix_fmt", "yuvj420p", "-c:v", "mjpeg"),
        ("-vf", "fieldorder=tff", "-flags", "+ildct+ilme", "-x264-params", "tff=1"),
        ("-vf", "setsar=2", "-c:v", "libx264"),
    ],
    ids=["hdr", "full-range", "interlaced", "anamorphic"],
)
def test_converted_parts_are_accepted(options, tmp_path):
    path = make(tmp_path / "a.mov", *options, size="320x192", frames=50)
    for profile in (SMALL, SMALL.changed(fps="10"), PROFILES["mjpeg"].changed(short_side=96)):
        assert pack(path, 0.4, 1.2, profile).message == ""


def test_turned_parts_are_accepted(tmp_path):
    path = turn(make(tmp_path / "a.mp4", size="320x192", frames=50), tmp_path / "turned.mp4")
    assert pack(path, 0.4, 1.2).message == ""


# Milliseconds of frame N, on average about 40: a constant rate drops about 28 of 70 frames, or 4.
LONG_BURST = "if(lt(N,35),N*7,245+(N-35)*73)"
SHORT_BURST = "if(lt(N,6),N*7,42+(N-6)*43)"


@pytest.mark.parametrize(("clock", "warned"), [(LONG_BURST, True), (SHORT_BURST, False)])
def test_frames_dropped_is_warned_of_above_a_tenth(clock, warned, videos, tmp_path):
    path = tmp_path / "a.mkv"
    times = ("-vf", f"setpts='({clock})/(1000*TB)'", "-fps_mode", "passthrough", "-enc_time_base", "1:1000")
    ffmpeg("-i", str(videos.painted("intra").path), *times, "-c:v", "libx264", "-bf", "0", str(path))
    outcome = pack(path)
    assert "timing-variable" in outcome.warnings
    assert ("frames-dropped" in outcome.warnings) == warned
