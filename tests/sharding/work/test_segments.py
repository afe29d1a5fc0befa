"""Clips of one file are the frames of the full decode, cost one fetch, and do not depend on each other."""

import math
import random
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.media.reasons import Reason
from fastvid.sharding.encode import parts as window
from fastvid.sharding.encode.flow import Streams
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.engines.local import LocalEngine
from fastvid.sharding.job.run import retry_alone
from fastvid.sharding.work import encode as encode_clip
from fastvid.sharding.work import encode as work
from fastvid.sharding.work.encode import encode_clips
from fastvid.sharding.work.tasks import SourceTask
from tests.makers import encode as write
from tests.makers import paint
from tests.sharding import shardtools
from tests.sharding.encode.test_transcode import numbers
from tests.sharding.shardtools import encode_source, ffmpeg, look, stub
from tests.skips import soak_but

SMALL = PROFILES["compact"].changed(short_side=96)
FRAMES = 240
X264 = ["-c:v", "libx264", "-preset", "veryfast", "-crf", "12", "-g", "24", "-sc_threshold", "0", "-bf", "3"]
# Where decoding may begin at a key frame: suffix, options, clock.
SEEKS = {
    "mp4": ("mp4", X264),
    "mp4-fragments": ("mp4", [*X264, "-movflags", "frag_keyframe+empty_moov"]),
    "mkv": ("mkv", X264),
    "late": ("mkv", [*X264, "-output_ts_offset", "5"]),
    "edit-list": ("mp4", X264),
    "webm": ("webm", ["-c:v", "libvpx-vp9", "-cpu-used", "8", "-b:v", "1M", "-g", "24", "-lag-in-frames", "16"]),
    "hevc": ("mp4", ["-c:v", "libx265", "-x265-params", "log-level=none:open-gop=0:keyint=24:scenecut=0"]),
    "variable": ("mkv", ["-vf", r"setpts='(N*N/400+N)/(25*TB)'", *X264]),
    "gaps": ("mp4", ["-vf", r"setpts='(N+floor(N/40)*3)/(25*TB)'", *X264]),
}
# Where it must begin at the first packet.
STARTS = {
    "ts": ("ts", X264),
    "avi": ("avi", X264),
    "mpeg": ("mpg", ["-c:v", "mpeg2video", "-b:v", "4M", "-bf", "2", "-g", "24"]),
    "mpeg4": ("avi", ["-c:v", "mpeg4", "-q:v", "3", "-g", "24"]),
    "raw": ("h264", X264),
    "open-groups": ("mp4", [*X264, "-x264-params", "open-gop=1"]),
    "interlaced": ("mp4", ["-vf", "fieldorder=tff", "-flags", "+ildct+ilme", "-x264-params", "tff=1", *X264]),
}

QUICK = ("mp4", "edit-list", "variable", "webm", "ts", "open-groups")


@pytest.fixture(scope="module")
def planes():
    return paint(FRAMES, (96, 160))


@pytest.fixture(scope="module")
def footage(planes, tmp_path_factory):
    """Return a function that writes a painted video once."""
    folder, made = tmp_path_factory.mktemp("painted"), {}

    def painted(name):
        if name not in made:
            suffix, options = (SEEKS | STARTS)[name]
            made[name] = folder / f"{name}.{suffix}"
            write(made[name], planes, options)
            if name == "edit-list":
                # The list hides the frames from the key frame to the cut.
                cut = made[name].with_name("cut.mp4")
                ffmpeg("-ss", "1.3", "-i", str(made[name]), "-c", "copy", str(cut))
                made[name] = cut
        return made[name]

    return painted


@pytest.fixture
def windows(monkeypatch):
    """Make starting ffmpeg free, so that short videos are sought in, too; list what ffmpeg decodes."""
    monkeypatch.setattr(window, "_START_PIXELS", 0)
    seen, real = [], encode_clip.transcode

    def transcode(*arguments, **options):
        seen.append(options["window"])
        return real(*arguments, **options)

    monkeypatch.setattr(encode_clip, "transcode", transcode)
    return seen


def settings(**options):
    return shardtools.settings(options.pop("profile", SMALL), **options)


def tasks_of(path, spans):
    return [
        SourceTask(number, f"c{number}", str(path), f"c{number}", path.stat().st_size, start, end, parent="file")
        for number, (start, end) in enumerate(spans)
    ]


def together(tasks, how):
    """Encode tasks as a group; return their outcomes in the order of the tasks, without the times."""
    found = {one.index: replace(one, seconds=0.0) for one in encode_clips(tasks, how, lambda *_: None, lambda _: None)}
    return [found[task.index] for task in tasks]


def alone(tasks, how):
    return [replace(encode_source(task, how), seconds=0.0) for task in tasks]


def random_spans(seed, length, count=4):
    draws = random.Random(seed)
    starts = [draws.uniform(0, length - 0.2) for _ in range(count)]
    return [(round(start, 3), round(min(length, start + draws.uniform(0.05, 1.5)), 3)) for start in starts]


@pytest.mark.parametrize("name", soak_but([*SEEKS, *STARTS], *QUICK))
def test_clips_show_the_frames_of_the_full_decode(name, footage, windows, monkeypatch):
    path, how = footage(name), settings()
    (whole,) = encode_source(SourceTask(0, "w", str(path), "w"), how).samples
    shown = numbers(whole.streams["rgb"])
    info = look(path)
    assert bool(len(info.keys)) == (name in SEEKS)
    length = float(info.timing.frames / info.timing.rate)
    tasks = tasks_of(path, [*random_spans(name, length), (length - 0.4, length), (0.0, 0.3)])
    windows.clear()
    group = together(tasks, how)
    assert [one.message for one in group if one.reason is not None] == []
    assert any(one.seek is not None for one in windows) == (name in SEEKS)
    # No seek had to be repeated from the first packet.
    assert len({(one.first, one.last) for one in windows}) == len(windows)
    for task, outcome in zip(tasks, group, strict=True):
        (sample,) = outcome.samples
        first = math.ceil(task.start * info.timing.rate - 0.5 - 1e-6)  # halfway between two, the earlier one
        assert numbers(sample.streams["rgb"]) == shown[first : first + sample.num_frames], task
        assert sample.meta["source_sha256"] == whole.meta["source_sha256"]
    assert [one.to_bytes() for one in alone(tasks, how)] == [one.to_bytes() for one in group]
    # One pass from the first packet gives the same bytes.
    plan = encode_clip.plan_window
    monkeypatch.setattr(encode_clip, "plan_window", lambda *given: plan(*given).from_start())
    assert [one.to_bytes() for one in alone(tasks, how)] == [one.to_bytes() for one in group]


@pytest.mark.parametrize("profile", [SMALL.changed(fps="10"), PROFILES["intra"].changed(short_side=96)])
def test_other_rates_and_profiles_have_the_bytes_of_a_full_pass(profile, footage, windows, monkeypatch):
    tasks, how = tasks_of(footage("mp4"), random_spans(1, FRAMES / 25)), settings(profile=profile)
    group = together(tasks, how)
    assert any(one.seek is not None for one in windows)
    plan = encode_clip.plan_window
    monkeypatch.setattr(encode_clip, "plan_window", lambda *given: plan(*given).from_start())
    assert [one.to_bytes() for one in alone(tasks, how)] == [one.to_bytes() for one in group]
    assert [one.reason for one in group] == [None] * len(tasks)


def test_seek_that_misleads_is_repeated_from_the_first_packet(footage, windows, monkeypatch):
    tasks, how = tasks_of(footage("mp4"), [(5.2, 5.8)]), settings()
    right = together(tasks, how)
    plan = encode_clip.plan_window

    def too_late(*given):
        found = plan(*given)
        return found if found.seek is None else replace(found, seek=found.seek + 3.0)

    monkeypatch.setattr(encode_clip, "plan_window", too_late)
    windows.clear()
    assert together(tasks, how)[0].to_bytes() == right[0].to_bytes()
    assert [one.seek is None for one in windows] == [False, True]


def test_key_frames_that_need_earlier_frames_are_not_sought(footage, tmp_path):
    # MP4's table marks recovery points and open groups, too.
    path = tmp_path / "open.mkv"
    ffmpeg("-i", str(footage("open-groups")), "-c", "copy", str(path))
    assert not len(look(path).keys)
    assert len(look(footage("mp4")).keys) == FRAMES // 24


def test_parameter_sets_that_change_inside_a_stream_forbid_seeks(footage, tmp_path):
    other, raw, path = tmp_path / "b.h264", tmp_path / "ab.h264", tmp_path / "ab.mp4"
    ffmpeg("-i", str(footage("raw")), *X264, "-vf", "scale=80:48", str(other))
    raw.write_bytes(footage("raw").read_bytes() + other.read_bytes())
    ffmpeg("-f", "h264", "-r", "25", "-i", str(raw), "-c", "copy", "-bsf:v", "setts=ts=N", str(path))
    assert not len(look(path).keys)


def counted(counts, name, real):
    def call(*arguments):
        counts[name] += 1
        return real(*arguments)

    return call


def test_file_is_opened_hashed_and_probed_once_for_all_its_clips(footage, monkeypatch):
    counts = dict.fromkeys(("open_task", "sha256_of_file", "probe"), 0)
    for name in counts:
        monkeypatch.setattr(work, name, counted(counts, name, getattr(work, name)))
    tasks = tasks_of(footage("mp4"), [(number * 0.4, number * 0.4 + 0.4) for number in range(20)])
    assert [one.reason for one in together(tasks, settings())] == [None] * 20
    assert set(counts.values()) == {1}


def test_file_in_a_store_is_fetched_once_for_all_its_clips(s3, footage):
    from fastvid.storage import open_storage

    bucket = s3.bucket()
    path = footage("mp4")
    open_storage(f"s3://{bucket}").write("long.mp4", path.read_bytes())
    here = tasks_of(path, [(number * 0.4, number * 0.4 + 0.4) for number in range(6)])
    tasks = [replace(task, path=f"s3://{bucket}/long.mp4") for task in here]
    with closing(LocalEngine(settings(), workers=1)) as engine:
        outcomes = {one.index: replace(one, seconds=0.0) for one in engine.run(tasks)}
    gets = [path for method, path, *_ in s3.requests(bucket) if method == "GET" and path.endswith("long.mp4")]
    assert len(gets) == 1
    assert [outcomes[task.index].to_bytes() for task in tasks] == [one.to_bytes() for one in together(here, settings())]


def test_damage_rejects_only_the_clips_that_contain_it(footage, tmp_path, windows):
    path = tmp_path / "damaged.mp4"
    ffmpeg("-i", str(footage("mp4")), "-c", "copy", "-bsf:v", "noise=amount='eq(n\\,130)*20'", str(path))
    tasks, how = tasks_of(path, [(0.4, 1.0), (5.1, 5.6), (4.9, 5.9), (8.0, 8.8)]), settings()
    group = together(tasks, how)
    assert [one.reason for one in group] == [None, Reason.DAMAGED, Reason.DAMAGED, None]
    assert [one.to_bytes() for one in alone(tasks, how)] == [one.to_bytes() for one in group]


def test_clips_outside_the_video_do_not_concern_the_others(footage):
    group = together(tasks_of(footage("mp4"), [(1.0, 2.0), (99.0, 100.0), (3.0, 4.0)]), settings())
    assert [one.reason for one in group] == [None, Reason.OUT_OF_RANGE, None]


@pytest.mark.parametrize(("audio", "count"), [("aac", 18), ("copy", 3)])  # more and fewer than one ffmpeg takes
def test_sound_of_a_clip_does_not_depend_on_the_others(audio, count, footage, tmp_path):
    path = tmp_path / "sound.mp4"
    tone = ("-f", "lavfi", "-i", f"aevalsrc='sin(1000*t*t)':d={FRAMES / 25}")
    ffmpeg("-i", str(footage("mp4")), *tone, "-c:v", "copy", "-c:a", "aac", str(path))
    tasks = tasks_of(path, [*random_spans(2, FRAMES / 25, count), (0.0, 1.0)])
    how = settings(streams=replace(Streams(), audio=audio))
    group = together(tasks, how)
    assert all(one.samples[0].streams["audio"] for one in group)
    assert [one.to_bytes() for one in alone(tasks, how)] == [one.to_bytes() for one in group]


@pytest.mark.parametrize(("crashes", "run"), [(5, range(16)), (16, range(16, 20))])
def test_crash_in_one_clip_does_not_concern_the_others(crashes, run, footage, tmp_path):
    # This "ffmpeg" kills the worker that runs it for one clip.
    starts = [number * 0.2 for number in range(16)] + [4.8, 6.0, 7.0, 8.0]
    where = f'*"start_pts={round(starts[crashes] * 25)}["*'
    body = f'case "$*" in {where}) kill -9 $PPID;; esac; exec {find_ffmpeg().path} "$@"'
    how = replace(settings(), build=replace(find_ffmpeg(), path=stub(tmp_path / "ffmpeg", body)))
    tasks = tasks_of(footage("mp4"), [(start, start + 0.2) for start in starts])
    with closing(LocalEngine(how, workers=1)) as engine:
        first = {outcome.index: outcome for outcome in engine.run(tasks)}
        assert sorted(first) == list(range(20))
        assert {number for number in first if first[number].transient} == set(run)
        assert [first[number].reason for number in range(20) if number not in run] == [None] * (20 - len(run))
        final = first | {number: retry_alone(engine, tasks[number]) for number in run}
    assert [number for number in range(20) if final[number].reason is not None] == [crashes]
    assert final[crashes].reason is Reason.CRASHED
    right = together(tasks, settings())
    assert all(replace(final[n], seconds=0.0).to_bytes() == right[n].to_bytes() for n in range(20) if n != crashes)


def test_costs_decide_between_one_pass_and_seeks(footage):
    info = replace(look(footage("mp4")), width=1920, height=1080)
    near, far = [[(10, 20)], [(30, 40)]], [[(10, 20)], [(200, 210)]]
    assert window.plan_runs(info, SMALL, near) == [range(2)]
    assert window.plan_runs(info, SMALL, far) == [range(1), range(1, 2)]
    from_start = replace(info, keys=np.zeros(0, np.int64))
    assert window.plan_runs(from_start, SMALL, far) == [range(2)]
    many = [[(number, number + 5)] for number in range(0, 200, 5)]
    assert [len(run) for run in window.plan_runs(from_start, SMALL, many)] == [16, 16, 8]
