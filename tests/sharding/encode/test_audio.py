"""Audio of samples: cut to the video's seconds, recorded in the dataset, and never a reason to reject a video."""

import io
from fractions import Fraction

import av
import numpy as np
import pyarrow.parquet as pq
import pytest

from fastvid.errors import FormatError, UsageError
from fastvid.format.dataset import Dataset
from fastvid.format.mp4 import index_m4a
from fastvid.media.probe import open_source
from fastvid.sharding.encode.audio import SampleAudio, extract_audio
from fastvid.sharding.encode.flow import Streams
from fastvid.sharding.job.job import run_job
from fastvid.sharding.verify.verify import verify_dataset
from fastvid.storage import LocalStorage
from tests.sharding.shardtools import SMALL, ffmpeg, ledger, settings, tars

PICTURE = ["-f", "lavfi", "-i", "testsrc2=s=96x64:r=25:d=4"]
# Silence, but for a tone from second 2.0 to 2.5.
BEEP = ["-f", "lavfi", "-i", "sine=1000:r=48000:d=4,volume='between(t,2,2.5)':eval=frame"]


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    folder = tmp_path_factory.mktemp("films")
    video = ["-c:v", "libx264", "-preset", "ultrafast", "-bf", "2"]
    for name, codec in (("aac.mp4", "aac"), ("alac.mov", "alac"), ("opus.mkv", "libopus")):
        ffmpeg(*PICTURE, *BEEP, *video, "-c:a", codec, str(folder / name))
    ffmpeg(*PICTURE, *video, str(folder / "mute.mp4"))
    # Audio that starts one second after the video.
    late = ["-f", "lavfi", "-itsoffset", "1", "-i", "sine=1000:r=48000:d=2"]
    ffmpeg(*PICTURE, *late, *video, "-c:a", "aac", str(folder / "late.mkv"))
    return folder


def sound(path, choice, *spans) -> SampleAudio:
    with open_source(str(path)) as source:
        wanted = [(Fraction(str(a)), Fraction(str(b))) for a, b in spans]
        return extract_audio(settings(streams=Streams(choice)), source, wanted)


def samples(data) -> tuple[np.ndarray, int]:
    """Return the samples of the first channel after the edit list, as a player plays them, and their rate."""
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        resampler = av.AudioResampler("fltp", "mono")
        frames = [f for frame in container.decode(stream) if frame.pts >= 0 for f in resampler.resample(frame)]
        first = frames[0].pts * frames[0].time_base
        pad = np.zeros(round(first * stream.rate))
        return np.concatenate([pad, *(frame.to_ndarray()[0] for frame in frames)]), stream.rate


def beep(data) -> tuple[float, float]:
    values, rate = samples(data)
    loud = np.flatnonzero(np.abs(values) > 0.05)
    return loud[0] / rate, loud[-1] / rate


@pytest.mark.parametrize(
    ("name", "choice", "codec", "copied"),
    [
        ("aac.mp4", "copy", "aac", True),
        ("aac.mp4", "aac", "aac", False),
        ("alac.mov", "copy", "alac", True),
        ("opus.mkv", "copy", "aac", False),
    ],
)
def test_audio_is_cut_to_the_seconds_of_its_sample(films, name, choice, codec, copied):
    found = sound(films / name, choice, (0, 4), (1.52, 3), (2.6, 4))
    assert found.copied is copied
    assert found.warnings == (("audio-encoded",) if choice == "copy" and not copied else ())
    # An ALAC packet has 4096 samples.
    slack = {"aac": 0.03, "alac": 0.09}[codec] if copied else 0.025
    assert beep(found.tracks[0][0]) == pytest.approx((2.0, 2.5), abs=slack)
    assert beep(found.tracks[1][0]) == pytest.approx((0.48, 0.98), abs=slack)
    assert np.abs(samples(found.tracks[2][0])[0][4800:]).max() < 0.05
    for (member, info), length in zip(found.tracks, (4, 1.48, 1.4), strict=True):
        assert info == index_m4a(member)
        assert (info.codec, info.sample_rate) == (codec, 48000)
        assert len(samples(member)[0]) / 48000 == pytest.approx(length, abs=0.1)


def test_late_audio_and_short_gaps_are_silence(films, tmp_path):
    values, rate = samples(sound(films / "late.mkv", "aac", (0, 4)).tracks[0][0])
    assert np.flatnonzero(np.abs(values) > 0.02)[0] / rate == pytest.approx(1.0, abs=0.03)
    # A gap of 9 ms after every tenth packet, as in a live recording: nine before the tone, in packet 94.
    gaps = r"setts=ts=TS+432*min(10\,floor(N/10))"
    ffmpeg("-i", str(films / "aac.mp4"), "-c", "copy", "-bsf:a", gaps, str(tmp_path / "gaps.mp4"))
    ((data, _),) = sound(tmp_path / "gaps.mp4", "aac", (0, 4)).tracks
    assert beep(data)[0] == pytest.approx(2.081, abs=0.012)


@pytest.mark.parametrize("choice", ["copy", "aac"])
def test_a_part_after_the_end_of_the_sound_has_none_and_the_others_keep_theirs(films, choice):
    made = sound(films / "late.mkv", choice, (1.5, 2.5), (3.2, 4))
    assert [track is not None for track in made.tracks] == [True, False]
    assert made.warnings == ("no-audio",)


def test_missing_and_damaged_audio_adds_a_warning(films, tmp_path):
    assert sound(films / "mute.mp4", "copy", (0, 4)) == SampleAudio.none(1, "no-audio")
    assert sound(films / "aac.mp4", "drop", (0, 4)) == SampleAudio.none(1)
    data = bytearray((films / "aac.mp4").read_bytes())
    with av.open(str(films / "aac.mp4")) as container:
        places = [(packet.pos, packet.size) for packet in container.demux(audio=0) if packet.size > 40]
    for position, size in places[10:30]:
        data[position + 2 : position + size] = bytes([0x5A]) * (size - 2)
    (tmp_path / "bad.mp4").write_bytes(data)
    assert sound(tmp_path / "bad.mp4", "aac", (0, 4)) == SampleAudio.none(1, "audio-damaged")
    assert sound(tmp_path / "bad.mp4", "copy", (0, 4)) == SampleAudio.none(1, "audio-damaged")


def test_dataset_records_the_location_of_audio(films, tmp_path):
    out = tmp_path / "out"
    report = run_job(str(films), out, profile=SMALL, audio="copy", max_seconds=2.5, workers=2)
    assert report.packed == 5
    warnings = {row["source_id"]: row["warnings"] for row in ledger(out)}
    assert "no-audio" in warnings["mute.mp4"]
    assert "audio-encoded" in warnings["opus.mkv"]
    dataset = Dataset(str(out))
    assert dataset.streams == ("rgb",)
    assert dataset.generation.extras == {"audio": "copy"}
    facts = pq.read_table(out / "data-000000.parquet").to_pylist()
    assert [row["stream"] for row in facts] == ["rgb"] * 10 + ["audio"] * 8
    store = LocalStorage(out)
    heard = {row["key"]: row for row in facts if row["stream"] == "audio"}
    row = heard["aac/0001"]
    view = store.map("data-000000.tar")
    member = bytes(view[row["member_offset"] : row["member_offset"] + row["member_size"]])
    info = index_m4a(member)
    assert row["member"] == "aac/0001.m4a"
    assert (row["codec"], row["fps_num"], row["channels"]) == (info.codec, info.sample_rate, info.channels)
    numbers = (info.num_samples, info.num_packets, info.extradata)
    assert (row["num_frames"], row["num_packets"], row["extradata"]) == numbers
    # The second half starts at second two.
    assert beep(member) == pytest.approx((0.0, 0.5), abs=0.04)
    audit = verify_dataset(str(out), workers=1)
    assert (audit.problems, audit.checked["audio"]) == ([], 8)
    again = tmp_path / "again"
    run_job(str(films), again, profile=SMALL, audio="copy", max_seconds=2.5, workers=1)
    assert tars(again) == tars(out)


def test_audit_finds_audio_that_does_not_decode(films, tmp_path):
    out = tmp_path / "out"
    run_job(str(films / "aac.mp4"), out, profile=SMALL, audio="aac", workers=1)
    row = pq.read_table(out / "data-000000.parquet").to_pylist()[-1]
    tar = out / "data-000000.tar"
    data = bytearray(tar.read_bytes())
    middle = row["member_offset"] + row["member_size"] // 2
    data[middle : middle + 2000] = bytes([0xFF]) * 2000
    tar.write_bytes(data)
    assert {"tar", "audio"} <= {problem.check for problem in verify_dataset(str(out), workers=1).problems}


def test_files_that_are_not_m4a_and_a_profile_that_copies_raise(films, tmp_path):
    for data in (b"", b"\0\0\0\x08moov", b"no mp4 at all", bytes(100)):
        with pytest.raises(FormatError):
            index_m4a(data)
    with pytest.raises(UsageError, match="profile 'copy'"):
        run_job(str(films), tmp_path / "out", profile="copy", audio="copy")
