"""A dataset encoded again in parts equals one encoded again by a single job."""

from __future__ import annotations

from fastvid.format.dataset import Dataset
from fastvid.sharding.job.job import run_job
from tests.sharding.shardtools import ledger, make, tars


def test_parts_of_a_dataset_encoded_again_equal_one_job(tmp_path):
    for number in range(4):
        make(tmp_path / "raw" / ("run", "jump")[number % 2] / f"{number}.mp4", frames=4 + number)
    options = {"samples_per_shard": 1, "workers": 1}
    run_job(str(tmp_path / "raw"), str(tmp_path / "data"), **options)
    run_job(str(tmp_path / "data"), str(tmp_path / "whole"), profile="intra", **options)
    for part in ("1/2", "0/2", None):
        report = run_job(str(tmp_path / "data"), str(tmp_path / "parts"), profile="intra", part=part, **options)
        assert report.packed == (4 if part is None else 2)
    assert tars(tmp_path / "parts") == tars(tmp_path / "whole")
    assert ledger(tmp_path / "parts") == ledger(tmp_path / "whole")
    one, other = Dataset(str(tmp_path / "parts")), Dataset(str(tmp_path / "whole"))
    assert one.classes == other.classes == ("jump", "run")
    assert one.annotations.equals(other.annotations)
