"""Parts of streams that change on the way or are interlaced are the right frames, or are refused."""

import io
from dataclasses import replace
from fractions import Fraction

import av
import numpy as np
import pytest

from fastvid.errors import SourceError
from fastvid.media.ffmpeg import Limits
from fastvid.media.prove import index_video
from fastvid.media.reasons import Reason
from fastvid.sharding.encode import profiles
from fastvid.sharding.encode.parts import plan_window
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.work import encode as encode_clip
from fastvid.sharding.work.tasks import SourceTask
from tests.fields import paff
from tests.makers import paint
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


CODEC = ("-c:v", "libx264", "-crf", "12", "-bf", "0")


def halves(source, target, change, suffix, codec, clock=""):
    """Write a video whose parameters change at frame 10."""
    paths = [target.with_name(f"{name}.{suffix}") for name in "ab"]
    cuts = (f"trim=end_frame=10{clock}", f"trim=start_frame=10,{START},{change}{clock}")
    for path, cut in zip(paths, cuts, strict=True):
        ffmpeg("-i", str(source), "-vf", cut, "-fps_mode", "passthrough", *codec, str(path))
    return paths


@pytest.fixture
def changing(videos, tmp_path):
    def write(change):
        halved = halves(videos.painted("intra").path, tmp_path / "x", CHANGES[change], "h264", CODEC)
        (tmp_path / "raw.h264").write_bytes(b"".join(part.read_bytes() for part in halved))
        return tmp_path / "raw.h264"

    return write


@pytest.mark.parametrize("change", sorted(CHANGES))
@pytest.mark.parametrize("suffix", ["h264", "ts"])
def test_clips_after_a_change_of_the_stream_are_the_frames_asked_for(change, suffix, changing, tmp_path):
    path = tmp_path / f"changing.{suffix}"
    ffmpeg("-i", str(changing(change)), "-c", "copy", str(path))
    (sample,) = pack(path, 1.2, 2.4).samples
    assert numbers(sample.streams["rgb"]) == list(range(30, 60))
    assert [numbers(s.streams["rgb"]) for s in pack(path, max_seconds=1.0).samples] == [
        list(range(23)), list(range(23, 46)), list(range(46, 70)),
    ]  # fmt: skip


@pytest.mark.parametrize("profile", ["compact", "copy"])
def test_parts_may_be_as_long_as_a_decimal_number_says(profile, tmp_path):
    path = make(tmp_path / "six.mp4", rate="10", frames=6)  # as a binary number, 0.3 s are a little less than 3 frames
    assert len(pack(path, profile=PROFILES[profile], max_seconds=0.3).samples) == 2


VARIABLE = r",setpts='(N*N/40+N)/(25*TB)'"
VP9 = ("-c:v", "libvpx-vp9", "-cpu-used", "8", "-crf", "20", "-b:v", "0")


def test_clip_of_a_variable_rate_stream_is_a_slice_of_the_whole(videos, tmp_path):
    path = tmp_path / "a.webm"
    # The sound begins 1.5 s before the picture, so the file's clock is not the picture's.
    noise = ("-f", "lavfi", "-i", "anoisesrc=duration=6", "-itsoffset", "1.52")
    clock = (f"null{VARIABLE.replace('(25*TB)', '(25*TB)+1.58/TB')}", "-fps_mode", "vfr")
    ffmpeg(*noise, "-i", str(videos.painted("intra").path), "-vf", *clock, *VP9, "-c:a", "libvorbis", str(path))
    (whole,) = pack(path).samples
    (clip,) = pack(path, 2.0, 4.0).samples
    every, some = numbers(whole.streams["rgb"]), numbers(clip.streams["rgb"])
    first, last = (round(seconds * Fraction(clip.meta["fps"])) for seconds in (2, 4))
    assert some == every[first:last]


def test_subsampled_clips_after_a_change_keep_every_second_frame(changing, tmp_path):
    path = tmp_path / "fast.ts"
    ffmpeg("-r", "120", "-i", str(changing("size")), "-c", "copy", str(path))
    (sample,) = pack(path, 0.25, 0.5).samples
    assert numbers(sample.streams["rgb"]) == list(range(30, 60, 2))


def count_frames(picture, rate, first, last):
    """Cut as version 0.1 did: by counting, which starts again when the stream changes."""
    return picture.trim(start_frame=first, end_frame=last).setpts("PTS-STARTPTS")


def test_part_that_begins_at_another_frame_is_refused(changing, monkeypatch):
    monkeypatch.setattr(profiles, "_cut", count_frames)
    monkeypatch.setattr(encode_clip, "plan_window", lambda *given: replace(plan_window(*given), trims=False))
    outcome = pack(changing("size"), 1.2, 2.0)
    assert outcome.reason is Reason.VERIFY_FAILED
    assert "another picture than the source" in outcome.message


@pytest.mark.parametrize(
    "options",
    [
        ("-vf", HDR, "-pix_fmt", "yuv420p10le", "-c:v", "libx265", "-x265-params", "log-level=none"),
        ("-pix_fmt", "yuvj420p", "-c:v", "mjpeg"),
        ("-vf", "fieldorder=tff", "-flags", "+ildct+ilme", "-x264-params", "tff=1"),
        ("-vf", "setsar=2", "-c:v", "libx264"),
        (),
    ],
    ids=["hdr", "full-range", "interlaced", "anamorphic", "turned"],
)
def test_converted_parts_are_accepted(options, tmp_path):
    path = make(tmp_path / "a.mov", *options, size="320x192", frames=50)
    path = path if options else turn(path, tmp_path / "turned.mov")
    for profile in (SMALL, SMALL.changed(fps="10"), PROFILES["mjpeg"].changed(short_side=96)):
        assert pack(path, 0.4, 1.2, profile).message == ""


def test_parts_of_small_pictures_are_accepted(tmp_path):
    path = make(tmp_path / "a.mp4", size="64x48", frames=50)
    # 42 columns are cut to 32; the margin of 5 is odd, and chroma has half the columns.
    assert pack(path, 0.4, 1.2, SMALL.changed(short_side=32)).message == ""


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


FRAMES = 26
CONTAINERS = {"ts": (), "mts": ("-f", "mpegts", "-mpegts_m2ts_mode", "1"), "mp4": ()}
INTERLACED = ("-c:v", "libx264", "-crf", "12", "-flags", "+ildct+ilme", "-x264-params", "tff=1")


@pytest.fixture(scope="module")
def pictures():
    return np.clip(paint(FRAMES, (96, 160))[0], 16, 235)


@pytest.fixture(scope="module")
def field_coded(pictures, tmp_path_factory):
    folder = tmp_path_factory.mktemp("paff")
    raw = folder / "paff.h264"
    raw.write_bytes(b"".join(paff(pictures)))
    for suffix, options in CONTAINERS.items():
        ffmpeg("-fflags", "+genpts", "-i", str(raw), "-c", "copy", *options, str(folder / f"paff.{suffix}"))
    return {suffix: folder / f"paff.{suffix}" for suffix in ("h264", *CONTAINERS)}


def mixed(videos, tmp_path, suffix, *filters):
    path = tmp_path / f"a.{suffix}"
    source = str(videos.painted("intra").path)
    filters = ("-vf", ",".join(filters)) if filters else ()
    ffmpeg("-i", source, *filters, *INTERLACED, *CONTAINERS[suffix], str(path))
    return path


def shown(data):
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray()[: frame.height] for frame in container.decode(video=0)])


@pytest.mark.parametrize("suffix", ["h264", *CONTAINERS])
def test_field_coded_video_is_packed_frame_by_frame(suffix, field_coded):
    path = field_coded[suffix]
    with av.open(str(path)) as container:
        assert sum(bool(packet.size) for packet in container.demux(video=0)) == 2 * FRAMES  # a packet is a field
    whole, clip = pack(path), pack(path, 0.4, 0.8)
    assert numbers(whole.samples[0].streams["rgb"]) == list(range(FRAMES))
    assert numbers(clip.samples[0].streams["rgb"]) == list(range(10, 20))
    assert whole.samples[0].meta["fps"] == "25"
    assert "deinterlaced" in whole.warnings


@pytest.mark.parametrize("suffix", ["h264", *CONTAINERS])
def test_fields_are_neither_copied_nor_indexed_in_place(suffix, field_coded, videos, tmp_path):
    """Packets cannot be deinterlaced, and woven fields are not what a player shows."""
    paths = [field_coded[suffix], *([mixed(videos, tmp_path, suffix)] if suffix in CONTAINERS else [])]
    for path in paths:
        copied = pack(path, profile=PROFILES["copy"])
        assert copied.reason is Reason.NO_INDEX
        assert "interlaced" in copied.message
        with pytest.raises(SourceError, match=r"interlaced|not contiguous"):
            index_video(path.read_bytes(), Limits())


def test_lost_fields_are_noticed(field_coded, pictures, tmp_path):
    fields = paff(pictures)
    path = tmp_path / "lost.h264"
    path.write_bytes(b"".join(fields[:20] + fields[22:]))
    assert look(path).timing.shown == FRAMES - 1
    path.write_bytes(b"".join([*fields[:21], fields[21][:200], *fields[22:]]))
    assert pack(path).reason is Reason.DAMAGED


@pytest.mark.parametrize("suffix", sorted(CONTAINERS))
def test_interlaced_macroblocks_and_telecine_keep_every_frame_and_its_order(suffix, videos, tmp_path):
    encoded = pack(mixed(videos, tmp_path, suffix))
    assert "deinterlaced" in encoded.warnings
    assert numbers(encoded.samples[0].streams["rgb"]) == list(range(70))
    # 3:2 pulldown: of five frames two mix fields of neighbours. The first frame is a whole one.
    path = mixed(videos, tmp_path, suffix, "telecine=first_field=top:pattern=23")
    encoded = pack(path)
    assert "deinterlaced" in encoded.warnings
    found = numbers(encoded.samples[0].streams["rgb"])
    assert len(found) == look(path).timing.shown
    assert found == sorted(found)
    assert {found[0], found[-1]} <= {0, 69}


def test_deinterlaced_motion_has_no_comb(videos, tmp_path):
    """Lines of the two fields differ where things move; after deinterlacing they hardly do."""
    path, pattern = tmp_path / "a.ts", "testsrc2=size=320x192:rate=50"
    ffmpeg("-f", "lavfi", "-i", pattern, "-frames:v", "60", "-vf", "tinterlace=interleave_top", *INTERLACED, str(path))

    def comb(frames):
        lines = frames.astype(np.int64)
        return float(np.abs(2 * lines[:, 1:-1] - lines[:, :-2] - lines[:, 2:]).mean())

    (made,) = pack(path, profile=PROFILES["compact"].changed(short_side=192)).samples
    assert comb(shown(made.streams["rgb"])) < 0.6 * comb(shown(path.read_bytes()))
