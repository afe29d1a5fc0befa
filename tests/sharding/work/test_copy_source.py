"""Profile copy: nothing is encoded, and every frame by plan is the one that a player shows for the source."""

import itertools
import json
import tarfile

import numpy as np
import pytest

import fastvid
from fastvid.errors import JobError, UsageError
from fastvid.format.schema import PacketFlag, StreamFlag
from fastvid.media.ffmpeg import Limits
from fastvid.media.prove import play
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.in_place import index_videos
from fastvid.sharding.job.index import rebuild
from fastvid.sharding.job.job import run_job
from fastvid.sharding.verify.verify import verify_dataset
from tests.makers import encode, paint, read_numbers
from tests.sharding.in_place import tools
from tests.sharding.shardtools import content, ffmpeg, ledger, make
from tests.skips import soak_but

X264 = ("-c:v", "libx264", "-pix_fmt", "yuv420p", "-g", "10")
OPEN = ("-c:v", "libx265", "-pix_fmt", "yuv420p", "-x265-params", "log-level=none:open-gop=1:keyint=10:bframes=3")
# What ffmpeg is told, whether the file can go into a shard as it is, and whether it must be decoded whole.
KINDS = {
    "plain.mp4": (X264, True, False),
    "plain.mov": (X264, True, False),
    "fragmented.mp4": ((*X264, "-movflags", "frag_keyframe+empty_moov"), False, False),
    "x264.mkv": ((*X264, "-bf", "3"), False, False),
    "x264.avi": ((*X264, "-bf", "2"), False, False),
    "x264.ts": ((*X264, "-bf", "2"), False, False),
    "x264.flv": (X264, False, False),
    "raw.h264": ((*X264, "-bf", "2"), False, False),
    "open.mkv": (OPEN, False, False),
    "wide.webm": (
        ("-vf", "setsar=2", "-c:v", "libvpx-vp9", "-g", "10", "-cpu-used", "8", "-lag-in-frames", "8"),
        False,
        False,
    ),
    "mjpeg.avi": (("-c:v", "mjpeg", "-pix_fmt", "yuvj420p", "-q:v", "4"), False, False),
    "mpeg4.mp4": (("-c:v", "mpeg4", "-bf", "2"), True, True),
    "mpeg4.avi": (("-c:v", "mpeg4", "-bf", "2"), False, True),
    "av1.mkv": (("-c:v", "libaom-av1", "-usage", "realtime", "-cpu-used", "8", "-pix_fmt", "yuv420p"), False, False),
}
FRAMES = 36


def check(dataset, key, path, first=0):
    """Hold planned frames of a sample against those of a player of its source, bit by bit; return its video."""
    assert tools.wrong_frames(dataset, dataset.find(key), path, most=14, first=first) == []
    return content(dataset, key)


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """A folder with a video of every kind, and one with an edit list."""
    folder = tmp_path_factory.mktemp("raw")
    for name, (options, _, _) in KINDS.items():
        make(folder / name, *options, size="80x48", frames=FRAMES)
    ffmpeg("-ss", "0.5", "-i", str(folder / "plain.mp4"), "-c", "copy", str(folder / "edited.mp4"))
    return folder


@pytest.fixture(scope="module")
def copied(raw, tmp_path_factory):
    out = tmp_path_factory.mktemp("copied") / "out"
    report = run_job(str(raw), str(out), profile="copy", workers=1)
    assert (report.packed, report.rejected) == (len(KINDS) + 1, {})
    return out


@pytest.mark.parametrize("name", [*KINDS, "edited.mp4"])
def test_frames_by_plan_are_those_of_a_player_of_the_source(name, copied, raw):
    dataset = fastvid.open(copied)
    keys = dict(zip(dataset.column("source_id").to_pylist(), dataset.keys.to_pylist(), strict=True))
    data, video = check(dataset, keys[name], raw / name), dataset[keys[name]]
    assert video.num_frames == len(tools.played(raw / name))
    _, as_it_is, whole = KINDS.get(name, (None, True, False))
    assert (data == (raw / name).read_bytes()) == as_it_is
    assert bool(video.info.flags & StreamFlag.WHOLE) == whole
    assert not video.info.flags & StreamFlag.CONFORMS
    # Another player, which knows nothing of the index, shows the same.
    other = play(data, "mov", Limits())
    assert other.digests == tools.played(raw / name)
    assert (other.aspect == 2) == (name == "wide.webm")


def test_json_and_ledger_say_what_differs_and_the_tars_alone_give_the_index(copied):
    rows = {row["source_id"]: row for row in ledger(copied)}
    assert "remuxed" in rows["x264.mkv"]["warnings"]
    assert "remuxed" not in rows["plain.mp4"]["warnings"]
    assert any(note.startswith("whole") for note in rows["mpeg4.mp4"]["warnings"])
    assert "edit-list" in rows["edited.mp4"]["warnings"]
    metas = []
    for path in sorted(copied.glob("*.tar")):
        with tarfile.open(path) as tar:
            metas += [json.load(tar.extractfile(name)) for name in tar.getnames() if name.endswith(".json")]
    assert [meta["conforms"] for meta in metas] == [False] * (len(KINDS) + 1)
    assert any(note.startswith("colour-") for note in metas[-1]["differs"])
    report = verify_dataset(str(copied), workers=1)
    assert (report.problems, report.samples) == ([], len(KINDS) + 1)
    sidecars = {one.name: one.read_bytes() for one in copied.glob("data-*") if one.suffix != ".tar"}
    for name in sidecars:
        (copied / name).unlink()
    rebuild(str(copied), workers=1)
    assert {name: (copied / name).read_bytes() for name in sidecars} == sidecars


def test_clips_are_exact_and_what_they_need_before_is_hidden(raw, tmp_path):
    table = tmp_path / "clips.csv"
    names = [name for name in KINDS if name != "raw.h264"]
    table.write_text("path,start,end\n" + "".join(f"{name},0.52,1.0\n" for name in names))
    report = run_job(str(raw), str(tmp_path / "out"), profile="copy", workers=1, annotations=f"csv:{table}")
    assert report.rejected == {}
    dataset = fastvid.open(tmp_path / "out")
    hidden = 0
    for video, source in zip(dataset, dataset.column("source_id").to_pylist(), strict=True):
        # 25 frames a second: 0.52 s is frame 13, 1.0 s frame 25.
        data = check(dataset, video.key, raw / source.split("#")[0], 13)
        assert video.num_frames == len(play(data, "mov", Limits()).digests) == 12, source
        hidden += bool((video.table.records["flags"] & PacketFlag.HIDDEN).any())
    assert hidden > 5
    assert dataset.column("start_seconds").to_pylist() == pytest.approx([0.52] * len(names), abs=0.002)
    assert verify_dataset(str(tmp_path / "out"), workers=1).ok


def test_slow_frames_and_jumps_of_the_clock_are_no_damage(tmp_path):
    made = {
        "slow.mp4": make(tmp_path / "in" / "slow.mp4", *X264, rate="1/2", frames=12),
        "jump.mkv": make(tmp_path / "in" / "jump.mkv", "-vf", r"setpts=(N/25+40*gte(N\,9))/TB", *X264, frames=20),
    }
    report = run_job(str(tmp_path / "in"), str(tmp_path / "out"), profile="copy", workers=1)
    assert (report.packed, report.rejected) == (2, {})
    dataset = fastvid.open(tmp_path / "out")
    for video, source in zip(dataset, dataset.column("source_id").to_pylist(), strict=True):
        assert video.num_frames == len(tools.played(made[source]))
        check(dataset, video.key, made[source])


def test_long_videos_become_parts_without_loss(raw, tmp_path):
    report = run_job(str(raw / "x264.mkv"), str(tmp_path / "out"), profile="copy", workers=1, max_seconds=0.5)
    assert report.packed == 1
    dataset = fastvid.open(tmp_path / "out")
    assert [video.num_frames for video in dataset] == [12, 12, 12]
    for number, video in enumerate(dataset):
        check(dataset, video.key, raw / "x264.mkv", 12 * number)
    assert dataset.column("start_seconds").to_pylist() == pytest.approx([0, 0.48, 0.96], abs=0.002)


def test_what_a_profile_wrote_conforms_when_it_is_copied(raw, tmp_path):
    small = PROFILES["compact"].changed(short_side=48)
    run_job(str(raw / "plain.mp4"), str(tmp_path / "first"), profile=small, workers=1)
    with tarfile.open(tmp_path / "first" / "data-000000.tar") as tar:
        tar.extract("plain.mp4", tmp_path / "again", filter="data")
    run_job(str(tmp_path / "again"), str(tmp_path / "second"), profile="copy", workers=1)
    (video,) = fastvid.open(tmp_path / "second")
    assert video.info.flags & StreamFlag.CONFORMS
    assert verify_dataset(str(tmp_path / "second"), workers=1).ok
    rows = ledger(tmp_path / "second")
    assert (rows[0]["warnings"], rows[0]["bytes_out"]) == ([], rows[0]["bytes_in"])


def test_what_cannot_be_copied_has_a_reason(raw, tmp_path):
    folder = tmp_path / "raw"
    make(folder / "mpeg2.mpg", "-c:v", "mpeg2video", size="80x48", frames=10)
    make(folder / "vp8.webm", "-c:v", "libvpx", size="80x48", frames=10)
    make(folder / "good.mp4", *X264, size="80x48", frames=10)
    broken = bytearray((raw / "plain.mp4").read_bytes())
    at = len(broken) * 2 // 3
    broken[at : at + 60] = bytes(60)
    (folder / "broken.mp4").write_bytes(broken)
    (folder / "cut.mkv").write_bytes((raw / "x264.mkv").read_bytes()[:-3000])
    report = run_job(str(folder), str(tmp_path / "out"), profile="copy", workers=1)
    reasons = {row["source_id"]: row["reason"] for row in report.ledger.to_pylist()}
    assert reasons.pop("good.mp4") is None
    assert reasons["mpeg2.mpg"] == reasons["vp8.webm"] == "no-index"
    assert reasons["broken.mp4"] == "damaged"
    assert reasons["cut.mkv"] in ("damaged", "truncated")


@pytest.mark.parametrize(
    ("name", "frames", "whole"),
    [
        ("Zulko__moviepy__fire2.mp4", 25, False),  # times that stand still
        ("google__ExoPlayer__sample_sef_slow_motion.mp4", 63, True),  # a first packet without a picture
        ("iejMac__clip-video-encode__vid1.mp4", 56, None),  # an edit list that starts between key frames
        ("shaka-project__shaka-player__s_00000.ts", 52, None),  # packets in pieces
        ("Zulko__moviepy__-video-with-dash-.mp4", 0, None),  # a single pixel
    ],
)
def test_real_files(name, frames, whole, footage, tmp_path):
    path = footage / "odd" / name
    if not frames:
        with pytest.raises(JobError, match="bad-shape"):
            run_job(str(path), str(tmp_path / "out"), profile="copy", workers=1)
        return
    assert run_job(str(path), str(tmp_path / "out"), profile="copy", workers=1).rejected == {}
    (video,) = fastvid.open(tmp_path / "out")
    assert video.num_frames == len(tools.played(path)) == frames
    check(fastvid.open(tmp_path / "out"), video.key, path)
    assert whole is None or bool(video.info.flags & StreamFlag.WHOLE) == whole
    assert verify_dataset(str(tmp_path / "out"), workers=1).ok


def test_parameters_of_an_encoder_mean_nothing():
    assert PROFILES["copy"].changed() == PROFILES["copy"]
    with pytest.raises(UsageError, match="crf has no effect"):
        PROFILES["copy"].changed(crf=20)


LAST, LENGTH = 136, 17
PRECISE = "-c:v libx264 -preset veryfast -g 12 -bf 2 -crf 18"
# Containers, encoders and clocks: every frame at n / rate, and one whose rate falls from 30 to 10 a second.
FILES = {
    "a2997.mp4": (30000 / 1001, f"-vf settb=1/30000,setpts=N*1001 -enc_time_base 1/30000 {PRECISE}"),
    "a30.mov": (30, f"-vf settb=1/30,setpts=N -enc_time_base 1/30 {PRECISE} -video_track_timescale 600"),
    "a2997.mkv": (30000 / 1001, f"-vf settb=1/30000,setpts=N*1001 -enc_time_base 1/30000 {PRECISE}"),
    "a25.mp4": (25, PRECISE),
    "a10.webm": (10, "-vf settb=1/10,setpts=N,fps=10 -c:v libvpx-vp9 -b:v 400k -g 12 -cpu-used 8"),
    "fast-slow.mkv": (None, f"-vf settb=1/30,setpts=if(lt(N\\,67)\\,N\\,67+3*(N-67)) -enc_time_base 1/30 {PRECISE}"),
}


def shown_at(name, number):
    rate = FILES[name][0]
    return number / rate if rate else (number + 2 * max(0, number - 67)) / 30


@pytest.fixture(scope="module")
def clocks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clocks")
    for name, (_, options) in FILES.items():
        encode(folder / name, paint(LAST, (96, 160)), [*options.split(), "-fps_mode", "passthrough"])
    return folder


@pytest.fixture(scope="module", params=soak_but([2, 3, 6], 2))
def made(request, clocks, tmp_path_factory):
    """Datasets of each kind of adjacent clips of 17 frames, whose seconds were rounded."""
    folder, rows = tmp_path_factory.mktemp(f"digits{request.param}"), ["path,start,end,first"]
    for name, first in itertools.product(FILES, range(0, LAST, LENGTH)):
        places = (f"{shown_at(name, frame):.{request.param}f}" for frame in (first, first + LENGTH))
        rows.append(f"{name},{','.join(places)},{first}")
    (folder / "clips.csv").write_text("\n".join(rows))
    given = {"annotations": f"csv:{folder / 'clips.csv'}", "workers": 1}
    reports = [index_videos([str(clocks)], folder / "index", **given)]
    for name, profile in (("copy", "copy"), ("intra", PROFILES["intra"].changed(short_side=96))):
        reports.append(run_job(str(clocks), str(folder / name), profile=profile, **given))
    assert [(report.packed, report.rejected) for report in reports] == [(len(rows) - 1, {})] * 3
    return folder


@pytest.mark.parametrize("kind", ["index", "copy", "intra"])
def test_a_clip_in_seconds_has_the_nearest_frames_whatever_is_made_of_it(made, kind):
    dataset = fastvid.open(made / kind)
    columns = (dataset.column(name).to_pylist() for name in ("source_id", "first", "start_seconds", "end_seconds"))
    for video, source, first, start, end in zip(dataset, *columns, strict=True):
        name, first, last = source.split("#")[0], int(first), int(first) + LENGTH
        if name.startswith("fast") and kind == "intra":
            continue  # encoded at a constant rate, with other frames
        assert video.num_frames == LENGTH, (name, first)
        found = read_numbers(video.frames(range(LENGTH)).data[..., 0])
        assert found == list(range(first, last)), (name, first)
        assert end == pytest.approx(shown_at(name, last), abs=0.07 if last == LAST else 0.002), (name, first)
        assert start == pytest.approx(shown_at(name, first), abs=0.002)


def test_a_clip_in_place_has_the_rate_of_its_own_frames(made):
    dataset = fastvid.open(made / "index")
    columns = (dataset.column(name).to_pylist() for name in ("source_id", "first"))
    for video, source, first in zip(dataset, *columns, strict=True):
        name, last = source.split("#")[0], int(first) + LENGTH
        rate = LENGTH / (shown_at(name, last) - shown_at(name, int(first)))
        assert float(video.info.fps) == pytest.approx(rate, rel=0.15 if last == LAST and not FILES[name][0] else 2e-3)


def test_a_copied_clip_has_the_rate_and_the_times_that_it_has_in_place(made):
    """Also where the times of the source, and those of the MP4, are rounded to milliseconds."""
    here, copied = (fastvid.open(made / kind) for kind in ("index", "copy"))
    for video in here:
        other = copied[video.key]
        assert other.info.fps == video.info.fps, video.key
        assert other.info.times == video.info.times or None not in (other.info.times, video.info.times), video.key
        assert other.info.seconds(np.arange(LENGTH)) == pytest.approx(video.info.seconds(np.arange(LENGTH)), abs=1e-9)


def test_a_few_frames_have_the_rate_that_their_container_claims(tmp_path):
    """Of one frame, and of a few, times in milliseconds tell another rate, such as 1000 or 30.3 for 30."""
    for frames, suffix in itertools.product((1, 5), ("mkv", "flv")):
        make(tmp_path / "films" / f"{suffix}{frames}.{suffix}", *X264, frames=frames, rate="30")
    index_videos([str(tmp_path / "films")], tmp_path / "index", workers=1)
    run_job(str(tmp_path / "films"), str(tmp_path / "copy"), profile="copy", workers=1)
    for kind in ("index", "copy"):
        assert [video.info.fps for video in fastvid.open(tmp_path / kind)] == [30] * 4, kind
