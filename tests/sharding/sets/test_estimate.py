"""A dry run lists what a job would do and estimates the whole; it writes no dataset."""

import random
import re

import pytest

from fastvid.cli.main import main
from fastvid.errors import UsageError
from fastvid.runtime.values import size
from fastvid.sharding.encode.profiles import PROFILES
from fastvid.sharding.job.estimate import Amount, Estimate, estimate_job, extrapolate
from fastvid.sharding.job.job import run_job
from tests.sharding.shardtools import make, tar_of

SMALL = PROFILES["intra"].changed(short_side=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    for number in range(6):
        make(folder / f"{number}.mp4", frames=10 + 2 * number)
    (folder / "bad.mp4").write_text("no video")
    rows = [
        "path,label,split",
        *(f"{n}.mp4,{'walk' if n % 2 else 'run'},{'val' if n > 3 else 'train'}" for n in range(6)),
    ]
    (folder / "rows.csv").write_text("\n".join([*rows, "lost.mp4,run,val", "bad.mp4,walk,train"]))
    return folder


def test_intervals_contain_the_total_as_often_as_they_say():
    draws = random.Random(1)
    population = [draws.lognormvariate(1, 0.4) for _ in range(400)]
    hits = 0
    for _ in range(1000):
        amount = extrapolate(draws.sample(population, 24), 400)
        hits += abs(amount.total - sum(population)) <= amount.error
    assert 900 < hits < 980  # of a skewed population slightly fewer than 950
    assert extrapolate([1.0, 2.0], 2) == Amount(3.0, 0.0)
    assert extrapolate([3.0], 2) == Amount(6.0, None)
    # Student's quantile for three degrees of freedom is 3.182; the series gives 3.13.
    assert extrapolate([0.0, 0.0, 2.0, 2.0], 10**9).error / 10**9 == pytest.approx(3.182 * 1.1547 / 2, rel=0.02)


def test_sentence_says_what_is_known():
    one = Estimate(500_000, 24, Amount(2.5e12, 3e11), Amount(3.6e6, 7.2e5), 16, 500)
    assert one.sentence() == "your 500,000 videos: 2.5 TB (±12 %), 62 h 30 min (±20 %) on 16 cores, 500 shards"
    wide = Estimate(170, 4, Amount(29.3e6, 70.9e6), Amount(103, 169), 1)
    assert wide.sentence() == "your 170 videos: 29.3 MB (at most 100 MB), 1 min 43 s (at most 4 min 32 s) on 1 core"
    assert "± unknown" in Estimate(2, 1, Amount(10, None), Amount(1, None), 1).sentence()


def test_whole_sample_gives_the_size_of_the_dataset(folder, tmp_path):
    annotations = f"csv:{folder / 'rows.csv'}"
    run = estimate_job(str(folder), annotations=annotations, profile=SMALL, samples_per_shard=3, workers=1)
    report = run_job(
        str(folder), tmp_path / "out", annotations=annotations, profile=SMALL, samples_per_shard=3, workers=1
    )
    written = sum(size or 0 for size in report.ledger["bytes_out"].to_pylist())
    assert run.estimate.bytes == Amount(written, 0.0)
    assert run.footage.total == pytest.approx(sum(10 + 2 * n for n in range(6)) / 25)
    assert run.estimate.shards == 3
    assert run.rejected.total() == 1
    assert [source.id for source in run.missing] == ["lost.mp4"]
    assert run.class_counts == {"run": 4, "walk": 4}
    assert run.split_counts == {"split": {"train": 5, "val": 3}}


def test_command_prints_the_estimate_and_writes_nothing(folder, tmp_path, capsys):
    arguments = ["shard", str(folder), "--annotations", f"csv:{folder / 'rows.csv'}", "--profile", "intra"]
    arguments += ["--short-side", "64", "--dry-run", "--sampled", "4", "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    for part in (
        "2 classes: run 4, walk 4",
        "values of split: ",
        "1 without a file: lost.mp4",
        "4 encoded as a sample",
    ):
        assert part in text
    assert re.search(r"your 7 videos: .* kB \(±\d+ %\), .* s \(±\d+ %\) on \d+ cores?, 1 shard, .* of footage", text)
    assert not (tmp_path / "out").exists()
    assert main(["shard", str(folder)]) == 2
    assert "name it with --out" in capsys.readouterr().err


def test_nothing_to_encode_is_an_error(folder, tmp_path):
    (tmp_path / "rows.csv").write_text("path,label\nlost.mp4,run\n")
    with pytest.raises(UsageError, match="no source has a file"):
        estimate_job(str(folder), annotations=f"csv:{tmp_path / 'rows.csv'}")
    with pytest.raises(UsageError, match="0 videos in the sample"):
        estimate_job(str(folder), sampled=0)


def test_a_file_counts_once_whatever_its_clips_and_a_tar_as_its_videos(tmp_path, capsys, caplog):
    caplog.set_level("INFO")
    films = [make(tmp_path / "raw" / f"{number}.mp4", frames=10) for number in range(2)]
    tar_of(tmp_path / "raw.tar", [(film.name, film.read_bytes()) for film in films])
    cuts = (0, 0.1, "run"), (0.1, 0.2, ""), (0.2, 0.3, "")
    rows = "".join(f"{film.name},{start},{end},{label}\n" for film in films for start, end, label in cuts)
    (tmp_path / "rows.csv").write_text(f"path,start,end,label\n{rows}")
    both = size(sum(film.stat().st_size for film in films))
    for words in ([tmp_path / "raw", "--annotations", f"csv:{tmp_path / 'rows.csv'}"], [tmp_path / "raw.tar"]):
        words = ["shard", *map(str, words), "--profile", "intra", "--workers", "1"]
        assert main([*words, "--dry-run"]) == 0
        assert f" sources, {both}\n" in capsys.readouterr().out
        caplog.clear()
        assert main([*words, "--out", str(tmp_path / f"out{len(words)}")]) == 0
        told = "6 videos in 1 class (4 without label)" if "--annotations" in words else "2 videos in 0 classes"
        assert f" {told}, {both}" in caplog.text
        assert f" from {both} (" in capsys.readouterr().out
