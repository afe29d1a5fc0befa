"""`fastvid tune` measures the encoded datasets, and its advice follows from the numbers."""

import json
from dataclasses import replace
from fractions import Fraction

import pytest

import fastvid
from fastvid.cli.main import main
from fastvid.errors import UsageError
from fastvid.media.ffmpeg import Limits, find_ffmpeg
from fastvid.media.probe import open_source, probe
from fastvid.sharding.encode.parts import plan_window
from fastvid.sharding.encode.profiles import PROFILES, Settings
from fastvid.sharding.encode.transcode import transcode
from fastvid.tune.measure import parse_sampling
from fastvid.tune.study import ProfileResult, Study, compare, recommend, study
from tests.sharding.shardtools import make

ONE = ProfileResult("compact", 100, 1.0, 0.97, 40.0, 100.0, 10.0, 26.0, 99.0)


def found(*measured, **options):
    return Study(8, 20, 60.0, 500, "tsn8", 2, 0, measured, {}, **options)


def test_advice_minimises_size_times_decode_time():
    # Twice the speed is not worth three times the bytes; half the bytes is worth two thirds of the speed.
    intra = replace(ONE, profile="intra", bytes=300, cpu_ms=5.0, clips_per_second=200.0)
    hevc = replace(ONE, profile="hevc", bytes=50, cpu_ms=15.0, clips_per_second=66.0)
    assert recommend(found(ONE, intra))[0] == "compact"
    assert recommend(found(ONE, intra, hevc))[0] == "hevc"
    # A profile that is small because of low quality is excluded.
    assert recommend(found(ONE, intra, replace(hevc, ssim=0.9)))[0] == "compact"
    assert recommend(found(ONE, replace(intra, bytes=190)))[0] == "intra"


def test_need_selects_the_smallest_profile_that_is_fast_enough():
    intra = replace(ONE, profile="intra", bytes=300, cpu_ms=5.0, clips_per_second=200.0)
    mjpeg = replace(ONE, profile="mjpeg", bytes=900, cpu_ms=4.0, clips_per_second=250.0)
    assert recommend(found(ONE, intra, mjpeg), 150)[0] == "intra"
    assert recommend(found(ONE, intra, mjpeg), 50)[0] == "compact"
    advice = recommend(found(ONE, intra, mjpeg), 1000)
    assert advice[0] == "mjpeg"
    assert "no profile decodes 1000" in advice[1][0]
    assert "2.00 times the clips" in recommend(found(ONE, intra))[1][1]
    with pytest.raises(UsageError, match="no profile was measured"):
        recommend(found())


@pytest.mark.parametrize(("text", "expected"), [("tsn8", (8, None)), ("tsn3", (3, None)), ("dense16x4", (16, 4))])
def test_sampling_is_parsed(text, expected):
    assert parse_sampling(text) == expected


@pytest.mark.parametrize("text", ["tsn", "tsn0", "dense16", "dense4x0", "uniform8", "tsn8 "])
def test_invalid_sampling_raises(text):
    with pytest.raises(UsageError, match="unknown sampling"):
        parse_sampling(text)


def scores(path, profile):
    """Return SSIM and PSNR of a file encoded with a profile."""
    build, limits = find_ffmpeg(), Limits()
    with open_source(str(path)) as source:
        info = probe(source, limits)
        how = Settings(profile, build, limits, 600.0)
        made = transcode(how, source, info, [None], plan_window(info, profile, [None]))
    return compare(build, profile, str(path), made[0], limits)


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """Two videos, and a file that is not a video."""
    folder = tmp_path_factory.mktemp("raw")
    for number, size in enumerate(("320x240", "240x320")):
        make(folder / f"{number}/v{number}.mp4", "-pix_fmt", "yuv420p", size=size, frames=40 + 10 * number)
    (folder / "text.mp4").write_text("no video")
    return folder


def test_quality_falls_with_crf_and_ignores_the_range_tag(raw):
    small = PROFILES["compact"].changed(short_side=128)
    good, bad = (scores(raw / "0/v0.mp4", small.changed(crf=crf)) for crf in (18, 45))
    assert good[0] > bad[0] + 0.05
    assert good[1] > bad[1] + 5
    # Full range, unlike the source, and almost no loss: an error of one level would cost more than this.
    ssim, psnr = scores(raw / "0/v0.mp4", PROFILES["mjpeg"].changed(short_side=128, crf=2))
    assert ssim > 0.98
    assert psnr > 38


@pytest.mark.usefixtures("own_interpreters")
def test_study_measures_the_encoded_datasets(raw, tmp_path, capsys):
    arguments = ["tune", str(raw), "--profiles", "compact", "intra", "copy", "--rounds", "1", "--workers", "1"]
    assert main([*arguments, "--json", "--keep", str(tmp_path / "kept")]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["videos"], record["found"]) == (2, 3)
    assert record["seconds"] == pytest.approx(90 / 25)
    by_name = {one["profile"]: one for one in record["measured"]}
    for name, one in by_name.items():
        dataset = fastvid.open(tmp_path / "kept" / name)
        sizes = [dataset.shard(0).member(row)[1] for row in range(len(dataset))]
        assert one["bytes"] == sum(sizes)
        assert one["rejected"] == {"not-video": 1}
        assert one["cpu_ms"] > 0
        assert one["encode_seconds"] > 0
    assert by_name["intra"]["packets"] == by_name["intra"]["packets_from_keys"] == 8
    assert by_name["compact"]["packets"] < by_name["compact"]["packets_from_keys"]
    assert by_name["copy"]["ssim"] is None
    assert by_name["copy"]["bytes"] == record["source_bytes"]
    assert 0.9 < by_name["compact"]["ssim"] <= 1
    assert by_name["copy"]["estimate"]["bytes"]["total"] == pytest.approx(1.5 * by_name["copy"]["bytes"])
    assert record["recommended"] in by_name
    with pytest.raises(UsageError, match="encoded samples are here already"):
        study([str(raw)], profiles=["compact"], folder=str(tmp_path / "kept"))


def test_sample_is_seeded_and_a_profile_that_accepts_too_few_is_refused(raw, tmp_path):
    make(tmp_path / "raw" / "a.webm", "-c:v", "libvpx", size="64x48", frames=5)
    make(tmp_path / "raw" / "b.webm", "-c:v", "libvpx", size="64x48", frames=6)
    options = {"profiles": [PROFILES["intra"].changed(short_side=256), "copy"], "rounds": 1, "workers": 1, "videos": 1}
    done = study([str(tmp_path / "raw")], sampling="dense4x2", **options)
    assert "none of 1 sources" in done.refused["copy"]
    assert [one.profile for one in done.measured] == ["intra"]
    with pytest.raises(UsageError, match=r"no profile accepts any video\n  hint: none of 1 sources could [^\n[]+$"):
        study([str(tmp_path / "raw")], **options | {"profiles": ["copy"]})
    frames = {study([str(tmp_path / "raw")], seed=seed, **options).seconds for seed in range(2)}
    assert frames == {float(Fraction(5, 25)), float(Fraction(6, 25))}


def test_study_without_videos_or_profiles_raises(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError, match="no video"):
        study([str(tmp_path)])
    with pytest.raises(UsageError, match="0 profiles: each must be at least 1"):
        study([str(tmp_path)], profiles=[])
