"""Clips of one file are the frames of the full decode, cost one fetch, and do not depend on each other."""

import math
import random
from contextlib import closing
from dataclasses import replace
from unittest.mock import Mock

import av
import numpy as np
import pytest

from fastvid.media.ffmpeg import find_ffmpeg
from fastvid.media.reasons import Reason
from fastvid.sharding.encode import parts as window
from fastvid.sharding.encode.flow import Streams
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.engines.local import LocalEngine
from fastvid.sharding.job.run import retry_alone
from fastvid.sharding.work import encode as work
from fastvid.sharding.work.encode import encode_clips
from fastvid.sharding.work.tasks import SourceTask
from fastvid.storage import open_storage
from tests.sharding import shardtools
from tests.sharding.encode.test_transcode import numbers
from tests.sharding.shardtools import FILMS, X264, encode_source, ffmpeg, look, stub
from tests.skips import soak_but

SMALL = PROFILES["compact"].changed(short_side=96)
FRAMES = 240
SEEKS, STARTS = list(FILMS)[:9], list(FILMS)[9:16]

QUICK = ("mp4", "variable", "webm", "open-groups")


@pytest.fixture
def windows(monkeypatch):
    """Make starting ffmpeg free, so that short videos are sought in, too; list what ffmpeg decodes."""
    monkeypatch.setattr(window, "_START_PIXELS", 0)
    seen, real = [], work.transcode

    def transcode(*arguments, **options):
        seen.append(options["window"])
        return real(*arguments, **options)

    monkeypatch.setattr(work, "transcode", transcode)
    return seen


def settings(**options):
    return shardtools.settings(options.pop("profile", SMALL), **options)


def tasks_of(path, spans):
    return [
        SourceTask(number, f"c{number}", str(path), f"c{number}", path.stat().st_size, start, end, parent="file")
        for number, (start, end) in enumerate(spans)
    ]


def together(tasks, how):
    found = {one.index: replace(one, seconds=0.0) for one in encode_clips(tasks, how, lambda *_: None, lambda _: None)}
    return [found[task.index] for task in tasks]


def alone(tasks, how):
    return [replace(encode_source(task, how), seconds=0.0) for task in tasks]


def one_pass(tasks, how, monkeypatch):
    plan = work.plan_window
    monkeypatch.setattr(work, "plan_window", lambda *given: plan(*given).from_start())
    return [one.to_bytes() for one in alone(tasks, how)]


def random_spans(seed, length, count=4):
    draws = random.Random(seed)
    starts = [draws.uniform(0, length - 0.2) for _ in range(count)]
    return [(round(start, 3), round(min(length, start + draws.uniform(0.05, 1.5)), 3)) for start in starts]


@pytest.mark.parametrize("name", soak_but([*SEEKS, *STARTS], *QUICK))
def test_clips_show_the_frames_of_the_full_decode(name, film, windows, monkeypatch):
    path, how = film(name), settings()
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
    assert one_pass(tasks, how, monkeypatch) == [one.to_bytes() for one in group]


@pytest.mark.parametrize("profile", [SMALL.changed(fps="10"), PROFILES["intra"].changed(short_side=96)])
def test_other_rates_and_profiles_have_the_bytes_of_a_full_pass(profile, film, windows, monkeypatch):
    tasks, how = tasks_of(film("mp4"), random_spans(1, FRAMES / 25)), settings(profile=profile)
    group = together(tasks, how)
    assert any(one.seek is not None for one in windows)
    assert one_pass(tasks, how, monkeypatch) == [one.to_bytes() for one in group]
    assert [one.reason for one in group] == [None] * len(tasks)


def test_seek_that_misleads_is_repeated_from_the_first_packet(film, windows, monkeypatch):
    tasks, how = tasks_of(film("mp4"), [(5.2, 5.8)]), settings()
    right = together(tasks, how)
    plan = work.plan_window

    def too_late(*given):
        found = plan(*given)
        return found if found.seek is None else replace(found, seek=found.seek + 3.0)

    monkeypatch.setattr(work, "plan_window", too_late)
    windows.clear()
    assert together(tasks, how)[0].to_bytes() == right[0].to_bytes()
    assert [one.seek is None for one in windows] == [False, True]


def test_parameter_sets_that_change_inside_a_stream_forbid_seeks(film, tmp_path):
    other, raw, path = tmp_path / "b.h264", tmp_path / "ab.h264", tmp_path / "ab.mp4"
    ffmpeg("-i", str(film("raw")), *X264, "-vf", "scale=80:48", str(other))
    raw.write_bytes(film("raw").read_bytes() + other.read_bytes())
    ffmpeg("-f", "h264", "-r", "25", "-i", str(raw), "-c", "copy", "-bsf:v", "setts=ts=N", str(path))
    assert not len(look(path).keys)


def test_file_is_opened_hashed_and_probed_once_for_all_its_clips(film, monkeypatch):
    calls = {name: Mock(wraps=getattr(work, name)) for name in ("open_task", "sha256_of_file", "probe")}
    for name, call in calls.items():
        monkeypatch.setattr(work, name, call)
    tasks = tasks_of(film("mp4"), [(number * 0.4, number * 0.4 + 0.4) for number in range(20)])
    assert [one.reason for one in together(tasks, settings())] == [None] * 20
    assert {call.call_count for call in calls.values()} == {1}


def test_file_in_a_store_is_fetched_once_for_all_its_clips(s3, film):
    bucket, path = s3.bucket(), film("mp4")
    open_storage(f"s3://{bucket}").write("long.mp4", path.read_bytes())
    here = tasks_of(path, [(number * 0.4, number * 0.4 + 0.4) for number in range(6)])
    tasks = [replace(task, path=f"s3://{bucket}/long.mp4") for task in here]
    with closing(LocalEngine(settings(), workers=1)) as engine:
        outcomes = {one.index: replace(one, seconds=0.0) for one in engine.run(tasks)}
    gets = [path for method, path, *_ in s3.requests(bucket) if method == "GET" and path.endswith("long.mp4")]
    assert len(gets) == 1
    assert [outcomes[task.index].to_bytes() for task in tasks] == [one.to_bytes() for one in together(here, settings())]


@pytest.mark.parametrize("of", ["slice", "length"])
def test_damage_rejects_only_the_clips_that_contain_it(of, film, tmp_path, windows):
    path, data = tmp_path / "damaged.mp4", bytearray(film("mp4").read_bytes())
    with av.open(str(film("mp4"))) as source:
        packet = list(source.demux(video=0))[130]
    begin, end = (packet.size // 2, packet.size) if of == "slice" else (0, 1)
    for at in range(packet.pos + begin, packet.pos + end):
        data[at] ^= 0x55
    path.write_bytes(data)
    tasks, how = tasks_of(path, [(0.4, 1.0), (5.1, 5.6), (4.9, 5.9), (8.0, 8.8), (99.0, 100.0)]), settings()
    group = together(tasks, how)
    assert [one.reason for one in group] == [None, Reason.DAMAGED, Reason.DAMAGED, None, Reason.OUT_OF_RANGE]
    assert [one.to_bytes() for one in alone(tasks, how)] == [one.to_bytes() for one in group]


@pytest.mark.parametrize(("audio", "count"), [("aac", 18), ("copy", 3)])  # more and fewer than one ffmpeg takes
def test_sound_of_a_clip_does_not_depend_on_the_others(audio, count, film, tmp_path):
    path = tmp_path / "sound.mp4"
    tone = ("-f", "lavfi", "-i", f"aevalsrc='sin(1000*t*t)':d={FRAMES / 25}")
    ffmpeg("-i", str(film("mp4")), *tone, "-c:v", "copy", "-c:a", "aac", str(path))
    tasks = tasks_of(path, [*random_spans(2, FRAMES / 25, count), (0.0, 1.0)])
    how = settings(streams=replace(Streams(), audio=audio))
    group = together(tasks, how)
    assert all(one.samples[0].streams["audio"] for one in group)
    assert [one.to_bytes() for one in alone(tasks, how)] == [one.to_bytes() for one in group]


@pytest.mark.parametrize(("crashes", "run"), [(5, range(16)), (16, range(16, 20))])
def test_crash_in_one_clip_does_not_concern_the_others(crashes, run, film, tmp_path):
    # This "ffmpeg" kills the worker that runs it for one clip.
    starts = [number * 0.2 for number in range(16)] + [4.8, 6.0, 7.0, 8.0]
    where = f'*"start_pts={round(starts[crashes] * 25)}["*'
    body = f'case "$*" in {where}) kill -9 $PPID;; esac; exec {find_ffmpeg().path} "$@"'
    how = replace(settings(), build=replace(find_ffmpeg(), path=stub(tmp_path / "ffmpeg", body)))
    tasks = tasks_of(film("mp4"), [(start, start + 0.2) for start in starts])
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


def test_costs_decide_between_one_pass_and_seeks(film):
    info = replace(look(film("mp4")), width=1920, height=1080)
    near, far = [[(10, 20)], [(30, 40)]], [[(10, 20)], [(200, 210)]]
    assert window.plan_runs(info, SMALL, near) == [range(2)]
    assert window.plan_runs(info, SMALL, far) == [range(1), range(1, 2)]
    from_start = replace(info, keys=np.zeros(0, np.int64))
    assert window.plan_runs(from_start, SMALL, far) == [range(2)]
    many = [[(number, number + 5)] for number in range(0, 200, 5)]
    assert [len(run) for run in window.plan_runs(from_start, SMALL, many)] == [16, 16, 8]
