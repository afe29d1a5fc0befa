"""Salvaged videos consist of frames of the undamaged video, without a gap, and their rows say what is missing."""

import io
import shutil
import struct
from dataclasses import replace
from functools import partial

import av
import numpy as np
import pyarrow.parquet as pq
import pytest

import fastvid
from fastvid.cli.main import main
from fastvid.errors import UsageError
from fastvid.format.dataset import Dataset
from fastvid.media.reasons import Reason
from fastvid.sharding.change.add import add_sources
from fastvid.sharding.encode import salvage
from fastvid.sharding.encode.flow import Streams
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.job.job import run_job
from fastvid.sharding.work.encode import encode_clips
from fastvid.sharding.work.tasks import SourceTask
from tests.makers import read_numbers
from tests.sharding import shardtools
from tests.sharding.encode.test_transcode import numbers
from tests.sharding.shardtools import FRONT, content, encode_source, ffmpeg, ledger, tars, turn
from tests.skips import soak_but

SMALL = PROFILES["compact"].changed(short_side=96)
FRAMES, GOP, RATE = 240, 24, 25


@pytest.fixture(scope="module")
def sounding(film, tmp_path_factory):
    """A video with a tone that rises, so that each moment of it differs."""
    path = tmp_path_factory.mktemp("sound") / "sound.mp4"
    sweep = "aevalsrc='0.5*sin(2*PI*(200+150*t)*t)':s=16000:d=9.6"
    ffmpeg(
        "-i", str(film("mp4")), "-f", "lavfi", "-i", sweep,
        "-map", "0:v", "-map", "1:a", "-c:v", "copy", "-c:a", "aac", *FRONT, str(path),
    )  # fmt: skip
    return path


def settings(limit="100%", **options):
    return shardtools.settings(SMALL, max_bad_frames=limit, **options)


def outcome(path, how, start=None, end=None):
    return encode_source(SourceTask(0, "c", str(path), "c", path.stat().st_size, start, end), how)


def truncated(path, part, folder):
    cut = folder / path.name
    data = path.read_bytes()
    cut.write_bytes(data[: int(len(data) * part)])
    return cut


def zeroed(path, frames, folder):
    """Write a file in which most bytes of some packets are zero, by their numbers in decode order."""
    data = bytearray(path.read_bytes())
    for packet in packets(path, frames):
        at = data.find(bytes(packet))
        assert at > 0
        data[at + 10 : at + packet.size] = bytes(packet.size - 10)
    cut = folder / path.name
    cut.write_bytes(data)
    return cut


def packets(path, wanted):
    with av.open(str(path)) as container:
        found = [packet for packet in container.demux(container.streams.video[0]) if packet.size]
        return [found[number] for number in wanted]


def check_frames(found, original, first, last):
    """Check that an outcome has frames `first` to `last` - 1, bit for bit as the undamaged video gives them."""
    assert found.reason is None, found.message
    (sample,) = found.samples
    assert numbers(sample.streams["rgb"]) == list(range(first, last))
    assert (sample.meta["start_seconds"], sample.meta["end_seconds"]) == (first / RATE, last / RATE)
    (same,) = outcome(original, settings(None), first / RATE, last / RATE).samples
    assert sample.streams["rgb"] == same.streams["rgb"]
    assert sample.meta["bad_frames"] == FRAMES - (last - first)
    assert "salvaged" in found.warnings
    assert f"{last - first} of {FRAMES} frames" in found.message


@pytest.mark.parametrize("part", [0.3, pytest.param(0.7, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", soak_but(["mp4", "mkv", "hevc", "webm"], "mp4", "webm"))
def test_truncated_video_keeps_what_it_contains(name, part, film, tmp_path):
    path = truncated(film(name), part, tmp_path)
    assert outcome(path, settings(None)).reason is Reason.TRUNCATED
    found = outcome(path, settings())
    last = found.samples[0].meta["num_frames"]
    assert FRAMES * part - 2 * GOP <= last <= FRAMES * (part + 0.2)
    check_frames(found, film(name), 0, last)


@pytest.mark.parametrize("name", ["mp4", "hevc"])
def test_last_packet_of_a_file_that_ends_between_packets_is_left_out(name, film, tmp_path):
    """What is missing behind it might be shown before it."""
    path, data = tmp_path / "cut.mp4", film(name).read_bytes()
    (packet,) = packets(film(name), [100])
    path.write_bytes(data[: data.find(bytes(packet))])
    check_frames(outcome(path, settings()), film(name), 0, 99)


@pytest.mark.parametrize(
    ("name", "hit", "first", "last"),
    [
        ("mp4", [100], 120, 240),
        ("mp4", [150], 0, 150),
        ("mp4", [40, 200], 48, 200),
        ("mp4", [5], 24, 240),
        ("mp4", [239], 0, 239),
        ("mkv", [40, 200], 48, 200),
    ],
)
def test_damaged_h264_keeps_the_longest_run_without_damage(name, hit, first, last, film, tmp_path):
    path = zeroed(film(name), hit, tmp_path)
    assert outcome(path, settings(None)).reason is Reason.DAMAGED
    check_frames(outcome(path, settings()), film(name), first, last)


def test_packet_without_a_picture_is_damage(film, tmp_path):
    """The decoder accepts a packet of filler, without a complaint, and returns no frame for it."""
    path, data = tmp_path / "filler.mp4", bytearray(film("mp4").read_bytes())
    (packet,) = packets(film("mp4"), [150])
    at = data.find(bytes(packet))
    # One unit of type 12, ITU-T H.264 7.3.2.7.
    data[at : at + packet.size] = struct.pack(">IB", packet.size - 4, 12) + b"\xff" * (packet.size - 6) + b"\x80"
    path.write_bytes(data)
    assert outcome(path, settings(None)).reason is Reason.DAMAGED
    check_frames(outcome(path, settings()), film("mp4"), 0, 150)


@pytest.mark.parametrize("hit", soak_but([149, 150, 153, 154], 150))
def test_run_that_ends_among_reordered_frames_has_no_gap(hit, film, tmp_path):
    path = zeroed(film("reordered"), [hit], tmp_path)
    found = outcome(path, settings())
    last = found.samples[0].meta["num_frames"]
    assert hit - 6 <= last <= hit
    check_frames(found, film("reordered"), 0, last)


@pytest.mark.parametrize("name", ["open-groups", "refresh"])
def test_key_frames_that_refer_to_earlier_frames_begin_no_run(name, film, tmp_path):
    found = outcome(zeroed(film(name), [5], tmp_path), settings())
    # The first group of all begins at an IDR picture.
    check_frames(found, film(name), 0, found.samples[0].meta["num_frames"])
    assert found.samples[0].meta["num_frames"] <= 5


def test_truncated_variable_rate_keeps_its_clock(film, tmp_path):
    path = truncated(film("variable-mp4"), 0.7, tmp_path)
    found = outcome(path, settings())
    assert found.reason is None
    (sample,) = found.samples
    shown = numbers(sample.streams["rgb"])
    assert shown[0] == 0
    assert (np.diff(shown) >= 0).all()
    assert sample.meta["start_seconds"] == 0
    assert sample.meta["bad_frames"] == FRAMES - max(shown) - 1
    assert "timing-gaps" in found.warnings


def test_damaged_video_is_rejected_beyond_the_limit(film, tmp_path):
    path = zeroed(film("mp4"), [150], tmp_path)
    for limit in ("89", "37.4%", "0"):
        found = outcome(path, settings(limit))
        assert (found.reason, found.samples) == (Reason.DAMAGED, ())
        allowed = 0 if limit == "0" else 89
        assert f"90 of {FRAMES} frames would be left out and max_bad_frames allows {allowed}" in found.message
        assert "raise --max-bad-frames" in found.message
    for limit in ("96", "40%"):
        check_frames(outcome(path, settings(limit)), film("mp4"), 0, 150)


def test_what_cannot_be_salvaged_says_why(film, tmp_path):
    found = outcome(zeroed(film("hevc"), [150], tmp_path), settings())
    assert found.reason is Reason.DAMAGED
    assert "decoders do not report all damage in hevc" in found.message
    found = outcome(truncated(film("interlaced"), 0.7, tmp_path), settings())
    assert found.reason is Reason.TRUNCATED
    assert "interlaced" in found.message


def test_lost_packet_in_matroska_is_no_jump_in_time(film, tmp_path):
    """A packet that is gone leaves no trace but a hole in time: nothing around it may be joined."""
    path, source = tmp_path / "holes.mkv", film("mkv")
    with av.open(str(source)) as old, av.open(str(path), "w") as new:
        stream = old.streams.video[0]
        made = new.add_stream_from_template(stream, opaque=True)
        for number, packet in enumerate(one for one in old.demux(stream) if one.size):
            if number == 143:  # the last of its group, which nothing refers to
                continue
            packet.stream = made
            new.mux_one(packet)
    path = zeroed(path, [20], tmp_path)
    found = outcome(path, settings())
    assert found.reason is Reason.DAMAGED
    assert "frames may be missing" in found.message


def test_clips_inside_the_salvaged_run_are_those_of_the_undamaged_video(film, tmp_path):
    path = truncated(film("mp4"), 0.7, tmp_path)
    spans = [(0.5, 2.1), (None, 1.0), (3.0, 5.5), (5.0, 7.0), (8.0, 9.0), (1.0, None)]
    tasks = [SourceTask(n, f"c{n}", str(path), f"c{n}", 0, *span, parent="file") for n, span in enumerate(spans)]
    how = settings("1")  # none of their frames are left out
    found = {one.index: one for one in encode_clips(tasks, how, lambda *_: None, lambda _: None)}
    assert [found[number].reason for number in range(6)] == [None] * 3 + [Reason.TRUNCATED] * 3
    assert "outside the frames that are free of damage" in found[3].message
    pairs = [(found[number], span) for number, span in enumerate(spans[:3])]
    # Behind damage, too.
    behind = zeroed(film("mp4"), [0, 1, 2], tmp_path)
    pairs += [(outcome(behind, settings(), *span), span) for span in ((2.5, 4.1), (0.98, 9.6))]
    for outcome_, span in pairs:
        (kept,), (same,) = outcome_.samples, outcome(film("mp4"), settings(None), *span).samples
        assert kept.streams["rgb"] == same.streams["rgb"]
        for name in ("start_seconds", "end_seconds"):
            assert kept.meta[name] == same.meta[name]
        assert "bad_frames" not in kept.meta
        assert "salvaged" not in outcome_.warnings
    early = outcome(behind, settings(), 0.5, 4.0)
    assert early.reason is Reason.DAMAGED
    assert "outside the frames that are free of damage" in early.message


def test_long_salvaged_video_is_divided(film, tmp_path):
    path = zeroed(film("mp4"), [5], tmp_path)
    found = outcome(path, replace(settings(), max_seconds=3.0))
    assert [sample.key for sample in found.samples] == ["c/0000", "c/0001", "c/0002"]
    shown = [number for sample in found.samples for number in numbers(sample.streams["rgb"])]
    assert shown == list(range(24, 240))
    places = [(sample.meta["start_seconds"], sample.meta["end_seconds"]) for sample in found.samples]
    assert places == [(0.96, 3.84), (3.84, 6.72), (6.72, 9.6)]
    assert [sample.meta["bad_frames"] for sample in found.samples] == [24] * 3


@pytest.mark.parametrize("name", ["mp4", "hevc"])
def test_hidden_frames_stay_hidden_and_pictures_rotated(name, film, tmp_path):
    """The edit list hides frames of the first group, so it is left out; the matrix turns by 90 degrees."""
    original = tmp_path / "original.mp4"
    ffmpeg("-ss", "1.3", "-i", str(film(name)), "-c", "copy", *FRONT, str(original))
    turn(original, original)
    (tmp_path / "cut").mkdir()
    (sample,) = outcome(truncated(original, 0.7, tmp_path / "cut"), settings()).samples
    begins, ends = sample.meta["start_seconds"], sample.meta["end_seconds"]
    (same,) = outcome(original, settings(None), begins, ends).samples
    assert sample.streams["rgb"] == same.streams["rgb"]
    assert begins > 0
    assert (sample.meta["width"], sample.meta["height"]) == (96, 160)


@pytest.mark.parametrize("choice", ["aac", "copy"])
def test_sound_is_that_of_the_frames_that_are_kept(choice, sounding, tmp_path):
    path = zeroed(sounding, [100], tmp_path)
    how = settings(streams=Streams(choice))
    found = outcome(path, how)
    assert found.reason is None, found.message
    same = outcome(sounding, how, 4.8, 9.6)
    kept, right = (decoded(one.samples[0].streams["audio"]) for one in (found, same))
    assert abs(len(kept) - len(right)) <= 2048
    at = slice(8000, 60_000)
    # Encoders differ in noise only; 10 ms of shift would make the difference as large as the tone.
    lag = best_lag(kept[at], right)
    assert abs(lag - 8000) <= 16
    assert np.abs(kept[at] - right[lag : lag + 52_000]).mean() < 0.02


def decoded(data):
    with av.open(io.BytesIO(data)) as container:
        return np.concatenate([frame.to_ndarray()[0] for frame in container.decode(audio=0)])


def best_lag(piece, whole):
    lags = range(8000 - 2000, 8000 + 2000)
    return min(lags, key=lambda lag: np.abs(whole[lag : lag + 4000] - piece[:4000]).sum())


def test_full_disk_rejects_nothing(film, tmp_path, monkeypatch):
    path = truncated(film("mp4"), 0.7, tmp_path)
    monkeypatch.setattr(salvage, "temporary_file", partial(open, "/dev/full", "r+b", buffering=0))
    found = outcome(path, settings())
    assert (found.reason, found.transient) == (Reason.NO_SPACE, True)


JOB = {"profile": SMALL, "workers": 1}


@pytest.fixture(scope="module")
def folder(film, tmp_path_factory):
    """A good video, one whose frames from 150 to 167 are damaged, and one that ends early."""
    where = tmp_path_factory.mktemp("videos")
    (where / "raw").mkdir()
    shutil.copy(film("mp4"), where / "raw" / "good.mp4")
    shutil.copy(zeroed(film("mp4"), [150], where), where / "raw" / "broken.mp4")
    shutil.copy(truncated(film("mp4"), 0.4, where), where / "raw" / "short.mp4")
    return where / "raw"


@pytest.fixture(scope="module")
def salvaged(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("salvaged") / "out"
    run_job(folder, out, max_bad_frames="50%", **JOB)
    return out


def rows(out):
    return {row["source_id"]: row for row in ledger(out)}


def test_tables_say_what_is_kept_and_what_is_left_out(salvaged):
    found = rows(salvaged)
    assert found["good.mp4"]["status"] == found["broken.mp4"]["status"] == "packed"
    assert found["broken.mp4"]["warnings"] == ["salvaged"]
    assert found["broken.mp4"]["message"].endswith("150 of 240 frames, 0.00 s to 6.00 s")
    assert found["broken.mp4"]["num_frames"] == 150
    assert found["good.mp4"]["warnings"] == []
    assert found["short.mp4"]["reason"] == "truncated"
    assert "of 240 frames would be left out and max_bad_frames allows 120" in found["short.mp4"]["message"]
    dataset = Dataset(str(salvaged))
    annotations = {row["key"]: row for row in dataset.annotations.to_pylist()}
    facts = pq.read_table(next(salvaged.glob("data-*.parquet"))).to_pylist()
    for table in (annotations, {row["key"]: row for row in facts}):
        place = [table["broken"][name] for name in ("parent", "start_seconds", "end_seconds")]
        assert place == ["broken.mp4", 0.0, 6.0]
        assert table["good"]["parent"] is None
    assert {key: row["bad_frames"] for key, row in annotations.items()} == {"broken": 90, "good": None}
    assert fastvid.open(salvaged, where="bad_frames > 0").keys.to_pylist() == ["broken"]
    assert fastvid.open(salvaged, where="bad_frames IS NULL").keys.to_pylist() == ["good"]
    pictures = fastvid.open(salvaged)["broken"].frames([0, 77, 143]).data
    assert read_numbers(pictures[..., 1]) == [0, 77, 143]


def test_verify_accepts_salvaged_videos_and_their_tars_restore_the_rows(salvaged, tmp_path, capsys):
    assert main(["verify", str(salvaged)]) == 0
    only = tmp_path / "tars"
    only.mkdir()
    for name in tars(salvaged):
        shutil.copy(salvaged / name, only / name)
    assert main(["index", str(only), "--out", str(only)]) == 0
    old, new = (Dataset(str(one)).annotations.to_pylist() for one in (salvaged, only))
    assert [row["bad_frames"] for row in new] == [row["bad_frames"] for row in old]
    assert sorted(row["bad_frames"] or 0 for row in new) == [0, 90]


def test_without_the_option_damaged_videos_are_rejected_and_the_rest_is_the_same(folder, salvaged, tmp_path):
    run_job(folder, tmp_path / "out", **JOB)
    found = rows(tmp_path / "out")
    assert [found[name]["reason"] for name in ("broken.mp4", "good.mp4", "short.mp4")] == ["damaged", None, "truncated"]
    (plain,) = Dataset(str(tmp_path / "out")).annotations.to_pylist()
    assert "bad_frames" not in plain
    assert content(fastvid.open(tmp_path / "out"), "good") == content(fastvid.open(salvaged), "good")


def test_other_limits_do_not_resume_a_job_and_add_salvages_on_request(folder, salvaged, tmp_path):
    run_job(folder, salvaged, max_bad_frames="50%", **JOB)
    for limit in (None, "51%", 50):
        with pytest.raises(UsageError, match="differs in max_bad_frames"):
            run_job(folder, salvaged, max_bad_frames=limit, **JOB)
    out = shutil.copytree(salvaged, tmp_path / "out")
    (tmp_path / "more").mkdir()
    shutil.copy(folder / "short.mp4", tmp_path / "more/late.mp4")
    assert add_sources(str(out), str(tmp_path / "more"), workers=1, max_bad_frames=200).report.packed == 1
    found = {row["key"]: row["bad_frames"] for row in Dataset(str(out)).annotations.to_pylist()}
    assert found["good"] is None
    assert 144 <= found["late"] <= 200


def test_command_prints_salvaged_and_refuses_what_is_no_limit(folder, tmp_path, capsys):
    options = ["--short-side", "96", "--workers", "1", "--allow-rejected"]
    assert main(["shard", str(folder), "--out", str(tmp_path / "out"), "--max-bad-frames", "50%", *options]) == 0
    assert "1   salvaged" in capsys.readouterr().out
    for limit in ("half", "-1", "120%"):
        assert main(["shard", str(folder), "--out", str(tmp_path / "no"), "--max-bad-frames", limit, *options]) == 2
        assert "max_bad_frames" in capsys.readouterr().err
    refused = ["--max-bad-frames", "5%", "--profile", "copy"]
    assert main(["shard", str(folder), "--out", str(tmp_path / "no"), *refused]) == 2
    assert "cannot leave out damaged frames" in capsys.readouterr().err
