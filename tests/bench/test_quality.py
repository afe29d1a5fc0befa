"""The quality benchmark: arms differ only in their encoding, and costs are paired by seed."""

import json

import pytest

pytest.importorskip("torch")

import fastvid
from bench import __main__ as command
from bench.shard import quality
from bench.shard.quality import ORIGINALS, cost


def test_cost_is_the_mean_of_paired_differences():
    # Seeds differ by 20 points, arms by 1 and 3 for the same seed: only the paired differences count.
    found = cost([90.0, 70.0], [89.0, 67.0])
    assert found == {"mean": 2.0, "standard_error": pytest.approx(1.0), "least": 1.0, "greatest": 3.0}
    assert cost([90.0], [91.0])["standard_error"] is None


@pytest.mark.soak
def test_the_command_trains_and_scores_every_arm_on_the_same_videos(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(quality, "INSTANCES", {"train": 1, "test": 1})
    # Two kinds of texture suffice to check that every arm has the same videos.
    kinds = dict(list(quality.motion.TEXTURES.items())[:2])
    monkeypatch.setattr(quality.motion, "TEXTURES", kinds)
    result = tmp_path / "quality.json"
    arms = [ORIGINALS, "coarse"]
    words = ["--arms", *arms, "--seeds", "1", "--epochs", "1", "--cache", str(tmp_path), "--json", str(result)]
    assert command.main(["quality", *words]) == 0
    record = json.loads(result.read_text())
    assert list(record["arms"]) == sorted(arms)
    for arm in record["arms"].values():
        assert 0 <= arm["top1_percent"][0] <= 100
        assert arm["loss"][0] > 0
    originals, coarse = record["arms"][ORIGINALS], record["arms"]["coarse"]
    assert originals["on_originals_percent"] == originals["top1_percent"]
    assert coarse["ssim"] < 0.97
    assert originals["ssim"] is None
    assert record["costs"]["coarse"]["top1_percent"]["mean"] == pytest.approx(
        originals["top1_percent"][0] - coarse["top1_percent"][0]
    )
    assert "coarse" in capsys.readouterr().out

    # The same samples in the same order with the same splits: runs of one seed are paired.
    one, other = (fastvid.open(tmp_path / "motion-1-1" / name, split="train") for name in arms)
    assert [one.key(n) for n in range(len(one))] == [other.key(n) for n in range(len(other))]
    assert one.labels.tolist() == other.labels.tolist()
    # The originals are packed unchanged.
    key = one.key(0)
    assert (one[0].num_frames, one[0].width) == (other[0].num_frames, other[0].width)
    assert key in {path.stem for path in (tmp_path / "motion-1-1" / "videos").glob("*.mp4")}
